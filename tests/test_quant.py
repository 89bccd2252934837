"""The formats and their rounding, against tables, exact fractions and a search over all codes."""
import itertools
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import quant
from quant import FORMATS, MXFP8, NVFP4, Quantized, cast, quantize, random_bits, round_elements

ROOT = Path(__file__).resolve().parent.parent
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
                 for e in range(16) for m in range(8)][:127])                    # byte 127 is NaN
E8M0 = np.array([2.0 ** (byte - 127) for byte in range(255)])
LARGEST_OUTER, SMALLEST_OUTER = 2.0 ** 116, 2.0 ** -100

ROUNDINGS = pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
BOTH = pytest.mark.parametrize("fmt", ("mxfp8", "nvfp4"))
ELEMENTS = pytest.mark.parametrize("fmt, table", ((NVFP4, E2M1), (MXFP8, E4M3)),
                                   ids=("e2m1", "e4m3"))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def heavy_tailed(*shape, seed=0):
    return gaussian(*shape, seed=seed) * gaussian(*shape, seed=seed + 1).mul(2).exp()


def assert_same(actual, expected):
    """Equal as numbers, NaN included: the sign of a zero reaches no sum."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def byte(t):
    return t.view(torch.uint8)


def nibbles(q):
    """The 4-bit codes [.., K] of a tensor packed along its last axis."""
    return torch.stack([q.codes & 15, q.codes >> 4], -1).flatten(-2)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def from_bits(bits):
    return torch.as_tensor(bits, dtype=torch.int32).view(torch.float32)


def with_neighbours(values, ulps=8):
    """Positive fp32 values and all that lie within 8 ulp of one of them, sorted."""
    bits = np.asarray(values, np.float32).view(np.int32)[:, None] + np.arange(-ulps, ulps + 1)
    return torch.from_numpy(np.unique(bits.clip(0)).astype(np.int32)).view(torch.float32)


def in_blocks(x, fmt):
    """x, at most fmt.largest, in blocks that start with it, so that their scale is one."""
    width = fmt.block - 1
    x = torch.cat([x, x.new_zeros(-len(x) % width)]).view(-1, width)
    return torch.cat([x.new_full((len(x), 1), fmt.largest), x], 1)


# ------------------------------------------------------------------------------------ golden values
def nvfp4(values, **kw):
    x = torch.tensor(values, dtype=torch.float32)
    return quantize(F.pad(x, (0, -x.shape[-1] % 16)), kw.pop("fmt", "nvfp4"), **kw)


def hexes(codes):
    return bytes(codes.flatten().tolist()).hex(" ")


def test_golden_minus_54_is_code_minus_6_times_9():
    q = nvfp4([-54.0, 27])
    assert q.codes[0].item() & 15 == 0b1111
    assert (q.scales.float() * q.outer).item() == 9
    assert q.dequantize()[0] == -54


def test_golden_ties_go_to_the_even_code():
    half = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]
    q = nvfp4(half + [-v for v in half], outer=6 / 2688)
    assert hexes(q.codes) == "20 42 64 76 a8 ca ec fe"
    assert q.scales.float().tolist() == [448]


def test_golden_ramp():
    q = nvfp4(np.arange(-16, 16).reshape(2, 16).tolist(), outer=16 / 2688)
    assert hexes(q.codes[0]) == "ff ef ee de dd cc ab 9a"
    assert hexes(q.codes[1]) == "10 22 43 54 65 66 76 77"
    assert q.scales.float().flatten().tolist() == [448, 416]


def test_golden_six_or_four():
    x = [10.0, 20, 30, 40]
    to_six = nvfp4(x, outer=40 / 2688)
    assert E2M1[nibbles(to_six)[:4]].tolist() == [1.5, 3, 4, 6]
    assert to_six.dequantize()[2].item() == pytest.approx(26.67, abs=0.01)
    best = nvfp4(x, fmt="nvfp4_46", outer=40 / 1536)
    assert E2M1[nibbles(best)[:4]].tolist() == [1, 2, 3, 4]
    assert best.dequantize()[:4].tolist() == pytest.approx(x, rel=1e-7)
    assert nvfp4([6.0], fmt="nvfp4_46", outer=1.0).scales.float() == 1        # equal errors: to 6
    default = nvfp4(x)
    assert default.outer == 2.0 ** -6 and default.scales.float() == 416
    assert default.dequantize()[:4].tolist() == [9.75, 19.5, 26, 39]


@pytest.mark.parametrize("amax, scale_byte, code", (
    (448, 127, 448), (449, 128, 224), (447.9, 127, 448), (1, 119, 256), (1.75, 119, 448),
    (from_bits(0x3FE00001).item(), 120, 224), (from_bits(0x40600001).item(), 121, 224),
    (1.9, 120, 240), (480, 128, 240), (600, 128, 288), (2.0 ** -126, 0, 2), (0, 0, 0)))
def test_golden_mxfp8_scales(amax, scale_byte, code):
    q = quantize(torch.tensor([amax] + [0.0] * 31), "mxfp8")
    assert q.scales.item() == scale_byte and q.codes[0].float() == code


def test_golden_mxfp8_decoded_values():
    values = [cast(torch.tensor([v] + [0.0] * 31), "mxfp8")[0].item() for v in (1.9, 480, 600)]
    assert values == [1.875, 480, 576]


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
def test_golden_mxfp8_scale_of_a_number_that_is_none_is_255(bad):
    assert quantize(torch.tensor([bad] + [1.0] * 31), "mxfp8").scales.item() == 255


# ----------------------------------------------------------------------------- every code and scale
def test_every_e4m3_code_times_every_e8m0_scale_decodes_exactly():
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    values = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])
    with np.errstate(over="ignore"):
        expected = (np.append(E8M0, np.nan)[:, None] * values).astype(np.float32)
    assert_same(Quantized("mxfp8", codes, scales).dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("outer", (1.0, 2.0 ** -123, SMALLEST_OUTER, LARGEST_OUTER, 0.3))
def test_every_pair_of_e2m1_codes_times_every_e4m3_scale_decodes_exactly(outer):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    q = Quantized("nvfp4", codes, scales, torch.full((256,), outer))
    elements = np.concatenate([E2M1, -E2M1])
    low_first = elements[np.stack([np.arange(256) & 15, np.arange(256) >> 4], 1)].flatten()
    factors = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]).astype(np.float32)
    expected = (factors * np.float32(outer))[:, None] * low_first.astype(np.float32)
    assert_same(q.dequantize(), torch.from_numpy(expected))


@ELEMENTS
def test_every_element_keeps_its_code(fmt, table):
    for sign in (1, -1):
        x = in_blocks(torch.tensor(table, dtype=torch.float32) * sign, fmt)
        q = quantize(x, fmt.name, outer=1.0)
        codes = byte(q.codes) if fmt is MXFP8 else nibbles(q)
        top = 0 if sign == 1 else 0x80 if fmt is MXFP8 else 8
        assert codes[:, 1:].flatten()[:len(table)].tolist() == [top + i for i in range(len(table))]


@ROUNDINGS
def test_every_positive_e4m3_scale_survives_a_round_trip(rounding):
    x = torch.tensor(E4M3[1:, None] * np.concatenate([E2M1, -E2M1]), dtype=torch.float32)
    q = quantize(x, "nvfp4", outer=1.0, rounding=rounding)
    assert byte(q.scales).flatten().tolist() == list(range(1, 127))
    assert_same(q.dequantize(), x)


# --------------------------------------------------------------------------------- nearest rounding
def rounding_points(table):
    """Every representable number, every midpoint, their neighbours within 8 ulp, and all bf16
    numbers below the largest; then the negatives."""
    mid = (table[1:] + table[:-1]) / 2
    bf16 = torch.arange(0, 1 << 15, dtype=torch.int32) << 16
    x = torch.cat([with_neighbours(np.concatenate([table, mid])), bf16.view(torch.float32)])
    x = x[x <= table[-1]]
    return torch.cat([x, -x])


def nearest_code(x, table):
    """The closest entry by search, ties to the even one, plus the sign bit."""
    distance = np.abs(np.abs(x)[:, None].astype(np.float64) - table)
    tied = distance == distance.min(1, keepdims=True)
    low, high = tied.argmax(1), len(table) - 1 - tied[:, ::-1].argmax(1)
    sign_bit = 8 if len(table) == 8 else 128
    return np.where(low % 2 == 0, low, high) + np.signbit(x) * sign_bit


def codes_of(x, fmt):
    q = quantize(in_blocks(x, fmt), fmt.name, outer=1.0)
    codes = byte(q.codes) if fmt is MXFP8 else nibbles(q)
    return codes[:, 1:].flatten()[:len(x)].numpy()


@ELEMENTS
def test_nearest_is_the_closest_code_by_search(fmt, table):
    x = rounding_points(table)
    assert np.array_equal(codes_of(x, fmt), nearest_code(x.numpy(), table))


@ELEMENTS
def test_nearest_agrees_with_ml_dtypes(fmt, table):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes holds the reference casts")
    kind = ml_dtypes.float8_e4m3fn if fmt is MXFP8 else ml_dtypes.float4_e2m1fn
    x = rounding_points(table)
    assert np.array_equal(codes_of(x, fmt), x.numpy().astype(kind).view(np.uint8))


# -------------------------------------------------------------------------------------- scale rules
def smallest_power_at_least(ratio, lowest, highest):
    """Exponent of the smallest power of two >= ratio (a Fraction), within limits."""
    e = lowest
    while e < highest and Fraction(2) ** e < ratio:
        e += 1
    return e


def amaxes_around(significand):
    """fp32 numbers around significand * 2^k and 2^k for every exponent k, denormals included."""
    values = [s * 2.0 ** k for k in range(-149, 128) for s in (1, significand)]
    x = with_neighbours([v for v in values if v < 3.4e38])
    return x[torch.isfinite(x)]


def test_mxfp8_scale_is_the_smallest_power_of_two_that_clips_nothing():
    amax = amaxes_around(1.75)
    x = torch.zeros(len(amax), 32)
    x[:, 5] = -amax
    found = quantize(x, "mxfp8").scales.flatten().tolist()
    for a, scale_byte in zip(amax.tolist(), found):
        ratio = Fraction(a) / 448
        assert Fraction(2) ** (scale_byte - 127) >= ratio
        assert scale_byte == 0 or Fraction(2) ** (scale_byte - 128) < ratio


@pytest.mark.parametrize("fmt, significand, largest", (
    ("nvfp4", 1.3125, 2688), ("nvfp4_46", 1.5, 1536)))
def test_outer_scale_is_the_smallest_power_of_two_within_its_limits(fmt, significand, largest):
    amax = amaxes_around(significand)
    x = torch.zeros(len(amax), 16)
    x[:, 3] = amax
    found = quantize(x, fmt).outer
    log2 = torch.log2(amax.double() / largest)
    expected = torch.exp2(torch.ceil(log2)).clamp(SMALLEST_OUTER, LARGEST_OUTER).float()
    for i in torch.where((log2 - log2.round()).abs() < 1e-5)[0].tolist():     # too close to trust
        expected[i] = 2.0 ** smallest_power_at_least(Fraction(amax[i].item()) / largest, -100, 116)
    assert_same(found, torch.where(amax == 0, 1.0, expected))


def test_outer_scale_skips_what_is_not_finite():
    x = gaussian(4, 32) * 100
    expected = quantize(x, "nvfp4").outer
    x[0, 0], x[1, 5], x[2, 31] = torch.nan, torch.inf, -torch.inf
    x[3, :] = torch.nan
    expected[3] = 1
    assert_same(quantize(x, "nvfp4").outer, expected)


def test_stochastic_scale_is_the_smallest_that_clips_nothing():
    """For every E4M3 scale s and the numbers around 6 s, where rounding up makes a difference."""
    amax = with_neighbours(6 * E4M3[1:-1])
    x = torch.zeros(len(amax), 16)
    x[:, 9] = amax
    codes = byte(quantize(x, "nvfp4", outer=1.0, rounding="stochastic").scales).flatten().numpy()
    assert (6 * E4M3[codes] >= amax.double().numpy()).all()
    assert (6 * E4M3[codes - 1] < amax.double().numpy()).all()


def test_nearest_scale_is_the_closest_e4m3():
    amax = with_neighbours(np.concatenate([E4M3[1:], (E4M3[1:] + E4M3[:-1]) / 2]) * 6)
    amax = amax[amax < 448 * 6]
    x = torch.zeros(len(amax), 16)
    x[:, 0] = amax
    s = (amax * np.float32(1 / 6)).numpy()
    assert np.array_equal(byte(quantize(x, "nvfp4", outer=1.0).scales).flatten().numpy(),
                          nearest_code(s, E4M3))


def test_a_callers_outer_scale_that_is_too_small_clips():
    q = nvfp4([1e6, -3e4, 100.0, 0.2], outer=1.0)
    assert q.scales.float() == 448
    assert q.dequantize()[:4].tolist() == [2688, -2688, 0, 0]


def nvfp4_by_hand(x, outer):
    """(codes, scale bytes) in numpy's fp32, rounded by search; x [R, K], outer [R]."""
    blocks = x.reshape(len(x), -1, 16)
    s = np.abs(blocks).max(-1) * np.float32(1 / 6) / outer[:, None]
    scales = nearest_code(np.minimum(s, 448).flatten(), E4M3)
    enc = 1 / (E4M3[scales].astype(np.float32).reshape(s.shape) * outer[:, None])
    y = (blocks * enc[..., None]).clip(-6, 6)
    return nearest_code(y.flatten(), E2M1).reshape(x.shape), scales.reshape(s.shape)


