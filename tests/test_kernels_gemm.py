"""The grouped GEMM kernels: right when they run, and what the compiler makes of them.

They run where there is a CUDA GPU, and in Triton's interpreter elsewhere: test_interpreter runs
this file once more, in a process of its own, with TRITON_INTERPRET=1.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kernels
import quant

tl, triton = kernels.tl, kernels.triton
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
TRITON = (0, 0) if triton is None else tuple(int(n) for n in triton.__version__.split(".")[:2])
runs_kernels = pytest.mark.skipif(triton is None or not (CUDA or INTERPRETED),
                                  reason="no CUDA GPU; test_interpreter runs it in the interpreter")
compiles = pytest.mark.skipif(triton is None or INTERPRETED,
                              reason="Triton is not installed, or interprets in this process")
# The interpreter multiplies bf16 bits as integers; the same numbers in fp32 go the same way.
DTYPE = torch.bfloat16 if CUDA else torch.float32
NATIVE = CUDA and torch.cuda.get_device_capability() in kernels.NATIVE
# Relative error (L2) of what is rounded to bf16, which the interpreter cuts, and of fp32 sums.
BF16, FP32 = (2e-3, 3e-6) if CUDA else (4e-3, 1e-6)

GROUPS = {                      # real rows of each expert, rows of the buffer
    "uneven": ([3, 0, 47, 50], 512),
    "one has all": ([0, 300, 0], 384),
    "exact": ([128, 256], 384),
    "none": ([0, 0], 256),
}
by_groups = pytest.mark.parametrize("counts, R", GROUPS.values(), ids=GROUPS)
by_format = pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])


@pytest.fixture(autouse=True)
def what_is_not_written_is_nan():
    """torch.empty fills with NaN, so that a store that is missing is seen."""
    torch.use_deterministic_algorithms(INTERPRETED)
    yield
    torch.use_deterministic_algorithms(False)


def error(y, right):
    y, right = y.cpu().double(), right.double()
    return ((y - right).norm() / right.norm().clamp(min=1e-30)).item()


def real_rows(counts, R):
    real = torch.zeros(R, dtype=torch.bool)
    for start, n, _ in quant.spans(torch.tensor(counts), R):
        real[start:start + n] = True
    return real


def grouped(a, b, counts):
    """fp64 Y[R, N] = A[R, C] B[E, N, C]^T of real rows, 0 elsewhere."""
    y = torch.zeros(a.shape[0], b.shape[1], dtype=torch.double)
    for e, (start, n, _) in enumerate(quant.spans(torch.tensor(counts), a.shape[0])):
        y[start:start + n] = a[start:start + n].double() @ b[e].double().T
    return y


def grouped_wgrad(dy, x, counts):
    """fp64 dW[E, N, K] = dY[R, N]^T X[R, K] of real rows."""
    return torch.stack([dy[start:start + n].double().T @ x[start:start + n].double()
                        for start, n, _ in quant.spans(torch.tensor(counts), x.shape[0])])


def problem(counts, R, N=160, K=288):
    """X, dY and W, exact in bf16, and counts on the device. No size is a multiple of a tile; rows,
    columns and experts differ in size, so that no outer scale is right for another."""
    torch.manual_seed(R + len(counts))
    x, dy, w = (torch.randn(s).bfloat16().float() for s in ((R, K), (R, N), (len(counts), N, K)))
    for t in (x, dy, w):
        for axis, size in enumerate(t.shape):
            t *= 2.0 ** torch.randint(4, (size,)).view(-1, *[1] * (t.dim() - axis - 1))
    return x, dy, w, torch.tensor(counts, dtype=torch.int32, device=DEVICE)


def poison(t, real):
    t = t.clone()
    t[~real] = torch.nan
    return t.to(DEVICE, DTYPE)


# -------------------------------------------------------- bf16, what every GPU but a Blackwell runs


@runs_kernels
@by_groups
def test_bf16_rows_meet_their_experts_matrix(counts, R):
    x, dy, w, on_device = problem(counts, R)
    real, wd = real_rows(counts, R), w.to(DEVICE, DTYPE)
    y = kernels.gemm(poison(x, real), wd, on_device)
    dx = kernels.gemm(poison(dy, real), wd, on_device, turned=True)
    assert y.dtype == dx.dtype == DTYPE
    assert error(y, grouped(x, w, counts)) < (BF16 if CUDA else FP32)
    assert error(dx, grouped(dy, w.transpose(1, 2), counts)) < (BF16 if CUDA else FP32)
    assert not y.cpu()[~real].any() and not dx.cpu()[~real].any()


@runs_kernels
@by_groups
def test_bf16_wgrad_sums_real_rows_only(counts, R):
    x, dy, _, on_device = problem(counts, R)
    real = real_rows(counts, R)
    dw = kernels.gemm_wgrad(poison(dy, real), poison(x, real), on_device)
    assert dw.dtype == torch.float32
    assert error(dw, grouped_wgrad(dy, x, counts)) < FP32
    assert not dw.cpu()[torch.tensor(counts) == 0].any()


@runs_kernels
def test_many_experts_of_equal_and_unequal_size():
    """Each expert has one turn: more than 32 are ranked in several steps; ties must not meet."""
    counts = [1 + e % 3 * 40 for e in range(40)]
    x, dy, w, on_device = problem(counts, 40 * 128, N=32, K=32)
    dw = kernels.gemm_wgrad(dy.to(DEVICE, DTYPE), x.to(DEVICE, DTYPE), on_device)
    assert error(dw, grouped_wgrad(dy, x, counts)) < FP32


@runs_kernels
def test_native_operands_have_one_format():
    x = torch.zeros(128, 64)
    a, b = (operand(quant.quantize(x, fmt)) for fmt in ("mxfp8", "nvfp4"))
    with pytest.raises(ValueError, match="mxfp8 times nvfp4: .* the emulated backend takes any"):
        kernels.gemm(a, b)


@runs_kernels
def test_a_row_that_the_copy_engine_cannot_address_is_refused():
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        kernels.gemm(torch.zeros(128, 20, device=DEVICE), torch.zeros(1, 8, 20, device=DEVICE),
                     torch.ones(1, dtype=torch.int32, device=DEVICE))


@pytest.mark.skipif(not CUDA, reason="a graph is captured on a GPU")
def test_counts_are_read_when_a_graph_is_replayed():
    x, dy, w, counts = problem([3, 0, 47, 50], 1024)
    x, dy, w = (t.to(DEVICE, DTYPE) for t in (x, dy, w))
    kernels.gemm(x, w, counts), kernels.gemm_wgrad(dy, x, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dw = kernels.gemm(x, w, counts), kernels.gemm_wgrad(dy, x, counts)
    counts.copy_(torch.tensor([200, 130, 0, 7]))
    graph.replay()
    assert torch.equal(y, kernels.gemm(x, w, counts))
    assert torch.equal(dw, kernels.gemm_wgrad(dy, x, counts))


# ------------------------------------------------------------------------------------- block-scaled
# What stands here for the tensor core decodes inside the kernel: layout, loads, schedule and
# epilogue are those of a Blackwell.


def operand(q):
    """A quant.Quantized as the native kernels read it: blocked axis last, one matrix for rows."""
    def turn(t):
        t = t.view(torch.uint8)
        return (t.transpose(-1, -2) if q.axis == -2 else t).contiguous().to(DEVICE)
    codes, scales = turn(q.codes), turn(q.scales)
    codes, scales = (t.view(-1, *t.shape[-2:]) for t in (codes, scales))
    outer = None if q.outer is None else q.outer.reshape(codes.shape[:2]).contiguous().to(DEVICE)
    return kernels.Operand(q.fmt, codes.view(q.codes.dtype),
                           kernels.blocked(scales.view(q.scales.dtype)), outer)


def poison_operand(op, real):
    """NaN in the codes, scales and outer scales of padding rows (an atom of scales has 128)."""
    real = real.to(DEVICE)
    codes, scales = op.codes.view(torch.uint8).clone(), op.scales.view(torch.uint8)
    codes[0, ~real] = 0x7F
    r = torch.arange(128, device=DEVICE)
    rows = (r % 32 * 16 + r // 32 * 4)[:, None] + torch.arange(4, device=DEVICE)         # [128, 4]
    flat = scales.reshape(scales.shape[1], -1, 512).transpose(1, 2).clone()        # [R/128, 512, S]
    flat[:, rows] = torch.where(real.view(-1, 128, 1, 1), flat[:, rows], 0xFF)
    scales = flat.transpose(1, 2).reshape(scales.shape).contiguous()
    outer = None if op.outer is None else op.outer.masked_fill(~real, torch.nan)
    return kernels.Operand(op.fmt, codes.view(op.codes.dtype), scales.view(op.scales.dtype), outer)


def run(a, b, counts, kind):
    if NATIVE:
        return kernels._grouped_gemm(a, b, counts, kind)
    tile = (128, 128, 128, 1, 8, 1) if CUDA else None       # decoded tiles are large
    return kernels._grouped_gemm(a, b, counts, kind, tile=tile, decode=True)


def quantized(x, fmt, axis=-1):
    outer = quant.weight_outer(x, fmt) if fmt == "nvfp4" and x.dim() == 3 else None
    return quant.quantize(x, fmt, axis=axis, outer=outer)


@runs_kernels
@by_format
@pytest.mark.parametrize("kind", ["forward", "dgrad"])
def test_native_rows(fmt, kind):
    counts, R = GROUPS["uneven"]
    x, dy, w, on_device = problem(counts, R)
    a = quantized(x if kind == "forward" else dy, fmt)
    b = quantized(w, fmt, axis=-1 if kind == "forward" else -2)
    right = b.dequantize() if kind == "forward" else b.dequantize().transpose(1, 2)
    real = real_rows(counts, R)
    y = run(poison_operand(operand(a), real), operand(b), on_device, kind)
    assert y.dtype == torch.bfloat16
    assert error(y, grouped(a.dequantize(), right, counts)) < BF16
    assert not y.cpu()[~real].any()


@runs_kernels
@by_format
def test_native_wgrad(fmt):
    counts, R = GROUPS["uneven"]
    x, dy, _, on_device = problem(counts, R)
    a, b = (quantized(quant.zero_padding(t, torch.tensor(counts)), fmt, axis=-2) for t in (dy, x))
    dw = run(operand(a), operand(b), on_device, "wgrad")
    assert error(dw, grouped_wgrad(a.dequantize(), b.dequantize(), counts)) < FP32
    assert not dw.cpu()[1].any()


@runs_kernels
@by_format
def test_native_without_experts(fmt):
    """A dense layer: one matrix, all rows real, no multiple of 128."""
    x, dy, w, _ = problem([1], 160)
    a, b = quantized(x, fmt), quantized(w, fmt)
    right = a.dequantize().double() @ b.dequantize()[0].double().T
    assert error(run(operand(a), operand(b), None, "forward"), right) < BF16
    a, b = quantized(dy, fmt, axis=-2), quantized(x, fmt, axis=-2)
    right = a.dequantize().double().T @ b.dequantize().double()
    assert error(run(operand(a), operand(b), None, "wgrad")[0], right) < FP32


@pytest.mark.skipif(TRITON < (3, 8) or not INTERPRETED, reason="interpreted, which Triton 3.8 can")
def test_the_block_scaled_dot_itself():
    """MXFP8 only: the interpreter reads NVFP4's E4M3 scales as E8M0."""
    counts, R = GROUPS["uneven"]
    x, _, w, on_device = problem(counts, R)
    a, b = quantized(x, "mxfp8"), quantized(w, "mxfp8")
    y = kernels.gemm(operand(a), operand(b), on_device)
    assert error(y, grouped(a.dequantize(), b.dequantize(), counts)) < BF16


