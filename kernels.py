"""The GPU path: Triton kernels with the numbers of quant.py, which stays the law.

A GEMM operand is made in one pass over memory. What is written depends on who reads it:

    backend     GPU                   a GEMM reads
    native      sm_100, sm_103        packed codes, and block scales in the tensor core's own layout
    emulated    any other CUDA GPU    the exact decoded values in bf16 (an ordinary bf16 GEMM then
                                      forms the same products: see quant.py)
    reference   CPU                   quant.py itself; nothing here is needed, not even Triton

Letters: E experts (matrices), R rows, K columns, V block size, A x B a tile whose blocks run along B.
`python kernels.py` says what this machine is; `python kernels.py --bench` measures it.
"""
import argparse
import math
import os
import statistics
from dataclasses import dataclass
from types import SimpleNamespace

import torch

import quant
from quant import FORMATS, Quantized

try:
    import triton
    import triton.language as tl
except ImportError:                        # macOS, or no GPU: the reference needs none of this
    triton, tl = None, SimpleNamespace(constexpr=int)


def jit(f):
    return triton.jit(f) if triton else f


INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


# --------------------------------------------------------------------------------- which backend runs
NATIVE = ((10, 0), (10, 3))                # compute capabilities whose block-scaled MMA we compile for
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
    return "bf16 tensor cores need compute capability 8.0" if capability < (8, 0) else None


def use(name, device=None):
    """Choose the backend of this process: "auto" takes the first of native, emulated, reference that
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
                emulated="a bf16 GEMM on the exact decoded values, the products of a block-scaled one",
                reference="plain PyTorch, the numbers that the GPU kernels are checked against")[name]
    why = "as asked for" if _chosen == name else _can_run("native", device)
    return f"{name}: {what}" + (f" ({why})" if why else "")


# --------------------------------------------------------------------------- rounding, inside a kernel
@jit
def _mix(h):
    """quant.mix on uint32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@jit
def _random_bits(row_hash, cols):
    """quant.random_bits for row_hash = mix(mix(rows) + mix(seed)) [BM] and cols [BK]."""
    h = row_hash[:, None] + _mix(cols.to(tl.uint32, bitcast=True) ^ 0x5BD1E995)[None, :]
    h = (h ^ (h >> 16)) * 0x7FEB352D
    return (h ^ (h >> 15)) * 0x846CA68B


@jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@jit
def _ceil_int(x):
    """The integer at or above x. tl.ceil means the same, but its PTX flushes denormals."""
    if INTERPRETED:
        return tl.ceil(x).to(tl.int32)
    return tl.inline_asm_elementwise("cvt.rpi.s32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32,
                                     is_pure=True, pack=1)


@jit
def _number(n):
    """fp32 of an integer 0 <= n < 2^23, by its bits (a conversion costs four times as much)."""
    return _float(n + 0x4B000000) - 8388608.0