@pytest.mark.parametrize("draw", (gaussian, heavy_tailed))
@pytest.mark.parametrize("arbitrary", (False, True), ids=("power of two", "amax/2688"))
def test_nvfp4_equals_a_few_lines_of_numpy(draw, arbitrary):
    x = draw(64, 512, seed=3)
    q = quantize(x, "nvfp4", outer=x.abs().amax(-1) / 2688 if arbitrary else None)
    codes, scales = nvfp4_by_hand(x.numpy(), q.outer.numpy())
    assert np.array_equal(byte(q.scales).numpy(), scales)
    assert np.array_equal(nibbles(q).numpy(), codes)


def test_nvfp4_equals_torchao_given_the_same_outer_scale():
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor",
                                  reason="torchao holds another implementation")
    x = gaussian(512, 512)
    outer = torch.tensor(2.0 ** -9)
    scales, codes = torchao.nvfp4_quantize(x, 16, outer)
    q = quantize(x, "nvfp4", outer=outer)
    assert torch.equal(byte(q.scales), byte(scales).view(512, 32))
    assert torch.equal(q.codes, byte(codes))


# --------------------------------------------------------------------------- exact values, one cast
def extremes():
    """Inputs [64, 64] at the ends of fp32, and mixtures of them by block, by row and by number."""
    g, wide = gaussian(64, 64), torch.arange(64)
    power = torch.exp2(torch.linspace(-149, 127, 64))
    shuffled = power.repeat(64)[torch.randperm(4096, generator=generator(2))].view(64, 64)
    special = g.clone()
    special[[3, 40, 8, 9], [7, 20, 60, 33]] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    alternate = torch.where(wide // 16 % 2 == 0, 2.0 ** -120, 2.0 ** 120)
    return {
        "gaussian": g,
        "heavy tails": heavy_tailed(64, 64),
        "zeros": torch.zeros(64, 64),
        "minus zeros": torch.full((64, 64), -0.0),
        "near 2^-126": g * 2.0 ** -126,
        "near 2^125": g * 2.0 ** 125,
        "subnormal": from_bits(torch.randint(0, 1 << 20, (64, 64), generator=generator(1))),
        "every exponent by row": g.sign() * power[:, None],
        "every exponent by column": g.sign() * power,
        "every exponent by number": g.sign() * shuffled,
        "tiny and huge columns": g * alternate,
        "tiny and huge rows": g * alternate[:, None],
        "zero blocks": g * (wide // 32 % 2) * (wide[:, None] // 32 % 2),
        "just inside the short way": g.sign() * 2.0 ** -80,
        "just outside the short way": g.sign() * from_bits(0x17800000 - 1),
        "special": special,
        "all nan": torch.full((64, 64), torch.nan),
        "largest finite": torch.full((64, 64), torch.finfo(torch.float32).max),
    }


EXTREMES = extremes()


def outer_for(fmt, x):
    """Tiles span rows, so they need one outer scale for all of them, as a weight matrix has."""
    return quant.weight_outer(x.float(), fmt) if FORMATS[fmt].tile > 1 else None


@ROUNDINGS
@pytest.mark.parametrize("fmt, axis", [(fmt, -1) for fmt in FORMATS] + [
    (fmt, -2) for fmt, f in FORMATS.items() if f.tile == 1])
def test_cast_is_quantize_and_dequantize(fmt, axis, rounding):
    for x in (*EXTREMES.values(), gaussian(64, 64).bfloat16(), gaussian(2, 32, 64)):
        kw = dict(rounding=rounding, seed=11, axis=axis, outer=outer_for(fmt, x))
        assert_same(cast(x, fmt, **kw), quantize(x, fmt, **kw).dequantize(x.dtype))


@ROUNDINGS
@pytest.mark.parametrize("fmt", ("mxfp8", "nvfp4", "nvfp4_46", "nvfp4_tile"))
def test_decoded_values_are_exact_in_bf16(fmt, rounding):
    for scale in (1.0, 2.0 ** -100, 2.0 ** -60, 2.0 ** 60, 2.0 ** 118):
        for x in (gaussian(64, 128) * scale, heavy_tailed(64, 128).clamp(-500, 500) * scale):
            q = quantize(x, fmt, rounding=rounding, outer=outer_for(fmt, x))
            assert_same(q.dequantize(torch.bfloat16).float(), q.dequantize())


def test_every_code_and_scale_in_range_is_exact_in_bf16():
    e4m3 = torch.tensor(E4M3, dtype=torch.float32)
    products = (e4m3[:, None] * torch.tensor(E2M1, dtype=torch.float32)).flatten()
    for outer in (2.0 ** -123, 1.0, LARGEST_OUTER):
        assert_same((products * outer).bfloat16().float(), products * outer)
    for scale in E8M0[3:247]:
        values = torch.tensor((E4M3 * scale)[E4M3 * scale < 2.0 ** 128], dtype=torch.float32)
        assert_same(values.bfloat16().float(), values)


@BOTH
def test_quantising_twice_changes_nothing(fmt):
    x = cast(heavy_tailed(64, 128), fmt)
    assert_same(cast(x, fmt), x)
    assert_same(cast(x, fmt, rounding="stochastic", seed=1), x)


# ------------------------------------------------------------------------------- shapes and storage
@pytest.mark.parametrize("shape", ((64,), (4, 64), (2, 3, 64)))
def test_storage_is_packed_as_documented(shape):
    lead, x = shape[:-1], gaussian(*shape)
    q = quantize(x, "mxfp8")
    assert (q.codes.dtype, q.codes.shape) == (torch.float8_e4m3fn, shape)
    assert (q.scales.dtype, q.scales.shape, q.outer) == (torch.uint8, (*lead, 2), None)
    assert (q.codes.nbytes + q.scales.nbytes) * 8 == 8.25 * x.numel()
    q = quantize(x, "nvfp4")
    assert (q.codes.dtype, q.codes.shape) == (torch.uint8, (*lead, 32))
    assert (q.scales.dtype, q.scales.shape) == (torch.float8_e4m3fn, (*lead, 4))
    assert (q.outer.dtype, q.outer.shape) == (torch.float32, lead)
    assert (q.codes.nbytes + q.scales.nbytes) * 8 == 4.5 * x.numel()
    assert q.dequantize().shape == x.shape and q.dequantize(torch.bfloat16).dtype == torch.bfloat16


@ROUNDINGS
@pytest.mark.parametrize("fmt", ("mxfp8", "nvfp4", "nvfp4_46"))
def test_matrices_of_a_stack_are_quantised_each_by_itself(fmt, rounding):
    x = heavy_tailed(3, 32, 64)
    ids = torch.arange(96, dtype=torch.int32).view(3, 32)
    for axis in (-1, -2):
        whole = cast(x, fmt, axis=axis, rounding=rounding, seed=5, rows=ids)
        for e in range(3):
            one = cast(x[e], fmt, axis=axis, rounding=rounding, seed=5, rows=ids[e])
            assert_same(whole[e], one)


@BOTH
def test_blocks_along_the_other_axis_are_those_of_the_turned_tensor(fmt):
    x = heavy_tailed(64, 48)
    q, turned = quantize(x, fmt, axis=-2), quantize(x.T, fmt)
    assert torch.equal(byte(q.codes), byte(turned.codes).T)
    assert torch.equal(byte(q.scales), byte(turned.scales).T)
    assert_same(q.dequantize(), turned.dequantize().T)


@BOTH
def test_strides_do_not_matter(fmt):
    x = heavy_tailed(64, 64).T
    kw = dict(rounding="stochastic", seed=2)
    for axis in (-1, -2):
        assert_same(cast(x, fmt, axis=axis, **kw), cast(x.contiguous(), fmt, axis=axis, **kw))


@BOTH
def test_selected_rows_are_the_rows(fmt):
    x, index = gaussian(8, 64), torch.tensor([5, 0, 5])
    assert_same(quantize(x, fmt).select(index).dequantize(), quantize(x[index], fmt).dequantize())


@pytest.mark.parametrize("fmt, shape, axis, block", (
    ("mxfp8", (4, 48), -1, 32), ("nvfp4", (4, 24), -1, 16), ("mxfp8", (48, 64), -2, 32),
    ("nvfp4", (7,), -1, 16)))
@pytest.mark.parametrize("call", (quantize, cast))
def test_a_shape_without_whole_blocks_is_named_with_the_block(call, fmt, shape, axis, block):
    with pytest.raises(ValueError) as error:
        call(torch.ones(shape), fmt, axis=axis)
    assert str(shape) in str(error.value) and f" {block} " in str(error.value)


@pytest.mark.parametrize("shape, axis", (((8, 32), -1), ((32,), -1), ((32, 32), -2)))
def test_tiles_are_for_weights_along_their_rows(shape, axis):
    with pytest.raises(ValueError) as error:
        cast(torch.ones(shape), "nvfp4_tile", axis=axis)
    assert str(shape) in str(error.value) and " 16 " in str(error.value)


def test_unknown_names_are_errors_that_list_what_is_allowed():
    with pytest.raises(ValueError, match="'fp4'.*nvfp4"):
        quantize(torch.ones(32), "fp4")
    for call in (quantize, cast):
        with pytest.raises(ValueError, match="'random'.*nearest.*stochastic"):
            call(torch.ones(32), "mxfp8", rounding="random")


# ---------------------------------------------------------------------------------- special numbers
@ROUNDINGS
@pytest.mark.parametrize("zero_block", (True, False))
def test_minus_zero_keeps_its_sign(rounding, zero_block):
    x = torch.full((2, 32), -0.0)
    x[:, ::2] = 0.0
    x[:, 2] = 0.0 if zero_block else 3.0
    negative = torch.signbit(x)
    q = quantize(x, "mxfp8", rounding=rounding)
    assert torch.equal(byte(q.codes) >= 128, negative)
    q = quantize(x, "nvfp4", rounding=rounding)
    assert torch.equal(nibbles(q) >= 8, negative)
    assert torch.equal(torch.signbit(q.dequantize()), negative)
    if zero_block:
        assert not (nibbles(q) & 7).any() and not byte(q.scales).any()


@ROUNDINGS
@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("bad", (0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1, 0x7F800000, -0x800000),
                         ids=("nan", "gpu nan", "signalling nan", "-nan", "inf", "-inf"))
@pytest.mark.parametrize("fmt", ("mxfp8", "nvfp4", "nvfp4_46", "nvfp4_tensor"))
def test_nan_and_inf_spoil_their_block_and_no_other(fmt, bad, axis, rounding):
    clean = gaussian(64, 64)
    x = clean.clone()
    i = torch.tensor([3, 37])                                  # two rows, two columns
    x[i, i + 5] = from_bits(bad)
    blocks = (~torch.isfinite(x)).unflatten(axis, (-1, FORMATS[fmt].block))
    spoiled = blocks.any(axis, keepdim=True).expand_as(blocks).flatten(axis - 1, axis)
    outer = quantize(clean, fmt, axis=axis).outer              # the amax may have been spoiled too
    kw = dict(axis=axis, outer=outer, rounding=rounding)
    expected = cast(clean, fmt, **kw).masked_fill(spoiled, torch.nan)
    assert_same(quantize(x, fmt, **kw).dequantize(), expected)
    assert_same(cast(x, fmt, **kw), expected)


@pytest.mark.parametrize("bad", (torch.nan, torch.inf, -torch.inf))
def test_a_spoiled_block_keeps_signs_and_has_no_magnitudes(bad):
    x = gaussian(4, 32)
    x[:, 7] = bad
    signs = torch.signbit(x)
    q = quantize(x, "nvfp4")
    assert byte(q.scales)[:, 0].tolist() == [0x7F] * 4
    assert torch.equal(nibbles(q)[:, :16], signs[:, :16] * 8)
    q = quantize(x, "mxfp8")
    assert q.scales.flatten().tolist() == [255] * 4
    assert torch.equal(byte(q.codes), (signs * 128).to(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_vanishing_tensor_is_about_right_or_exactly_zero(fmt):
    x = gaussian(32, 64)
    x = x / x.abs().max() * 1e-36
    decoded = cast(x, fmt, outer=outer_for(fmt, x))
    assert not decoded.any() or relative(decoded, x) < 0.2


# -------------------------------------------------------------------------------------- random bits
def grid(n_rows, n_cols, row=0, col=0):
    return (torch.arange(row, row + n_rows, dtype=torch.int32)[:, None],
            torch.arange(col, col + n_cols, dtype=torch.int32))


def bits_of(seed, row, col):
    row, col = (torch.tensor([v], dtype=torch.int32) for v in (row, col))
    return random_bits(seed, row, col).item() % 2 ** 32


PINNED = {(0, 0, 0): 0x3925EDE8,
          (1, 0, 0): 0x86CCB54A,
          (0, 1, 0): 0xBB1C8BB0,
          (0, 0, 1): 0xDBF446FE,
          (-1, 2147483647, 4095): 0x8175AF99,
          (1234567, 89, 1011): 0xABAA5A41}


def test_random_bits_never_change_silently():
    """Runs that were published, and the kernels of another device, draw these."""
    assert {key: bits_of(*key) for key in PINNED} == PINNED
    assert bits_of(quant.fold(7, 1, 2), 3, 4) == 0xBABB5F44


def test_the_same_number_draws_the_same_bits_in_any_company():
    whole = random_bits(7, *grid(64, 48))
    assert torch.equal(whole, random_bits(7, *grid(64, 48)))
    assert torch.equal(whole[10:20, 5:9], random_bits(7, *grid(10, 4, 10, 5)))
    assert whole[10, 5].item() % 2 ** 32 == bits_of(7, 10, 5)
    assert (whole != random_bits(8, *grid(64, 48))).float().mean() > 0.999


@pytest.mark.parametrize("seed", (0, 1, -1, 5, 2 ** 31 - 1, -2 ** 31, 2 ** 31, 2 ** 40 + 3))
def test_a_seed_in_a_tensor_draws_the_same_bits(seed):
    as_tensor = torch.tensor((seed + 2 ** 31) % 2 ** 32 - 2 ** 31, dtype=torch.int32)
    for labels in ((), (3,), (3, -4, 2 ** 20)):
        whole, scalar = quant.fold(seed, *labels), quant.fold(as_tensor, *labels)
        assert torch.equal(random_bits(whole, *grid(4, 8)), random_bits(scalar, *grid(4, 8)))
    x = gaussian(4, 64)
    assert_same(cast(x, "nvfp4", rounding="stochastic", seed=seed),
                cast(x, "nvfp4", rounding="stochastic", seed=as_tensor))


def test_fold_separates_what_it_names():
    seeds = [quant.fold(s, *labels) for s in range(12) for n in range(4)
             for labels in itertools.product(range(6), repeat=n)]
    drawn = {tuple(random_bits(seed, *grid(1, 2)).flatten().tolist()) for seed in seeds}
    assert len(drawn) == len(seeds)


def test_folding_twice_is_folding_once_with_both_labels():
    once, twice = quant.fold(7, 1, 2), quant.fold(quant.fold(7, 1), 2)
    assert torch.equal(random_bits(once, *grid(4, 8)), random_bits(twice, *grid(4, 8)))


def layouts():
    """A million numbers as tensors draw them: few rows, few columns, far from 0, many seeds."""
    yield random_bits(1, *grid(16, 1 << 16))
    yield random_bits(2, *grid(1 << 16, 16))
    yield random_bits(3, *grid(1024, 1024, 10 ** 9, 10 ** 6))
    yield torch.stack([random_bits(s, *grid(32, 32)) for s in range(1024)])


def test_uniform_numbers_are_uniform():
    for bits in layouts():
        u = (bits >> 8 & 0xFFFFFF).flatten()
        for shift in (0, 8, 16):
            counts = torch.bincount(u >> shift & 255, minlength=256).double()
            expected = u.numel() / 256
            chi_square = ((counts - expected) ** 2 / expected).sum().item()
            assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
        ones = torch.stack([(u >> b & 1).double().mean() for b in range(24)])
        assert (ones - 0.5).abs().max() < 5 * 0.5 / u.numel() ** 0.5


def test_uniform_is_the_upper_24_bits():
    rows, cols = grid(64, 64)
    u, bits = quant.uniform(4, rows, cols), random_bits(4, rows, cols).long() % 2 ** 32
    assert torch.equal(u.double() * 2 ** 24, (bits >> 8).double())


def repeats(bits):
    """How many pairs of successive numbers (last axis) occur more than once: by chance none, but
    wherever two streams are shifted copies of each other, almost all."""
    bits = bits.long() & 0xFFFFFFFF
    pairs = (bits[..., :-1] << 32 | bits[..., 1:]).flatten()
    return pairs.numel() - pairs.unique().numel()


def test_no_stream_is_another_one_shifted():
    seeds = list(range(24)) + [quant.fold(1, s) for s in range(24)]
    bits = torch.stack([random_bits(s, *grid(128, 96)) for s in seeds])          # [seed, row, col]
    for axis in range(3):
        assert repeats(bits.movedim(axis, -1)) == 0


def test_the_shift_test_finds_a_linear_mixture_of_row_and_seed():
    rows, cols = grid(128, 16)
    linear = torch.stack([quant.mix(rows * 3 + 6 * s + quant.mix(cols)) for s in range(8)])
    assert repeats(linear.movedim(1, -1)) > linear.numel() // 2


def test_neighbours_in_row_column_and_seed_are_uncorrelated():
    u = torch.stack([quant.uniform(s, *grid(64, 256)) for s in range(64)]).double() - 0.5
    for axis, lag in itertools.product(range(3), range(1, 9)):
        n = u.shape[axis]
        a, b = u.narrow(axis, 0, n - lag), u.narrow(axis, lag, n - lag)
        assert abs((a * b).mean().item() * 12) < 4.5 / a.numel() ** 0.5


@BOTH
@pytest.mark.parametrize("axis", (-1, -2))
def test_bits_follow_the_number_when_rows_move(fmt, axis):
    """Rows of a micro-batch, or sorted another way, keep their bits by their ids."""
    x, ids = gaussian(128, 64), torch.randperm(10 ** 6, generator=generator(1))[:128].int()
    kw = dict(rounding="stochastic", seed=9, axis=axis, outer=0.125 if fmt == "nvfp4" else None)
    whole = cast(x, fmt, rows=ids, **kw)
    for part in (slice(0, 64), slice(64, 128)):
        assert_same(cast(x[part], fmt, rows=ids[part], **kw), whole[part])
    order = torch.randperm(4, generator=generator(2))                  # whole blocks along T move
    moved = torch.arange(128).view(4, 32)[order].flatten()
    assert_same(cast(x[moved], fmt, rows=ids[moved], **kw), whole[moved])
    if axis == -1:
        order = torch.randperm(128, generator=generator(3))
        assert_same(cast(x[order], fmt, rows=ids[order], **kw), whole[order])
        assert relative(cast(x[order], fmt, **kw), cast(x, fmt, **kw)[order]) > 0.02


def test_column_ids_name_columns():
    x = gaussian(8, 128)
    cols = torch.arange(128, dtype=torch.int32)
    kw = dict(rounding="stochastic", seed=9)
    assert_same(cast(x[:, 64:], "mxfp8", cols=cols[64:], **kw), cast(x, "mxfp8", **kw)[:, 64:])


def test_a_number_draws_the_same_bits_for_blocks_along_either_axis():
    x = gaussian(64, 64)
    i = torch.arange(64)
    x[i, i] = x[i, (i + 32) % 64] = 448.0                      # each block either way has scale 1
    kw = dict(rounding="stochastic", seed=3)
    assert_same(cast(x, "mxfp8", **kw), cast(x, "mxfp8", axis=-2, **kw))


# ------------------------------------------------------------------------------ stochastic rounding
def neighbours(x, table):
    """The entries of the table around |x|, lo < hi unless it holds |x|; fp64."""
    x = x.abs().double().numpy()
    lo, hi = np.searchsorted(table, x, "right") - 1, np.searchsorted(table, x, "left")
    return torch.from_numpy(table[lo]), torch.from_numpy(table[hi])


@ELEMENTS
def test_stochastic_goes_up_exactly_when_u_is_below_the_fraction(fmt, table):
    """For u at both ends, and as close to the fraction as its 24 bits allow, on either side."""
    x = rounding_points(table)
    lo, hi = neighbours(x, table)
    fraction = torch.where(hi > lo, (x.abs() - lo) / (hi - lo), 0)
    closest = torch.ceil(fraction * 2 ** 24)
    for u in (closest - 2, closest - 1, closest, closest + 1,
              closest * 0, closest * 0 + 2 ** 24 - 1):
        u = u.clamp(0, 2 ** 24 - 1) * 2.0 ** -24
        expected = torch.where(u < fraction, hi, lo).float().copysign(x)
        assert_same(round_elements(x, fmt, u.float()), expected)


def test_two_and_a_quarter_is_two_three_times_of_four():
    x = torch.full((20_000, 16), 2.25)
    x[:, 0] = 6.0
    q = cast(x, "nvfp4", rounding="stochastic", seed=1, outer=1.0)[:, 1:]
    assert q.unique().tolist() == [2, 3]
    assert abs((q == 3).double().mean().item() - 0.25) < 4 * (0.1875 / q.numel()) ** 0.5


@ELEMENTS
def test_numbers_of_the_format_stay(fmt, table):
    x = in_blocks(torch.tensor(np.concatenate([table, -table]), dtype=torch.float32), fmt)
    for seed in range(50):
        assert_same(cast(x, fmt.name, rounding="stochastic", seed=seed, outer=1.0), x)


@ELEMENTS
def test_stochastic_never_leaves_the_two_neighbours(fmt, table):
    x = rounding_points(table)
    lo, hi = neighbours(x, table)
    for seed in range(4):
        q = cast(in_blocks(x, fmt), fmt.name, rounding="stochastic", seed=seed, outer=1.0)
        q = q[:, 1:].flatten()[:len(x)]
        assert ((q.abs() == lo) | (q.abs() == hi)).all() and (q * x >= 0).all()


def slope(q, x, block):
    """(mean of q/x, its standard error) over samples q [S, R, K], every block weighing the same."""
    y = x.double().unflatten(-1, (-1, block))
    y = y / y.abs().amax(-1, keepdim=True).square()
    each = (q.double() * y.flatten(-2)).flatten(1).sum(1) / (x * y.flatten(-2)).sum()
    return each.mean().item(), each.std().item() / len(each) ** 0.5


def draws(x, fmt, seeds, **kw):
    return torch.stack([cast(x, fmt, rounding="stochastic", seed=s, **kw) for s in range(seeds)])


@pytest.mark.parametrize("fmt", ("mxfp8", "nvfp4", "nvfp4_tensor"))
@pytest.mark.parametrize("draw", (gaussian, heavy_tailed))
def test_stochastic_rounding_is_unbiased(fmt, draw):
    x, seeds = draw(32, 128, seed=5), 800
    q = draws(x, fmt, seeds)
    mean, error = slope(q, x, FORMATS[fmt].block)
    assert abs(mean - 1) < 4 * error and error < 1e-3
    # Each number by itself: its mean error over the seeds, in standard errors, is standard normal.
    lo, hi = q.amin(0).double(), q.amax(0).double()
    deviation = ((x - lo) * (hi - x)).clamp(min=0).sqrt()      # of a coin between two neighbours
    likely = deviation > 0.1 * (hi - lo)
    z = ((q.double().mean(0) - x) / (deviation / seeds ** 0.5))[likely]
    assert abs(z.mean()) < 4 / z.numel() ** 0.5
    assert abs(z.square().mean() - 1) < 4 * (2 / z.numel()) ** 0.5
    assert z.abs().max() < 5.5


def ratio_at_the_maximum(q, x, block):
    """(mean, worst mean of one block, standard error) of q/x at each block's largest number."""
    xb, qb = x.unflatten(-1, (-1, block)), q.unflatten(-1, (-1, block))
    at = xb.abs().argmax(-1, keepdim=True)
    ratio = qb.gather(-1, at.expand(len(q), *at.shape)).double() / xb.gather(-1, at)
    error = ratio.flatten(1).mean(1).std().item() / len(q) ** 0.5
    return ratio.mean().item(), ratio.mean(0).min().item(), error


@BOTH
def test_stochastic_rounding_is_unbiased_at_the_block_maximum(fmt):
    x = gaussian(64, 512)
    mean, worst, error = ratio_at_the_maximum(draws(x, fmt, 200), x, FORMATS[fmt].block)
    assert abs(mean - 1) < 4 * error and error < 3e-4
    assert worst > 0.95                                        # 200 coins of up to 18 % each


def test_a_scale_rounded_to_nearest_would_be_biased_at_the_block_maximum():
    """As published recipes have it: half of the blocks clip, and their largest number is low."""
    x = gaussian(64, 512)
    nearest = quantize(x, "nvfp4")
    scale = (nearest.scales.float() * nearest.outer[:, None]).repeat_interleave(16, -1)
    y = x / scale
    clipped = y.unflatten(-1, (-1, 16)).abs().amax(-1) > 6
    q = torch.stack([round_elements(y.clamp(-6, 6), NVFP4, quant.uniform(s, *grid(64, 512))) * scale
                     for s in range(200)])
    mean, worst, error = ratio_at_the_maximum(q, x, 16)
    assert clipped.float().mean().item() == pytest.approx(0.51, abs=0.03)
    assert mean == pytest.approx(0.989, abs=0.001) and mean < 1 - 20 * error
    assert worst == pytest.approx(0.942, abs=0.003)


def correlation_in_standard_errors(a, b):
    product = (a.double() * b).flatten()
    return (product.mean() / product.std() * product.numel() ** 0.5).item()


def test_the_second_copys_error_has_nothing_to_do_with_the_firsts():
    x = gaussian(512, 512)
    copy = cast(x, "nvfp4")
    first = copy - x
    again = [cast(copy, "mxfp8", axis=-2, rounding="stochastic", seed=s) - copy for s in (1, 2)]
    assert abs(correlation_in_standard_errors(first, again[0])) < 4
    assert abs(correlation_in_standard_errors(*again)) < 4
    assert correlation_in_standard_errors(again[0], again[0]) > 100


# --------------------------------------------------------------------------------- variants, errors
def test_a_tile_shares_its_scale_and_a_weight_its_outer_scale():
    w = gaussian(3, 64, 128) * torch.tensor([1.0, 50, 0.01]).view(3, 1, 1)
    outer = quant.weight_outer(w, "nvfp4_tile")
    q = quantize(w, "nvfp4_tile", outer=outer)
    tiles = byte(q.scales).unflatten(1, (4, 16))
    assert (tiles == tiles[:, :, :1]).all()
    amax = w.unflatten(1, (4, 16)).unflatten(-1, (-1, 16)).abs().amax((2, 4))
    expected = nearest_code((amax * np.float32(1 / 6) / outer[..., None]).flatten().numpy(), E4M3)
    assert np.array_equal(tiles[:, :, 0].flatten().numpy(), expected)
    assert outer.shape == (3, 1) and (q.outer == outer).all()


def test_the_tensor_variant_has_one_arbitrary_outer_scale():
    x = heavy_tailed(16, 64)
    outer = quantize(x, "nvfp4_tensor").outer
    assert outer.shape == (16,) and (outer == x.abs().max() / 2688).all()
    assert torch.frexp(outer[0])[0] != 0.5
    assert quantize(torch.zeros(4, 16), "nvfp4_tensor").dequantize().count_nonzero() == 0


def test_a_row_does_not_depend_on_its_neighbours_but_in_the_tensor_variant():
    x = heavy_tailed(16, 64)
    for fmt in ("mxfp8", "nvfp4", "nvfp4_46"):
        assert_same(cast(x, fmt)[3:5], cast(x[3:5], fmt))
    assert not torch.equal(cast(x, "nvfp4_tensor")[3:5], cast(x[3:5], "nvfp4_tensor"))


def test_six_or_four_keeps_the_better_of_the_two():
    x = heavy_tailed(64, 256)
    outer = quantize(x, "nvfp4_46").outer
    error = [(cast(x, fmt, outer=outer) - x).unflatten(-1, (-1, 16)).square().sum(-1)
             for fmt in ("nvfp4_46", "nvfp4")]
    assert (error[0] <= error[1]).all() and (error[0] < error[1]).float().mean() > 0.2


def test_one_outer_scale_for_an_expert_matrix_whatever_is_not_finite():
    w = gaussian(2, 32, 64)
    expected = quant.weight_outer(w, "nvfp4")
    w[0, 3, 4], w[1, 0, 0] = torch.nan, torch.inf
    assert_same(quant.weight_outer(w, "nvfp4"), expected)


@pytest.mark.parametrize("fmt, percent", (
    ("mxfp8", 2.65), ("nvfp4", 9.51), ("nvfp4_tensor", 9.51), ("nvfp4_46", 8.70),
    ("nvfp4_tile", 11.13)))
def test_relative_error_on_gaussian_numbers(fmt, percent):
    x = gaussian(1024, 1024)
    error = relative(cast(x, fmt, outer=outer_for(fmt, x)), x)
    assert 100 * error == pytest.approx(percent, abs=0.03)


def test_a_power_of_two_outer_scale_costs_nothing():
    x = gaussian(1024, 1024)
    ours, theirs = (relative(cast(x, "nvfp4", outer=o), x) for o in (None, x.abs().amax() / 2688))
    assert abs(ours / theirs - 1) < 1e-3


def test_tiles_cost_more_where_tails_are_heavy():
    x = heavy_tailed(512, 512)
    outer = quant.weight_outer(x, "nvfp4")
    tiles, blocks = (relative(cast(x, fmt, outer=outer), x) for fmt in ("nvfp4_tile", "nvfp4"))
    assert tiles > 1.4 * blocks


def test_error_of_the_backward_weight_against_the_forward_weight():
    w = gaussian(1024, 1024)
    forward = cast(w, "nvfp4", outer=quant.weight_outer(w, "nvfp4"))
    again = dict(axis=-2, seed=1)
    found = [relative(second, forward) for second in (
        cast(w, "nvfp4", **again), cast(forward, "nvfp4", **again), cast(forward, "mxfp8", **again),
        cast(forward, "mxfp8", rounding="stochastic", **again))]
    assert [100 * e for e in found] == pytest.approx([13.0, 9.3, 2.1, 2.8], abs=0.06)


# --------------------------------------------------------------------------------------- the lesson
def test_the_lesson_fits_a_screen_and_shows_the_golden_block():
    run = [sys.executable, ROOT / "quant.py"]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 100
    words = [line.split() for line in lines]
    assert ["value", *(f"{v:g}" for v in E2M1)] in words
    assert any(w[:5] == ["-54", "-6.000", "-6", "f", "-54"] for w in words)
    mean = next(w for w in words if w[:4] == ["2.25", "to", "nearest:", "2;"])[-1]
    assert abs(float(mean) - 2.25) < 0.02
    assert {w[0]: w[2] for w in words if w and w[0] in FORMATS and "%" in w[-1]} == {
        name: "8.25" if name == "mxfp8" else "4.5" for name in FORMATS}
    assert {w[0] for w in words if w} >= quant.RECIPES.keys()


# -------------------------------------------------------------------------------- captured on a GPU
@pytest.fixture
def pretended(monkeypatch):
    """Tensors on a GPU that need none: any wait for their numbers raises, as a capture would."""
    with FakeTensorMode():
        def empty(*shape, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device="cuda")
        tables = SimpleNamespace(e4m3=empty(256), e8m0=empty(256), e8m0_inverse=empty(256),
                                 e2m1_pairs=empty(256, dtype=torch.complex64))
        monkeypatch.setattr(quant, "_TABLES", {empty(1).device: tables})
        yield empty


@pytest.mark.parametrize("fmt", ["nvfp4_tensor", "nvfp4_tile", "nvfp4_46"])
def test_formats_without_a_kernel_never_wait_for_the_gpu(fmt, pretended):
    w = pretended(2, 64, 64)
    q = quantize(w, fmt, outer=quant.weight_outer(w, fmt))
    assert q.dequantize(torch.bfloat16).shape == w.shape
    if FORMATS[fmt].tile == 1:
        x = pretended(256, 64, dtype=torch.bfloat16)
        index = pretended(300, dtype=torch.int64)
        assert quantize(x, fmt).select(index).dequantize().shape == (300, 64)
        assert quant.operand(x, fmt, dtype=x.dtype).dtype == x.dtype
    with pytest.raises(DataDependentOutputException):
        w.amax().item()


def test_the_rotation_never_waits_for_the_gpu(pretended):
    x, counts = pretended(256, 64, dtype=torch.bfloat16), pretended(2, dtype=torch.int32)
    seed = quant.fold(pretended(dtype=torch.int32), 1)
    assert quant.hadamard16(quant.zero_padding(x, counts), seed).shape == x.shape