@pytest.mark.skipif(triton is None or INTERPRETED or CUDA, reason="they run, or this interprets")
def test_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-x", __file__]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ran = " passed" in done.stdout and "no CUDA GPU" not in done.stdout
    assert done.returncode == 0 and ran, done.stdout[-4000:]


# -------------------------------------------------------------- compiled for GPUs that are not here


@compiles
@by_format
@pytest.mark.parametrize("experts", [64, None])
@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("arch", [100, 103])
def test_every_native_gemm_is_native(arch, kind, experts, fmt):
    assert kernels.native_faults(kernels.compile_gemm(arch, fmt, kind, experts), fmt) == []


UPCAST = ["no block-scaled MMA of kind mxf8f6f4", "an MMA on upcast numbers"]


@kernels.jit
def one_tile(a, b, y, a_scales, b_scales, BM: tl.constexpr):
    """A block-scaled dot of BM x 128 x 128 MXFP8 numbers, scales row by row."""
    m, n, k, s = tl.arange(0, BM), tl.arange(0, 128), tl.arange(0, 128), tl.arange(0, 4)
    x, w = tl.load(a + m[:, None] * 128 + k), tl.load(b + n[:, None] * 128 + k)
    xs, ws = tl.load(a_scales + m[:, None] * 4 + s), tl.load(b_scales + n[:, None] * 4 + s)
    tl.store(y + m[:, None] * 128 + n, tl.dot_scaled(x, xs, "e4m3", w.T, ws, "e4m3"))