@jit
def _to_grid(y, draw, STOCHASTIC: tl.constexpr, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """Round 0 <= y <= largest to an element format: (value, code without its sign in the low byte).

    n = y / step is rounded to an integer; value = n * step and code = n + exponent << MANTISSA, into
    whose exponent a carry walks by itself. Nearest: a number above 2^23 has no bits after its point,
    so adding 2^23 rounds to nearest, ties to even. The product before it is exact (a power of two),
    so fusing them into one multiply-add changes nothing. Stochastic, draw = u * 2^24, up where
    u < fraction: in integers with 24 bits after the point, n * 2^24 + 2^24 - 1 - draw is cut.
    BIAS, part of the integer that is added anyway, cancels the code's exponent of the binade EMIN.
    """
    BIAS: tl.constexpr = -((EMIN + 127) << MANTISSA) % 256
    binade = tl.maximum(_bits(y) & 0x7F800000, (EMIN + 127) << 23)
    if STOCHASTIC:
        z = y * _float((127 << 23) - (binade - ((127 + MANTISSA + 24) << 23)))
        n = (_ceil_int(z) - draw + ((BIAS + 1 << 24) - 1)) >> 24
        value = _number(n) - BIAS
    else:
        t = y * _float((127 << 23) - (binade - ((127 + MANTISSA) << 23))) + (8388608.0 + BIAS)
        n = _bits(t)
        value = t - (8388608.0 + BIAS)
    value *= _float(binade - (MANTISSA << 23))
    code = n + (binade >> (23 - MANTISSA))
    if MANTISSA == 1 and not STOCHASTIC:       # E2M1 has three binades: three roundings are cheaper
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
def _row_amax(x, FINITE: tl.constexpr):
    """Bits of the largest |x| of each row; as integers they order as |x| does, with Inf, NaN above."""
    bits = tl.reshape(_bits(x) & 0x7FFFFFFF, (x.shape[0], x.shape[1] // 16, 16))
    if FINITE:
        bits = tl.where(bits < 0x7F800000, bits, 0)
    return tl.max(tl.max(bits, 2), 1)


@jit
def _mxfp8_scales(amax):
    """quant._mxfp8_scales from the bits of each block's amax: (byte, scale, inverse)."""
    byte = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
    byte = tl.where(amax >= 0x7F800000, 255, byte)
    scale = tl.where(byte == 255, 0x7FC00000, tl.maximum(byte << 23, 0x00400000))
    return byte, _float(scale), _float(tl.maximum(254 - byte, 0) << 23)


@jit
def _nvfp4_scales(amax, outer, UP: tl.constexpr, GIVEN: tl.constexpr):
    """quant._nvfp4_scales from the bits of each block's amax: (byte, scale with outer, inverse)."""
    s = _float(amax) * (1 / 6)
    if GIVEN:
        s = tl.math.div_rn(s, outer)
    else:
        s = s * _float((254 << 23) - _bits(outer))      # our own power of two: a product is exact too
    s, byte = _to_grid(tl.minimum(s, 448.0), 0, UP, 3, -6)       # up: above, however small the rest
    bad = amax >= 0x7F800000
    s = tl.where(bad, float("nan"), s)
    scale = s * outer
    return tl.where(bad, 0x7F, byte), scale, tl.where(s > 0, tl.math.div_rn(1.0, scale), 0.0)


# ---------------------------------------------------------------------------- decoding, inside a kernel
@jit
def _decode_e4m3(byte):
    m = byte.to(tl.int32) & 0x7F
    v = tl.where(m < 8, _number(m) * 0.001953125, _float((m << 20) + (120 << 23)))
    v = tl.where(m == 0x7F, float("nan"), v)
    return _float(_bits(v) | ((byte.to(tl.int32) & 0x80) << 24))


@jit
def _decode_e2m1(code, sign):
    """fp32 of codes 0 to 7 with the top bit of `sign`: 0 and .5, then an exponent and one bit."""
    bits = tl.where(code < 2, code * 0x3F000000, (code << 22) + 0x3F000000)
    return _float(bits | (sign & -0x80000000))


@jit
def _decode_e8m0(byte):
    b = byte.to(tl.int32)
    return _float(tl.where(b == 255, 0x7FC00000, tl.maximum(b << 23, 0x00400000)))


# ------------------------------------------------------------------------------------ the one kernel
@jit
def _gather(p, row, base, width, k0, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, rows_left,
            EVEN: tl.constexpr, VECTOR: tl.constexpr):
    """Load [rows, WIDTH] from column k0 of a matrix with `width` numbers a row. VECTOR numbers belong
    to one thread: 8 decoded ones, else blocks along the rows would be spread over too many threads."""
    k = tl.arange(0, WIDTH)
    p = tl.max_contiguous(p + base * width + k0 + row[:, None] * width + k[None, :], (1, VECTOR))
    if EVEN:
        return tl.load(p)
    r = tl.arange(0, row.shape[0])
    return tl.load(p, mask=(r < rows_left)[:, None] & (k < COLUMNS - k0)[None, :], other=0)


@jit
def _load(x, x_scales, outer, row, base, stride, k0, rows_left, K: tl.constexpr, SOURCE: tl.constexpr,
          BK: tl.constexpr, EVEN: tl.constexpr):
    """fp32 [BM, BK] of the source from column k0: as it is, silu(gate) * up, or decoded."""
    if SOURCE == "values":
        return _gather(x, row, base, stride, k0, BK, K, rows_left, EVEN, 8).to(tl.float32)
    elif SOURCE == "swiglu":                               # two roundings to bf16, as in the model
        gate = _gather(x, row, base, stride, k0, BK, K, rows_left, EVEN, 8).to(tl.float32)
        up = _gather(x + K, row, base, stride, k0, BK, K, rows_left, EVEN, 8).to(tl.float32)
        gate = tl.math.div_rn(gate, 1 + tl.exp(-gate)).to(tl.bfloat16).to(tl.float32)
        return (gate * up).to(tl.bfloat16).to(tl.float32)
    elif SOURCE == "mxfp8":
        codes = _gather(x, row, base, K, k0, BK, K, rows_left, EVEN, 8)
        scales = _gather(x_scales, row, base, K // 32, k0 // 32, BK // 32, K // 32, rows_left, EVEN, 1)
        v = tl.reshape(_decode_e4m3(codes), (row.shape[0], BK // 32, 32))
        return tl.reshape(v * _decode_e8m0(scales)[:, :, None], (row.shape[0], BK))
    else:
        codes = _gather(x, row, base, K // 2, k0 // 2, BK // 2, K // 2, rows_left, EVEN, 4)
        scales = _gather(x_scales, row, base, K // 16, k0 // 16, BK // 16, K // 16, rows_left, EVEN, 1)
        b = codes.to(tl.int32)
        v = tl.interleave(_decode_e2m1(b & 7, b << 28), _decode_e2m1((b >> 4) & 7, b << 24))
        v = tl.reshape(v, (row.shape[0], BK // 16, 16))
        return tl.reshape(v * (_decode_e4m3(scales) * outer[:, None])[:, :, None], (row.shape[0], BK))


@jit
def _store(out, value, e, i0, j0, I, J, ROWWISE: tl.constexpr, EVEN: tl.constexpr,
           VECTOR: tl.constexpr):
    """Store a tile at (i0, j0) of matrix e of out [E, I, J], or [E, J, I] where not ROWWISE. VECTOR: no
    thread stores more at once, so that it can be the thread that computed it."""
    i, j = tl.arange(0, value.shape[0])[:, None], tl.arange(0, value.shape[1])[None, :]
    out = out + e * I * J
    if ROWWISE:
        p = tl.max_contiguous(out + (i0 * J + j0) + (i * J + j), (1, VECTOR))
    else:
        p = tl.max_contiguous(out + (j0 * I + i0) + (j * I + i), (VECTOR, 1))
    value = value.to(out.dtype.element_ty)
    if EVEN:
        tl.store(p, value)
    else:
        tl.store(p, value, mask=(i < I - i0) & (j < J - j0))


@jit
def _store_blocked(out, byte, e, i0, j0, I, J, EVEN: tl.constexpr):
    """Store block scales [A, B] at (i0, j0) in the layout [E, I/128, J/4, 2, 256] of the tensor core:
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
def _emit(x, draw, outer, codes, scales, blocked, values, e, i0, j0, I, J, FMT: tl.constexpr,
          ROWWISE: tl.constexpr, STOCHASTIC: tl.constexpr, GIVEN: tl.constexpr, EVEN: tl.constexpr):
    """Round a tile x [A, B], blocks along B, and store what is asked for (what is not None)."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    if FMT == "bf16":
        _store(values, x, e, i0, j0, I, J, ROWWISE, EVEN, 8)
    else:
        V: tl.constexpr = 32 if FMT == "mxfp8" else 16
        xb = tl.reshape(x, (A, B // V, V))
        amax = tl.max(_bits(xb) & 0x7FFFFFFF, 2)                        # [A, B/V]
        if FMT == "mxfp8":
            byte, scale, inverse = _mxfp8_scales(amax)
        else:
            byte, scale, inverse = _nvfp4_scales(amax, outer[:, None], STOCHASTIC, GIVEN)
        y = tl.abs(xb * inverse[:, :, None])
        if codes is not None:                                 # magnitudes 0 in a block with NaN, Inf
            y = tl.where((amax >= 0x7F800000)[:, :, None], 0.0, y)
        if FMT == "nvfp4" and (STOCHASTIC or GIVEN):          # own scales, nearest: y < 7, which is 6
            y = tl.minimum(y, 6.0)
        u = tl.reshape(draw, (A, B // V, V)) if STOCHASTIC else None
        v, code = _to_grid(y, u, STOCHASTIC, 3 if FMT == "mxfp8" else 1, -6 if FMT == "mxfp8" else 0)
        if values is not None:
            v = _float(_bits(v) | (_bits(xb) & -0x80000000)) * scale[:, :, None]
            _store(values, tl.reshape(v, (A, B)), e, i0, j0, I, J, ROWWISE, EVEN, 8)
        if codes is not None:
            ACROSS: tl.constexpr = ROWWISE or blocked is not None      # native: the contracted axis last
            TURNED: tl.constexpr = ACROSS and not ROWWISE
            WIDE: tl.constexpr = 16 if TURNED else 8 * V // 32 if ROWWISE else 8
            if FMT == "mxfp8":
                code = tl.reshape(code | (_bits(xb) >> 24 & 0x80), (A, B)).to(tl.uint8)
                _store(codes, code, e, i0, j0, I, J, ACROSS, EVEN, WIDE)
            else:
                code = tl.reshape(code | (_bits(xb) >> 28 & 8), (A, B // 2, 2)).to(tl.uint8)
                low, high = tl.split(code)
                _store(codes, low | high << 4, e, i0, j0 // 2, I, J // 2, ACROSS, EVEN, WIDE)
        if scales is not None:
            _store(scales, byte, e, i0, j0 // V, I, J // V, ROWWISE, EVEN, 16)
        if blocked is not None:
            _store_blocked(blocked, byte, e, i0, j0 // V, I, J // V, EVEN)


@jit
def _group_end(counts, r0, groups, WIDTH: tl.constexpr):
    """End of the real rows in the group that row r0 belongs to; groups start at multiples of 128."""
    i = tl.arange(0, WIDTH)
    n = tl.load(counts + i, mask=i < groups, other=0)
    size = (n + 127) // 128 * 128
    start = tl.cumsum(size, 0) - size
    return tl.max(tl.where(start <= r0, start + n, 0), 0)


@jit
def _round_kernel(x, x_scales, x_outer, index, counts, rows, cols, seed, outer,
                  row_codes, row_scales, row_blocked, row_values,
                  col_codes, col_scales, col_blocked, col_values,
                  R, stride, groups, K: tl.constexpr, SOURCE: tl.constexpr, ROW: tl.constexpr,
                  COL: tl.constexpr, STOCHASTIC: tl.constexpr, OUTER: tl.constexpr,
                  WIDTH: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
                  EVEN: tl.constexpr):
    """Read rows of x [E, R, K] once; write them rounded along K (format ROW), along R (COL) or both.

    A program has BM rows and CHUNKS times BK columns. x is a tensor, [gate | up] halves, or a
    packed tensor (SOURCE). index: row of x for each row. counts: x is sorted by expert, padding
    counts as zero. OUTER: "own" computes each row's outer scale and stores it, "given" loads it.
    """
    SPAN: tl.constexpr = CHUNKS * BK
    tiles: tl.constexpr = (K + SPAN - 1) // SPAN
    pid = tl.program_id(0)
    row_tiles = tl.cdiv(R, BM)
    tile = pid // tiles
    e = (tile // row_tiles).to(tl.int64)
    r0 = (tile % row_tiles).to(tl.int64) * BM
    first = (pid % tiles).to(tl.int64) * SPAN
    r = tl.arange(0, BM)
    left = (R - r0).to(tl.int32)
    here = e * R + r0                                       # this tile's first row among all rows

    row, base = r, here
    if index is not None:
        row = tl.load(index + here + r, mask=r < left, other=0).to(tl.int64)
        base = e * 0
    x_out = tl.load(x_outer + base + row, mask=r < left, other=0) if SOURCE == "nvfp4" else None
    row_hash = None
    if STOCHASTIC:
        name = (here + r).to(tl.int32)
        if rows is not None:
            name = tl.load(rows + here + r, mask=r < left, other=0)
        s = tl.load(seed).to(tl.uint32, bitcast=True)      # on the device: a replayed graph draws anew
        row_hash = _mix(_mix(name.to(tl.uint32, bitcast=True)) + _mix(s))
    end = left
    if counts is not None:
        end = (_group_end(counts, r0, groups, WIDTH) - r0).to(tl.int32)

    tile = ()
    for i in tl.static_range(CHUNKS):
        v = _load(x, x_scales, x_out, row, base, stride, first + i * BK, left, K, SOURCE, BK, EVEN)
        # Masked after the load, so that the load does not wait for the group's end.
        tile = tile + (v if counts is None else tl.where((r < end)[:, None], v, 0.0),)
    o = None
    if OUTER == "own":
        amax = tl.zeros((BM,), tl.int32)
        for i in tl.static_range(CHUNKS):
            amax = tl.maximum(amax, _row_amax(tile[i], False))
        if tl.max(amax, 0) >= 0x7F800000:      # only now look at each number for the largest finite one
            amax = tl.zeros((BM,), tl.int32)
            for i in tl.static_range(CHUNKS):
                amax = tl.maximum(amax, _row_amax(tile[i], True))
        o = _outer_of(amax)
        tl.store(outer + here + r, o, mask=r < left)
    elif OUTER == "given" and ROW is not None:
        o = tl.load(outer + here + r, mask=r < left, other=1.0)

    for i in tl.static_range(CHUNKS):
        k0 = first + i * BK
        c = k0.to(tl.int32) + tl.arange(0, BK)
        draw = None
        turned = None
        if STOCHASTIC:
            name = c if cols is None else tl.load(cols + c, mask=c < K, other=0)
            draw = (_random_bits(row_hash, name) >> 8).to(tl.int32)
            turned = tl.trans(draw)
        if ROW is not None:
            _emit(tile[i], draw, o, row_codes, row_scales, row_blocked, row_values, e, r0, k0, R, K,
                  ROW, True, STOCHASTIC, OUTER == "given", EVEN)
        if COL is not None:
            if OUTER == "given":
                o = tl.load(outer + e * K + c, mask=c < K, other=1.0)
            _emit(tl.trans(tile[i]), turned, o, col_codes, col_scales, col_blocked, col_values, e, k0,
                  r0, K, R, COL, False, STOCHASTIC, True, EVEN)


@jit
def _amax_kernel(w, amax, size, BLOCK: tl.constexpr):
    """The largest finite |w| of each matrix; as integers, whose maximum knows no order of summation."""
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

# (rows, columns, warps) of a tile, by what is written: along rows, along columns, both, or along rows
# by a program that sees whole rows because it computes their outer scale.
TILES = dict(row=(32, 128, 4), column=(64, 128, 4), both=(64, 128, 4), own=(16, 256, 4))


def _ceil(a, b):
    return -(-a // b)


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
            raise ValueError(f"a tensor of shape {tuple(shape)} has no whole blocks of {block} along "
                             f"axis {a}, as {fmt} needs")


def _source(x, swiglu):
    """(kind, numbers, scales, outer, stride of a row, shape of the values) of what a kernel reads."""
    if isinstance(x, Quantized):
        kind = "nvfp4" if quant.is_fp4(x.fmt) else "mxfp8"
        shape = (*x.codes.shape[:-1], x.scales.shape[-1] * FORMATS[x.fmt].block)
        outer = x.outer.contiguous() if kind == "nvfp4" else None
        codes, scales = x.codes.contiguous(), x.scales.contiguous()
        return kind, codes.view(torch.uint8), scales.view(torch.uint8), outer, 0, shape
    if x.dim() != 2 or x.stride(-1) != 1:
        x = x.contiguous()
    if not swiglu:
        return "values", x, None, None, x.stride(-2) if x.dim() > 1 else x.numel(), tuple(x.shape)
    return "swiglu", x, None, None, x.stride(-2), (*x.shape[:-1], x.shape[-1] // 2)


def _outputs(want, fmt, shape, axis, device, dtype):
    """Empty tensors for one direction of x [.., R, K]: what is not in `want` stays None."""
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
        out.values = empty(*shape, dtype=dtype)
    if "packed" in want:
        out.codes, out.scales = plain(J // pack), plain(J // block)
    if "native" in want:
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
        x = _run(x, "bf16", -1, ("values",), counts=counts, swiglu=swiglu, dtype=torch.float32)[0].values
        outer = quant.weight_outer(x.movedim(-1, -2)[..., None, :], fmt)[..., 0]
    device = x.codes.device if isinstance(x, Quantized) else x.device
    outer = torch.as_tensor(outer, dtype=torch.float32, device=device)
    return outer.expand(shape[:-1] if axis == -1 else (*shape[:-2], shape[-1]))


def _run(x, fmt, axis, want, *, counts=None, index=None, swiglu=False, dtype=torch.bfloat16,
         rounding="nearest", seed=0, outer=None, rows=None, cols=None):
    """Launch the kernel: (outputs along rows, outputs along columns, outer scales)."""
    source, data, scales, x_outer, stride, shape = _source(x, swiglu)
    if index is not None:
        shape = (index.numel(), shape[-1])
    _check(shape, fmt, axis, rounding)
    device = data.device
    given = _given_outer(x, fmt, outer, shape, axis, counts, swiglu)
    own = given is None and quant.is_fp4(fmt)
    if own:
        outer = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    else:
        outer = given
    row, col = (_outputs(want if a == axis or axis == "both" else (), fmt, shape, a, device, dtype)
                for a in (-1, -2))
    if rounding == "stochastic" and not (torch.is_tensor(seed) and seed.device == device):
        seed = torch.full((), int(quant.fold(seed)), dtype=torch.int32, device=device)   # no host sync
    *lead, R, K = shape
    E = math.prod(lead)
    if row.blocked is None and axis == -1:
        E, R = 1, E * R
    BM, BK, warps = TILES["own" if own else {-1: "row", -2: "column", "both": "both"}[axis]]
    if own:                                                   # whole rows in a few chunks
        BK = max(min(BK, K & -K), triton.next_power_of_2(_ceil(K, 12)), 32)
    chunks = _ceil(K, BK) if own else 1
    grid = (E * _ceil(R, BM) * _ceil(K, BK * chunks),)
    _round_kernel[grid](
        data, scales, x_outer, index, counts, *(t if t is None else t.int() for t in (rows, cols)),
        seed if rounding == "stochastic" else None, outer if own or outer is None else outer.contiguous(),
        row.codes, row.scales, row.blocked, row.values, col.codes, col.scales, col.blocked, col.values,
        R, stride, 0 if counts is None else counts.numel(), K=K, SOURCE=source,
        ROW=None if axis == -2 else fmt, COL=None if axis == -1 else fmt,
        STOCHASTIC=rounding == "stochastic", OUTER="own" if own else None if given is None else "given",
        WIDTH=1 if counts is None else triton.next_power_of_2(counts.numel()),
        BM=BM, BK=BK, CHUNKS=chunks, EVEN=R % BM == 0 and K % BK == 0, num_warps=warps)
    return row, col, outer


def _packed(fmt, out, outer, axis=-1):
    block = FORMATS[fmt].block
    return Quantized(fmt, out.codes.view(CODES[block]), out.scales.view(SCALES[block]), outer, axis)


def _native(fmt, out, outer):
    block = FORMATS[fmt].block
    codes = out.codes.view(-1, *out.codes.shape[-2:])
    outer = None if outer is None else outer.reshape(codes.shape[:2])
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
    if fmt not in ("mxfp8", "nvfp4"):                         # the ablations are not worth a kernel
        return quant.quantize(x, fmt, rounding=rounding, seed=seed, outer=outer, rows=rows, cols=cols,
                              axis=axis)
    row, col, outer = _run(x, fmt, axis, ("packed",), rounding=rounding, seed=seed, outer=outer,
                           rows=rows, cols=cols)
    return _packed(fmt, row if axis == -1 else col, outer, axis)


def cast(x, fmt, *, axis=-1, dtype=torch.bfloat16, **kw):
    """The exact values in `fmt` of x, a tensor or a packed one, as a tensor of x's shape: what an
    emulated GEMM reads, and what travels where results are not sent packed.

    A packed tensor is decoded (axis=-1), or decoded and rounded again along its rows (axis=-2).
    counts: int32 [E] real rows of x [R, K] sorted by expert; padding rows become zero.
    index: make row r from row index[r] of x. swiglu: x is [gate | up], round silu(gate) * up.
    """
    dtype = dtype or torch.bfloat16
    if fmt not in ("bf16", "mxfp8", "nvfp4") and torch.is_tensor(x):
        return quant.operand(x, fmt, axis=axis, **kw).to(dtype)
    if axis == -1 and isinstance(x, Quantized) or fmt == "bf16":
        fmt, axis = "bf16", -1
        kw = {k: kw[k] for k in kw if k in ("counts", "index", "swiglu")}
    row, col, _ = _run(x, fmt, axis, ("values",), dtype=dtype, **kw)
    return row.values if axis == -1 else col.values


def _native_operand(x, fmt, *, counts=None, dtype=None, axis=-1, **kw):
    """An Operand: packed codes and blocked scales."""
    if fmt == "bf16":
        return _emulated_operand(x, fmt, counts=counts, axis=axis, **kw)
    if axis == -1 and fmt not in ("mxfp8", "nvfp4"):
        x = x if isinstance(x, Quantized) else quant.quantize(x, fmt, **kw)
    if axis == -1 and isinstance(x, Quantized) and kw.get("index") is None:
        codes = x.codes.view(-1, *x.codes.shape[-2:])
        outer = None if x.outer is None else x.outer.reshape(codes.shape[:2])
        return Operand(x.fmt, codes, blocked(x.scales.view(-1, *x.scales.shape[-2:])), outer)
    row, col, outer = _run(x, fmt, axis, ("native",), counts=counts, **kw)
    return _native(fmt, row if axis == -1 else col, outer)


def _emulated_operand(x, fmt, *, counts=None, axis=-1, **kw):
    """The values in bf16. "bf16" means as the tensor is, but that padding counts as zero along T."""
    if fmt == "bf16" and (axis == -1 or counts is None) and torch.is_tensor(x) and not kw.get("swiglu"):
        return x
    return cast(x, fmt, counts=counts, axis=axis, **kw)
