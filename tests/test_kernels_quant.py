"""The quantise kernels against quant.py, bit for bit, and what the compiler makes of them.

The kernels run where there is a CUDA GPU, and in Triton's interpreter elsewhere: test_interpreter
runs this file once more, in a process of its own, with TRITON_INTERPRET=1.
"""
import dataclasses
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kernels
import quant
from quant import Quantized

ROOT = Path(__file__).resolve().parent.parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed")
runs_kernels = pytest.mark.skipif(kernels.triton is None or (DEVICE == "cpu" and not INTERPRETED),
                                  reason="no CUDA GPU; test_interpreter runs it in the interpreter")
compiles = pytest.mark.skipif(kernels.triton is None or INTERPRETED,
                              reason="Triton is not installed, or interprets in this process")
if INTERPRETED:                      # few and large steps: it pays for each operation, not number
    kernels.TILES = {kind: (64, 128, 1, None, 1) for kind in kernels.TILES}
FORMATS = pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
ROUNDINGS = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
AXES = pytest.mark.parametrize("axis", [-1, -2])


# --------------------------------------------------------------------------------------------- data
def hard_numbers(cols, rows=32, seed=0):
    """[8 * rows, cols]: Gaussian, heavy-tailed, constant, subnormal, zero, NaN, Inf, huge blocks,
    whichever axis the blocks run along."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(8, rows, cols, generator=g)
    x[1] *= torch.exp(8 * torch.randn(rows, cols, generator=g))
    x[2] = x[2, :, :1]
    x[3] *= 2.0 ** -torch.randint(120, 150, (rows, 1), generator=g).float()
    x[4] = torch.where(x[4] < 0, -0.0, 0.0)
    x[4, 0, 0] = 1e-30                                     # a block whose scale rounds to nothing
    x[5, 3, 5], x[5, 4, 40], x[5, 5, 7] = torch.nan, -torch.nan, torch.nan
    x[6, 3, 5], x[6, 4, 40], x[6, 5, 7] = torch.inf, -torch.inf, torch.inf
    x[7] *= 2.0 ** torch.randint(90, 126, (rows, 1), generator=g).float()
    return x.flatten(0, 1)


def bits(t):
    t = t.detach().cpu().contiguous()
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def assert_same(got, want, what):
    if want is None:
        assert got is None, what
        return
    assert got.shape == want.shape and got.dtype == want.dtype, (
        what, got.shape, want.shape, got.dtype)
    wrong = bits(got) != bits(want)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first " \
                            f"{wrong.nonzero()[0].tolist()}"


def assert_packed(got, want):
    assert (got.fmt, got.axis) == (want.fmt, want.axis)
    for name in ("codes", "scales", "outer"):
        assert_same(getattr(got, name), getattr(want, name), name)


def assert_values(got, want):
    """Equal numbers, or NaN in both (a NaN's bits and a zero's sign mean nothing to a GEMM)."""
    got, want = got.cpu().float(), want.cpu().float()
    wrong = (got != want) & ~(got.isnan() & want.isnan())
    assert got.shape == want.shape and not wrong.any(), f"{int(wrong.sum())} differ"


def on(device, value):
    if isinstance(value, Quantized):
        return Quantized(value.fmt, *(on(device, t) for t in value.tensors()), axis=value.axis)
    return value.to(device) if torch.is_tensor(value) else value


def experts_buffer(cols, counts=(70, 0, 128, 33), seed=1):
    """(x [R, cols] whose padding is NaN, its counts, the mask of its real rows)."""
    rows = sum(-(-n // 128) * 128 for n in counts) + 128
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16()
    real, start = torch.zeros(rows, dtype=torch.bool), 0
    for n in counts:
        real[start:start + n] = True
        start += -(-n // 128) * 128
    x[~real] = torch.nan
    return x, torch.tensor(counts, dtype=torch.int32), real


# ------------------------------------------------------------------------------------- bits, packed
@runs_kernels
@FORMATS
@ROUNDINGS
@AXES
@pytest.mark.parametrize("cols, dtype", [(128, torch.float32), (96, torch.bfloat16)])
def test_quantize_has_the_bits_of_the_reference(fmt, rounding, axis, cols, dtype):
    x = hard_numbers(cols, 32 if axis == -2 else 8).to(dtype)
    kw = dict(axis=axis, rounding=rounding, seed=7)
    assert_packed(kernels.quantize(x.to(DEVICE), fmt, **kw), quant.quantize(x, fmt, **kw))


@runs_kernels
@FORMATS
@ROUNDINGS
def test_ties_and_their_neighbours(fmt, rounding):
    """Each midpoint of two elements and the 8 fp32 numbers on either side, in blocks of scale 1."""
    f = quant.FORMATS[fmt]
    elements = torch.tensor(quant.E2M1) if fmt == "nvfp4" else quant.tables("cpu").e4m3[:127]
    ties = (elements[1:] + elements[:-1]) / 2
    near = (ties.view(torch.int32)
            + torch.arange(-8, 9, dtype=torch.int32)[:, None]).view(torch.float32)
    near = torch.cat([near, -near], 1).flatten()
    near = torch.nn.functional.pad(near, (0, -len(near) % (f.block - 1))).view(-1, f.block - 1)
    x = torch.nn.functional.pad(near, (1, 0), value=f.largest).view(1, -1)
    kw = dict(rounding=rounding, seed=1, outer=1.0 if fmt == "nvfp4" else None)
    assert_packed(kernels.quantize(x.to(DEVICE), fmt, **kw), quant.quantize(x, fmt, **kw))


@runs_kernels
@pytest.mark.parametrize("cols", [16, 48, 208, 1408])
def test_whole_rows_of_any_width(cols):
    x = hard_numbers(max(cols, 48), rows=8)[:, :cols].contiguous()
    assert_packed(kernels.quantize(x.to(DEVICE), "nvfp4"), quant.quantize(x, "nvfp4"))


@runs_kernels
@ROUNDINGS
def test_weights_with_a_given_outer_scale(rounding):
    w = torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(2))
    kw = dict(rounding=rounding, seed=3)
    for outer in (quant.weight_outer(w, "nvfp4"), 40 / 2688, torch.full((3, 96), 1e-3)):
        want = quant.quantize(w, "nvfp4", outer=outer, **kw)
        assert_packed(kernels.quantize(w.to(DEVICE), "nvfp4", outer=on(DEVICE, outer), **kw), want)
    outer = quant.weight_outer(w, "nvfp4")
    want = quant.quantize(w, "nvfp4", outer=outer, axis=-2, **kw)
    assert_packed(kernels.quantize(w.to(DEVICE), "nvfp4", outer=outer.to(DEVICE), axis=-2, **kw),
                  want)
    w[1, 2, 3], w[2, 0, 0] = torch.nan, -torch.inf
    assert_same(kernels.weight_outer(w.to(DEVICE), "nvfp4"),
                quant.weight_outer(w, "nvfp4"), "outer")


@runs_kernels
@FORMATS
def test_random_bits_follow_the_logical_row_and_column(fmt):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    rows, cols = torch.randperm(64).int(), torch.arange(64, dtype=torch.int32) + 1000
    kw = dict(rounding="stochastic", rows=rows, cols=cols)
    want = quant.quantize(x, fmt, seed=-5, **kw)
    kw = {name: on(DEVICE, value) for name, value in kw.items()}
    for seed in (-5, torch.tensor(-5, dtype=torch.int32),
                 torch.tensor(-5, dtype=torch.int32).to(DEVICE)):
        assert_packed(kernels.quantize(x.to(DEVICE), fmt, seed=seed, **kw), want)


@runs_kernels
def test_bad_arguments_are_sentences():
    x = torch.randn(64, 48).to(DEVICE)
    for call in (lambda: kernels.quantize(x, "mxfp8"), lambda: kernels.quantize(x, "fp3"),
                 lambda: kernels.quantize(x, "nvfp4", rounding="up"),
                 lambda: kernels.quantize(x[:40], "mxfp8", axis=-2),
                 lambda: kernels.quantize(x[:0], "nvfp4")):
        with pytest.raises(ValueError) as caught:
            call()
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------- values, for emulation
@runs_kernels
@FORMATS
@ROUNDINGS
@AXES
def test_values_are_the_decoded_codes(fmt, rounding, axis):
    x = hard_numbers(64, 32 if axis == -2 else 8).bfloat16()
    kw = dict(axis=axis, rounding=rounding, seed=11)
    want = quant.quantize(x, fmt, **kw)
    # The interpreter loses bf16 subnormals.
    for dtype in (torch.float32, torch.bfloat16)[:1 if INTERPRETED else 2]:
        assert_values(kernels.cast(x.to(DEVICE), fmt, dtype=dtype, **kw), want.dequantize(dtype))


@runs_kernels
@ROUNDINGS
def test_row_and_column_in_one_pass_and_padding_is_never_data(rounding):
    x, counts, real = experts_buffer(64)
    kw = dict(rounding=rounding, seed=5, rows=torch.arange(len(x), dtype=torch.int32) * 3)
    clean = torch.where(real[:, None], x, 0)
    want_row, want_col = quant.cast(clean, "mxfp8", **kw), quant.cast(clean, "mxfp8", axis=-2, **kw)
    kw = {name: on(DEVICE, value) for name, value in kw.items()}
    row, col = kernels.operand_pair(x.to(DEVICE), "mxfp8", counts=counts.to(DEVICE), **kw)
    assert_values(row[real], want_row[real])
    assert_values(col, want_col)                                       # zero in the padding
    alone = kernels.operand(x.to(DEVICE), "mxfp8", axis=-2, counts=counts.to(DEVICE), **kw)
    assert_values(alone, want_col)
    assert_values(kernels.cast(x.to(DEVICE), "bf16", counts=counts.to(DEVICE)), clean)
    assert kernels.operand(x, "bf16", axis=-2, counts=counts) is x   # a bf16 GEMM reads no padding


@runs_kernels
@FORMATS
@ROUNDINGS
def test_a_packed_tensor_is_decoded_or_rounded_again_along_the_other_axis(fmt, rounding):
    x, counts, real = experts_buffer(64)
    x[~real] = 0
    x[5, 7], x[40, :16] = torch.nan, 0
    q = quant.quantize(x, fmt)
    assert_values(kernels.operand(on(DEVICE, q), fmt), q.dequantize(torch.bfloat16))
    kw = dict(axis=-2, rounding=rounding, seed=9)
    want = quant.cast(q.dequantize(), "mxfp8", **kw)
    got = kernels.operand(on(DEVICE, q), "mxfp8", counts=counts.to(DEVICE), **kw)
    assert_values(got, want)
    index = torch.randperm(len(x))[:128]
    want = quant.cast(q.dequantize()[index], "mxfp8", **kw)
    rows = dataclasses.replace(on(DEVICE, q), index=index.to(DEVICE))
    assert_values(kernels.cast(rows, "mxfp8", **kw), want)
    assert_values(kernels.cast(rows, fmt), q.dequantize()[index])
    assert_values(rows.dequantize(), q.dequantize()[index])


@runs_kernels
@FORMATS
def test_swiglu_is_rounded_to_bf16_first(fmt):
    h = torch.randn(128, 128, generator=torch.Generator().manual_seed(4)).bfloat16().to(DEVICE)
    product = kernels.operand(h, "bf16", swiglu=True)
    gate, up = h.float().chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    assert ((product - exact).abs() <= 2 ** -7 * exact.abs()).all()  # the interpreter cuts to bf16
    assert_same(product, kernels.swiglu(h), "swiglu")
    for kw in (dict(), dict(axis=-2, rounding="stochastic", seed=1)):
        assert_same(kernels.operand(h, fmt, swiglu=True, **kw),
                    kernels.cast(product, fmt, **kw), "swiglu")


@runs_kernels
@pytest.mark.parametrize("recipe, F", [         # 96: a half that is no multiple of a tile
    (quant.IN_MXFP8, 128), (quant.IN_NVFP4, 96),
    (dataclasses.replace(quant.IN_MXFP8, dy_rounding="stochastic"), 96),
    (dataclasses.replace(quant.IN_NVFP4, dy="nvfp4"), 128)],
    ids=["mxfp8", "nvfp4", "stochastic dY", "dY in FP4"])
def test_two_layers_around_swiglu_have_the_numbers_of_each_alone(recipe, F, monkeypatch):
    ours = SimpleNamespace(**vars(quant.REFERENCE) | {
        name: getattr(kernels, name) for name in
        ("swiglu", "operand", "operand_pair", "quantize_operand")})
    monkeypatch.setattr(quant, "backend_for", lambda _: ours)
    x, counts, _ = experts_buffer(64)
    x, counts = x.nan_to_num().bfloat16().to(DEVICE), counts.to(DEVICE)
    params = [torch.randn(4, *shape, device=DEVICE) for shape in ((2 * F, 64), (96, F))]
    weights = [quant.Weight(w.bfloat16(), w.bfloat16()) for w in params]
    dy, found = torch.randn(len(x), 96).bfloat16().to(DEVICE), []
    for fused in (True, False):
        inputs = [t.clone().requires_grad_() for t in (x, *params)]
        if fused:
            y = quant.grouped_mlp(*inputs, counts, recipe, weights=weights, seeds=(3, 4))
        else:
            h, w1, w2 = inputs
            h = quant.grouped_linear(h, w1, counts, recipe, weight=weights[0], seed=3)
            y = quant.grouped_linear(kernels.swiglu(h), w2, counts, recipe, weight=weights[1],
                                     seed=4)
        found.append((y, *torch.autograd.grad(y, inputs, dy)))
    for got, want in zip(*found):
        assert_same(got, want, "mlp")


@runs_kernels
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_fp32_activations_have_the_numbers_of_bf16_ones_but_for_their_rounding(recipe, monkeypatch):
    ours = SimpleNamespace(**vars(quant.REFERENCE) | {
        name: getattr(kernels, name) for name in ("operand", "operand_pair", "quantize_operand")})
    monkeypatch.setattr(quant, "backend_for", lambda _: ours)
    x, counts, _ = experts_buffer(64)
    x, found = x.nan_to_num().bfloat16().to(DEVICE), []
    params = [torch.randn(4, *shape, device=DEVICE) for shape in ((128, 64), (96, 64))]
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [t.clone().requires_grad_() for t in (x.to(dtype), *params)]
        y = quant.grouped_mlp(*inputs, counts.to(DEVICE), recipe)
        found.append((y, *torch.autograd.grad(y, inputs, torch.ones_like(y))))
        assert y.dtype == found[-1][1].dtype == dtype
    for a, b in zip(*found):
        assert (a.float() - b).norm() < 0.03 * b.norm()


@runs_kernels
@pytest.mark.parametrize("native", [False, True])
def test_the_gradient_of_gate_and_up_is_rounded_where_it_is_made(native):
    generator = torch.Generator().manual_seed(5)
    h, d = (torch.randn(256, n, generator=generator).bfloat16().to(DEVICE) for n in (256, 128))
    kw = dict(native=native, counts=torch.tensor([100, 64], dtype=torch.int32, device=DEVICE))
    found = kernels.operand_pair(quant.Hidden(h, d), "mxfp8", **kw)
    wanted = kernels.operand_pair(kernels.swiglu_backward(h, d), "mxfp8", **kw)
    for got, want in zip(quant.storage(*found), quant.storage(*wanted)):
        assert_same(got.view(torch.uint8), want.view(torch.uint8), "hidden")


@runs_kernels
@FORMATS
def test_packed_and_operand_in_one_pass(fmt):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(6)).bfloat16()
    q, values = kernels.quantize_operand(x.to(DEVICE), fmt)
    assert_packed(q, quant.quantize(x, fmt))
    assert_values(values, quant.cast(x, fmt))


@runs_kernels
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("recipe", [quant.IN_MXFP8, quant.IN_NVFP4])
def test_operands_of_weights_are_written_in_place(recipe, native, monkeypatch):
    ours = {name: partial(getattr(kernels, name), native=native)
            for name in ("operand", "operand_pair", "quantize_operand")}
    ours = SimpleNamespace(weight_outer=kernels.weight_outer, **ours)
    monkeypatch.setattr(quant, "backend_for", lambda w: ours)
    one, two = (torch.randn(2, 64, 96, device=DEVICE) for _ in range(2))
    weight = quant.prepare(one, recipe, 3)
    where = [t.data_ptr() for t in weight.storage()]
    again, fresh = quant.prepare(two, recipe, 4, into=weight), quant.prepare(two, recipe, 4)
    assert [t.data_ptr() for t in again.storage()] == where
    for got, want in zip(quant.storage(again.forward, again.backward),
                         quant.storage(fresh.forward, fresh.backward), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@runs_kernels
@FORMATS
@pytest.mark.parametrize("cols, count", [(128, 9), (128, 1), (384, 40), (640, 37)])
def test_payload_rows_are_codes_scales_and_outer_scales_side_by_side(fmt, cols, count):
    x = hard_numbers(cols, rows=8).bfloat16()
    index = torch.randint(0, len(x), (count,), generator=torch.Generator().manual_seed(1))
    wanted, dtype = quant.payload(x, fmt, index), torch.float32
    rows = kernels.payload(x.to(DEVICE), fmt, index.to(DEVICE))
    assert torch.equal(rows.cpu(), wanted)
    assert torch.equal(kernels.payload(x.to(DEVICE), fmt).cpu(), quant.payload(x, fmt))
    q, values = quant.from_payload(rows, fmt, cols), quant.cast(x.float(), fmt)[index]
    assert_same_values(kernels.cast(q, fmt, dtype=dtype), values)
    again = torch.arange(len(q.codes) - 1, -1, -1, device=DEVICE)
    lazy = dataclasses.replace(q, index=again)
    assert_same_values(kernels.cast(lazy, fmt, dtype=dtype), values.flip(0))


def assert_same_values(got, wanted):
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@runs_kernels
def test_ablations_fall_back_to_the_reference():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    for fmt in ("nvfp4_46", "nvfp4_tensor", "nvfp4_tile"):
        want = quant.quantize(x, fmt)
        q, values = kernels.quantize_operand(x.to(DEVICE), fmt, dtype=torch.float32)
        assert_packed(q, want)
        assert_packed(kernels.quantize(x.to(DEVICE), fmt), want)
        assert_values(values, want.dequantize())


# ---------------------------------------------------------------------------------- native operands
def blocked_by_hand(scales):
    """The layout that cuBLAS and tl.dot_scaled document, from its formula, one scale at a time."""
    E, M, S = scales.shape
    tiles = torch.zeros(E, -(-M // 128), -(-S // 4), 512, dtype=torch.uint8)
    e, r, c = torch.meshgrid(*(torch.arange(n) for n in (E, M, S)), indexing="ij")
    place = (r % 32) * 16 + (r // 32 % 4) * 4 + c % 4
    tiles[e, r // 128, c // 4, place] = scales.view(torch.uint8)
    return tiles.view(*tiles.shape[:3], 2, 256)


@runs_kernels
@FORMATS
@pytest.mark.parametrize("shape", [(128, 256), (2, 160, 96)])
def test_native_operands_are_turned_and_their_scales_blocked(fmt, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(8)).bfloat16()
    outer = quant.weight_outer(x.float(), "nvfp4") if fmt == "nvfp4" and len(shape) == 3 else None
    kw = dict(outer=on(DEVICE, outer))
    for axis in (-1, -2):
        q = quant.quantize(x, fmt, axis=axis, outer=outer)
        codes, scales = (t.view(torch.uint8).view(-1, *t.shape[-2:]) for t in (q.codes, q.scales))
        if axis == -2:
            codes, scales = codes.mT, scales.mT
        got = kernels.operand(x.to(DEVICE), fmt, native=True, axis=axis, **kw)
        assert_same(got.codes.view(torch.uint8), codes, "codes")
        assert_same(got.scales.view(torch.uint8), blocked_by_hand(scales), "scales")
        assert_same(kernels.blocked(scales), blocked_by_hand(scales), "blocked")
        if fmt == "nvfp4":
            assert_same(got.outer, q.outer.reshape(got.codes.shape[:2]), "outer")
    again = kernels.operand(on(DEVICE, quant.quantize(x, fmt, outer=outer)), fmt, native=True)
    made = kernels.operand(x.to(DEVICE), fmt, native=True, **kw)
    for name in ("codes", "scales", "outer"):
        assert_same(getattr(again, name), on("cpu", getattr(made, name)), name)


# ----------------------------------------------------------------------------------------- compiler
class Recorder:
    """Takes the place of a kernel and keeps what it was called with."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **kw):
        self.args, self.kw = args, kw


POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8",
            torch.int32: "*i32"}


def ptx_of(call, capability):
    """PTX of the launch that `call` makes, for a GPU that need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel, recorder = kernels._round_kernel, Recorder()
    try:
        kernels._round_kernel = recorder
        call()
    finally:
        kernels._round_kernel = kernel
    args = dict(zip(kernel.arg_names, recorder.args)) | recorder.kw
    options = dict(num_warps=args.pop("num_warps"))
    args["FP8"] = True                                    # no GPU of `capability` was there to ask
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value, runtime = args[name], i < len(recorder.args) and args[name] is not None
        pointer = torch.is_tensor(value)
        signature[name] = POINTERS[value.dtype] if pointer else "i32" if runtime else "constexpr"
        if not runtime:
            constants[i,] = value
        elif pointer or value % 16 == 0:
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return kernels.triton.compile(source, target=target, options=options).asm["ptx"]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled_cases():
    x, counts, seed = meta(4096, 768), meta(32, dtype=torch.int32), meta(dtype=torch.int32)
    q = Quantized("nvfp4", meta(4096, 384, dtype=torch.uint8), meta(4096, 48, dtype=torch.uint8),
                  meta(4096, dtype=torch.float32))
    random = dict(rounding="stochastic", seed=seed)
    pair = partial(kernels.operand_pair, x, "mxfp8", counts=counts)
    return dict(
        mxfp8=partial(kernels.cast, x, "mxfp8"),
        pair=pair,
        native_pair=partial(pair, native=True, **random),
        nvfp4=partial(kernels.quantize_operand, x, "nvfp4"),
        native_nvfp4=partial(kernels.quantize_operand, x, "nvfp4", native=True, **random),
        again=partial(kernels.operand, q, "mxfp8", axis=-2, counts=counts, **random),
    )


@compiles
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("case", ["mxfp8", "pair", "native_pair", "nvfp4", "native_nvfp4", "again"])
def test_no_approximate_division_and_no_flush_to_zero(case, capability):
    ptx = ptx_of(compiled_cases()[case], capability)
    assert "div.full" not in ptx and "div.approx" not in ptx and "rcp.approx" not in ptx
    assert ".ftz" not in ptx
    assert re.search(r"ld\.global\S*\.v[24]|cp\.async\.cg", ptx) or case == "again"


# ---------------------------------------------------------------------------------------- processes
def python(*args, **environment):
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=os.environ | environment,
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels ran on the GPU")
def test_interpreter():
    done = python("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-x", __file__,
                  TRITON_INTERPRET="1")
    ran = " passed" in done.stdout and "no CUDA GPU" not in done.stdout
    assert done.returncode == 0 and ran, done.stdout[-4000:]


@pytest.mark.skipif(INTERPRETED, reason="once is enough")
def test_the_reference_needs_no_triton():
    done = python("-c", "import sys; sys.modules['triton'] = None\n"
                        "import kernels, quant\n"
                        "assert kernels.triton is None and kernels.ops('cpu') is quant.REFERENCE\n"
                        "print(kernels.describe('cpu'))")
    assert done.returncode == 0 and done.stdout.startswith("reference: "), done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_backends_say_why_they_cannot_run():
    assert kernels.backend("cpu") == "reference"
    for name in ("native", "emulated"):
        with pytest.raises(ValueError, match="cpu is no CUDA GPU"):
            kernels.use(name)
    with pytest.raises(ValueError, match="allowed are auto, native, emulated, reference"):
        kernels.use("fast")
    kernels.use("reference")
    kernels.use("auto")