@compiles
def test_a_tile_of_64_rows_is_upcast_and_the_check_sees_it(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", kernels._Target(100))
    tensors = [torch.empty(128, size, dtype=dtype, device="meta") for size, dtype in (
        (128, torch.float8_e4m3fn), (128, torch.float8_e4m3fn), (128, torch.float32),
        (4, torch.uint8), (4, torch.uint8))]
    faults = {BM: kernels.native_faults(one_tile.warmup(*tensors, BM=BM, grid=(1,)), "mxfp8")
              for BM in (64, 128)}
    assert faults[64][:2] == UPCAST
    # 128 rows are not; but scales that come row by row take the slow way.
    assert not set(faults[128]) & set(UPCAST)
    assert "scales do not go through tcgen05.cp" in faults[128]


def faults_of_tile(*tile):
    return kernels.native_faults(kernels.compile_gemm(100, "mxfp8", "forward", tile=tile), "mxfp8")


@compiles
def test_the_check_sees_what_the_compiler_does_not_say():
    assert faults_of_tile(128, 128, 128, 1, 16, 4)[:2] == UPCAST                 # 16 warps
    wide = faults_of_tile(128, 256, 128, 1, 4, 4)    # more tensor memory than there is: from 3.8
    assert wide and (TRITON < (3, 8) or "a body that traps" in wide)         # a kernel that traps


@pytest.mark.parametrize("counts", [None, torch.tensor([128], dtype=torch.int32)])
def test_operands_of_two_formats_are_refused_in_a_sentence(counts):
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    four = kernels.Operand("nvfp4", torch.zeros(1, 128, 64, dtype=torch.uint8), None)
    eight = kernels.Operand("mxfp8", torch.zeros(1, 128, 128, dtype=torch.uint8), None)
    for a, b, words in ((x, four, "bf16 times nvfp4"), (four, x, "nvfp4 times bf16"),
                        (eight, four, "mxfp8 times nvfp4")):
        for f in (kernels.gemm, kernels.gemm_wgrad):
            with pytest.raises(ValueError, match=words):
                f(a, b, counts)


@compiles
@pytest.mark.parametrize("arch, limit", [(80, 166912), (90, 232448), (100, 232448), (120, 101376)])
@pytest.mark.parametrize("kind", ["dgrad", "wgrad"])
def test_bf16_gemms_fit_other_gpus(arch, limit, kind):
    kernel = kernels.compile_gemm(arch, "bf16", kind)
    assert kernel.metadata.shared <= limit
    assert kernels._resources(kernel)[1] < 32                # spills are hundreds of bytes
    assert not re.search(r"\btrap;", kernel.asm["ptx"])
