"""Numbers of 8 and 4 bits for training: MXFP8, NVFP4, how they are rounded, which GEMM reads what.

A low-precision tensor is made of *blocks*: a run of 32 (MXFP8) or 16 (NVFP4) neighbours along the
axis that a matrix product sums over. The numbers of a block share one *scale*, so that the largest
of them just fits the few bits of an element:

                   MXFP8                         NVFP4
    element        E4M3, largest 448             E2M1: 0 .5 1 1.5 2 3 4 6 and their negatives
    block          32                            16
    block scale    E8M0: a power of two          E4M3, 3 bits of mantissa, largest 448
    outer scale    none                          fp32, a power of two, one per row
    bits a number  8 + 8/32 = 8.25               4 + 8/16 = 4.5

    value = element * block scale * outer scale

Three ideas carry the file.

1. The outer scale is a power of two. An E2M1 element times an E4M3 scale has at most 6 significant
   bits, so every decoded number is exact in bf16. A bf16 GEMM on decoded numbers therefore forms
   the very products that a block-scaled tensor core forms, and one recipe has the same numbers
   on a CPU, on a Hopper and on a Blackwell. There is one per row, so what a token becomes does not
   depend on its neighbours in the batch: rollout and training round alike, and a token may be
   rounded before it is sent to another GPU.

2. Stochastic rounding is unbiased only if nothing clips. Rounding x between neighbours lo < hi up
   with probability (x - lo) / (hi - lo) has mean x, but if the block scale was itself rounded down,
   the block's largest number lies above the largest element and is clipped. So the NVFP4 scale is
   rounded up when elements are rounded stochastically (and MXFP8's always is).

3. A linear layer is three GEMMs, each summing over another axis, so each tensor is rounded twice:

       forward  Y  = X  W^T    sums over K     X [T, K], W [N, K], blocks along K
       dgrad    dX = dY W      sums over N     dY [T, N], W [N, K], blocks along N
       wgrad    dW = dY^T X    sums over T     dY [T, N], X [T, K], blocks along T

   The second copy of W and X should stand for what the forward pass used. The NVFP4 recipe decodes
   the 4-bit copy exactly and rounds it along the other axis to MXFP8 stochastically: averaged over
   steps, the backward pass sees the forward weights and nothing of X but 4.5 bits is kept.

Letters: T tokens, R rows sorted by expert and padded, E experts, N outputs, K inputs, V block size.
Where numbers are rounded, `rows` and `cols` name them for their random bits, and select nothing.
Sources: OCP Microscaling v1.0 (MX); NVIDIA, "Pretraining LLMs with NVFP4" (2025); the MXFP8
recipe of TorchAO; Thinking Machines' Inkling 2 Small for a 4-bit forward with an 8-bit backward.
`python quant.py` prints the formats and rounds one block by hand.
"""
import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch.autograd.function import once_differentiable

# ------------------------------------------------------------------------------------------ formats
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)     # code & 7; bit 3 is the sign


@dataclass(frozen=True)
class Format:
    """A block format. The last three fields are the choices that the ablations turn."""
    name: str
    block: int            # numbers that share one scale
    mantissa: int         # mantissa bits of an element
    emin: int             # exponent of the smallest normal element; below it the grid is even
    largest: float        # largest element
    outer: str = "row"    # NVFP4: "row", a power of two per row, or "tensor", one amax/2688 for all
    tile: int = 1         # NVFP4 weights: rows that share a scale (16: NVIDIA's 16x16 weight tiles)
    four_six: bool = False    # NVFP4: map a block's largest to 6 or to 4, whichever fits better


MXFP8 = Format("mxfp8", block=32, mantissa=3, emin=-6, largest=448.0)
NVFP4 = Format("nvfp4", block=16, mantissa=1, emin=0, largest=6.0)
FORMATS = {
    "mxfp8": MXFP8,
    "nvfp4": NVFP4,
    "nvfp4_tensor": replace(NVFP4, name="nvfp4_tensor", outer="tensor"),
    "nvfp4_tile": replace(NVFP4, name="nvfp4_tile", tile=16),
    "nvfp4_46": replace(NVFP4, name="nvfp4_46", four_six=True),
}


def is_fp4(fmt):
    return fmt in FORMATS and FORMATS[fmt].block == NVFP4.block


def _byte_values(kind):
    """The 256 values of a byte format as an fp32 table. E8M0 is 2^(byte-127) and 255 is NaN."""
    byte = torch.arange(256, dtype=torch.int32)
    if kind == "e4m3":
        return byte.to(torch.uint8).view(torch.float8_e4m3fn).float()
    # Byte 0 is 2^-127, an fp32 denormal; the fp32 bits of the others are the byte as exponent.
    values = (byte << 23).clamp_(min=0x00400000).view(torch.float32)
    values[255] = torch.nan
    return values


def _tables(device):
    signed = torch.tensor(E2M1 + tuple(-v for v in E2M1))
    pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], -1)  # low nibble first
    e8m0 = _byte_values("e8m0")
    encode = (254 - torch.arange(256, dtype=torch.int32) << 23).clamp_(min=0).view(torch.float32)
    return SimpleNamespace(e4m3=_byte_values("e4m3").to(device), e8m0=e8m0.to(device),
                           e8m0_inverse=encode.to(device),
                           e2m1_pairs=torch.view_as_complex(pairs.contiguous()).to(device))


_TABLES = {}


def tables(device):
    """The decoding tables on `device`, made once."""
    if device not in _TABLES:
        _TABLES[device] = _tables(device)
    return _TABLES[device]


def _lookup(table, index):
    """table[index] for an integer tensor of any shape (index_select is 5x faster than indexing)."""
    return table.index_select(0, index.reshape(-1).int()).view(index.shape)


# ----------------------------------------------------------------------------------- random numbers
def _wrap(h):
    """A Python integer as signed 32 bits; int32 tensors wrap by themselves."""
    return h if torch.is_tensor(h) else (h + (1 << 31)) % (1 << 32) - (1 << 31)


MIX = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))      # Wellons' lowbias32


def mix(h):
    """A bijection of 32-bit integers that looks random; h is an int32 tensor or a Python integer.
    The mask makes the arithmetic shift of a signed number a logical one."""
    for shift, factor in MIX:
        h = _wrap((h ^ (h >> shift & 0xFFFFFFFF >> shift)) * factor)
    return h ^ (h >> 16 & 0xFFFF)


def fold(seed, *labels):
    """A new seed from a seed and integer labels (step, layer, operand ...): a pair (base, stream).

    seed: an integer, such a pair, or an int32 scalar tensor on the device, which a CUDA graph
    reads again at each replay; labels only touch the integer beside it, so they cost no launch.
    """
    base, stream = seed if isinstance(seed, tuple) else (seed, 0)
    for label in labels:
        stream = mix(_wrap(mix(stream) + label + 0x9E3779B9))        # mix keeps 0: no label is one
    return (base if torch.is_tensor(base) else _wrap(base)), stream


