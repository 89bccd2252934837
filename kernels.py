"""The GPU path: Triton kernels with the numbers of quant.py, which stays the law.

A GEMM operand is made in one pass over memory. What is written depends on who reads it:

    backend     GPU                   a GEMM reads
    native      sm_100, sm_103        packed codes, and block scales in the tensor core's own layout
    emulated    any other CUDA GPU    the exact decoded values in bf16 (an ordinary bf16 GEMM then
                                      forms the same products: see quant.py)
    reference   CPU                   quant.py itself; nothing here is needed, not even Triton

Letters: E experts (matrices), R rows, K columns, V block size, A x B a tile, its blocks along B.
`python kernels.py` says what this machine is; `python kernels.py --bench` measures it.
"""
import argparse
import math
import os
import re
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch.autograd.function import once_differentiable

import quant
from quant import FORMATS, Quantized

try:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:                        # macOS, or no GPU: the reference needs none of this
    triton, tl = None, SimpleNamespace(constexpr=int)


def jit(f):
    # A seed's labels must not compile a kernel for each of their values.
    return triton.jit(f, do_not_specialize=["stream"]) if triton else f


INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


# ------------------------------------------------------------------------------- which backend runs
NATIVE = ((10, 0), (10, 3))          # compute capabilities whose block-scaled MMA we compile for
BACKENDS = ("auto", "native", "emulated", "reference")
_chosen = "auto"


def _can_run(name, device):
    """None where backend `name` can run on `device`, else the reason why not."""
    if name == "reference":
        return None
    if device.type != "cuda":
        return f"{device} is no CUDA GPU"
    if triton is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if name == "native" and capability not in NATIVE:
        return (f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}."
                f"{capability[1]}; block-scaled tensor cores need 10.0 or 10.3")
    too_old = capability < quant.BF16_CORES
    return "bf16 tensor cores need compute capability 8.0" if too_old else None


def use(name, device=None):
    """Choose the backend of this process: "auto" is the first of native, emulated, reference that
    can run. Raises ValueError with the reason where the one asked for cannot run on `device`."""
    global _chosen
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r}: allowed are {', '.join(BACKENDS)}")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    why_not = None if name == "auto" else _can_run(name, device)
    if why_not:
        raise ValueError(f"backend {name!r} cannot run: {why_not}")
    _chosen = name


def backend(device):
    """"native", "emulated" or "reference": who computes on `device`."""
    device = torch.device(device)
    if _chosen == "auto" or _can_run(_chosen, device):
        return next(name for name in BACKENDS[1:] if _can_run(name, device) is None)
    return _chosen


def describe(device):
    """One sentence: which backend runs on `device`, and why."""
    device = torch.device(device)
    name = backend(device)
    what = dict(native="packed codes and scales go into block-scaled tensor cores",
                emulated="a bf16 GEMM on the exact decoded values, "
                         "the products of a block-scaled one",
                reference="plain PyTorch, "
                          "the numbers that the GPU kernels are checked against")[name]
    why = "as asked for" if _chosen == name else _can_run("native", device)
    return f"{name}: {what}" + (f" ({why})" if why else "")