def seed_bits(seed):
    """The 32 bits of a seed: an integer, or an int32 scalar tensor where the base is one."""
    base, stream = fold(seed)
    return _wrap(mix(base) + stream)


def random_bits(seed, rows, cols):
    """32 random bits for each number (row, col): a hash, so the same number draws the same bits
    on any device, in any storage order, after a resume, and in a test.

    rows, cols: int32 tensors that broadcast together. Each is mixed alone before they meet: with
    row * A + seed * B some pairs of seeds give one stream, shifted.
    """
    h = mix(mix(rows) + mix(seed_bits(seed))) + mix(cols ^ 0x5BD1E995)
    for shift, factor in MIX:
        h ^= h >> shift & 0xFFFFFFFF >> shift
        h *= factor
    return h


def uniform(seed, rows, cols):
    """Uniform fp32 numbers in [0, 1), multiples of 2^-24."""
    return (random_bits(seed, rows, cols) >> 8 & 0xFFFFFF).float().mul_(2.0 ** -24)


# ----------------------------------------------------------------------------------------- rounding
def round_to_grid(x, lowest_bits, mantissa, u=None):
    """Round fp32 x to `mantissa` bits below its leading one: to nearest, ties to even, or, where u,
    uniform in [0, 1), is given, away from zero with probability = the fraction that is cut off.

    lowest_bits: fp32 bits, an integer or an int32 tensor, of the power of two below which the grid
    stays even, at multiples of 2^-mantissa of it: the subnormals of the format.
    """
    exponent = (x.view(torch.int32) & 0x7F800000).clamp_(min=lowest_bits)    # bits of 2^E <= |x|
    if u is None:
        # Adding 1.5 * 2^(23 - mantissa) * 2^E leaves fp32 just these bits; it rounds ties to even.
        magic = exponent.add_((23 - mantissa << 23) + 0x400000).view(torch.float32)
        return (x + magic).sub_(magic)
    step = exponent.sub_(mantissa << 23)                                     # 2^(E - mantissa)
    z = x.abs().mul_((0x7F000000 - step).view(torch.float32))                # |x| / step, exactly
    lo = z.floor()
    n = lo + (z - lo).sub_(u).ceil_()        # = lo + (u < z - lo); the ceiling of (-1, 1) is 0 or 1
    return n.mul_(step.view(torch.float32)).copysign_(x)


def round_elements(y, fmt, u=None):
    """Round scaled numbers, |y| <= fmt.largest, to the elements of a format."""
    return round_to_grid(y, 127 + fmt.emin << 23, fmt.mantissa, u)


# ------------------------------------------------------------------------------------------- scales
def fp32_bits(amax):
    """The bits of fp32 numbers >= 0, with Inf for NaN, which may have any sign and bits."""
    return (amax.view(torch.int32) & 0x7FFFFFFF).clamp_(max=0x7F800000)


def power_of_two_at_least(amax, significand, exponent):
    """fp32 exponent field of the smallest power of two >= amax / (significand * 2^exponent), not
    clamped; in integers: one more than the exponents' difference if amax's significand is larger.
    """
    carry = 0x7FFFFF - int((significand - 1) * (1 << 23))
    return (fp32_bits(amax) + carry >> 23) - exponent


def _row_outer(amax, fmt):
    """Outer scale from the amax (finite, >= 0): a power of two >= amax/2688; 2688 = 6 * 448.

    With the 6-or-4 choice 1536 = 6 * 256, so that 1.5 times a block scale still fits E4M3.
    """
    significand, exponent = (1.5, 10) if fmt.four_six else (1.3125, 11)
    if fmt.outer == "tensor":
        return (amax / (significand * 2 ** exponent)).clamp_(min=2.0 ** -100)
    power = power_of_two_at_least(amax, significand, exponent).clamp_(127 - 100, 127 + 116)
    return torch.where(amax == 0, 1.0, (power << 23).view(torch.float32))


def weight_outer(w, fmt):
    """One outer scale for each matrix of w [..., N, K] (gate and up of an expert are one matrix),
    shaped to broadcast over rows: [..., 1]."""
    amax = w.float().abs().nan_to_num(0.0, 0.0).amax((-2, -1))
    return _row_outer(amax, FORMATS[fmt])[..., None]


def _mxfp8_scales(amax):
    """(byte, decoded scale, inverse) for each block's amax: the smallest power of two >= amax/448,
    so nothing clips. NaN or Inf gives byte 255, which decodes to NaN."""
    byte = power_of_two_at_least(amax, 1.75, 8).clamp_(min=0)
    byte += (fp32_bits(amax) == 0x7F800000) * 8                   # 247 -> 255
    t = tables(amax.device)
    return byte.to(torch.uint8), _lookup(t.e8m0, byte), _lookup(t.e8m0_inverse, byte)


def _nvfp4_scales(amax, outer, up, largest=6.0):
    """(E4M3 block scale, decoded scale, its inverse). `up` rounds the scale up: then no element is
    above 6 and stochastic rounding is unbiased. A block with NaN or Inf gets the scale NaN."""
    one_over = torch.full((), 1 / largest, dtype=torch.float32, device=amax.device)
    s = torch.where(amax < torch.inf, (amax * one_over / outer).clamp_(max=MXFP8.largest),
                    torch.nan)
    s = round_elements(s, MXFP8, u=0.0 if up else None)         # u = 0: any fraction rounds up
    scale = s * outer
    inverse = torch.where(s > 0, 1.0 / scale, 0.0)
    return s.to(torch.float8_e4m3fn), scale, inverse


# ------------------------------------------------------------------------------------------- blocks
def _to_blocks(x, fmt, axis):
    """x with its axis -1 or -2 split into blocks: [..., K/V, V] or [..., T/V, V, K]."""
    if x.shape[axis] % fmt.block or x.numel() == 0:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no whole blocks of {fmt.block} "
                         f"along axis {axis}, as {fmt.name} needs")
    return x.unflatten(axis, (x.shape[axis] // fmt.block, fmt.block))


def _uniform_for(x, rounding, seed, rows, cols):
    """The uniform numbers of x's elements for stochastic rounding, None for rounding to nearest."""
    if rounding == "nearest":
        return None
    if rounding != "stochastic":
        raise ValueError(f"rounding {rounding!r}: allowed are 'nearest' and 'stochastic'")
    if rows is None:
        rows = torch.arange(x[..., 0].numel(), dtype=torch.int32, device=x.device)
    if cols is None:
        cols = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    check_names(x.shape, rows, cols)
    return uniform(seed, rows.int().reshape(x.shape[:-1])[..., None], cols.int())


def check_names(shape, rows, cols):
    """ValueError where logical indices do not name each row and column of a tensor once."""
    for what, given, n in (("rows", rows, math.prod(shape[:-1])), ("cols", cols, shape[-1])):
        if given is not None and given.numel() != n:
            raise ValueError(f"{what}: {given.numel()} names for the {n} of a tensor of shape "
                             f"{tuple(shape)}")


def _finite_amax(xb, amax, axis, dims):
    """amax over `dims` that skips non-finite elements; on a CPU the slow way only if there are any
    (a captured step on a GPU cannot ask)."""
    if amax.is_cuda or not amax.amax().item() < torch.inf:
        amax = xb.abs().nan_to_num(nan=0.0, posinf=0.0).amax(axis, keepdim=True)
    return amax.amax(dims, keepdim=True)


def _outer_scales(xb, amax, fmt, outer, axis):
    """The outer scales of a tensor in blocks, one for each row (or column): those given, or new."""
    lines = amax.select(axis, 0).select(axis, 0).shape          # x's without the axis of the blocks
    if outer is None:
        dims = (axis - 1, axis) if fmt.outer == "row" else tuple(range(-xb.dim(), 0))
        outer = _row_outer(_finite_amax(xb, amax, axis, dims), fmt).squeeze(axis).squeeze(axis)
    return torch.as_tensor(outer, dtype=torch.float32, device=xb.device).expand(lines)


def _share_in_tiles(amax, shape, fmt, axis):
    """Each block's amax [..., T, K/V, 1] becomes the largest of the fmt.tile rows of its tile."""
    if axis != -1 or len(shape) < 2 or shape[-2] % fmt.tile:
        raise ValueError(f"a tensor of shape {tuple(shape)}, blocks along axis {axis}: {fmt.name} "
                         f"needs them along axis -1, and whole tiles of {fmt.tile} rows")
    amax = amax.unflatten(-3, (-1, fmt.tile))
    return amax.amax(-3, keepdim=True).expand(amax.shape).flatten(-4, -3)


def _closer(xb, six, four, axis):
    """Of two roundings of blocks, each (elements, stored scales, decoded scales), the one with the
    smaller error in each block; the first where they are equal."""
    errors = [(e * s - xb).square().sum(axis, keepdim=True) for e, _, s in (six, four)]
    use = errors[1] < errors[0]
    elements, scale = (torch.where(use, four[i], six[i]) for i in (0, 2))
    stored = torch.where(use, four[1].float(), six[1].float()).to(six[1].dtype)
    return elements, stored, scale


def _round_blocks(x, fmt, u, outer=None, axis=-1):
    """Round fp32 x: (elements, stored scales, decoded scales) in blocks, and the outer scales."""
    xb = _to_blocks(x, fmt, axis)
    u = u if u is None else _to_blocks(u, fmt, axis)
    amax = xb.abs().amax(axis, keepdim=True)
    if fmt.block == MXFP8.block:
        stored, scale, inverse = _mxfp8_scales(amax)
        return round_elements(xb * inverse, fmt, u), stored, scale, None
    outer = _outer_scales(xb, amax, fmt, outer, axis)
    if fmt.tile > 1:
        amax = _share_in_tiles(amax, x.shape, fmt, axis)

    def largest_becomes(element):
        stored, scale, inverse = _nvfp4_scales(amax, outer.unsqueeze(axis).unsqueeze(axis),
                                               u is not None, element)
        return round_elements((xb * inverse).clamp_(-6.0, 6.0), fmt, u), stored, scale
    rounded = largest_becomes(6.0)
    if fmt.four_six:
        rounded = _closer(xb, rounded, largest_becomes(4.0), axis)
    return *rounded, outer


# ------------------------------------------------------------------------------------------ tensors
@dataclass
class Quantized:
    """A packed tensor. codes: float8_e4m3fn [.., K] or uint8 [.., K/2], even element in the low
    nibble; scales: uint8 [.., K/32] (E8M0) or float8_e4m3fn [.., K/16]; outer: fp32 or None.
    index: row r is row index[r] of these; None: they are all meant, in order."""
    fmt: str
    codes: torch.Tensor
    scales: torch.Tensor
    outer: torch.Tensor | None = None
    axis: int = -1
    index: torch.Tensor | None = None

    def dequantize(self, dtype=torch.float32):
        """The exact decoded values in `dtype` (fp32 and bf16 hold them all)."""
        if self.index is not None:
            return self.gathered().dequantize(dtype)
        fmt, t, axis = FORMATS[self.fmt], tables(self.codes.device), self.axis
        if fmt.block == MXFP8.block:
            values = _lookup(t.e4m3, self.codes.view(torch.uint8))
            scale = _lookup(t.e8m0, self.scales).unsqueeze(axis)
        else:
            pairs = torch.view_as_real(_lookup(t.e2m1_pairs, self.codes))      # [.., K/2, 2]
            values = (pairs.movedim(-1, axis) if axis == -2 else pairs).flatten(axis - 1, axis)
            scale = _lookup(t.e4m3, self.scales.view(torch.uint8)) * self.outer.unsqueeze(axis)
            scale = scale.unsqueeze(axis)
        blocks = _to_blocks(values, fmt, axis) * scale
        return blocks.flatten(axis - 1, axis).to(dtype)

    def select(self, index):
        """The rows `index` of a two-dimensional tensor quantised along its rows. On a GPU they are
        gathered by the kernels that read them."""
        lazy = replace(self, index=index)
        return lazy if index.is_cuda else lazy.gathered()

    def gathered(self):
        """The same without an index."""
        if self.index is None:
            return self

        def rows(t):       # index_select knows no 8-bit floats
            return t.view(torch.uint8).index_select(0, self.index).view(t.dtype)
        outer = None if self.outer is None else self.outer.index_select(0, self.index)
        return Quantized(self.fmt, rows(self.codes), rows(self.scales), outer)

    def tensors(self):
        return self.codes, self.scales, self.outer


def _pack_e2m1(elements, axis):
    """E2M1 values (fp32) to codes, two in a byte along `axis`, the even one in the low nibble."""
    m = elements.abs()
    code = torch.minimum(m * 2, m + 2)
    torch.minimum(code, m.mul_(0.5).add_(4), out=code)      # 0 .5 1 1.5 2 3 4 6 -> 0 1 2 3 4 5 6 7
    code.add_(4).sub_(torch.full_like(m, 4.0).copysign_(elements))            # + 8 where negative
    code = code.unflatten(axis, (code.shape[axis] // 2, 2))
    return (code.select(axis, 0) + code.select(axis, 1) * 16).to(torch.uint8)


def quantize(x, fmt, *, rounding="nearest", seed=0, outer=None, rows=None, cols=None, axis=-1):
    """Quantise x to `fmt` ("mxfp8" or "nvfp4"), blocks along the last axis (or along axis -2).

    outer: fp32 outer scale(s) of NVFP4, broadcastable to x.shape without the blocked axis, usually
    x.shape[:-1]; None means one for each row.
    rows, cols: logical indices [x.shape[:-1]] and [x.shape[-1]] that name a number for its random
    bits; by default its place in x. Raises ValueError where an axis is no multiple of the block.
    Any NaN or Inf makes its block decode to NaN, and only its block.
    """
    if fmt not in FORMATS:
        raise ValueError(f"format {fmt!r}: allowed are {', '.join(FORMATS)}")
    f, x = FORMATS[fmt], x.float()
    u = _uniform_for(x, rounding, seed, rows, cols)
    elements, scales, scale, outer = _round_blocks(x, f, u, outer, axis)
    bad = torch.isnan(scale)
    if bad.is_cuda or bool(bad.any()):
        elements = torch.where(bad, 0.0, elements)
    elements = elements.flatten(axis - 1, axis).copysign_(x)         # zeros keep their sign
    codes = (elements.to(torch.float8_e4m3fn) if f.block == MXFP8.block
             else _pack_e2m1(elements, axis))
    return Quantized(fmt, codes, scales.squeeze(axis), outer, axis)


def cast(x, fmt, *, rounding="nearest", seed=0, outer=None, rows=None, cols=None, axis=-1):
    """`quantize(...).dequantize(x.dtype)` without packing and unpacking: the exact values a GEMM
    in this format reads (a zero may lose its sign). "bf16" means: as the tensor is."""
    if fmt == "bf16":
        return x
    f, dtype, x = FORMATS[fmt], x.dtype, x.float()
    u = _uniform_for(x, rounding, seed, rows, cols)
    values = _cast_mxfp8(x, u, axis) if fmt == "mxfp8" else None
    if values is None:
        elements, _, scale, _ = _round_blocks(x, f, u, outer, axis)
        values = elements.mul_(scale)
    return values.flatten(axis - 1, axis).to(dtype)


def _cast_mxfp8(x, u, axis):
    """The short way for numbers far from fp32's ends (else None): scaling by a power of two and
    rounding commute, so each number is rounded where it is, on the grid its block's scale means.
    """
    xb = _to_blocks(x, MXFP8, axis)
    amax = xb.abs().amax(axis, keepdim=True)
    bits = fp32_bits(amax)
    smallest = (bits - 1 & 0x7FFFFFFF).min().item()                  # of blocks that are not zero
    if smallest < (127 - 80 << 23) or bits.max().item() > (127 + 80 << 23):
        return None
    exponent = power_of_two_at_least(amax, 1.75, 8).clamp_(min=1 - MXFP8.emin)
    u = u if u is None else _to_blocks(u, MXFP8, axis)
    return round_to_grid(xb, exponent.add_(MXFP8.emin) << 23, MXFP8.mantissa, u)


# ------------------------------------------------------------------------------------------ recipes
@dataclass(frozen=True)
class Gemms:
    """How the operands of a linear layer's three GEMMs are rounded. "bf16" means not at all (the
    type of the activations: bf16 on a GPU, fp32 on a CPU)."""
    x: str = "bf16"              # X in forward
    w: str = "bf16"              # W in forward
    dy: str = "bf16"             # dY in dgrad and wgrad
    back: str = "bf16"           # W in dgrad, X in wgrad ...
    source: str = "original"     # ... rounded from the "original" or from the forward "copy"
    rounding: str = "nearest"    # ... "nearest" or "stochastic"
    dy_rounding: str = "nearest"
    hadamard: bool = False       # rotate both wgrad operands along T in groups of 16

    def __post_init__(self):
        """Refuse what is misspelt, what no GEMM could read, and what would be ignored."""
        allowed = dict.fromkeys(("x", "w", "dy", "back"), ("bf16", *FORMATS))
        allowed |= dict.fromkeys(("rounding", "dy_rounding"), ("nearest", "stochastic"))
        for name, words in dict(allowed, source=("original", "copy")).items():
            if getattr(self, name) not in words:
                raise ValueError(f"{name} {getattr(self, name)!r}: allowed are {', '.join(words)}")
        for name in ("x", "dy", "back"):
            if getattr(self, name) in FORMATS and FORMATS[getattr(self, name)].tile > 1:
                raise ValueError(f"{name} {getattr(self, name)!r}: only w can have tiles")
        if self.w == "bf16" and self.back != "bf16":
            raise ValueError(f"back {self.back!r}: must be 'bf16' where w is, which has one copy")
        if self.source == "copy" and "bf16" in (self.x, self.w):
            raise ValueError("source 'copy': x and w must both be rounded, or there is no copy")
        if self.hadamard and self.wire != "bf16":
            raise ValueError("hadamard: the X that it rotates must not be rounded before, but "
                             f"experts receive it in {self.wire}")

    @property
    def block(self):
        """Every dimension of the layer must be a multiple of this."""
        return 1 if {self.x, self.w, self.dy, self.back} == {"bf16"} else 32

    @property
    def wire(self):
        """The format in which X travels to the experts: that of its GEMM, where X along T is made
        from the same copy, and where it is MXFP8. Then "original" is true of W and of any X that is
        not sent; experts get no X but the rounded one, and round that again along T."""
        return self.x if self.source == "copy" or self.x == "mxfp8" else "bf16"


#                   forward           backward
#                   X        W        dY       X and W again
IN_BF16 = Gemms()
IN_MXFP8 = Gemms("mxfp8", "mxfp8", "mxfp8", "mxfp8", "original", "nearest")
IN_NVFP4 = Gemms("nvfp4", "nvfp4", "mxfp8", "mxfp8", "copy", "stochastic")
IN_FP4 = Gemms("nvfp4", "nvfp4", "nvfp4", "nvfp4", "original",
               dy_rounding="stochastic", hadamard=True)


@dataclass(frozen=True)
class Recipe:
    """Which layers are rounded how. Never rounded: router, k and v, embedding, output head."""
    name: str
    experts: Gemms = IN_BF16         # routed experts
    last: Gemms | None = None        # routed experts of the last layers; None: as the others
    last_share: float = 0.15         # ... this share of the layers, at least one (0: none)
    dense: Gemms = IN_BF16           # attention q and o, shared experts, leading dense layers
    combine: str = "bf16"            # what experts send back, and both gradients on the wire

    def __post_init__(self):
        if not 0 <= self.last_share <= 1:
            raise ValueError(f"last_share {self.last_share}: must be 0 to 1")
        if self.combine not in ("bf16", "mxfp8"):
            raise ValueError(f"combine {self.combine!r}: allowed are bf16, mxfp8")

    def experts_of(self, layer, layers):
        """The Gemms of the routed experts in layer `layer` of `layers`."""
        last = max(1, round(self.last_share * layers)) if self.last_share > 0 else 0
        return self.last if self.last and layer >= layers - last else self.experts


_MX = Recipe("mxfp8", experts=IN_MXFP8, dense=IN_MXFP8, combine="mxfp8")
_NV = replace(_MX, name="nvfp4", experts=IN_NVFP4, last=IN_MXFP8)


def _nvfp4_but(name, **changes):
    return replace(_NV, name=name, experts=replace(IN_NVFP4, **changes))


RECIPES = {r.name: r for r in (
    Recipe("bf16"),
    _MX,
    _NV,
    # Ablations: the nvfp4 recipe with one thing changed.
    _nvfp4_but("nvfp4-nearest", rounding="nearest"),          # second copies drift with their error
    _nvfp4_but("nvfp4-original", source="original", rounding="nearest"),
    _nvfp4_but("nvfp4-independent", back="nvfp4", source="original", rounding="nearest"),
    _nvfp4_but("nvfp4-tensor", x="nvfp4_tensor"),             # one scale for all tokens
    _nvfp4_but("nvfp4-tile", w="nvfp4_tile"),                 # 16x16 weight tiles
    _nvfp4_but("nvfp4-46", x="nvfp4_46", w="nvfp4_46"),       # 6-or-4 block scales
    replace(_NV, name="nvfp4-last-none", last=None),          # the last layer's experts in 4 bits
    replace(_NV, name="nvfp4-last-half", last_share=0.5),     # half of the layers' in 8 bits
    replace(_NV, name="nvfp4-fp4", experts=IN_FP4),           # 4-bit backward as well
    replace(_NV, name="nvfp4-all", last=IN_NVFP4, dense=IN_NVFP4),    # every linear in 4 bits
    replace(_NV, name="nvfp4-dense", experts=IN_MXFP8, dense=IN_NVFP4),   # 4 bits elsewhere instead
    replace(_NV, name="nvfp4-bf16-combine", combine="bf16"),  # expert results sent at 16 bits
)}


def recipe_of(name):
    """The Recipe of that name; ValueError where there is none."""
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r}: there are {', '.join(RECIPES)}")
    return RECIPES[name]


# ---------------------------------------------------------------- the reference: operands and GEMMs
def zero_padding(x, counts):
    """A copy of x [R, K] with each expert's padding rows set to zero: blocks along T span them."""
    if counts is None:
        return x
    if x.is_cuda:               # a captured step cannot ask for the counts; on a CPU this is slower
        return x.masked_fill(is_padding(counts, x.shape[0])[:, None], 0)
    x = x.clone()
    for start, n, end in spans(counts, x.shape[0]):
        x[start + n:end] = 0
    return x


def is_padding(counts, R):
    """Which of R rows are padding, on the device of counts."""
    padded = (counts + 127) // 128 * 128
    ends = padded.cumsum(0)
    row = torch.arange(R, device=counts.device)
    e = torch.searchsorted(ends, row, right=True).clamp_(max=counts.numel() - 1)
    return row >= (ends - padded + counts)[e]


def spans(counts, R):
    """(start, real rows, end) of each expert's rows; starts are multiples of 128, the last one owns
    the rest of the buffer."""
    out, start, counts = [], 0, counts.tolist()
    for n in counts:
        end = start + -(-n // 128) * 128
        out.append([start, n, end])
        start = end
    if start > R or min(counts) < 0:
        raise ValueError(f"{R} rows cannot hold groups of {counts} rows, each padded to 128")
    out[-1][2] = R
    return out


def operand(x, fmt, *, counts=None, dtype=None, **kw):
    """What a GEMM reads of x, a tensor or a packed one: the exact values in `fmt`.

    A packed tensor is decoded (axis=-1), or decoded and rounded again along its rows (axis=-2).
    Along T, axis=-2, padding counts as zero. dtype: of the result, by default that of x, fp32 of a
    packed one, as kernels.operand has bf16. Only this backend's GEMMs read the result.
    """
    if isinstance(x, Quantized):
        x = x.dequantize(dtype or torch.float32)
        if kw.get("axis", -1) == -1:
            return x
    if kw.get("axis") == -2:
        x = zero_padding(x, counts)
    return cast(x, fmt, **kw).to(dtype or x.dtype)


def quantize_operand(x, fmt, *, dtype=None, **kw):
    """(quantize(x, fmt), operand(x, fmt)): backward keeps the first, forward reads the second."""
    q = quantize(x, fmt, **kw)
    return q, q.dequantize(dtype or x.dtype)


def operand_pair(x, fmt, *, counts=None, rounded=False, **kw):
    """(operand along the rows of x [R, K], operand along T): a GPU makes both in one pass. rounded:
    x holds values of `fmt` already, in blocks along its rows (rounding twice changes nothing)."""
    return (x if rounded else operand(x, fmt, **kw),
            operand(x, fmt, axis=-2, counts=counts, **kw))


def gemm(a, b, counts=None, turned=False):
    """Y[R, N] = A[R, K] B[E, N, K]^T, each expert's rows with its own matrix; padding gives zeros.
    turned: Y[R, K] = A[R, N] B[E, N, K]."""
    if not turned:
        b = b.transpose(-1, -2)
    if counts is None:
        return a @ b[0]
    y = a.new_empty(a.shape[0], b.shape[2])
    for e, (start, n, end) in enumerate(spans(counts, a.shape[0])):
        stop = min(start + -(-n // 32) * 32, end)    # whole 32s: a row's bits must not depend on n
        torch.mm(a[start:stop], b[e], out=y[start:stop])
        y[start + n:end] = 0
    return y


def gemm_wgrad(dy, x, counts=None):
    """dW[E, N, K] = dY[R, N]^T X[R, K], summed over each expert's real rows; fp32."""
    dy, x = dy.float(), x.float()
    if counts is None:
        return (dy.T @ x)[None]
    dw = dy.new_zeros(counts.numel(), dy.shape[1], x.shape[1])
    for e, (start, n, _) in enumerate(spans(counts, x.shape[0])):
        torch.mm(dy[start:start + n].T, x[start:start + n], out=dw[e])
    return dw


def swiglu(h):
    """silu(gate) * up for h = [gate | up], rounded once."""
    gate, up = h.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(h.dtype)


# -------------------------------------------------------------------------------- the linear layers
@dataclass
class Weight:
    """What the GEMMs read of a weight: made per optimizer step, not per micro-batch or token; but
    that of dgrad, where it is made of the packed copy, is only made when it is read. Kept, it would
    take twice the bytes of the codes, and decoded four times."""
    forward: object                  # W [E, N, K], blocks along K
    second: object                   # W [E, N, K], blocks along N, or a function that makes it
    packed: Quantized | None = None

    @property
    def backward(self):
        return self.second() if callable(self.second) else self.second

    def rewrite(self, new):
        """Take over the numbers of `new` that are not in this storage already, and keep it."""
        for mine, given in zip(self.storage(), new.storage()):
            if mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
        self.packed = new.packed
        if callable(new.second):
            self.second = new.second
        return self

    def storage(self):
        return storage(*(o for o in (self.forward, self.second) if not callable(o)))


def storage(*operands):
    """All tensors of operands, which are tensors or, for native GEMMs, dataclasses of them."""
    found = [[o] if torch.is_tensor(o) else list(vars(o).values()) for o in operands]
    return [t for ts in found for t in ts if torch.is_tensor(t)]


@torch.no_grad()
def prepare(w, gemms, seed=0, dtype=torch.float32, rows=None, packed=None, into=None):
    """The GEMM operands of a weight w [E, N, K] (fp32).

    seed: for the stochastic second copy; rows: logical indices [E, N] of its rows (a shard of the
    experts passes global ones). packed: the codes that w was decoded from, where a 4-bit file had
    them. into: an earlier Weight whose storage is written again, where a captured graph reads it.
    """
    w = w.detach()
    if gemms.w != "bf16":
        again = dict(axis=-2, rounding=gemms.rounding, seed=seed, rows=rows)
        new = _two_copies(w, gemms, dtype, again, packed, into)
        return new if into is None else into.rewrite(new)
    if into is not None and dtype != w.dtype:
        into.forward.copy_(w)
        return into
    w = w.to(dtype)
    return Weight(w, w)


def _two_copies(w, gemms, dtype, again, packed, into):
    """The operands of a weight that is rounded; `again`: the options of its second copy."""
    b = backend_for(w)
    outer = b.weight_outer(w, gemms.w) if is_fp4(gemms.w) else None
    first = second = both = {}                          # a GPU's kernels write in place
    if into is not None and b is not REFERENCE:
        first, second = dict(into=into.forward), dict(into=into.second)
        both = dict(into=(into.forward, into.second))
    if gemms.source == "copy":
        if packed is None:
            packed, forward = b.quantize_operand(w, gemms.w, outer=outer, dtype=dtype, **first)
        else:
            forward = b.operand(packed, gemms.w, dtype=dtype, **first)
        backward = functools.partial(b.operand, packed, gemms.back, dtype=dtype, **again)
    elif gemms.w == gemms.back == "mxfp8" and gemms.rounding == "nearest":
        forward, backward = b.operand_pair(w, "mxfp8", dtype=dtype, **both)
    else:
        forward = b.operand(packed or w, gemms.w, outer=outer, dtype=dtype, **first)
        backward = b.operand(w.to(dtype) if gemms.back == "bf16" else w, gemms.back, dtype=dtype,
                             outer=outer if is_fp4(gemms.back) else None, **again, **second)
    return Weight(forward, backward, packed)


def hadamard16(x, seed):
    """Rotate x [T, K] along T in 16s by a Hadamard matrix with random signs (orthonormal)."""
    h = torch.ones(1, 1, device=x.device)
    for _ in range(4):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    cols = torch.arange(16, dtype=torch.int32, device=x.device)
    sign = uniform(seed, torch.zeros_like(cols[:1]), cols)
    h = (h / 4 * (sign < 0.5).float().mul(2).sub(1)).to(x.dtype)
    return (h @ x.unflatten(0, (-1, 16))).flatten(0, 1)


@dataclass(frozen=True)
class _Layer:
    """A linear layer but for its tensors: how its GEMMs round, the seed of that, and whether dY
    comes over the wire and so holds values of its format already."""
    weight: Weight
    g: Gemms
    seed: object
    rounded: bool = False

    def forward(self, x, xq, counts, gated=False):
        """(Y [R, N] of X, what backward reads of X). gated: X is swiglu(x), not yet made."""
        b, g, kw = backend_for(x), self.g, dict(swiglu=True) if gated else {}
        if xq is None and g.source == "copy":
            xq, x_row = b.quantize_operand(x, g.x, dtype=x.dtype, **kw)             # [R, K] along K
        else:
            x_row = b.operand(x if xq is None else xq, g.x, dtype=x.dtype, **kw)
        # Where X is packed, because it came so or the backward pass starts from that copy, nothing
        # else of it is kept.
        kept = (x, None, None, None) if xq is None else (*xq.tensors(), xq.index)
        return b.gemm(x_row, self.weight.forward, counts), kept

    def backward(self, dy, kept, counts, rows, dtype, gated=False):
        """(dX [R, K], dW [E, N, K]) for dY [R, N] and what forward kept."""
        b, g, seed, x, kw = backend_for(dy), self.g, self.seed, kept[0], {}
        if kept[1] is not None:
            x = Quantized(g.x, *kept[:3], index=kept[3])
        elif gated:
            kw = dict(swiglu=True)
        dy_row, dy_col, x, counts_t = _dy_operands(b, dy, x, g, counts, self.rounded, seed, rows,
                                                   dtype)
        dx = b.gemm(dy_row, self.weight.backward, counts, turned=True)              # [R, K]
        x_col = b.operand(x, g.back, axis=-2, counts=counts_t, dtype=dtype,         # [R, K] along T
                          rounding=g.rounding, seed=fold(seed, 2), rows=rows, **kw)
        return dx, b.gemm_wgrad(dy_col, x_col, counts_t)                            # [E, N, K]


class _Linear(torch.autograd.Function):
    """Y = X W^T for each expert, and its two gradients."""

    @staticmethod
    def forward(ctx, x, w, layer, xq, counts, rows):
        y, kept = layer.forward(x, xq, counts)
        ctx.save_for_backward(counts, rows, *kept)
        ctx.layer, ctx.dtype = layer, x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        counts, rows, *kept = ctx.saved_tensors
        return *ctx.layer.backward(dy, kept, counts, rows, ctx.dtype), *[None] * 4


@dataclass
class Hidden:
    """The gradient of h = [gate | up], still to be made of h and that of swiglu(h)."""
    h: torch.Tensor
    d: torch.Tensor

    @property
    def device(self):
        return self.h.device


class _MLP(torch.autograd.Function):
    """Two linear layers with SwiGLU between, where a GPU makes swiglu(h) and the gradient of h
    while it rounds them and never writes them otherwise."""

    @staticmethod
    def forward(ctx, x, w1, w2, first, second, xq, counts, rows):
        h, kept = first.forward(x, xq, counts)                                      # [R, 2F]
        y, kept_of_h = second.forward(h, None, counts, gated=True)                  # [R, N]
        ctx.save_for_backward(counts, rows, h, *kept, *kept_of_h)
        ctx.layers, ctx.dtype = (first, second), x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        counts, rows, h, *kept = ctx.saved_tensors
        (first, second), rest = ctx.layers, (counts, rows, ctx.dtype)
        d, dw2 = second.backward(dy, kept[4:], *rest, gated=True)                   # [R, F]
        return *(first.backward(Hidden(h, d), kept[:4], *rest)), dw2, *[None] * 5


def _dy_operands(b, dy, x, g, counts, rounded, seed, rows, dtype):
    """(dY along N, dY along T, X, rows of each expert along T): both wgrad operands rotated first
    where the recipe says so, which fills groups of 16 rows up with what their real rows hold."""
    kw = dict(rounding=g.dy_rounding, seed=fold(seed, 1), rows=rows, dtype=dtype)
    if not g.hadamard:
        return *b.operand_pair(dy, g.dy, counts=counts, rounded=rounded, **kw), x, counts
    x, turned = (hadamard16(zero_padding(t, counts), seed) for t in (x, dy))
    filled = None if counts is None else (counts + 15) // 16 * 16
    return (b.operand(dy, g.dy, **kw), b.operand(turned, g.dy, axis=-2, counts=filled, **kw),
            x, filled)


def grouped_linear(x, w, counts, recipe, *, weight=None, xq=None, rounded=False, seed=0,
                   rows=None):
    """Y[r] = W[e] X[r] for rows sorted by expert, with the three GEMMs of a recipe.

    x [R, K]: each expert's rows start at multiples of 128; counts int32 [E]: its real rows. Padding
    rows are never read as data, their output is zero. w [E, N, K], fp32. recipe: a `Gemms`, or the
    name of a Recipe, whose rule for experts is meant. weight: prepare()d operands of w. xq: x as it
    came packed over the wire; x then only carries the gradient. rounded: dY comes over the wire and
    so holds values of its format already. seed, rows: for stochastic rounding, the logical index
    [R] of each row. Differentiable in x and w. Raises ValueError on a bad shape.
    """
    g = gemms_of(recipe, "experts")
    _check_shapes(x.shape, w.shape, counts, rows, g.block)
    return _Linear.apply(x, w, _layer(w, x.dtype, g, weight, rounded, seed), xq, counts,
                         _names(x, rows))


def gemms_of(recipe, part):
    """The Gemms that are meant: themselves, or a Recipe's of that name for its experts or dense
    layers."""
    return getattr(recipe_of(recipe), part) if isinstance(recipe, str) else recipe


def _check_shapes(x, w, counts, rows, block):
    """ValueError where X of shape x and W of shape w do not fit, nor fill whole blocks."""
    if len(x) != 2 or len(w) != 3 or w[2] != x[1] or not w[0]:
        raise ValueError(f"x {tuple(x)} and w {tuple(w)} do not fit: [R, K] and [E, N, K]")
    if w[1] % block or w[2] % block or x[0] % block:
        raise ValueError(f"x {tuple(x)} and w {tuple(w)}: R, N and K must be multiples of {block}")
    if w[0] > 1 if counts is None else counts.shape != w[:1] or counts.is_floating_point():
        raise ValueError(f"w {tuple(w)} needs the rows of each expert, integers [{w[0]}]")
    check_names(x, rows, None)


def _layer(w, dtype, g, weight, rounded, seed):
    return _Layer(prepare(w, g, fold(seed, 3), dtype) if weight is None else weight, g, seed,
                  rounded)


def _names(x, rows):
    return torch.arange(len(x), dtype=torch.int32, device=x.device) if rows is None else rows


def grouped_mlp(x, w1, w2, counts, recipe, *, weights=(None, None), xq=None, rounded=False,
                seeds=(0, 1), rows=None):
    """grouped_linear by w2 [E, N, F] of swiglu(h), where h = [gate | up] is grouped_linear by
    w1 [E, 2F, K] of x. weights, seeds: of both; xq: of the first, rounded: of the second."""
    g, b = gemms_of(recipe, "experts"), backend_for(x)
    if w1.dim() != 3 or w2.dim() != 3 or w1.shape[1] % 2 or w1.shape[0] != w2.shape[0]:
        raise ValueError(f"w1 {tuple(w1.shape)} and w2 {tuple(w2.shape)} do not fit: "
                         "[E, 2F, K] and [E, N, F]")
    if (b is REFERENCE or g.hadamard or g.dy != "mxfp8"
            or not {g.x, g.back} <= {"mxfp8", "nvfp4"}):
        h = grouped_linear(x, w1, counts, g, weight=weights[0], xq=xq, seed=seeds[0], rows=rows)
        return grouped_linear(b.swiglu(h), w2, counts, g, weight=weights[1], rounded=rounded,
                              seed=seeds[1], rows=rows)
    _check_shapes(x.shape, w1.shape, counts, rows, g.block)
    _check_shapes((len(x), w1.shape[1] // 2), w2.shape, counts, rows, g.block)
    first = _layer(w1, x.dtype, g, weights[0], False, seeds[0])
    second = _layer(w2, x.dtype, g, weights[1], rounded, seeds[1])
    return _MLP.apply(x, w1, w2, first, second, xq, counts, _names(x, rows))


def _of_all_rows(f, x, rows, *weights, **kw):
    """f of x [..., K] as one group whose rows are all real, and of weights [N, K]."""
    shape, x = x.shape, x.reshape(-1, x.shape[-1])
    check_names(x.shape, rows, None)
    # Blocks along T; and a CPU row's bits must not depend on T.
    short = -len(x) % 32 or 32 * (len(x) == 0)
    if short:
        x = torch.nn.functional.pad(x, (0, 0, 0, short))
        rows = rows if rows is None else torch.nn.functional.pad(rows.flatten(), (0, short))
    y = f(x, *(w[None] for w in weights), None, rows=rows, **kw)
    return (y[:-short] if short else y).view(*shape[:-1], y.shape[-1])


def linear(x, w, recipe, *, rows=None, **kw):
    """x [..., K] times w [N, K] transposed, as in grouped_linear; of a Recipe its rule for dense
    layers is meant."""
    return _of_all_rows(grouped_linear, x, rows, w, recipe=gemms_of(recipe, "dense"), **kw)


def mlp(x, w1, w2, recipe, *, rows=None, **kw):
    """The same as grouped_mlp of x [..., K], w1 [2F, K], w2 [N, F]."""
    return _of_all_rows(grouped_mlp, x, rows, w1, w2, recipe=gemms_of(recipe, "dense"), **kw)


# ------------------------------------------------------------------------------------- what travels
def payload_parts(fmt, width):
    """Bytes of a row's codes, scales and outer scale."""
    if FORMATS[fmt].block == MXFP8.block:
        return width, width // 32
    return width // 2, width // 16, 4


def payload_bytes(fmt, width):
    return sum(payload_parts(fmt, width))


def payload(x, fmt, index=None):
    """Rows x[index] as the bytes that travel, uint8 [n, ..]: codes | scales | outer scale. "bf16"
    means as they are."""
    if fmt != "bf16":
        parts = [t for t in quantize(x, fmt).tensors() if t is not None]
        x = torch.cat([t.contiguous().view(len(x), -1).view(torch.uint8) for t in parts], 1)
    return (x if index is None else x.index_select(0, index)).contiguous().view(torch.uint8)


def from_payload(rows, fmt, width):
    """The packed tensor of uint8 rows whose numbers are `width` to a row: a view of them, where
    outer scales lie at multiples of 4 bytes."""
    codes, scales, *outer = rows.split(payload_parts(fmt, width), 1)
    if not outer:
        return Quantized(fmt, codes.view(torch.float8_e4m3fn), scales)
    if width % 64:
        outer[0] = outer[0].clone(memory_format=torch.contiguous_format)
    return Quantized(fmt, codes, scales.view(torch.float8_e4m3fn),
                     outer[0].view(torch.float32)[:, 0])


# ------------------------------------------------------------------------------------ how it is run
# A backend is a namespace of functions: these for a CPU, those of kernels.py for GPUs. That file is
# imported where a GPU asks for it, so that a CPU needs no Triton.
REFERENCE = SimpleNamespace(
    quantize=quantize, payload=payload, weight_outer=weight_outer, swiglu=swiglu, operand=operand,
    operand_pair=operand_pair, quantize_operand=quantize_operand, gemm=gemm, gemm_wgrad=gemm_wgrad)


def backend_for(x):
    """The functions that serve x's device."""
    if x.device.type != "cuda":
        return REFERENCE
    import kernels
    return kernels.ops(x.device)


BF16_CORES = (8, 0)             # compute capability of the first GPUs whose tensor cores take bf16


def uses_kernels(device):
    """Does kernels.py compute on `device`, not the reference?"""
    if device.type != "cuda":
        return False
    import kernels
    return kernels.backend(device) != "reference"


def has_kernel(f):
    """f as written; where a GPU computes, the function of its name in kernels.py, which is the same
    in few passes over memory."""
    @functools.wraps(f)
    def call(first, *rest, **kw):
        if not uses_kernels(first.device):
            return f(first, *rest, **kw)
        import kernels
        return getattr(kernels, f.__name__)(first, *rest, **kw)
    return call


def captured(function, device, waits=False):
    """The function, on a GPU as a CUDA graph where nothing in it waits for the device, as the
    reference does."""
    return Captured(function) if uses_kernels(device) and not waits else function


class Captured:
    """A function of tensors, replayed on a GPU as one CUDA graph, without a launch per kernel. The
    first calls run as they are, which compiles and warms up; shapes must not change."""

    def __init__(self, function):
        self.function, self.warmup, self.graph, self.side = function, 3, None, None

    def __call__(self, *tensors):
        if self.warmup:
            self.warmup -= 1
            # A stream of the GPU in use: by default all graphs are captured on that of the first.
            self.side = self.side or torch.cuda.Stream()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                result = self.function(*tensors)
            torch.cuda.current_stream().wait_stream(self.side)
            return result
        if not self.graph:
            self.inputs, self.graph = [t.clone() for t in tensors], torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.side):
                self.result = self.function(*self.inputs)
        for mine, given in zip(self.inputs, tensors):
            mine.copy_(given)
        self.graph.replay()
        return self.result


# --------------------------------------------------------------------------------------- the lesson
EXAMPLE = torch.tensor([-54, 27, 20.25, 13, 9, 4.5, 2, 1, 0, -1, -3, -7, -12, -18, -30, 40])


def lesson_formats():
    """The 4-bit numbers; each format's bits a number, outer scale aside, and error on N(0, 1)."""
    print("E2M1 code" + "".join(f"{code:>6}" for code in range(8)) + "   8 to 15: the negatives")
    print("    value" + "".join(f"{v:>6g}" for v in E2M1))
    print(f"\n{'format':<13}{'block':>5}{'bits a number':>15}   error: nearest   stochastic")
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    for name, f in FORMATS.items():
        outer = weight_outer(x, name) if f.tile > 1 else None
        q = quantize(x, name, outer=outer)
        bits = 8 * (q.codes.nbytes + q.scales.nbytes) / x.numel()
        nearest, stochastic = ((cast(x, name, outer=outer, rounding=r) - x).norm() / x.norm()
                               for r in ("nearest", "stochastic"))
        print(f"{name:<13}{f.block:>5}{bits:>15}{nearest:>17.2%}{stochastic:>13.2%}")


def lesson_block():
    """One block of 16 rounded to nearest, step by step; then its third number, stochastically."""
    x = EXAMPLE
    q, largest = quantize(x, "nvfp4"), x.abs().max().item()
    s, outer = q.scales.item(), q.outer.item()
    scale, decoded = s * outer, q.dequantize()
    codes = [c for byte in q.codes.tolist() for c in (byte & 15, byte >> 4)]
    print(f"\nA block whose largest is {largest:g}: E4M3 scale {s:g} x outer scale {outer:g} = "
          f"{scale:g} = {largest:g} / {E2M1[-1]:g}")
    row = "{:>9}{:>9}{:>9}{:>9}{:>9}".format
    print(2 * row("x", f"x / {scale:g}", "element", "code", "decoded"))
    rows = [row(f"{v:g}", f"{v / scale:.3f}", f"{d / scale:g}", f"{c:x}", f"{d:g}")
            for v, c, d in zip(x, codes, decoded)]
    print("\n".join(left + right for left, right in zip(rows[:8], rows[8:])))
    draws = [cast(x, "nvfp4", rounding="stochastic", seed=i)[2] / scale for i in range(16)]
    mean = cast(x.repeat(10_000, 1), "nvfp4", rounding="stochastic")[:, 2].mean() / scale
    print(f"\n{x[2] / scale:g} to nearest: {decoded[2] / scale:g}; stochastically: "
          f"{' '.join(f'{v:g}' for v in draws)} ..., mean of 10,000: {mean:.3f}")


def lesson_second_copy():
    """The same block in the backward pass: its decoded numbers, rounded again to MXFP8 along the
    other axis, stochastically. Here each of them stands in a column of 32 like it."""
    decoded = quantize(EXAMPLE, "nvfp4").dequantize()
    draws = torch.stack([cast(decoded.repeat(32, 1), "mxfp8", axis=-2, rounding="stochastic",
                              seed=i)[0] for i in range(1000)])
    print("\nBackward: the decoded numbers in MXFP8 along the other axis, stochastically")
    for i in (1, 3):
        print(f"{EXAMPLE[i]:>9g} forward {decoded[i]:>5g}, backward "
              f"{' '.join(f'{v:g}' for v in draws[:12, i])} ..., mean {draws[:, i].mean():.2f}")


def lesson_recipes():
    """What the GEMMs of each recipe read."""
    row = "{:<19}{:<21}{:<18}{:<25}{:<6}{:<6}{}".format
    print()
    print(row("experts", "forward: X, W", "backward: dY", "X and W again, of", "dense", "sent",
              "8-bit"))
    print(row("  blocks along", "K", "N and T", "T (X), N (W)", "", "back", "last"))
    for name, r in RECIPES.items():
        g = r.experts
        sent = "*" if g.source == "original" and g.wire != "bf16" else ""
        print(row(name, f"{g.x}, {g.w}", f"{g.dy} {g.dy_rounding}",
                  f"{g.back} {g.rounding}, {g.source}{sent}", r.dense.x, r.combine,
                  f"{r.last_share:g}" if r.last else ""))
    print("* of the X sent to experts only the rounded copy; "
          "8-bit last: share of layers, at least one")


if __name__ == "__main__":
    lesson_formats()
    lesson_block()
    lesson_second_copy()
    lesson_recipes()