# ------------------------------------------------------------------------ rounding, inside a kernel
@jit
def _mix(h):
    """quant.mix on uint32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@jit
def _number(n):
    """fp32 of an integer 0 <= n < 2^23, by its bits (a conversion takes as long as four integer
    operations)."""
    return _float(n + 0x4B000000) - 8388608.0


@jit
def _signed(value, x):
    """value >= 0 with the sign of x."""
    return _float(_bits(value) | _bits(x) & -0x80000000)


@jit
def _up_to_grid(y, u, step, big):
    """big + the smallest multiple of step that is >= y - u * step, by two sums that round up."""
    if INTERPRETED:
        n = tl.ceil((y.to(tl.float64) - u.to(tl.float64) * step) / step)
        return (n * step).to(tl.float32) + big
    return tl.inline_asm_elementwise("""{ .reg .f32 t;
        neg.f32 t, $2;
        fma.rp.f32 t, t, $3, $1;
        add.rp.f32 $0, t, $4; }""", "=f,f,f,f,f", [y, u, step, big], dtype=tl.float32,
        is_pure=True, pack=1)


@jit
def _to_grid(y, u, STOCHASTIC: tl.constexpr, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """Round 0 <= y <= largest to an element format: (value, code in the low byte).

    y is n steps of its binade. Next to a large enough power of two fp32 has no bits below a step,
    so adding it rounds to nearest, ties to even, and leaves n in the low byte. Stochastic, up where
    u < the fraction of n, is y - u * step rounded up. code = n + exponent << MANTISSA, into whose
    exponent a carry walks by itself.
    """
    binade = tl.maximum(_bits(y) & 0x7F800000, (EMIN + 127) << 23)
    step = _float(binade) * 0.5 ** MANTISSA
    big = step * 12582912.0                                             # 1.5 * 2^23 steps
    if STOCHASTIC:
        total = _up_to_grid(y, u, step, big)
    else:
        total = y + big
    # The exponent of the lowest binade counts as 0.
    code = _bits(total) + (binade >> (23 - MANTISSA)) - ((EMIN + 127) << MANTISSA)
    return total - big, code


@jit
def _to_e4m3(y):
    """(value, code) of |y| <= 448 to nearest by the GPU's own conversions, four numbers at a time.
    (Of Triton 3.6's, half of the values can be wrong where code and value are both used.)"""
    return tl.inline_asm_elementwise("""{ .reg .b16 a, b, c, d;
        .reg .b32 low, high;
        cvt.rn.satfinite.e4m3x2.f32 a, $6, $5;
        cvt.rn.satfinite.e4m3x2.f32 b, $8, $7;
        mov.b32 $4, {a, b};
        cvt.rn.f16x2.e4m3x2 low, a;
        cvt.rn.f16x2.e4m3x2 high, b;
        mov.b32 {a, b}, low;
        mov.b32 {c, d}, high;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d; }""", "=f,=f,=f,=f,=r,f,f,f,f", [y], dtype=(tl.float32, tl.uint8),
        is_pure=True, pack=4)


@jit
def _e4m3(y, x, u, STOCHASTIC: tl.constexpr, FP8: tl.constexpr):
    """(value, code) of 0 <= y <= 448 with the sign of x. FP8: the GPU converts, from 8.9 on."""
    if FP8 and not STOCHASTIC:
        return _to_e4m3(_signed(y, x))
    value, code = _to_grid(y, u, STOCHASTIC, 3, -6)
    value = _signed(value, x)
    if FP8:
        return value, _to_e4m3(value)[1]
    return value, (code | (_bits(x) >> 24 & 0x80)).to(tl.uint8)


@jit
def _e2m1(y, u, STOCHASTIC: tl.constexpr):
    """(value, code in the low byte) of 0 <= y <= 6."""
    value, code = _to_grid(y, u, STOCHASTIC, 1, 0)
    if not STOCHASTIC:                         # three binades: three roundings are cheaper
        code = tl.minimum(_bits(y * 2 + 8388608.0), _bits(y + 8388610.0))
        code = tl.minimum(code, _bits(y * 0.5 + 8388612.0))
    return value, code


@jit
def _outer_of(amax):
    """quant._row_outer from the bits of a finite amax: a power of two >= amax/2688."""
    field = ((amax + 0x57FFFF) >> 23) - 11
    field = tl.minimum(tl.maximum(field, 127 - 100), 127 + 116)
    return _float(tl.where(amax == 0, 127, field) << 23)


@jit
def _block_amax(x, FINITE: tl.constexpr):
    """Bits of the largest |x| of each block of x [A, B/V, V]. As integers they order as |x| does,
    with Inf and NaN above. FINITE: of the finite numbers."""
    bits = _bits(x) & 0x7FFFFFFF
    return tl.max(tl.where(bits < 0x7F800000, bits, 0) if FINITE else bits, 2)


@jit
def _mxfp8_scales(amax):
    """quant._mxfp8_scales from the bits of each block's amax: (byte, scale, inverse)."""
    byte = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    byte = tl.where(amax >= 0x7F800000, 255, byte)
    return byte, _decode_e8m0(byte), _float(tl.maximum(254 - byte, 0) << 23)


@jit
def _nvfp4_scales(amax, outer, UP: tl.constexpr, GIVEN: tl.constexpr, FP8: tl.constexpr):
    """quant._nvfp4_scales from the bits of each block's amax: (byte, scale with outer, inverse)."""
    s = _float(amax) * (1 / 6)
    if GIVEN:
        s = tl.math.div_rn(s, outer)
    else:
        s = s * _float((254 << 23) - _bits(outer))       # our own power of two: as exact
    s = tl.minimum(s, 448.0)
    s, byte = _e4m3(s, s, s * 0, UP, FP8)                       # u = 0: any fraction rounds up
    bad = amax >= 0x7F800000
    s = tl.where(bad, float("nan"), s)
    scale = s * outer
    return tl.where(bad, 0x7F, byte), scale, tl.where(s > 0, tl.math.div_rn(1.0, scale), 0.0)


# ------------------------------------------------------------------------ decoding, inside a kernel
@jit
def _decode_e4m3(byte, FP8: tl.constexpr):
    if FP8:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    m = byte.to(tl.int32) & 0x7F
    v = tl.where(m < 8, _number(m) * 0.001953125, _float((m << 20) + (120 << 23)))
    v = tl.where(m == 0x7F, float("nan"), v)
    return _float(_bits(v) | ((byte.to(tl.int32) & 0x80) << 24))


@jit
def _decode_e2m1(code):
    """fp32 of codes 0 to 15: as the sign and the first bits of an fp32 number, the denormal ones
    included, they mean the same times 2^-126."""
    return _float(code * 0x10400000 & -0x7E400000) * 8.507059173023462e37


@jit
def _decode_pairs(byte):
    """fp32 [A, 2B] of bytes [A, B] of two codes each, the even one in the low half."""
    b = byte.to(tl.int32)
    return tl.interleave(_decode_e2m1(b & 15), _decode_e2m1(b >> 4 & 15))


@jit
def _decode_e8m0(byte):
    b = byte.to(tl.int32)
    return _float(tl.where(b == 255, 0x7FC00000, tl.maximum(b << 23, 0x00400000)))


# ----------------------------------------------------------------------------------- the one kernel
@jit
def _gather(p, at, width, k, COLUMNS: tl.constexpr, EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """Load columns k of the rows `at` of a matrix with `width` numbers a row, VECTOR to a thread at
    once. at: (row numbers, where they count from, how many are there)."""
    row, base, left = at
    p = tl.max_contiguous(p + base * width + row[:, None] * width + k[None, :], (1, VECTOR))
    if EVEN:
        return tl.load(p)
    here = tl.arange(0, row.shape[0]) < left
    return tl.load(p, mask=here[:, None] & (k < COLUMNS)[None, :], other=0)


@jit
def _unpair(w):
    """fp32 [A, 2B] of pairs of bf16 [A, B]: either number is a shift or a mask away."""
    return tl.interleave(_float(w << 16), _float(w & -65536))


@jit
def _load_bf16(p, at, width, k0, BM: tl.constexpr, BK: tl.constexpr, K: tl.constexpr,
               EVEN: tl.constexpr, WIDE: tl.constexpr):
    """fp32 [BM, BK] from column k0 of a bf16 matrix with `width` pairs a row. WIDE: a thread has 16
    numbers in a row, a whole block of NVFP4, instead of the 8 that one load brings."""
    if WIDE:
        j = tl.arange(0, BK // 4)
        k = k0 // 2 + j // 4 * 8 + j % 4                             # the first half of each block
        a = tl.reshape(_unpair(_gather(p, at, width, k, K // 2, EVEN, 4)), (BM, BK // 16, 8))
        b = tl.reshape(_unpair(_gather(p, at, width, k + 4, K // 2, EVEN, 4)), (BM, BK // 16, 8))
        return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 3, 2)), (BM, BK))
    return _unpair(_gather(p, at, width, k0 // 2 + tl.arange(0, BK // 2), K // 2, EVEN, 4))


@jit
def _bf16(x):
    """x rounded to bf16, in fp32."""
    return _float(x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@jit
def _sigmoid(x):
    """1 / (1 + e^-x) to an ulp or two. What a compiler adds to care for denormals makes no
    difference here, and costs more than the rest."""
    if INTERPRETED:
        return 1 / (1 + tl.exp(-x))
    return tl.inline_asm_elementwise("""{ .reg .f32 e;
        ex2.approx.ftz.f32 e, $1;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e; }""", "=f,f", [x * -1.4426950408889634], dtype=tl.float32,
        is_pure=True, pack=1)


@jit
def _gated_gradient(gate, up, d):
    """The gradients of gate and up for that of silu(gate) * up."""
    s = _sigmoid(gate)
    return d * up * (s * (1 + gate * (1 - s))), d * gate * s


@jit
def _load_hidden(source, at, k, BM: tl.constexpr, BK: tl.constexpr, K: tl.constexpr,
                 EVEN: tl.constexpr):
    """fp32 [BM, BK] twice, bf16 as _swiglu_kernel writes them: the gradients of columns k of gate
    and of up."""
    h, d, _, _ = source
    gate = _load_bf16(h, at, K, k, BM, BK, K, EVEN, False)
    up = _load_bf16(h + K // 2, at, K, k, BM, BK, K, EVEN, False)
    gate, up = _gated_gradient(gate, up, _load_bf16(d, at, K // 2, k, BM, BK, K, EVEN, False))
    return _bf16(gate), _bf16(up)


@jit
def _load(source, at, k0, BM: tl.constexpr, BK: tl.constexpr, K: tl.constexpr, SOURCE: tl.constexpr,
          EVEN: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr):
    """fp32 [BM, BK] of the source from column k0: as it is, silu(gate) * up, or decoded."""
    x, scales, outer, stride = source
    if SOURCE == "bf16":
        return _load_bf16(x, at, stride, k0, BM, BK, K, EVEN, WIDE)
    elif SOURCE == "swiglu":                               # rounded to bf16, as by _swiglu_kernel
        gate = _load_bf16(x, at, stride, k0, BM, BK, K, EVEN, WIDE)
        up = _load_bf16(x + K // 2, at, stride, k0, BM, BK, K, EVEN, WIDE)
        return _bf16(gate * _sigmoid(gate) * up)
    elif SOURCE == "mxfp8":
        width, step = _row_width(K, stride), _row_width(K // 32, stride)
        v = _decode_e4m3(_gather(x, at, width, k0 + tl.arange(0, BK), K, EVEN, 8), FP8)
        k = k0 // 32 + tl.arange(0, BK // 32)
        scale = _decode_e8m0(_gather(scales, at, step, k, K // 32, EVEN, 1))
        return tl.reshape(tl.reshape(v, (BM, BK // 32, 32)) * scale[:, :, None], (BM, BK))
    elif SOURCE == "nvfp4":
        width, step = _row_width(K // 2, stride), _row_width(K // 16, stride)
        v = _decode_pairs(_gather(x, at, width, k0 // 2 + tl.arange(0, BK // 2), K // 2, EVEN, 4))
        k = k0 // 16 + tl.arange(0, BK // 16)
        scale = _decode_e4m3(_gather(scales, at, step, k, K // 16, EVEN, 1), FP8)
        row, base, left = at
        if stride is not None:
            row, base = row * stride, base * stride
        scale *= tl.load(outer + base + row, mask=tl.arange(0, BM) < left, other=0)[:, None]
        return tl.reshape(tl.reshape(v, (BM, BK // 16, 16)) * scale[:, :, None], (BM, BK))
    else:
        return _gather(x, at, stride, k0 + tl.arange(0, BK), K, EVEN, 8).to(tl.float32)


@jit
def _row_width(width, pitch):
    """Bytes from row to row of codes or of scales: their number, or, where both lie side by side in
    the rows of one payload, `pitch` fours of bytes."""
    if pitch is None:
        return width
    else:
        return pitch * 4


@jit
def _store(out, value, e, i0, j0, I, J, pitch, ROWWISE: tl.constexpr, EVEN: tl.constexpr,
           VECTOR: tl.constexpr):
    """Store a tile at (i0, j0) of matrix e of out [E, I, J], or [E, J, I] if not ROWWISE. VECTOR:
    no thread stores more at once, so that it can be the thread that computed it. pitch: as in
    _row_width, for E = 1."""
    i, j = tl.arange(0, value.shape[0])[:, None], tl.arange(0, value.shape[1])[None, :]
    out = out + e * I * J
    if ROWWISE:
        width = _row_width(J, pitch)
        p = tl.max_contiguous(out + (i0 * width + j0) + (i * width + j), (1, VECTOR))
    else:
        p = tl.max_contiguous(out + (j0 * I + i0) + (j * I + i), (VECTOR, 1))
    value = value.to(out.dtype.element_ty)
    if EVEN:
        tl.store(p, value)
    else:
        tl.store(p, value, mask=(i < I - i0) & (j < J - j0))


@jit
def _store_blocked(out, byte, e, i0, j0, I, J, EVEN: tl.constexpr):
    """Store block scales [A, B] at (i0, j0) in the tensor core's layout [E, I/128, J/4, 2, 256]:
    atoms of 128 rows x 4 scales, in which row r, scale c lies at (r % 32) * 16 + r / 32 * 4 + c."""
    i, j = i0 + tl.arange(0, byte.shape[0])[:, None], j0 + tl.arange(0, byte.shape[1])[None, :]
    width = (J + 3) // 4
    atom = (e * ((I + 127) // 128) + i // 128) * width + j // 4
    p = out + atom * 512 + (i % 32 * 16 + i // 32 % 4 * 4 + j % 4)
    if EVEN:
        tl.store(p, byte.to(tl.uint8))
    else:
        tl.store(p, byte.to(tl.uint8), mask=(i < I) & (j < J))


@jit
def _store_codes(codes, code, x, e, i0, j0, I, J, pitch, FMT: tl.constexpr, ACROSS: tl.constexpr,
                 EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """Store codes [A, B/V, V]; E2M1's get the signs of x and share bytes, the even one low."""
    A: tl.constexpr = code.shape[0]
    B: tl.constexpr = code.shape[1] * code.shape[2]
    if FMT == "mxfp8":
        _store(codes, tl.reshape(code, (A, B)), e, i0, j0, I, J, pitch, ACROSS, EVEN, VECTOR)
    else:
        low, high = tl.split(tl.reshape(code, (A, B // 2, 2)))
        low_x, high_x = tl.split(tl.reshape(_bits(x), (A, B // 2, 2)))
        code = low + (high << 4) | (low_x >> 28 & 8) | (high_x >> 24 & 0x80)
        _store(codes, code.to(tl.uint8), e, i0, j0 // 2, I, J // 2, pitch, ACROSS, EVEN, VECTOR)


@jit
def _round_blocks(x, amax, u, outer, FMT: tl.constexpr, STOCHASTIC: tl.constexpr,
                  GIVEN: tl.constexpr, LIMIT: tl.constexpr, FP8: tl.constexpr):
    """Round x [A, B/V, V]: (elements, codes in the low byte, E2M1's without signs; each block's
    scale, its byte). LIMIT: elements may be above the largest, or wanted of blocks with NaN."""
    if FMT == "mxfp8":
        byte, scale, inverse = _mxfp8_scales(amax)
    else:
        byte, scale, inverse = _nvfp4_scales(amax, outer[:, None], STOCHASTIC, GIVEN, FP8)
    y = tl.abs(x) * inverse[:, :, None]
    # A number is above the largest element only where its scale was rounded down. In a block with
    # NaN or Inf magnitudes are 0: of a NaN and a number the minimum is the number. It also stands
    # between x * inverse and the sums of the rounding, which fused would round once.
    limit = tl.where(amax >= 0x7F800000, 0.0, 448.0 if FMT == "mxfp8" else 6.0)[:, :, None]
    if LIMIT:
        y = tl.minimum(y, limit)
    if FMT == "mxfp8":
        v, code = _e4m3(y, x, u, STOCHASTIC, FP8)
    else:
        v, code = _e2m1(y, u, STOCHASTIC)
        v = _signed(v, x)
    return v, code, scale, byte


@jit
def _emit(x, amax, draw, outer, codes, scales, blocked, values, e, i0, j0, I, J, pitch,
          FMT: tl.constexpr, ROWWISE: tl.constexpr, STOCHASTIC: tl.constexpr, GIVEN: tl.constexpr,
          EVEN: tl.constexpr, WIDE: tl.constexpr, FP8: tl.constexpr):
    """Round a tile x [A, B], blocks along B, and store what is asked for (what is not None)."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    if FMT == "bf16":
        _store(values, x, e, i0, j0, I, J, None, ROWWISE, EVEN, 8)
    else:
        V: tl.constexpr = 32 if FMT == "mxfp8" else 16
        x = tl.reshape(x, (A, B // V, V))
        if amax is None:
            amax = _block_amax(x, False)                                # [A, B/V]
        u = tl.reshape(draw, (A, B // V, V)) if STOCHASTIC else None
        v, code, scale, byte = _round_blocks(x, amax, u, outer, FMT, STOCHASTIC, GIVEN,
                                             FMT == "nvfp4" or codes is not None, FP8)
        if values is not None:
            v = tl.reshape(v * scale[:, :, None], (A, B))
            _store(values, v, e, i0, j0, I, J, None, ROWWISE, EVEN, 8)
        if codes is not None:
            # A native GEMM reads the contracted axis last, so that columns have to be turned.
            TURNED: tl.constexpr = blocked is not None and not ROWWISE
            VECTOR: tl.constexpr = 16 if TURNED else (16 if WIDE else 8) * V // 32 if ROWWISE else 8
            _store_codes(codes, code, x, e, i0, j0, I, J, pitch, FMT, ROWWISE or TURNED, EVEN,
                         VECTOR)
        if scales is not None:
            _store(scales, byte, e, i0, j0 // V, I, J // V, pitch, ROWWISE, EVEN, 16)
        if blocked is not None:
            _store_blocked(blocked, byte, e, i0, j0 // V, I, J // V, EVEN)


@jit
def _whole_rows(source, at, first, BM: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
                K: tl.constexpr, SOURCE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
                FP8: tl.constexpr):
    """Whole rows: (their own outer scales, their chunks, block amaxes of each chunk). Chunks that
    are not held are loaded again, from a cache."""
    chunks, amaxes = (), ()
    top = tl.zeros((BM,), tl.int32)
    for i in tl.static_range(CHUNKS):
        x = _load(source, at, first + i * BK, BM, BK, K, SOURCE, EVEN, WIDE, FP8)
        amax = _block_amax(tl.reshape(x, (BM, BK // 16, 16)), False)
        chunks, amaxes = chunks + (x,), amaxes + (amax,)
        top = tl.maximum(top, tl.max(amax, 1))
    if tl.max(top, 0) >= 0x7F800000:                # only now look for the largest finite number
        top = tl.zeros((BM,), tl.int32)
        for k in range(0, CHUNKS * BK, BK):
            x = _load(source, at, first + k, BM, BK, K, SOURCE, EVEN, WIDE, FP8)
            amax = _block_amax(tl.reshape(x, (BM, BK // 16, 16)), True)
            top = tl.maximum(top, tl.max(amax, 1))
    return _outer_of(top), chunks, amaxes


@jit
def _row_hash(rows, here, left, seed_hash, BM: tl.constexpr):
    """The rows' part of quant.random_bits; by default a row's name is its place."""
    name = (here + tl.arange(0, BM)).to(tl.int32)
    if rows is not None:
        name = tl.load(rows + here + tl.arange(0, BM), mask=tl.arange(0, BM) < left, other=0)
    return _mix(_mix(name.to(tl.uint32, bitcast=True)) + seed_hash)


@jit
def _draw(row_hash, cols, k0, BK: tl.constexpr, K: tl.constexpr):
    """quant.uniform of a tile of numbers."""
    c = k0.to(tl.int32) + tl.arange(0, BK)
    if cols is not None:
        c = tl.load(cols + c, mask=c < K, other=0)
    h = row_hash[:, None] + _mix(c.to(tl.uint32, bitcast=True) ^ 0x5BD1E995)[None, :]
    h = (h ^ (h >> 16)) * 0x7FEB352D
    # 24 bits behind 0x3F make a float f. Without the first one, which doubles f, u = f - 1/2; with
    # it u = f / 2; that is the smaller one each time. (No conversion: see _number.)
    f = _float((h ^ (h >> 15)) * 0x846CA68B >> 8 | 0x3F000000)
    return tl.minimum(f - 0.5, f * 0.5)


@jit
def _round_kernel(x, x_scales, x_outer, index, counts, rows, cols, seed, stream, outer,
                  row_codes, row_scales, row_blocked, row_values,
                  col_codes, col_scales, col_blocked, col_values,
                  E, R, stride, pitch, groups, K: tl.constexpr, SOURCE: tl.constexpr,
                  ROW: tl.constexpr, COL: tl.constexpr, STOCHASTIC: tl.constexpr,
                  OUTER: tl.constexpr,
                  WIDTH: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
                  EVEN: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr):
    """Read rows of x [E, R, K] once; write them rounded along K (format ROW), R (COL) or both.

    A program has CHUNKS times BK columns and goes down the rows, BM at a time. x is a tensor, [gate
    | up] halves, or a packed tensor (SOURCE); or "hidden": the gradient of such halves of K columns
    each, one a chunk. index: row of x for each row. counts: x is sorted by expert, padding counts
    as zero. OUTER: "own" computes each row's outer scale and stores it, "given" loads it. pitch: as
    in _row_width, of the rows that are written.
    """
    HIDDEN: tl.constexpr = SOURCE == "hidden"
    SPAN: tl.constexpr = BK if HIDDEN else CHUNKS * BK
    ACROSS: tl.constexpr = (K + SPAN - 1) // SPAN
    J: tl.constexpr = CHUNKS * K if HIDDEN else K                   # columns to write
    WIDE: tl.constexpr = COL is None and ROW != "bf16"
    HELD: tl.constexpr = HIDDEN or (OUTER == "own" and SOURCE == "swiglu"
                                    and BM * BK * CHUNKS <= 2048)
    first = (tl.program_id(0) % ACROSS).to(tl.int64) * SPAN
    r = tl.arange(0, BM)
    if counts is not None:
        start, stop, end = _experts(counts, R, groups, WIDTH)
    if STOCHASTIC:
        s = _mix(tl.load(seed).to(tl.uint32, bitcast=True))       # a replayed graph draws anew
        seed_hash = _mix((s.to(tl.int32, bitcast=True) + stream).to(tl.uint32, bitcast=True))

    down = tl.cdiv(R, BM)
    for t in tl.range(tl.program_id(0) // ACROSS, E * down, tl.num_programs(0) // ACROSS,
                      num_stages=STAGES):
        e = (t // down).to(tl.int64)
        r0 = (t % down).to(tl.int64) * BM
        here = e * R + r0                                   # this tile's first row among all rows
        left = (R - r0).to(tl.int32)
        at = (r, here, left)
        if index is not None:
            at = (tl.load(index + here + r, mask=r < left, other=0).to(tl.int64), e * 0, left)
        source = (x, x_scales, x_outer, stride)
        if OUTER == "own":
            o, chunks, amaxes = _whole_rows(source, at, first, BM, BK, CHUNKS, K, SOURCE, EVEN,
                                            WIDE, FP8)
            tl.store(outer + (here + r) * (1 if pitch is None else pitch), o, mask=r < left)
        elif OUTER == "given" and ROW is not None:
            o = tl.load(outer + here + r, mask=r < left, other=1.0)
        else:
            o = None
        if HIDDEN:
            chunks = _load_hidden(source, at, first, BM, BK, K, EVEN)

        for i in tl.static_range(CHUNKS):
            k0 = first + i * (K if HIDDEN else BK)
            if HELD:
                v = chunks[i]
            else:
                v = _load(source, at, k0, BM, BK, K, SOURCE, EVEN, WIDE, FP8)
            if counts is not None:         # after the load, so that neither waits for the other
                real = (tl.max(tl.where(start <= r0, stop, 0), 0) - r0).to(tl.int32)
                if real < BM:
                    v = tl.where((r < real)[:, None], v, 0.0)
            draw, turned = None, None
            if STOCHASTIC:
                draw = _draw(_row_hash(rows, here, left, seed_hash, BM), cols, k0, BK, J)
                turned = tl.trans(draw)
            if ROW is not None:
                _emit(v, amaxes[i] if OUTER == "own" else None, draw, o, row_codes, row_scales,
                      row_blocked, row_values, e, r0, k0, R, J, pitch, ROW, True, STOCHASTIC,
                      OUTER == "given", EVEN, WIDE, FP8)
            if COL is not None:
                if OUTER == "given":
                    c = k0 + tl.arange(0, BK)
                    o = tl.load(outer + e * J + c, mask=c < J, other=1.0)
                _emit(tl.trans(v), None, turned, o, col_codes, col_scales, col_blocked,
                      col_values, e, k0, r0, J, R, None, COL, False, STOCHASTIC, True, EVEN, False,
                      FP8)


@jit
def _amax_kernel(w, amax, size, BLOCK: tl.constexpr):
    """Bits of the largest finite |w| of each matrix: of integers, in any order the same."""
    e = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = _bits(tl.load(w + e * size + i, mask=i < size, other=0.0).to(tl.float32)) & 0x7FFFFFFF
    tl.atomic_max(amax + e, tl.max(tl.where(b < 0x7F800000, b, 0), 0))


# ------------------------------------------------------------------------------------- calling it
@dataclass
class Operand:
    """What a native GEMM reads of a tensor: codes [E, M, C] (FP4: [E, M, C/2]) with the contracted
    axis C last, block scales [E, M/128, C/V/4, 2, 256] (rounded up), outer scales [E, M] or None.
    Rows x [R, K] are one matrix, E = 1; along T they are turned, M = K and C = R."""
    fmt: str
    codes: torch.Tensor
    scales: torch.Tensor
    outer: torch.Tensor | None = None


CODES = {32: torch.float8_e4m3fn, 16: torch.uint8}             # by block size
SCALES = {32: torch.uint8, 16: torch.float8_e4m3fn}

# Shape of a program by what it writes, "random" if it draws: rows and columns of a step, warps,
# stages of the pipeline that loads ahead (None: none), and warps a multiprocessor before programs
# take several steps (EACH: never, a program for each). Chosen by measuring on an H200.
EACH = 1 << 20
TILES = {
    "row": (4, 256, 1, None, EACH),                 # along rows
    "row random": (16, 128, 1, 3, 32),
    "own": (1, 512, 1, None, EACH),                 # along rows whose outer scale is computed first
    "own random": (2, 512, 2, None, EACH),
    "column": (32, 64, 1, 2, EACH),                 # along columns
    "column random": (32, 64, 1, 3, 32),
    "both": (32, 128, 2, 3, 32),
    "both random": (32, 64, 2, 4, 32),
    "hidden": (32, 64, 2, 3, 32),                   # the same, of two halves that are made here
    "hidden random": (32, 64, 2, 3, 32),
}


def _ceil(a, b):
    return -(-a // b)


def _has_fp8(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _tile(kind, random, K):
    """TILES for rows of K numbers; whole rows are cut into few chunks, equal ones if possible."""
    BM, BK, warps, stages, fill = TILES[kind + " random" * random]
    if kind == "hidden":
        return BM, min(BK, K & -K), 2, warps, stages, fill
    if kind != "own":
        return BM, BK, 1, warps, stages, fill
    columns = max(min(BK, K & -K), triton.next_power_of_2(_ceil(K, 12)), 32)
    return max(1, BM * BK // columns), columns, _ceil(K, columns), warps, stages, fill


def _programs(device, steps, across, warps, fill):
    """How many programs share the steps; `across` of them stand side by side."""
    processors = 4
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return across * min(steps, max(1, processors * fill // warps // across))


def _check(shape, fmt, axis, rounding):
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding {rounding!r}: allowed are 'nearest' and 'stochastic'")
    if fmt not in ("bf16", "mxfp8", "nvfp4"):
        raise ValueError(f"format {fmt!r}: the kernels know bf16, mxfp8 and nvfp4")
    if 0 in shape:
        raise ValueError(f"a tensor of shape {tuple(shape)} holds no numbers to quantise")
    block = 1 if fmt == "bf16" else FORMATS[fmt].block
    for a in (-1, -2) if axis == "both" else (axis,):
        if shape[a] % block:
            raise ValueError(f"a tensor of shape {tuple(shape)} has no whole blocks of {block} "
                             f"along axis {a}, as {fmt} needs")


def _parts(q):
    """(codes, scales, outer scales, pitch of a payload's rows or None) as a kernel takes them."""
    codes, scales, outer = q.codes.view(torch.uint8), q.scales.view(torch.uint8), q.outer
    if codes.dim() == 2 and not codes.is_contiguous():
        pitch = codes.stride(0)
        if pitch % 4 == 0 and scales.stride() == (pitch, 1) and (
                outer is None or outer.stride(0) * 4 == pitch):
            return codes, scales, outer, pitch // 4
    return (codes.contiguous(), scales.contiguous(),
            None if outer is None else outer.contiguous(), None)


def _source(x, swiglu):
    """What the kernel reads: (kind, numbers, scales, outer, stride of a row, shape as numbers)."""
    if isinstance(x, quant.Hidden):
        h, d = (t.contiguous().bfloat16().view(torch.int32) for t in (x.h, x.d))
        return "hidden", h, d, None, None, tuple(x.h.shape)
    if isinstance(x, Quantized):
        kind = "nvfp4" if quant.is_fp4(x.fmt) else "mxfp8"
        shape = (*x.codes.shape[:-1], x.scales.shape[-1] * FORMATS[x.fmt].block)
        codes, scales, outer, pitch = _parts(x)
        return kind, codes, scales, outer, pitch, shape
    if x.dim() != 2 or x.stride(-1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.contiguous()
    stride = x.stride(-2) if x.dim() > 1 else x.numel()
    if swiglu:
        x, shape = x.bfloat16(), (*x.shape[:-1], x.shape[-1] // 2)
        return "swiglu", x.view(torch.int32), None, None, x.stride(-2) // 2, shape
    if x.dtype == torch.bfloat16:                       # read as pairs
        return "bf16", x.view(torch.int32), None, None, stride // 2, tuple(x.shape)
    return "values", x, None, None, stride, tuple(x.shape)


def _outputs(want, fmt, shape, axis, device, dtype, into):
    """Empty tensors, or the storage of an operand `into`, for one direction of x [.., R, K]: what
    is not in `want` stays None."""
    block = 32 if fmt == "bf16" else FORMATS[fmt].block
    pack = 2 if block == 16 else 1
    *lead, R, K = shape
    I, J = (R, K) if axis == -1 else (K, R)                    # blocks run along J

    def empty(*shape, dtype=torch.uint8):
        return torch.empty(shape, dtype=dtype, device=device)

    def plain(j):
        return empty(*lead, R, j) if axis == -1 else empty(*lead, j, K)
    out = SimpleNamespace(codes=None, scales=None, blocked=None, values=None)
    if "values" in want:
        out.values = empty(*shape, dtype=dtype) if into is None else into
    if "packed" in want:
        out.codes, out.scales = plain(J // pack), plain(J // block)
    if "native" in want and into is not None:
        out.codes, out.blocked = into.codes.view(torch.uint8), into.scales.view(torch.uint8)
    elif "native" in want:
        out.codes = empty(*lead, I, J // pack) if out.codes is None else out.codes
        out.blocked = empty(math.prod(lead), _ceil(I, 128), _ceil(J // block, 4), 2, 256)
        if I % 128 or J // block % 4:
            out.blocked.zero_()            # a NaN there would spoil a sum, even times a code of 0
    return out


def _given_outer(x, fmt, outer, shape, axis, counts, swiglu):
    """The outer scales to load: the caller's, or along T those of columns (only an ablation, so in
    plain torch); None where the kernel computes its own."""
    if axis == "both" or not quant.is_fp4(fmt) or (outer is None and axis == -1):
        return None
    if outer is None:
        kw = dict(counts=counts, swiglu=swiglu, dtype=torch.float32)
        x = _run(x, "bf16", -1, ("values",), **kw)[0].values
        outer = quant.weight_outer(x.movedim(-1, -2)[..., None, :], fmt)[..., 0]
    device = x.codes.device if isinstance(x, Quantized) else x.device
    outer = torch.as_tensor(outer, dtype=torch.float32, device=device)
    return outer.expand(shape[:-1] if axis == -1 else (*shape[:-2], shape[-1]))


def _run(x, fmt, axis, want, *, counts=None, swiglu=False, index=None, dtype=torch.bfloat16,
         rounding="nearest", seed=0, outer=None, rows=None, cols=None, into=(None, None),
         payload=None):
    """Launch the kernel: (outputs along rows, outputs along columns, outer scales)."""
    source, data, scales, x_outer, stride, shape = _source(x, swiglu)
    index = x.index if isinstance(x, Quantized) else index
    if index is not None:
        shape = (index.numel(), shape[-1])
    _check(shape, fmt, axis, rounding)
    quant.check_names(shape, rows, cols)
    device = data.device
    given = _given_outer(x, fmt, outer, shape, axis, counts, swiglu)
    own = given is None and quant.is_fp4(fmt)
    if payload is not None:
        outer = payload.outer
    elif own:
        outer = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    else:
        outer = given
    row, col = (_outputs(want if a == axis or axis == "both" else (), fmt, shape, a, device, dtype,
                         where) for a, where in zip((-1, -2), into))
    pitch = None
    if payload is not None:
        row.codes, row.scales, _, pitch = _parts(payload)
    random, (base, stream) = rounding == "stochastic", quant.fold(seed)
    if random and not (torch.is_tensor(base) and base.device == device):
        base = torch.full((), int(base), dtype=torch.int32, device=device)     # no host sync
    *lead, R, K = shape
    E = math.prod(lead)
    if row.blocked is None and axis == -1:
        E, R = 1, E * R
    kind = "own" if own else {-1: "row", -2: "column", "both": "both"}[axis]
    if source == "hidden":
        kind, K = "hidden", K // 2                              # columns of a half
    BM, BK, chunks, warps, stages, fill = _tile(kind, random, K)
    across = _ceil(K, BK if kind == "hidden" else BK * chunks)
    programs = _programs(device, E * _ceil(R, BM), across, warps, fill)
    groups = 0 if counts is None else counts.numel()
    _round_kernel[programs,](
        data, scales, x_outer, index, counts,
        *(t if t is None else t.int().contiguous() for t in (rows, cols)),
        base if random else None, stream,
        outer if outer is None or pitch is not None else outer.contiguous(),
        row.codes, row.scales, row.blocked, row.values,
        col.codes, col.scales, col.blocked, col.values,
        E, R, stride, pitch, groups, K=K, SOURCE=source, ROW=None if axis == -2 else fmt,
        COL=None if axis == -1 else fmt, STOCHASTIC=random,
        OUTER="own" if own else None if given is None else "given",
        WIDTH=triton.next_power_of_2(max(groups, 1)),
        BM=BM, BK=BK, CHUNKS=chunks, EVEN=R % BM == 0 and K % BK == 0, FP8=_has_fp8(device),
        STAGES=stages, num_warps=warps)
    return row, col, outer


def _packed(fmt, out, outer, axis=-1):
    block = FORMATS[fmt].block
    return Quantized(fmt, out.codes.view(CODES[block]), out.scales.view(SCALES[block]), outer, axis)


def _native(fmt, out, outer):
    block = FORMATS[fmt].block
    codes = out.codes.view(-1, *out.codes.shape[-2:])
    outer = None if outer is None else outer.reshape(codes.shape[:2]).contiguous()
    return Operand(fmt, codes.view(CODES[block]), out.blocked.view(SCALES[block]), outer)


def blocked(scales):
    """Plain scales [E, M, C/V] in the layout of the tensor core [E, M/128, C/V/4, 2, 256]."""
    E, M, S = scales.shape
    s = scales.view(torch.uint8)
    s = torch.nn.functional.pad(s, (0, -S % 4, 0, -M % 128))
    s = s.view(E, _ceil(M, 128), 4, 32, _ceil(S, 4), 4).permute(0, 1, 4, 3, 2, 5)
    return s.reshape(E, _ceil(M, 128), _ceil(S, 4), 2, 256).view(scales.dtype)


def quantize(x, fmt, *, rounding="nearest", seed=0, outer=None, rows=None, cols=None, axis=-1):
    """quant.quantize in one pass: the same arguments and the same bits."""
    kw = dict(rounding=rounding, seed=seed, outer=outer, rows=rows, cols=cols)
    if fmt not in ("mxfp8", "nvfp4"):                         # the ablations are not worth a kernel
        return quant.quantize(x, fmt, axis=axis, **kw)
    row, col, outer = _run(x, fmt, axis, ("packed",), **kw)
    return _packed(fmt, row if axis == -1 else col, outer, axis)


def payload(x, fmt, index=None):
    """quant.payload in one pass over memory."""
    n, width = len(x) if index is None else index.numel(), x.shape[-1]
    if fmt not in ("mxfp8", "nvfp4") or width % 128 or n < 2:
        return quant.payload(x, fmt, index)
    rows = torch.empty(n, quant.payload_bytes(fmt, width), dtype=torch.uint8, device=x.device)
    _run(x, fmt, -1, (), index=index, payload=quant.from_payload(rows, fmt, width))
    return rows


def cast(x, fmt, *, axis=-1, dtype=torch.bfloat16, into=None, **kw):
    """The exact values in `fmt` of x, a tensor or a packed one, as a tensor: what an emulated GEMM
    reads.

    A packed tensor is decoded (axis=-1), or decoded and rounded again along its rows (axis=-2).
    rounding, seed, outer, rows, cols: as in quantize; counts: int32 [E] real rows of x [R, K]
    sorted by expert; padding becomes zero. swiglu: x is [gate | up], and silu(gate) * up in bf16 is
    rounded. into: where to write.
    """
    dtype = dtype or torch.bfloat16
    if fmt not in ("bf16", "mxfp8", "nvfp4") and torch.is_tensor(x):
        return quant.operand(x, fmt, axis=axis, **kw).to(dtype)
    if fmt == "bf16" or axis == -1 and isinstance(x, Quantized):
        fmt, axis = "bf16", -1
        kw = {name: kw[name] for name in ("counts", "swiglu") if name in kw}
    row, col, _ = _run(x, fmt, axis, ("values",), dtype=dtype, into=(into, into), **kw)
    return row.values if axis == -1 else col.values


def operand(x, fmt, *, native=False, axis=-1, into=None, **kw):
    """What a GEMM reads of x: an Operand where it is native, else the exact values in bf16. Options
    as in quant.operand and cast, but dtype None is bf16. "bf16" means as the tensor is: a bf16 GEMM
    reads no padding. into: an earlier operand that may be written over."""
    plain = torch.is_tensor(x) and not kw.get("swiglu")
    if plain and fmt == "bf16":
        return x
    if not native or fmt == "bf16":
        return cast(x, fmt, axis=axis, into=into, **kw)
    kw.pop("dtype", None)
    if axis == -1 and fmt not in ("mxfp8", "nvfp4") and plain:
        x = quant.quantize(x, fmt, **{name: kw[name] for name in kw if name != "counts"})
    if axis == -1 and isinstance(x, Quantized):
        x = x.gathered()
        scales = x.scales.view(-1, *x.scales.shape[-2:])
        return _native(x.fmt, SimpleNamespace(codes=x.codes, blocked=blocked(scales)), x.outer)
    row, col, outer = _run(x, fmt, axis, ("native",), into=(into, into), **kw)
    return _native(fmt, row if axis == -1 else col, outer)


def operand_pair(x, fmt, *, native=False, counts=None, dtype=torch.bfloat16, rounded=False, **kw):
    """(operand along the rows of x [.., R, K], operand along R), for MXFP8 in one pass over memory.
    x: a tensor, or for MXFP8 Hidden. rounded: as in quant.operand_pair; a native GEMM's operands
    are made of it all the same. into: two earlier operands that may be written over."""
    if rounded and not native:
        return x, operand(x, fmt, dtype=dtype, counts=counts, axis=-2, **kw)
    if fmt != "mxfp8":
        return (operand(x, fmt, native=native, dtype=dtype, **kw),
                operand(x, fmt, native=native, dtype=dtype, counts=counts, axis=-2, **kw))
    want, dtype = "native" if native else "values", dtype or torch.bfloat16
    row, col, _ = _run(x, fmt, "both", (want,), counts=counts, dtype=dtype, **kw)
    if native:
        return _native(fmt, row, None), _native(fmt, col, None)
    return row.values, col.values


def quantize_operand(x, fmt, *, native=False, dtype=torch.bfloat16, into=None, **kw):
    """(quantize(x, fmt), operand(x, fmt)) in one pass: backward keeps the one, a forward GEMM reads
    the other. Arguments as in cast, axis = -1."""
    if fmt not in ("mxfp8", "nvfp4"):
        q = quant.quantize(x, fmt, **kw)
        return q, operand(q, fmt, native=native, dtype=dtype)
    want = ("packed", "native" if native else "values")
    row, _, outer = _run(x, fmt, -1, want, dtype=dtype or torch.bfloat16, into=(into, None), **kw)
    return _packed(fmt, row, outer), _native(fmt, row, outer) if native else row.values


def weight_outer(w, fmt):
    """quant.weight_outer of w [..., N, K] without a copy of w."""
    amax = torch.zeros(w.shape[:-2], dtype=torch.int32, device=w.device)
    w, size = w.contiguous(), w.shape[-2] * w.shape[-1]
    _amax_kernel[_ceil(size, 8192), amax.numel()](w, amax, size, BLOCK=8192, num_warps=8)
    return quant.weight_outer(amax.view(torch.float32)[..., None, None], fmt)


# ------------------------------------------------------------------------------------ grouped GEMMs
# One kernel for the three GEMMs of a layer, y[m, n] = sum over c of a[m, c] * b[n, c], in bf16 and
# in block-scaled formats, by programs that each do tile after tile:
#
#                m  n  c    each expert has           a and b in bf16           in codes, c last
#     forward    R  N  K    its rows m of y, its b    X [R, K],  W [E, N, K]    the same
#     dgrad      R  K  N    its rows m of y, its b    dY [R, N], W [E, N, K]    dY, W as [E, K, N]
#     wgrad      N  K  R    its y, its stretch of c   dY [R, N], X [R, K]       dY, X turned
#
# Which expert a tile belongs to follows from `counts` on the device: the host never waits for it.
@jit
def _experts(counts, rows, E, WIDTH: tl.constexpr):
    """Where each expert's rows start, the real ones stop and their padding ends, [WIDTH >= E]."""
    e = tl.arange(0, WIDTH)
    if counts is None:
        n = tl.full((WIDTH,), 0, tl.int32) + rows
    else:
        n = tl.load(counts + e, mask=e < E, other=0)
    end = tl.cumsum((n + 127) // 128 * 128, 0)
    start = end - (n + 127) // 128 * 128
    return start, start + n, end


@jit
def _turns(counts, n, E):
    """The turn of each expert: those with most rows n come first, so that the last tiles, for which
    all wait, are short. (tl.sort before warps are specialised keeps Triton 3.8 busy for ever.)"""
    e = tl.arange(0, n.shape[0])
    turn = tl.zeros_like(n)
    if counts is not None:
        for i in range(0, E, 32):
            other = i + tl.arange(0, 32)
            rows = tl.load(counts + other, mask=other < E, other=-1)[None, :]
            ahead = (rows > n[:, None]) | ((rows == n[:, None]) & (other[None, :] < e[:, None]))
            turn += tl.sum(ahead.to(tl.int32), 1)
    return turn


@jit
def _pick(values, e):
    """values[e] of a vector; 0 where e is past its end."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == e, values, 0), 0)


@jit
def _load_scales(scales, e, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Block scales [ROWS, COLS] from their blocked layout. The compiler knows this shuffle: it lets
    the copy engine and tcgen05.cp move whole atoms to where the tensor core reads them."""
    s = scales.load([e, row // 128, col // 4, 0, 0])
    s = tl.permute(tl.reshape(s, (ROWS // 128, COLS // 4, 32, 4, 4)), (0, 3, 2, 1, 4))
    return tl.reshape(s, (ROWS, COLS))


@jit
def _decode(codes, scales, FP4: tl.constexpr):
    """The numbers of a tile, outer scale aside: for tests, where no block-scaled MMA can run."""
    if FP4:
        v = _decode_pairs(codes)
        s = _decode_e4m3(scales.to(tl.uint8, bitcast=True), False)
    else:
        v = _decode_e4m3(codes.to(tl.uint8, bitcast=True), False)
        s = _decode_e8m0(scales)
    v = tl.reshape(v, (s.shape[0], s.shape[1], v.shape[1] // s.shape[1])) * s[:, :, None]
    return tl.reshape(v, (v.shape[0], v.shape[1] * v.shape[2]))


@jit
def _place(tile, cols, turn, start, stop, end, M, C, WGRAD: tl.constexpr, BM: tl.constexpr,
           BC: tl.constexpr):
    """A tile's (expert, first m, first c, end of the expert's real rows, steps of BC along c)."""
    if WGRAD:
        rows = tl.cdiv(M, BM)
        e = tl.sum(tl.where(turn == tile // cols // rows, tl.arange(0, turn.shape[0]), 0), 0)
        first, last = _pick(start, e), _pick(stop, e)
        return e, tile // cols % rows * BM, first, last, tl.maximum(tl.cdiv(last - first, BC), 1)
    else:
        m0 = tile // cols * BM
        e = tl.sum((end <= m0).to(tl.int32), 0)
        return e, m0, 0, _pick(stop, e), tl.cdiv(C, BC)


@jit
def _add_bf16(acc, a, b, e, m0, n0, c, first, last, KIND: tl.constexpr, BC: tl.constexpr):
    """acc + the products of BC columns from c."""
    if KIND == "wgrad":                          # zeros, not padding, follow the last real row
        x = load_ragged(a, first, last - first, [c - first, m0])
        w = load_ragged(b, first, last - first, [c - first, n0])
        return tl.dot(tl.trans(x), w, acc)
    else:
        x = tl.reshape(a.load([0, m0, c]), (acc.shape[0], BC))
        if KIND == "dgrad":
            w = tl.reshape(b.load([e, c, n0]), (BC, acc.shape[1]))
        else:
            w = tl.trans(tl.reshape(b.load([e, n0, c]), (acc.shape[1], BC)))
        return tl.dot(x, w, acc)


@jit
def _add_scaled(acc, a, b, a_scales, b_scales, e, m0, n0, c, FMT: tl.constexpr,
                DECODE: tl.constexpr, BC: tl.constexpr):
    """The same of codes and block scales, in a block-scaled tensor core (DECODE: or for tests)."""
    BM: tl.constexpr = acc.shape[0]
    BN: tl.constexpr = acc.shape[1]
    PACK: tl.constexpr = 2 if FMT == "e2m1" else 1
    V: tl.constexpr = 32 // PACK
    x = tl.reshape(a.load([0, m0, c // PACK]), (BM, BC // PACK))
    w = tl.reshape(b.load([e, n0, c // PACK]), (BN, BC // PACK))
    xs = _load_scales(a_scales, 0, m0, c // V, BM, BC // V)
    ws = _load_scales(b_scales, e, n0, c // V, BN, BC // V)
    if DECODE:
        return tl.dot(_decode(x, xs, PACK == 2), tl.trans(_decode(w, ws, PACK == 2)), acc)
    else:
        return tl.dot_scaled(x, xs, FMT, tl.trans(w), ws, FMT, acc)


@jit
def _put(y, acc, e, m0, n0, PARTS: tl.constexpr):
    """Store a tile, in halves where the staging memory saved buys another stage of loads."""
    BM: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1] // PARTS
    if PARTS == 2:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, WIDTH)), (0, 2, 1)))
        y.store([e, m0, n0], tl.reshape(left.to(y.dtype), (1, BM, WIDTH)))
        y.store([e, m0, n0 + WIDTH], tl.reshape(right.to(y.dtype), (1, BM, WIDTH)))
    else:
        y.store([e, m0, n0], tl.reshape(acc.to(y.dtype), (1, BM, WIDTH)))


@jit
def _gemm_kernel(a, b, y, a_scales, b_scales, a_outer, b_outer, counts, E, M, N, C,
                 KIND: tl.constexpr, FMT: tl.constexpr, DECODE: tl.constexpr, WIDTH: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
                 SPECIALIZE: tl.constexpr):
    """a, b, y and scales are tensor descriptors of a tile BM x BC, BN x BC, BM x BN each."""
    WGRAD: tl.constexpr = KIND == "wgrad"
    start, stop, end = _experts(counts, C if WGRAD else M, E, WIDTH)
    turn = _turns(counts, stop - start, E) if WGRAD else None
    cols = tl.cdiv(N, BN)
    tiles = E * tl.cdiv(M, BM) * cols if WGRAD else tl.max(end, 0) // BM * cols
    # flatten: the loads of a tile start before the tile before it is stored.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True,
                         warp_specialize=SPECIALIZE):
        n0 = tile % cols * BN
        e, m0, first, last, steps = _place(tile, cols, turn, start, stop, end, M, C, WGRAD, BM, BC)
        b_e = 0 if WGRAD else e
        y_e = e if WGRAD else 0
        tl.assume(steps > 0)                     # or warps cannot be specialised
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(0, steps):
            c = first + step * BC
            if FMT == "bf16":
                acc = _add_bf16(acc, a, b, b_e, m0, n0, c, first, last, KIND, BC)
            else:                                # along c padding is zero
                acc = _add_scaled(acc, a, b, a_scales, b_scales, b_e, m0, n0, c, FMT, DECODE, BC)

        m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
        if a_outer is not None:
            acc *= tl.load(a_outer + m, mask=m < M, other=0.0)[:, None]
            acc *= tl.load(b_outer + b_e * N + n, mask=n < N, other=0.0)[None, :]
        if WGRAD:                                # an expert without rows took another's first step
            acc = tl.where(first < last, acc, 0.0)
        else:
            acc = tl.where((m < last)[:, None], acc, 0.0)
        _put(y, acc, y_e, m0, n0, PARTS)

    if not WGRAD:                                # the buffer's rows behind the last expert's
        zeros = tl.zeros((BM, BN), tl.float32)
        for tile in range(tiles + tl.program_id(0), tl.cdiv(M, BM) * cols, tl.num_programs(0)):
            _put(y, zeros, 0, tile // cols * BM, tile % cols * BN, PARTS)


def _gemm_tile(fmt, kind, N, major):
    """(BM, BN, BC, parts, warps, stages) for N columns on compute capability major.x. An expert's
    rows come in 128s, and so do those of a block of scales. Measured on an H200; the block-scaled
    ones are the largest that fit the tensor memory of a Blackwell with two accumulators."""
    if fmt == "nvfp4":
        return 128, 128, 128 if kind == "wgrad" else 256, 1, 4, 4
    if fmt == "mxfp8":
        return 128, 128, 128, 1, 4, 4
    if major not in (9, 10):                     # less shared memory, or no copy engine
        return 128, 128, 32, 2, 8, 3
    if kind == "wgrad" or major == 10:
        return 128, 256, 64, 2, 8, 3
    if 0 < N % 256 <= 128:                       # half of the last tile would be empty
        return 128, 128, 64, 1, 4, 6
    return 128, 256, 64, 2, 8, 4


def _common_format(a, b):
    """bf16, mxfp8 or nvfp4: what two tensors or two Operands hold."""
    names = ["bf16" if torch.is_tensor(t) else t.fmt for t in (a, b)]
    fmt, other = ("nvfp4" if quant.is_fp4(name) else name for name in names)
    if fmt != other:
        raise ValueError(f"{' times '.join(names)}: block-scaled tensor cores take two of one "
                         "format; the emulated backend takes any")
    return fmt


def _gemm_call(a, b, counts, kind, tile=None, decode=False):
    """(result, grid, arguments, options) of the kernel for two tensors or two Operands."""
    fmt = _common_format(a, b)
    native = fmt != "bf16"
    V, pack = (16, 2) if fmt == "nvfp4" else (32, 1)
    if not native and (a.shape[-1] % 8 or b.shape[-1] % 8):
        raise ValueError(f"operands {tuple(a.shape)} and {tuple(b.shape)}: "
                         "rows must be a multiple of 16 bytes")
    if native:
        a_rows, b_rows = a.codes, b.codes
        kind = "wgrad" if kind == "wgrad" else "forward"       # turned already
    else:
        a_rows, b_rows = (t.contiguous().view(-1, *t.shape[-2:]) for t in (a, b))
    turn_a, turn_b = kind == "wgrad" and not native, kind != "forward" and not native
    M, C = a_rows.shape[:0:-1] if turn_a else a_rows.shape[1:]
    N, C, E = b_rows.shape[2 if turn_b else 1], C * pack, 1 if counts is None else counts.numel()
    major = torch.cuda.get_device_capability(a_rows.device)[0] if a_rows.is_cuda else 9
    BM, BN, BC, parts, warps, stages = tile or _gemm_tile(fmt, kind, N, major)
    y_dtype = torch.float32 if kind == "wgrad" else torch.bfloat16 if native else a.dtype
    y = torch.empty(E if kind == "wgrad" else 1, M, N, dtype=y_dtype, device=a_rows.device)

    tiled, scales, outer = TensorDescriptor.from_tensor, (None, None), (None, None)
    if turn_a:
        x = create_ragged_descriptor(a_rows[0], [BC, BM])
        w = create_ragged_descriptor(b_rows[0], [BC, BN])
    else:
        x = tiled(a_rows, [1, BM, BC // pack])
        w = tiled(b_rows, [1, BC, BN] if turn_b else [1, BN, BC // pack])
    if native:
        scales = (tiled(a.scales, [1, BM // 128, BC // V // 4, 2, 256]),
                  tiled(b.scales, [1, BN // 128, BC // V // 4, 2, 256]))
        outer = a.outer, b.outer
    programs = tiles = y.shape[0] * _ceil(M, BM) * _ceil(N, BN)
    if not turn_a:           # bf16 wgrad's tiles differ in length: the hardware hands them out best
        cuda = y.device.type == "cuda"
        programs = torch.cuda.get_device_properties(y.device).multi_processor_count if cuda else 2
    args = x, w, tiled(y, [1, BM, BN // parts]), *scales, *outer, counts, E, M, N, C
    # Triton 3.6 cannot give the roles of a loop with a sum in it to different warps.
    specialize = native and not decode and not triton.__version__.startswith("3.6.")
    options = dict(KIND=kind, FMT=dict(bf16="bf16", mxfp8="e4m3", nvfp4="e2m1")[fmt], DECODE=decode,
                   WIDTH=triton.next_power_of_2(E), BM=BM, BN=BN, BC=BC, PARTS=parts,
                   SPECIALIZE=specialize, num_warps=warps, num_stages=stages)
    return y, (min(tiles, programs),), args, options


def _grouped_gemm(a, b, counts, kind, **kw):
    y, grid, args, options = _gemm_call(a, b, counts, kind, **kw)
    _gemm_kernel[grid](*args, **options)
    return y if kind == "wgrad" else y[0]


def gemm(a, b, counts=None, turned=False):
    """quant.gemm: Y[R, N] = A[R, K] B[E, N, K]^T, each expert's rows with its own matrix; padding
    gives zeros. turned: Y[R, K] = A[R, N] B[E, N, K]. bf16, or Operands, whose B comes turned."""
    if counts is None and _common_format(a, b) == "bf16":
        return torch.mm(a, b[0] if turned else b[0].T)
    return _grouped_gemm(a, b, counts, "dgrad" if turned else "forward")


def gemm_wgrad(dy, x, counts=None):
    """quant.gemm_wgrad: dW[E, N, K] = dY[R, N]^T X[R, K] over each expert's real rows, fp32. What
    lies in padding rows does not matter in bf16; an Operand's padding is zero."""
    if counts is None and _common_format(dy, x) == "bf16":
        return torch.mm(dy.T, x, out_dtype=torch.float32)[None]
    return _grouped_gemm(dy, x, counts, "wgrad")


# ------------------------------------------------------------- what the compiler makes of the GEMMs
# No Blackwell was at hand. What is known of the native kernels is their machine code, which Triton
# makes on any machine: a tile it cannot map would be upcast, or trap, without an error.
class _Target:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return f"sm_{self.arch}"                 # only a key of the kernel's cache

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


def compile_gemm(arch, fmt, kind, experts=64, tile=None):
    """The kernel launched for a GEMM in `fmt` on sm_<arch>, compiled but not run; of a dense
    layer where experts=None. Sizes matter only as multiples of 128."""
    R, N, K, E = 1024, 256, 512, experts or 1

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def operand(E, M, C):
        V = FORMATS[fmt].block
        codes = empty(E, M, C * V // 32, dtype=CODES[V])
        scales = empty(E, M // 128, C // V // 4, 2, 256, dtype=SCALES[V])
        return Operand(fmt, codes, scales, empty(E, M, dtype=torch.float32) if V == 16 else None)

    if fmt == "bf16":
        x, dy, w = empty(R, K), empty(R, N), empty(E, N, K)
        a, b = dict(forward=(x, w), dgrad=(dy, w), wgrad=(dy, x))[kind]
    else:
        a, b = dict(forward=((1, R, K), (E, N, K)), dgrad=((1, R, N), (E, K, N)),
                    wgrad=((1, N, R), (1, K, R)))[kind]
        a, b = operand(*a), operand(*b)
    counts = None if experts is None else empty(E, dtype=torch.int32)
    tile = tile or _gemm_tile(fmt, kind, N if kind == "forward" else K, arch // 10)
    _, grid, args, options = _gemm_call(a, b, counts, kind, tile)
    triton.runtime.driver.set_active(_Target(arch))
    try:
        return _gemm_kernel.warmup(*args, grid=grid, **options)
    finally:
        if torch.cuda.is_available():
            triton.runtime.driver.reset_active()


def _resources(kernel):
    """(registers, bytes of stack) a thread: a register that does not fit spills to the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
                              capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK"))


def native_faults(kernel, fmt):
    """What is wrong with a compiled block-scaled GEMM: sentences, none where all is well."""
    ptx, meta, (_, stack) = kernel.asm["ptx"], kernel.metadata, _resources(kernel)
    mma = dict(mxfp8="mxf8f6f4", nvfp4="mxf4nvf4")[fmt]

    def has(pattern):
        return re.search(pattern, ptx) is not None
    checks = {
        f"no block-scaled MMA of kind {mma}": has(rf"tcgen05\.mma\S*kind::{mma}\.block_scale"),
        "an MMA on upcast numbers": not has(r"kind::(f16|tf32)|wgmma|\bmma\.sync"),
        "a body that traps": not has(r"\btrap;"),
        "scales do not go through tcgen05.cp": has(r"tcgen05\.cp"),
        "codes come by no tensor descriptor": has(r"cp\.async\.bulk\.tensor\.3d\.shared"),
        "scales come by no tensor descriptor": has(r"cp\.async\.bulk\.tensor\.5d\.shared"),
        f"{meta.tmem_size} columns of tensor memory, of 512": meta.tmem_size <= 512,
        f"{meta.shared} bytes of shared memory, of 232448": meta.shared <= 232448,
        f"{stack} bytes a thread spilled": stack == 0,
    }
    return [fault for fault, fine in checks.items() if not fine]


def report_native():
    """Print what the native GEMMs compile to: no GPU needed, about two seconds a line."""
    print("\nThe GEMMs of a Blackwell, as they compile here: the tensor core's instruction must "
          "read codes and\nblock scales itself, and scales must reach it by tcgen05.cp. Tensor "
          "memory holds 512 columns, a\nblock has 232,448 bytes of shared memory, and a stack "
          "would mean registers that spill.")
    print(f"\n{'native GEMM, compiled':30}{'tcgen05.mma':35}{'scales by':12}{'TMEM':>5}"
          f"{'shared':>8}{'stack':>6}  faults")
    for arch in (100, 103):
        for fmt in ("mxfp8", "nvfp4"):
            for kind, name in (("forward", "forward, dgrad"), ("wgrad", "wgrad")):
                kernel = compile_gemm(arch, fmt, kind)
                ptx, meta = kernel.asm["ptx"], kernel.metadata
                mma = re.search(r"tcgen05\.mma\S*(kind::\S+)", ptx)
                scales = "tcgen05.cp" if "tcgen05.cp" in ptx else "registers"
                print(f"{f'sm_{arch} {fmt} {name}':30}{mma[1] if mma else 'none':35}{scales:12}"
                      f"{meta.tmem_size:5}{meta.shared:8}{_resources(kernel)[1]:6}  "
                      f"{'; '.join(native_faults(kernel, fmt)) or 'none'}")


# ------------------------------------------------------------------------------------------- SwiGLU
@jit
def _swiglu_kernel(h, dy, out, size, F: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up of h [R, 2F] = [gate | up], or, given dy [R, F], its gradient [R, 2F]: both
    halves from one read, which a compiler makes two of."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    at = i // F * (2 * F) + i % F
    gate = tl.load(h + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(h + at + F, mask=inside, other=0).to(tl.float32)
    if dy is None:
        tl.store(out + i, (gate * _sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
    else:
        d = tl.load(dy + i, mask=inside, other=0).to(tl.float32)
        gate, up = _gated_gradient(gate, up, d)
        tl.store(out + at, gate.to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + F, up.to(out.dtype.element_ty), mask=inside)


def _swiglu(h, dy, out):
    F = h.shape[1] // 2
    _swiglu_kernel[_ceil(h.shape[0] * F, 2048),](h, dy, out, h.shape[0] * F,
                                                 F=F, BLOCK=2048, num_warps=8)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return _swiglu(h, None, h.new_empty(h.shape[0], h.shape[1] // 2))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return swiglu_backward(*ctx.saved_tensors, dy)


def swiglu(h):
    """quant.swiglu of h [R, 2F]."""
    return _SwiGLU.apply(h.contiguous())


def swiglu_backward(h, dy):
    """The gradient of swiglu(h) for that of its result."""
    return _swiglu(h, dy.contiguous(), torch.empty_like(h))


# ------------------------------------------------------------------------ the rest of a layer
# Each does in one pass over memory what the function of its name in model.py or moe_comm.py says.
# Programs take whole rows of D numbers; what is summed over rows is summed by each program, then
# over programs in a fixed order.
@jit
def _rows_at(x, row, col, inside, D: tl.constexpr):
    """fp32 of rows of x [.., D]; 0 where x is None."""
    if x is None:
        return tl.zeros(inside.shape, tl.float32)
    else:
        return tl.load(x + row[:, None] * D + col[None, :], mask=inside, other=0).to(tl.float32)


@jit
def _add_norm_kernel(x, a, b, weight, out, h, rows, eps, D: tl.constexpr, ROWS: tl.constexpr,
                     WIDTH: tl.constexpr):
    """out = x + a + b, h = out / rms(out) * weight."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (col < D)[None, :]
    v = _rows_at(x, row, col, inside, D)
    if a is not None:
        v += _rows_at(a, row, col, inside, D) + _rows_at(b, row, col, inside, D)
        v = v.to(out.dtype.element_ty).to(tl.float32)
        tl.store(out + row[:, None] * D + col[None, :], v.to(out.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
    v *= scale[:, None] * tl.load(weight + col, mask=col < D, other=0)[None, :]
    tl.store(h + row[:, None] * D + col[None, :], v.to(h.dtype.element_ty), mask=inside)


@jit
def _add_norm_backward_kernel(x, weight, dout, dh0, dh1, dh2, dx, dw, rows, eps, D: tl.constexpr,
                              ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """dx = dout + the norm's gradient for h's gradient dh0 + dh1 + dh2; each program's part of the
    weight's."""
    col = tl.arange(0, WIDTH)
    w = tl.load(weight + col, mask=col < D, other=0)[None, :]
    part = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (col < D)[None, :]
        v = _rows_at(x, row, col, inside, D)
        g = _rows_at(dh0, row, col, inside, D)
        if dh1 is not None:
            g += _rows_at(dh1, row, col, inside, D)
        if dh2 is not None:
            g += _rows_at(dh2, row, col, inside, D)
        scale = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
        v *= scale
        part += g * v
        g *= w
        g = scale * (g - v * (tl.sum(g * v, 1) / D)[:, None])
        g += _rows_at(dout, row, col, inside, D)
        tl.store(dx + row[:, None] * D + col[None, :], g.to(dx.dtype.element_ty), mask=inside)
    tl.store(dw + tl.program_id(0) * D + col, tl.sum(part, 0), mask=col < D)


def _row_tiles(rows, width, device):
    """(rows of a tile, warps, tiles, programs that share them): a warp holds a row, if it can."""
    tile, warps = max(1, 1024 // width), max(1, min(width // 1024, 8))
    return tile, warps, _ceil(rows, tile), _programs(device, _ceil(rows, tile), 1, warps, 16)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, readers, *deltas):
        D, h = x.shape[-1], torch.empty_like(x)
        out = torch.empty_like(x) if deltas else x
        deltas = [d.contiguous() for d in deltas] + [None] * (2 - len(deltas))
        width = triton.next_power_of_2(D)
        tile, warps, tiles, _ = _row_tiles(x.numel() // D, width, x.device)
        _add_norm_kernel[tiles,](x, *deltas, weight, out, h, x.numel() // D, eps, D=D, ROWS=tile,
                                 WIDTH=width, num_warps=warps)
        ctx.save_for_backward(out, weight)
        ctx.eps, ctx.readers = eps, readers
        ctx.set_materialize_grads(False)
        return out, *(h.view_as(h) for _ in range(readers))

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, *dh):
        x, weight = ctx.saved_tensors
        D, width = x.shape[-1], triton.next_power_of_2(x.shape[-1])
        dh = [g.contiguous() for g in dh if g is not None]
        dout = dout if dout is None else dout.contiguous()
        tile, warps, _, programs = _row_tiles(x.numel() // D, width, x.device)
        dx = torch.empty_like(x)
        dw = torch.empty(programs, D, device=x.device)
        _add_norm_backward_kernel[programs,](
            x, weight, dout, *dh, *[None] * (3 - len(dh)), dx, dw, x.numel() // D, ctx.eps,
            D=D, ROWS=tile, WIDTH=width, num_warps=warps)
        return dx, dw.sum(0), None, None, *[dx] * (len(ctx.needs_input_grad) - 4)


def add_norm(x, deltas, weight, eps, readers=1):
    """model.add_norm, for up to two deltas and three readers."""
    return _AddNorm.apply(x.contiguous(), weight, eps, readers, *deltas)


@jit
def _norm_rope_kernel(x, weight, cos, sin, dy, out, dw, rows, T, heads, eps, C: tl.constexpr,
                      ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows x of C numbers, `heads` for each of T positions, normalised and turned in pairs (i, i +
    C/2); given dy, the gradient of that and each program's part of the weight's."""
    H: tl.constexpr = C // 2
    j = tl.arange(0, WIDTH)
    wa = tl.load(weight + j, mask=j < H, other=0)[None, :]
    wb = tl.load(weight + H + j, mask=j < H, other=0)[None, :]
    part_a = tl.zeros((ROWS, WIDTH), tl.float32)
    part_b = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (j < H)[None, :]
        at = row[:, None] * C + j[None, :]
        turn = (row // heads % T)[:, None] * C + j[None, :]
        c = tl.load(cos + turn, mask=inside, other=0)
        s = tl.load(sin + turn, mask=inside, other=0)
        a = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        b = tl.load(x + at + H, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / C + eps)[:, None]
        a *= scale
        b *= scale
        if dy is None:
            a = (a * wa).to(out.dtype.element_ty).to(tl.float32)
            b = (b * wb).to(out.dtype.element_ty).to(tl.float32)
            ga, gb = a * c - b * s, b * c + a * s
        else:
            da = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
            db = tl.load(dy + at + H, mask=inside, other=0).to(tl.float32)
            ga, gb = da * c + db * s, db * c - da * s
            part_a += ga * a
            part_b += gb * b
            ga *= wa
            gb *= wb
            mean = ((tl.sum(ga * a, 1) + tl.sum(gb * b, 1)) / C)[:, None]
            ga, gb = scale * (ga - a * mean), scale * (gb - b * mean)
        tl.store(out + at, ga.to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + H, gb.to(out.dtype.element_ty), mask=inside)
    if dy is not None:
        tl.store(dw + tl.program_id(0) * C + j, tl.sum(part_a, 0), mask=j < H)
        tl.store(dw + tl.program_id(0) * C + H + j, tl.sum(part_b, 0), mask=j < H)


class _NormRope(torch.autograd.Function):
    @staticmethod
    def run(x, weight, cos, sin, eps, dy=None):
        C, T = weight.shape[0], cos.shape[0]
        rows, out, dw = x.numel() // C, torch.empty_like(x), None
        width = triton.next_power_of_2(C // 2)
        tile, warps, tiles, programs = _row_tiles(rows, 2 * width, x.device)
        if dy is None:
            programs = tiles
        else:
            dw = torch.empty(programs, C, device=x.device)
        _norm_rope_kernel[programs,](x, weight, cos, sin, dy, out, dw, rows, T, x.shape[-1] // C,
                                     eps, C=C, ROWS=tile, WIDTH=width, num_warps=warps)
        return out, dw

    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps):
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return _NormRope.run(x, weight, cos, sin, eps)[0].unflatten(-1, (-1, weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx, dw = _NormRope.run(*ctx.saved_tensors, ctx.eps, dy.contiguous())
        return dx, dw.sum(0), None, None, None


def norm_rope(x, weight, cos, sin, eps):
    """model.norm_rope."""
    return _NormRope.apply(x.contiguous(), weight, cos, sin, eps)


@jit
def _choose_kernel(logits, bias, experts, gates, dgates, dlogits, N, E, scale, K: tl.constexpr,
                   SLOTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The K largest of sigmoid(logits) + bias and their gates; given dgates, the gradient."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)[None, :]
    here = row < N
    inside = here[:, None] & (col < E)
    x = tl.load(logits + row[:, None] * E + col, mask=inside, other=0)
    score = 1 / (1 + tl.exp(-x))
    if dgates is None:
        key = score + tl.load(bias + col, mask=col < E, other=0)
        key = tl.where(col < E, key, float("-inf"))
    slot = tl.arange(0, SLOTS)[None, :]
    picked = here[:, None] & (slot < K)
    at = row[:, None] * K + slot
    if dgates is None:
        gate, index = tl.zeros((ROWS, SLOTS), tl.float32), tl.zeros((ROWS, SLOTS), tl.int32)
        for k in tl.static_range(K):
            best = tl.minimum(tl.argmax(key, 1), E - 1)[:, None]       # E - 1: where all are NaN
            index = tl.where(slot == k, best, index)
            gate = tl.where(slot == k, tl.sum(tl.where(col == best, score, 0.0), 1)[:, None], gate)
            key = tl.where(col == best, float("-inf"), key)
        tl.store(experts + at, index.to(tl.int64), mask=picked)
        tl.store(gates + at, gate / tl.sum(gate, 1)[:, None] * scale, mask=picked)
    else:                        # d score = (dgate - sum of gates * dgates) / sum of scores
        dgate = tl.load(dgates + at, mask=picked, other=0)
        index = tl.load(experts + at, mask=picked, other=-1)
        chosen, d = tl.zeros((ROWS, WIDTH), tl.int32), tl.zeros((ROWS, WIDTH), tl.float32)
        for k in tl.static_range(K):
            mine = col == tl.sum(tl.where(slot == k, index, 0), 1)[:, None]
            chosen = tl.where(mine, 1, chosen)
            d = tl.where(mine, tl.sum(tl.where(slot == k, dgate, 0.0), 1)[:, None], d)
        score = tl.where(chosen > 0, score, 0.0)
        total = tl.sum(score, 1)[:, None]
        d = tl.where(chosen > 0, (d - tl.sum(d * score, 1)[:, None] / total) / total, 0.0)
        d *= score * (1 - score) * scale
        tl.store(dlogits + row[:, None] * E + col, d, mask=inside)


class _Choose(torch.autograd.Function):
    @staticmethod
    def run(logits, bias, experts, gates, dgates, dlogits, scale):
        N, E = logits.shape
        width = triton.next_power_of_2(E)
        tile = max(1, 1024 // width)
        _choose_kernel[_ceil(N, tile),](logits, bias, experts, gates, dgates, dlogits, N, E, scale,
                                        K=(k := experts.shape[1]), ROWS=tile, WIDTH=width,
                                        SLOTS=triton.next_power_of_2(k))

    @staticmethod
    def forward(ctx, logits, bias, top_k, scale):
        logits = logits.contiguous()
        gates = logits.new_empty(len(logits), top_k)
        experts = torch.empty_like(gates, dtype=torch.int64)
        _Choose.run(logits, bias, experts, gates, None, None, scale)
        ctx.save_for_backward(logits, experts)
        ctx.scale = scale
        ctx.mark_non_differentiable(experts)
        return experts, gates

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dgates):
        (logits, experts), d = ctx.saved_tensors, torch.empty_like(ctx.saved_tensors[0])
        _Choose.run(logits, None, experts, None, dgates.contiguous(), d, ctx.scale)
        return d, None, None, None


def choose(logits, bias, top_k, scale):
    """model.choose."""
    return _Choose.apply(logits, bias, top_k, scale)


@jit
def _wire_round(v, FP8: tl.constexpr):
    """(v [A, B] rounded to MXFP8, its codes, its scales [A, B/32])."""
    A: tl.constexpr = v.shape[0]
    B: tl.constexpr = v.shape[1]
    x = tl.reshape(v, (A, B // 32, 32))
    value, code, scale, byte = _round_blocks(x, _block_amax(x, False), None, None, "mxfp8", False,
                                             False, True, FP8)
    return tl.reshape(value * scale[:, :, None], (A, B)), tl.reshape(code, (A, B)), byte


@jit
def _copies_kernel(rows, slot, gates, out, codes, scales, T, pitch, D: tl.constexpr,
                   K: tl.constexpr, ROUND: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
                   FP8: tl.constexpr):
    """out[t] = sum of gates[t, k] * rows[slot[t, k]]. ROUND: rows are rounded first, and their
    codes kept where asked for. Rows that are None came as codes."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    here, left = t < T, T - tl.program_id(0) * BT
    inside = here[:, None] & (d < D)[None, :]
    total = tl.zeros((BT, BD), tl.float32)
    for k in tl.static_range(K):
        r = tl.load(slot + t * K + k, mask=here, other=0)
        if rows is None:
            v = _load((codes, scales, None, pitch), (r, 0, left), tl.program_id(1) * BD, BT, BD, D,
                      "mxfp8", False, False, FP8)
        else:
            v = _rows_at(rows, r, d, inside, D)
        if ROUND:
            v, code, byte = _wire_round(v, FP8)
            if codes is not None:
                tl.store(codes + r[:, None] * D + d[None, :], code.to(tl.uint8), mask=inside)
                b = tl.program_id(1) * (BD // 32) + tl.arange(0, BD // 32)
                tl.store(scales + r[:, None] * (D // 32) + b[None, :], byte.to(tl.uint8),
                         mask=here[:, None] & (b < D // 32)[None, :])
        total += v * tl.load(gates + t * K + k, mask=here, other=0)[:, None]
    tl.store(out + t[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=inside)


@jit
def _copies_backward_kernel(rows, scales, slot, gates, dout, dgates, drows, T, pitch,
                            D: tl.constexpr, K: tl.constexpr, ROUND: tl.constexpr,
                            BT: tl.constexpr, BD: tl.constexpr, FP8: tl.constexpr):
    """dgates[t, k] = <rows[slot[t, k]], dout[t]>, and drows[slot[t, k]] = gates[t, k] * dout[t],
    rounded where ROUND; rows are codes where they have scales."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    here, left = t < T, T - tl.program_id(0) * BT
    for k in tl.static_range(K):
        r = tl.load(slot + t * K + k, mask=here, other=0)
        gate = tl.load(gates + t * K + k, mask=here, other=0)[:, None]
        product = tl.zeros((BT, BD), tl.float32)
        for d0 in tl.static_range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            inside = here[:, None] & (d < D)[None, :]
            g = _rows_at(dout, t, d, inside, D)
            if scales is None:
                v = _rows_at(rows, r, d, inside, D)
            else:
                v = _load((rows, scales, None, pitch), (r, 0, left), d0, BT, BD, D, "mxfp8", False,
                          False, FP8)
            product += v * g
            g = (g * gate).to(drows.dtype.element_ty).to(tl.float32)
            if ROUND:
                g, _, _ = _wire_round(g, FP8)
            tl.store(drows + r[:, None] * D + d[None, :], g.to(drows.dtype.element_ty), mask=inside)
        tl.store(dgates + t * K + k, tl.sum(product, 1), mask=here)


def sum_of_copies(slot, rows, gates, fmt, dtype, keep=False):
    """moe_comm.sum_of_copies. Rows that come in MXFP8 or are rounded to it are kept as codes."""
    (T, k), device, codes, scales, pitch = gates.shape, gates.device, None, None, None
    came, gates = isinstance(rows, Quantized), gates.contiguous()
    if not came:
        rows = rows.contiguous()
    R, D = rows.codes.shape if came else rows.shape
    out = torch.empty(T, D, dtype=dtype, device=device)
    if came:
        codes, scales, _, pitch = _parts(rows)
    elif keep and fmt == "mxfp8":
        codes = torch.empty(R, D, dtype=torch.uint8, device=device)
        scales = torch.empty(R, D // 32, dtype=torch.uint8, device=device)
    _copies_kernel[_ceil(T, 4), _ceil(D, 256)](
        None if came else rows, slot, gates, out, codes, scales, T, pitch, D=D, K=k,
        ROUND=fmt == "mxfp8", BT=4, BD=256, FP8=_has_fp8(device))
    return (out, (rows if codes is None else codes, scales)) if keep else out


def copies_backward(dout, kept, slot, gates, fmt):
    """moe_comm.copies_backward. The gradient of a row without a copy stays undefined."""
    (rows, scales), (T, D), gates = kept, dout.shape, gates.contiguous()
    dgates, drows = torch.empty_like(gates), dout.new_empty(rows.shape)
    pitch = None if rows.is_contiguous() else rows.stride(0) // 4
    _copies_backward_kernel[_ceil(T, 4),](
        rows, scales, slot, gates, dout.contiguous(), dgates, drows, T, pitch, D=D,
        K=gates.shape[1],
        ROUND=fmt == "mxfp8", BT=4, BD=256, FP8=_has_fp8(dout.device))
    return dgates, drows


# ------------------------------------------------------------------------------------ the optimizer
@jit
def _adamw_kernel(p, g, m, v, steps, lr, factor, size, decay, beta1, beta2, log_beta1, log_beta2,
                  eps, BLOCK: tl.constexpr):
    """A step of AdamW for the gradient factor * g, with the step's number and rate read here."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    step, rate = tl.load(steps), tl.load(lr)
    grad = tl.load(g + i, mask=inside) * tl.load(factor)
    first = tl.load(m + i, mask=inside)
    second = tl.load(v + i, mask=inside)
    old = tl.load(p + i, mask=inside)
    first += (1 - beta1) * (grad - first)
    second = beta2 * second + (1 - beta2) * grad * grad
    size1, size2 = 1 - tl.exp2(step * log_beta1), 1 - tl.exp2(step * log_beta2)
    move = first / (tl.sqrt(second) / tl.sqrt(size2) + eps)
    tl.store(p + i, old * (1 - rate * decay) - rate / size1 * move, mask=inside)
    tl.store(m + i, first, mask=inside)
    tl.store(v + i, second, mask=inside)


def clipped_step(norm, opt, clip):
    """train.clipped_step, in one pass over memory."""
    factor = torch.clamp(clip / (norm + 1e-6), max=1.0)
    torch._foreach_add_([opt.state[p]["step"] for p in opt.mine], 1)
    for group in opt.param_groups:
        (beta1, beta2), rate = group["betas"], (group["lr"], factor)
        betas = beta1, beta2, math.log2(beta1), math.log2(beta2)
        for p in group["params"]:
            s, size = opt.state[p], p.numel()
            _adamw_kernel[_ceil(size, 1024),](
                p, p.grad.contiguous(), s["exp_avg"], s["exp_avg_sq"], s["step"], *rate, size,
                group["weight_decay"], *betas, group["eps"], BLOCK=1024)


# ------------------------------------------------------------------------------ what quant.py calls
def ops(device):
    """The functions of quant.REFERENCE for the backend that runs on `device`."""
    name = backend(device)
    if name == "reference":
        return quant.REFERENCE
    native = dict(native=name == "native")
    return SimpleNamespace(swiglu=swiglu, quantize=quantize, payload=payload,
                           weight_outer=weight_outer,
                           operand=partial(operand, **native),
                           operand_pair=partial(operand_pair, **native),
                           quantize_operand=partial(quantize_operand, **native),
                           gemm=gemm, gemm_wgrad=gemm_wgrad)


# ------------------------------------------------------------------------------------ the benchmark
def quantise_cases(rows, cols, device="cuda"):
    """name -> (function, bytes read and written, share of copy bandwidth to reach or None)."""
    x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16)
    q = quantize(x, "nvfp4")
    n, counts = x.numel(), torch.full((32,), rows // 32, dtype=torch.int32, device=device)
    random = dict(rounding="stochastic", seed=torch.tensor(1, dtype=torch.int32, device=device))
    mx, nv = 1 + 1 / 32, 0.5 + 1 / 16                   # bytes of a packed number
    return {
        "mxfp8 row, packed": (lambda: quantize(x, "mxfp8"), n * (2 + mx), 0.85),
        "mxfp8 row, values": (lambda: cast(x, "mxfp8"), n * 4, 0.85),
        "mxfp8 row + column, packed":
            (lambda: operand_pair(x, "mxfp8", native=True), n * (2 + 2 * mx), None),
        "mxfp8 row + column, values":
            (lambda: operand_pair(x, "mxfp8", counts=counts), n * 6, 0.85),
        "mxfp8 column, values": (lambda: cast(x, "mxfp8", axis=-2, counts=counts), n * 4, None),
        "nvfp4 row, packed": (lambda: quantize(x, "nvfp4"), n * (2 + nv) + 4 * rows, 0.85),
        "nvfp4 row, packed + values": (lambda: quantize_operand(x, "nvfp4"), n * (4 + nv), None),
        "nvfp4 decode": (lambda: cast(q, "nvfp4"), n * (2 + nv) + 4 * rows, None),
        "mxfp8 row, packed, stochastic":
            (lambda: quantize(x, "mxfp8", **random), n * (2 + mx), 0.65),
        "mxfp8 row + column, values, stochastic":
            (lambda: operand_pair(x, "mxfp8", counts=counts, **random), n * 6, 0.65),
        "nvfp4 row, packed, stochastic":
            (lambda: quantize(x, "nvfp4", **random), n * (2 + nv) + 4 * rows, 0.65),
        "nvfp4 to mxfp8 column, values, stochastic":
            (lambda: cast(q, "mxfp8", axis=-2, counts=counts, **random),
             n * (2 + nv) + 4 * rows, None),
    }


def graphed(f, calls):
    """A captured graph of `calls` calls of f: its replay times kernels, not launches."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            f()
    return graph


def interleaved(functions, repeats=15, calls=4):
    """name -> seconds of one call, `repeats` times: each round times every function once."""
    graphs = {name: graphed(f, calls) for name, f in functions.items()}
    seconds = {name: [] for name in graphs}
    for _ in range(repeats + 2):
        for name, graph in graphs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            seconds[name].append(start.elapsed_time(stop) / 1000 / calls)
    return {name: s[2:] for name, s in seconds.items()}


def bench_quantise(rows=131072, cols=2048):
    """Print each quantise kernel's bandwidth and its share of that of a copy of as many bytes."""
    cases, functions = quantise_cases(rows, cols), {}
    for name, (f, size, _) in cases.items():
        # Copies of some sizes are slow for no reason of ours: the faster of two kinds counts.
        a, b = torch.empty(2, int(size) // 4 + 5 * 65536, dtype=torch.int16, device="cuda")
        functions[name] = f
        functions[name, 0], functions[name, 1] = partial(b.copy_, a), partial(torch.neg, a, out=b)
    seconds = interleaved(functions)
    print(f"\n{rows} x {cols} bf16, n = {len(seconds[next(iter(cases))])}, "
          "median (lowest to highest)")
    print(f"{'kernel':44}{'GB':>6}{'TB/s':>7}{'share of a copy':>26}{'bar':>7}")
    for name, (_, size, bar) in cases.items():
        share = sorted(min(copies) / s for s, *copies in
                       zip(seconds[name], seconds[name, 0], seconds[name, 1]))
        spread = f"{statistics.median(share):.3f} ({share[0]:.3f} to {share[-1]:.3f})"
        print(f"{name:44}{size / 1e9:6.2f}{size / statistics.median(seconds[name]) / 1e12:7.2f}"
              f"{spread:>26}{bar or '':>7}")


# The expert GEMMs of two models: name, experts, their rows in all, and (K, N) of each.
SHAPES = (("A", 32, 4 * 32768, ((768, 1024), (512, 768))),
          ("B", 64, 6 * 32768, ((2048, 2816), (1408, 2048))))


def gemm_cases(E, T, K, N):
    """GEMM -> whose -> call, for bf16 experts with uneven shares of T rows: ours, torch's (padding
    counts, and stays undefined), and cuBLAS's dense one of as many FLOPs."""
    share = torch.distributions.Dirichlet(torch.full((E,), 8.0)).sample()
    counts = torch.bincount(torch.multinomial(share, T, replacement=True), minlength=E).int().cuda()
    R, offs = _ceil(T + E * 127, 128) * 128, ((counts + 127) // 128 * 128).cumsum(0).int()
    x, dy, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((R, K), (R, N), (E, N, K)))
    torchs = partial(torch._grouped_mm, offs=offs)
    return dict(
        forward=dict(ours=partial(gemm, x, w, counts), torch=partial(torchs, x, w.transpose(1, 2)),
                     cublas=partial(gemm, x[:T], w)),
        dgrad=dict(ours=partial(gemm, dy, w, counts, turned=True), torch=partial(torchs, dy, w),
                   cublas=partial(gemm, dy[:T], w, turned=True)),
        wgrad=dict(ours=partial(gemm_wgrad, dy, x, counts), torch=partial(torchs, dy.T, x),
                   cublas=partial(gemm_wgrad, dy[:T], x[:T])))


def bench_gemm():
    """Print the speed of each expert GEMM in bf16, and its share of a dense one's by cuBLAS."""
    torch.manual_seed(0)
    print(f"\n{'expert GEMM, bf16':44}{'TFLOP/s':>8}{'share of cuBLAS':>26}{'bar':>5}"
          f"{'torch grouped_mm':>26}")
    for model, E, T, shapes in SHAPES:
        for K, N in shapes:
            for kind, calls in gemm_cases(E, T, K, N).items():
                seconds, share = interleaved(calls), {}
                for whose in ("ours", "torch"):
                    s = sorted(c / t for c, t in zip(seconds["cublas"], seconds[whose]))
                    share[whose] = f"{statistics.median(s):.3f} ({s[0]:.3f} to {s[-1]:.3f})"
                tflops = 2 * T * K * N / statistics.median(seconds["ours"]) / 1e12
                name = f"{model} {kind} T={T} E={E} K={K} N={N}"
                print(f"{name:44}{tflops:8.0f}{share['ours']:>26}"
                      f"{0.8 if kind == 'wgrad' else 0.9:5}{share['torch']:>26}")


def main():
    parser = argparse.ArgumentParser(
        description="What this machine is, and how fast the kernels are.")
    parser.add_argument("--bench", action="store_true", help="measure (needs a CUDA GPU)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "no CUDA GPU"
    print(f"{name}, torch {torch.__version__}, "
          f"Triton {triton.__version__ if triton else 'not installed'}")
    print(describe(device))
    if triton:
        report_native()
    if args.bench and device == "cpu":
        raise SystemExit("--bench: needs a CUDA GPU")
    if args.bench:
        for cols in (768, 2048):
            bench_quantise(cols=cols)
        bench_gemm()


if __name__ == "__main__":
    main()
