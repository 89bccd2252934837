"""The three GEMMs of each recipe, and a token's way to its experts, against sums in fp64."""
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import moe_comm
import quant
from quant import (IN_BF16, IN_MXFP8, IN_NVFP4, RECIPES, Gemms, Recipe, cast, fold, grouped_linear,
                   linear, prepare, quantize)

#   experts of          forward                 backward         X in wgrad, W in dgrad
#   recipe              X            W          dY    rounding   as    made of  rounding
TABLE = {row.split()[0]: row.split()[1:] for row in """
    bf16                bf16         bf16       bf16  nearest    bf16  original nearest
    mxfp8               mxfp8        mxfp8      mxfp8 nearest    mxfp8 original nearest
    nvfp4               nvfp4        nvfp4      mxfp8 nearest    mxfp8 copy     stochastic
    nvfp4-nearest       nvfp4        nvfp4      mxfp8 nearest    mxfp8 copy     nearest
    nvfp4-original      nvfp4        nvfp4      mxfp8 nearest    mxfp8 original nearest
    nvfp4-independent   nvfp4        nvfp4      mxfp8 nearest    nvfp4 original nearest
    nvfp4-tensor        nvfp4_tensor nvfp4      mxfp8 nearest    mxfp8 copy     stochastic
    nvfp4-tile          nvfp4        nvfp4_tile mxfp8 nearest    mxfp8 copy     stochastic
    nvfp4-46            nvfp4_46     nvfp4_46   mxfp8 nearest    mxfp8 copy     stochastic
    nvfp4-fp4           nvfp4        nvfp4      nvfp4 stochastic nvfp4 original nearest
""".strip().splitlines()}
SAME_EXPERTS = {"nvfp4-all": "nvfp4", "nvfp4-dense": "mxfp8", "nvfp4-bf16-combine": "nvfp4",
                "nvfp4-last-none": "nvfp4", "nvfp4-last-half": "nvfp4"}
ROTATED = ("nvfp4-fp4",)                     # both wgrad operands, by a Hadamard matrix of 16 rows
CORNERS = (3, 0, 47, 50)
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def row_of(recipe):
    return TABLE[SAME_EXPERTS.get(recipe, recipe)]


def generator(seed):
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def padded_to(n, multiple):
    return -(-n // multiple) * multiple


def starts_of(counts):
    return [0, *itertools.accumulate(padded_to(n, 128) for n in counts)]


def real_rows(counts):
    """Indices of the rows that are no padding."""
    return torch.cat([torch.arange(s, s + n) for s, n in zip(starts_of(counts), counts)])


class Case:
    """One grouped linear layer: x [R, K], w [E, N, K], dy [R, N], and ids that name the rows."""

    def __init__(self, counts=CORNERS, N=64, K=96, seed=0):
        R, E = starts_of(counts)[-1] + 128, len(counts)                # a free tile at the end
        self.counts = counts
        self.x, self.dy = gaussian(R, K, seed=seed), gaussian(R, N, seed=seed + 1)
        self.w = gaussian(E, N, K, seed=seed + 2) * torch.linspace(0.1, 3, E).view(-1, 1, 1)
        self.ids = torch.randperm(10 ** 6, generator=generator(seed + 3))[:R].int()

    def run(self, recipe, seed=5, **kw):
        """(Y, dX, dW) of the layer."""
        x, w = self.x.clone().requires_grad_(), self.w.clone().requires_grad_()
        counts = torch.tensor(self.counts, dtype=torch.int32)
        y = grouped_linear(x, w, counts, recipe, seed=seed, **{"rows": self.ids} | kw)
        y.backward(self.dy)
        return y.detach(), x.grad, w.grad


# -------------------------------------------------------------- the recipes by hand, summed in fp64
def decoded(x, fmt, **kw):
    return x.double() if fmt == "bf16" else quantize(x, fmt, **kw).dequantize().double()


def outer_of(w, fmt):
    """The outer scale of one matrix, from NUMERICS' rule, where the format has one."""
    if not fmt.startswith("nvfp4"):
        return None
    ratio = w.abs().max().double() / (1536 if fmt == "nvfp4_46" else 2688)
    return 2.0 ** torch.ceil(torch.log2(ratio)).item()


def along_T(x, fmt, ids, **kw):
    """Real rows x [n, K] rounded in blocks along T, which start at the first row; fp64."""
    if fmt == "bf16":
        return x.double()
    n, end = len(x), padded_to(len(x), 32)
    return decoded(F.pad(x, (0, 0, 0, end - n)), fmt, axis=-2, rows=F.pad(ids, (0, end - n)), **kw)


def rotated(x, seed):
    return quant.hadamard16(F.pad(x, (0, 0, 0, -len(x) % 16)), seed)


def reference(case, recipe, seed=5):
    """(Y, dX, dW): NUMERICS.md section 4 applied to each expert, products and sums in fp64."""
    X, W, DY, dy_rounding, back, source, rounding = row_of(recipe)
    y = torch.zeros(case.x.shape[0], case.w.shape[1], dtype=torch.float64)
    dx, dw = (torch.zeros(t.shape, dtype=torch.float64) for t in (case.x, case.w))
    x_outer = case.x.abs().max() / 2688 if X == "nvfp4_tensor" else None
    for e, (start, n) in enumerate(zip(starts_of(case.counts), case.counts)):
        if n == 0:
            continue
        rows = slice(start, start + n)
        x, grad, w, ids = case.x[rows], case.dy[rows], case.w[e], case.ids[rows]
        x_fwd, w_fwd = decoded(x, X, outer=x_outer), decoded(w, W, outer=outer_of(w, W))
        x_src, w_src = (x_fwd.float(), w_fwd.float()) if source == "copy" else (x, w)
        w_ids = torch.arange(e * len(w), (e + 1) * len(w), dtype=torch.int32)
        w_back = decoded(w_src, back, axis=-2, outer=outer_of(w, back), rounding=rounding,
                         seed=fold(seed, 3), rows=w_ids)
        draw = dict(rounding=dy_rounding, seed=fold(seed, 1))
        y[rows] = x_fwd @ w_fwd.T
        dx[rows] = decoded(grad, DY, rows=ids, **draw) @ w_back
        if recipe in ROTATED:
            x_src, grad = rotated(x_src, seed), rotated(grad, seed)
            ids = case.ids[start:start + len(grad)]
        x_back = along_T(x_src, back, ids, rounding=rounding, seed=fold(seed, 2))
        dw[e] = along_T(grad, DY, ids, **draw).T @ x_back
    return y, dx, dw


def test_the_tables_cover_every_recipe():
    assert {*TABLE, *SAME_EXPERTS} == {*RECIPES}


@EVERY_RECIPE
@pytest.mark.parametrize("counts", (CORNERS, (0, 0, 130, 0), (32, 64, 1, 128)), ids=str)
def test_the_three_gemms_equal_the_recipe_summed_in_fp64(recipe, counts):
    case = Case(counts)
    for found, expected in zip(case.run(recipe), reference(case, recipe)):
        assert relative(found, expected) < 1e-6


@EVERY_RECIPE
def test_linear_is_one_group_of_real_rows(recipe):
    """The 50 rows are no multiple of a block: they are padded by zeros, which are all named 0."""
    gemms = RECIPES[recipe].experts
    case = Case((50,))
    case.x[50:] = case.ids[50:] = 0
    x, w = case.x[:50].view(5, 10, -1).clone().requires_grad_(), case.w[0].clone().requires_grad_()
    y = linear(x, w, gemms, seed=5, rows=case.ids[:50])
    assert y.shape == (5, 10, 64)
    y.backward(case.dy[:50].view(5, 10, -1))
    right_y, right_dx, right_dw = reference(case, recipe)
    assert relative(y.flatten(0, 1), right_y[:50]) < 1e-6
    assert relative(x.grad.flatten(0, 1), right_dx[:50]) < 1e-6
    assert relative(w.grad, right_dw[0]) < 1e-6


def test_recipe_names_mean_their_rule_for_experts_or_for_dense_layers():
    case = Case()
    assert_same(case.run("nvfp4"), case.run(IN_NVFP4))
    assert_same(linear(case.x, case.w[0], "nvfp4"), linear(case.x, case.w[0], IN_MXFP8))
    assert_same(linear(case.x, case.w[0], "bf16"), linear(case.x, case.w[0], IN_BF16))


@pytest.mark.parametrize("layers, last", ((1, 1), (4, 1), (10, 2), (20, 3)))
def test_the_last_layers_keep_8_bits(layers, last):
    kinds = [RECIPES["nvfp4"].experts_of(i, layers).x for i in range(layers)]
    assert kinds == ["nvfp4"] * (layers - last) + ["mxfp8"] * last


def test_without_a_rule_of_their_own_the_last_layers_are_as_the_others():
    mine = Recipe("mine", IN_NVFP4)
    assert [mine.experts_of(i, 4) for i in range(4)] == [IN_NVFP4] * 4
    assert replace(mine, experts=IN_MXFP8).experts_of(3, 4) == IN_MXFP8


WORDS = dict(x=("bf16", "mxfp8", "nvfp4", "nvfp4_tile"), w=("bf16", "mxfp8", "nvfp4", "nvfp4_tile"),
             dy=("bf16", "mxfp8", "nvfp4"), back=("bf16", "mxfp8", "nvfp4", "nvfp4_tile"),
             source=("original", "copy"), hadamard=(False, True))


@pytest.mark.parametrize("x", WORDS["x"])
@pytest.mark.parametrize("w", WORDS["w"])
def test_a_combination_is_refused_in_one_sentence_or_it_trains(x, w):
    case, refused, ran = Case((5, 40), N=32, K=32), set(), 0
    for rest in itertools.product(*(WORDS[n] for n in ("dy", "back", "source", "hadamard"))):
        try:
            gemms = Gemms(x, w, *rest[:3], hadamard=rest[3])
        except ValueError as error:
            refused.add(str(error).split()[0])
            continue
        y, dx, dw = case.run(gemms)
        rows = real_rows(case.counts)
        assert y[rows].any() and dx[rows].any() and all(t.isfinite().all() for t in (y, dx, dw))
        assert (w == "bf16") <= (gemms.back == "bf16")           # nothing in it is ignored
        ran += 1
    assert refused <= {"x", "back", "source", "hadamard:"} and (ran > 0) == (x != "nvfp4_tile")


@pytest.mark.parametrize("wrong", [dict(x="fp4"), dict(back="mxfp4"), dict(rounding="up"),
                                   dict(dy_rounding=""), dict(source="x")], ids=str)
def test_a_misspelt_word_of_a_recipe_is_named_with_what_is_allowed(wrong):
    (name, word), = wrong.items()
    with pytest.raises(ValueError, match=f"^{name} '{word}': allowed are "):
        Gemms(**wrong)


@pytest.mark.parametrize("wrong", [dict(combine="nvfp4"), dict(last_share=15)], ids=str)
def test_a_recipe_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recipe("mine", IN_MXFP8, **wrong)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4-all"])
@pytest.mark.parametrize("shape", [(32,), (0, 32), (1, 3, 32)])
def test_dense_layers_take_any_number_of_tokens(recipe, shape):
    x = torch.randn(shape, requires_grad=True)
    w1, w2 = (torch.randn(n, 32, requires_grad=True) for n in (64, 96))
    y = quant.mlp(x, w1, w2, recipe)
    assert y.shape == (*shape[:-1], 96) and linear(x, w2, recipe).shape == y.shape
    y.sum().backward()
    assert x.grad.shape == x.shape and w1.grad.isfinite().all() and w2.grad.isfinite().all()


def test_every_dimension_that_no_block_divides_is_named():
    x, w, counts = torch.ones(128, 48), torch.ones(1, 32, 48), torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\(1, 32, 48\).*32"):
        grouped_linear(x, w, counts, "mxfp8")
    with pytest.raises(ValueError, match=r"\(128, 48\).*\(1, 32, 64\)"):
        grouped_linear(x, torch.ones(1, 32, 64), counts, "mxfp8")
    one, two = torch.tensor([5], dtype=torch.int32), torch.tensor([5, 60], dtype=torch.int32)
    w = torch.ones(2, 64, 32)
    for x, w, counts, rows, words in (
            (torch.ones(256, 32), w, one, None, r"each expert, integers \[2\]"),
            (torch.ones(256, 32), w, None, None, "each expert"),
            (torch.ones(256, 32), w, two.float(), None, "each expert"),
            (torch.ones(256, 32), w[:0], one[:0], None, "do not fit"),
            (torch.ones(130, 32), w, two, None, "multiples of 32"),
            (torch.ones(256, 32), w, two, torch.arange(9), "9 names for the 256"),
            (torch.ones(256, 32), w, -two, None, "cannot hold")):
        with pytest.raises(ValueError, match=words):
            grouped_linear(x, w, counts, "mxfp8", rows=rows)
    for w1, w2 in ((w, torch.ones(1, 32, 32)), (torch.ones(2, 63, 32), torch.ones(2, 32, 31)),
                   (w, torch.ones(2, 32, 64))):
        with pytest.raises(ValueError, match="do not fit"):
            quant.grouped_mlp(torch.ones(256, 32), w1, w2, two, "bf16")
    with pytest.raises(ValueError, match="recipe 'fp3'.*nvfp4"):
        linear(torch.ones(2, 32), torch.ones(32, 32), "fp3")
    counts = torch.tensor([150, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="200 rows cannot hold.*150"):
        grouped_linear(torch.ones(200, 64), torch.ones(2, 32, 64), counts, "bf16")


def test_the_rotation_is_a_hadamard_matrix_with_random_signs():
    h = quant.hadamard16(torch.eye(16), 3) * 4
    assert_same((h @ h.T), 16 * torch.eye(16))
    bits = torch.arange(16)
    parity = sum((bits[:, None] & bits) >> b & 1 for b in range(4)) % 2
    assert_same(h * h[:1], (1 - 2 * parity).float())
    assert not torch.equal(h, quant.hadamard16(torch.eye(16), 4) * 4)


# ----------------------------------------------------------------------------------- mean gradients
SEEDS = 400


def gradients(recipe, case, seeds):
    """dX of the real rows and dW, for each seed: [seeds, n, K], [seeds, E, N, K]."""
    rows = real_rows(case.counts)
    found = [case.run(recipe, seed) for seed in seeds]
    return torch.stack([f[1][rows] for f in found]), torch.stack([f[2] for f in found])


def targets(case):
    """dX and dW with dY rounded and with X and W as the forward pass read them, in fp64."""
    (n,), w, x = case.counts, case.w[0], case.x
    x4, w4 = decoded(x[:n], "nvfp4"), decoded(w, "nvfp4", outer=outer_of(w, "nvfp4"))
    dy_col = along_T(case.dy[:n], "mxfp8", case.ids[:n])[:n]
    return decoded(case.dy[:n], "mxfp8") @ w4, (dy_col.T @ x4)[None]


@pytest.fixture(scope="module")
def mean_gradients():
    case = Case((40,), N=32, K=64)
    return case, gradients("nvfp4", case, range(SEEDS)), targets(case)


def test_the_mean_gradient_has_x_and_w_unrounded_in_backward(mean_gradients):
    _, drawn, target = mean_gradients
    for g, t in zip(drawn, target):
        slope = (g.double() * t).flatten(1).sum(1) / t.square().sum()
        assert abs(slope.mean() - 1) < 4 * slope.std() / SEEDS ** 0.5
        z = (g.double().mean(0) - t) / (g.double().std(0) / SEEDS ** 0.5)
        # Thousands of z, but no more independent ones than numbers were rounded: 2,048.
        assert abs(z.mean()) < 0.2 and 0.8 < z.square().mean() < 1.2
        assert z.abs().max() < 5.5


def test_the_mean_gradient_shows_the_bias_of_a_nearest_second_copy(mean_gradients):
    case, drawn, target = mean_gradients
    for g, nearest, t in zip(drawn, gradients("nvfp4-nearest", case, [0]), target):
        z = (nearest[0].double() - t) / (g.double().std(0) / SEEDS ** 0.5)
        assert z.square().mean() > 50


def test_rounding_dy_to_nearest_costs_little():
    """2.6 % from the gradient with nothing rounded in backward, hardly any of it along that one."""
    case = Case((128,), N=256, K=256)
    (dx, dw), (w,), dy = targets(case), case.w, case.dy[:128].double()
    x4, w4 = decoded(case.x[:128], "nvfp4"), decoded(w, "nvfp4", outer=outer_of(w, "nvfp4"))
    for rounded, exact in ((dx, dy @ w4), (dw[0], dy.T @ x4)):
        assert relative(rounded, exact) == pytest.approx(0.0265, abs=0.001)
        assert (rounded * exact).sum() / exact.square().sum() == pytest.approx(0.9993, abs=0.0006)


def test_two_seeds_differ_and_one_seed_repeats():
    case = Case()
    first, again, other = (case.run("nvfp4", seed) for seed in (1, 1, 2))
    assert_same(first, again)
    assert_same(first[0], other[0])                        # the forward pass is never stochastic
    for a, b in zip(first[1:], other[1:]):
        assert 0.01 < relative(a, b) < 0.1


# ---------------------------------------------------------------------------- padding and row order
@pytest.mark.parametrize("counts", [CORNERS, (128, 1), (0, 0, 5), (0,), (127, 129, 0)])
def test_a_gpu_finds_the_padding_that_a_cpu_does(counts):
    rows, counts = starts_of(counts)[-1] + 64, torch.tensor(counts, dtype=torch.int32)
    x = quant.zero_padding(torch.ones(rows, 1), counts)
    assert torch.equal(quant.is_padding(counts, rows), x[:, 0] == 0)


# One outer scale for the whole buffer reads all of it, as nvfp4-tensor is there to show.
@pytest.mark.parametrize("recipe, poison", [
    (recipe, poison) for recipe in RECIPES for poison in (torch.nan, torch.inf, 1e30)
    if (recipe, poison) != ("nvfp4-tensor", 1e30)])
def test_poisoned_padding_changes_no_real_row_and_no_gradient(recipe, poison):
    clean, poisoned = Case(), Case()
    padding = torch.ones(len(clean.x), dtype=torch.bool)
    padding[real_rows(CORNERS)] = False
    clean.x[padding] = clean.dy[padding] = 0
    poisoned.x[padding] = poisoned.dy[padding] = poison
    a, b = clean.run(recipe), poisoned.run(recipe)
    assert_same(b, a)
    assert not b[0][padding].any() and not b[1][padding].any()
    assert not b[2][1].any() and b[2][0].any()                 # the second expert has no rows


@pytest.mark.parametrize("recipe", ("bf16", "mxfp8", "nvfp4"))
def test_an_expert_may_get_all_rows(recipe):
    case = Case((0, 200, 0))
    y, dx, dw = case.run(recipe)
    assert y[:200].any(1).all() and dx[:200].any(1).all()
    assert not dw[0].any() and not dw[2].any() and dw[1].any()


def moved(case, order):
    """The same rows of one expert in another order."""
    other = Case(case.counts)
    n = case.counts[0]
    for name in ("x", "dy", "ids"):
        getattr(other, name)[:n] = getattr(case, name)[:n][order]
    return other


@pytest.mark.parametrize("recipe", ("bf16", "mxfp8", "nvfp4"))
def test_row_order_changes_gradients_by_summation_only(recipe):
    case, order = Case((100,)), torch.randperm(100, generator=generator(8))
    y, dx, dw = case.run(recipe)
    y_moved, dx_moved, dw_moved = moved(case, order).run(recipe)
    assert_same(y_moved[:100], y[:100][order])
    assert_same(dx_moved[:100], dx[:100][order])
    assert relative(dw_moved, dw) < 1e-6


def half(case, start, ids=True):
    """The rows start::2 of one expert as a micro-batch, named by their ids or by their places."""
    part = Case((case.counts[0] // 2,))
    n = part.counts[0]
    for name in ("x", "dy", "ids"):
        getattr(part, name)[:n] = getattr(case, name)[start:case.counts[0]:2]
    part.w = case.w
    if not ids:
        part.ids = torch.arange(len(part.x), dtype=torch.int32)
    return part


@pytest.mark.parametrize("recipe", ("bf16", "mxfp8", "nvfp4"))
def test_micro_batches_change_dw_by_summation_only(recipe):
    case = Case((180,))
    parts = [half(case, start).run(recipe)[2] for start in (0, 1)]
    assert relative(parts[0] + parts[1], case.run(recipe)[2]) < 1e-6


def test_keyed_by_place_in_the_buffer_micro_batches_would_differ():
    case = Case((180,))
    case.ids = torch.arange(len(case.x), dtype=torch.int32)
    parts = [half(case, start, ids=False).run("nvfp4")[2] for start in (0, 1)]
    assert relative(parts[0] + parts[1], case.run("nvfp4")[2]) > 0.02


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "nvfp4-tensor"])
def test_a_rows_result_does_not_depend_on_the_others(recipe):
    case, few = Case((100,)), Case((7,))
    few.w = case.w
    for name in ("x", "dy", "ids"):
        getattr(few, name)[:7] = getattr(case, name)[50:57]
    y, dx, _ = case.run(recipe)
    y_few, dx_few, _ = few.run(recipe)
    assert_same(y_few[:7], y[50:57])
    assert_same(dx_few[:7], dx[50:57])


# --------------------------------------------------------------------- what is kept, what is reused
def kept_for_backward(recipe, case):
    """Shapes and bytes of the tensors that autograd keeps, but for counts and ids."""
    kept = []
    x, w = case.x.requires_grad_(), case.w.requires_grad_()
    counts = torch.tensor(case.counts, dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(x, w, counts, recipe, rows=case.ids)
    return [t for t in kept if t is not None and t.dtype != torch.int32]


def test_nvfp4_keeps_four_and_a_half_bits_of_x():
    case = Case()
    R, K = case.x.shape
    kept = kept_for_backward("nvfp4", case)
    assert sum(t.numel() * t.element_size() for t in kept) * 8 == R * K * 4.5 + R * 32
    assert sorted(tuple(t.shape) for t in kept) == sorted([(R, K // 2), (R, K // 16), (R,)])
    (x,) = kept_for_backward("mxfp8", case)
    assert x.data_ptr() == case.x.data_ptr()                   # no second copy


@pytest.mark.parametrize("recipe", ("bf16", "mxfp8", "nvfp4"))
def test_a_prepared_weight_is_used_as_it_is(recipe, monkeypatch):
    case = Case()
    expected = case.run(recipe)
    weight = prepare(case.w, RECIPES[recipe].experts, fold(5, 3))
    monkeypatch.setattr(quant, "prepare", None)
    assert_same(case.run(recipe, weight=weight), expected)
    case.w = torch.full_like(case.w, torch.nan)                # only its shape matters now
    assert_same(case.run(recipe, weight=weight), expected)


def test_experts_of_a_shard_are_prepared_as_in_the_whole():
    w, ids = Case().w, torch.arange(4 * 64, dtype=torch.int32).view(4, 64)
    whole, shard = prepare(w, IN_NVFP4, 9), prepare(w[2:], IN_NVFP4, 9, rows=ids[2:])
    assert_same((shard.forward, shard.backward), (whole.forward[2:], whole.backward[2:]))
    assert not torch.equal(prepare(w[2:], IN_NVFP4, 9).backward, whole.backward[2:])


@pytest.mark.parametrize("gemms", (IN_MXFP8, IN_NVFP4), ids=("mxfp8", "nvfp4"))
def test_a_weight_that_is_prepared_again_keeps_its_storage(gemms):
    old, new = gaussian(2, 64, 96), gaussian(2, 64, 96, seed=1)
    weight = prepare(old, gemms, 1)
    places = [t.data_ptr() for t in weight.storage()]
    again, fresh = prepare(new, gemms, 2, into=weight), prepare(new, gemms, 2)
    assert [t.data_ptr() for t in again.storage()] == places
    assert len(places) == 2 - (gemms.source == "copy")      # then the codes are kept instead
    assert_same((again.forward, again.backward), (fresh.forward, fresh.backward))


def test_a_weight_from_a_4_bit_file_keeps_its_codes():
    expected = prepare(Case().w, IN_NVFP4, 9)
    found = prepare(expected.packed.dequantize(), IN_NVFP4, 9, packed=expected.packed)
    assert_same((found.forward, found.backward), (expected.forward, expected.backward))


def test_a_weight_has_one_outer_scale_for_each_expert_matrix():
    """gate and up are rows of one matrix, so they share it."""
    w = Case().w
    packed = prepare(w, IN_NVFP4).packed
    expected = torch.tensor([outer_of(matrix, "nvfp4") for matrix in w])
    assert_same(packed.outer, expected[:, None].expand(4, 64))
    assert len(expected.unique()) > 1


def test_x_that_came_packed_or_rounded_is_not_rounded_again():
    case, expected = Case(), Case().run("nvfp4")
    assert_same(case.run("nvfp4", xq=quantize(case.x, "nvfp4")), expected)
    x, case.x, case.dy = case.x, cast(case.x, "mxfp8"), cast(case.dy, "mxfp8")
    expected = case.run("mxfp8")
    case.x = torch.full_like(x, torch.nan)                      # only its shape matters
    assert_same(case.run("mxfp8", rounded=True, xq=quantize(x, "mxfp8")), expected)


# ----------------------------------------------------------------------------------- quality floors
def decibels(found, exact):
    return -20 * torch.log10(torch.tensor(relative(found, exact))).item()


@pytest.mark.parametrize("recipe, floors", (("mxfp8", (27, 25, 24)), ("nvfp4", (16, 16, 16))))
def test_signal_to_quantisation_noise(recipe, floors):
    case = Case((128, 128), N=256, K=256)
    case.w = gaussian(2, 256, 256, seed=9)
    for found, exact, floor in zip(case.run(recipe), reference(case, "bf16"), floors):
        assert decibels(found, exact) >= floor


# ------------------------------------------------------------------------- route, dispatch, combine
T, TOP, EXPERTS, D, HIDDEN = 45, 2, 5, 64, 96


def choices(tokens=T, seed=0):
    scores = torch.rand(tokens, EXPERTS, generator=generator(seed))
    gates, experts = scores.topk(TOP, -1)
    return experts, gates


def moe(x, w1, w2, experts, gates, recipe, seed=3, ids=None):
    """A layer of experts as model.py has it, with a ReLU between the two matrices."""
    g, wire = RECIPES[recipe].experts, RECIPES[recipe].combine
    plan = moe_comm.route(experts, len(w1))
    rows = (plan.copy if ids is None else ids[plan.token] * TOP + plan.copy % TOP).int()
    xe, xq = moe_comm.dispatch(x, plan, g.wire, wire)
    h = grouped_linear(xe, w1, plan.counts, g, xq=xq, rows=rows, seed=fold(seed, 1))
    y = grouped_linear(h.relu(), w2, plan.counts, g, rows=rows, seed=fold(seed, 2),
                       rounded=wire == g.dy)
    return moe_comm.combine(y, gates, plan, wire)


def moe_weights():
    return gaussian(EXPERTS, HIDDEN, D, seed=1) / 8, gaussian(EXPERTS, D, HIDDEN, seed=2) / 8


def leaves(*tensors, dtype=torch.float32):
    return [t.to(dtype).clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("experts", (choices()[0], torch.tensor([[3, 0]]).repeat(T, 1)),
                         ids=("any", "the same two"))
def test_a_layer_of_experts_equals_a_loop_over_tokens(experts):
    gates, dout = choices()[1], gaussian(T, D, seed=7)
    single = leaves(gaussian(T, D), *moe_weights(), gates)
    moe(*single[:3], experts, single[3], "bf16").backward(dout)
    double = leaves(gaussian(T, D), *moe_weights(), gates, dtype=torch.float64)
    x, w1, w2, g = double
    out = torch.stack([sum(g[t, j] * (w2[e] @ (w1[e] @ x[t]).relu())
                           for j, e in enumerate(experts[t])) for t in range(T)])
    out.backward(dout.double())
    assert relative(moe(*single[:3], experts, single[3], "bf16"), out) < 1e-6
    for found, expected in zip(single, double):
        assert relative(found.grad, expected.grad) < 1e-6


def test_a_plan_sorts_copies_by_expert_in_token_order():
    experts = choices()[0]
    plan, flat = moe_comm.route(experts, EXPERTS), experts.flatten()
    assert plan.counts.tolist() == [(flat == e).sum().item() for e in range(EXPERTS)]
    starts = starts_of(plan.counts.tolist())
    for e in range(EXPERTS):
        copies = torch.where(flat == e)[0]
        assert torch.equal(plan.slot[copies], starts[e] + torch.arange(len(copies)))
    assert torch.equal(plan.copy[plan.slot], torch.arange(T * TOP))
    assert torch.equal(plan.token, plan.copy // TOP)


def test_a_plan_holds_any_choice():
    """The buffer's size depends on the number of tokens only, and suffices at the worst."""
    sizes = set()
    for experts in (torch.zeros(T, 1), torch.full((T, 1), 4), torch.arange(T)[:, None] % EXPERTS):
        plan = moe_comm.route(experts.long(), EXPERTS)
        assert plan.counts.sum() == T and plan.slot.max() < len(plan.copy)
        quant.spans(plan.counts, len(plan.copy))
        sizes.add(len(plan.copy))
    assert len(sizes) == 1


def test_rows_travel_as_the_gemm_reads_them():
    x, plan = gaussian(T, D), moe_comm.route(choices()[0], EXPERTS)
    rows, packed = moe_comm.dispatch(x, plan)
    assert packed is None
    assert_same(rows, x[plan.token])
    for wire in ("mxfp8", "nvfp4"):
        rows, packed = moe_comm.dispatch(x, plan, wire)
        assert_same(packed.dequantize(), cast(x, wire)[plan.token])
        assert rows.shape == (len(plan.token), D) and rows.untyped_storage().nbytes() <= 4


def test_combine_in_8_bits_is_rounding_by_hand():
    experts, gates = choices()
    plan, dout = moe_comm.route(experts, EXPERTS), gaussian(T, D, seed=7)
    y, g = leaves(gaussian(len(plan.copy), D, seed=4), gates)
    out = moe_comm.combine(y, g, plan, "mxfp8")
    out.backward(dout)
    slots, rounded = plan.slot.view(T, TOP), decoded(y.detach(), "mxfp8")
    gated = gates[..., None] * dout[:, None]                                     # [T, k, D]
    assert relative(out, (gates.double()[..., None] * rounded[slots]).sum(1)) < 1e-6
    assert relative(g.grad, (rounded[slots] * dout[:, None]).sum(-1)) < 1e-6
    assert_same(y.grad[slots], decoded(gated, "mxfp8").float())


def test_the_gradient_of_each_copy_goes_home_in_8_bits_and_is_summed_there():
    plan = moe_comm.route(choices()[0], EXPERTS)
    for wire in ("nvfp4", "mxfp8", "bf16"):
        (x,) = leaves(gaussian(T, D))
        rows, _ = moe_comm.dispatch(x, plan, wire, "mxfp8")
        drows = gaussian(len(plan.copy), D, seed=6)
        rows.backward(drows)
        copies = decoded(drows, "mxfp8")[plan.slot].view(T, TOP, D)
        assert relative(x.grad, copies.sum(1)) < 1e-6


@pytest.mark.parametrize("recipe", ("bf16", "mxfp8", "nvfp4"))
def test_a_token_does_not_see_the_others_in_its_batch(recipe):
    experts, gates = choices()
    x, dout = gaussian(T, D), gaussian(T, D, seed=7)
    some, ids = torch.tensor([44, 3, 17, 4]), torch.arange(T)

    def layer(of):
        inputs = leaves(x[of], gates[of])
        out = moe(inputs[0], *moe_weights(), experts[of], inputs[1], recipe, ids=ids[of])
        out.backward(dout[of])
        return out.detach(), *(t.grad for t in inputs)
    assert_same(layer(some), tuple(t[some] for t in layer(ids)))


@EVERY_RECIPE
def test_the_reference_takes_bf16_activations(recipe):
    """As on a GPU that is told to use it: the same but for the rounding of what goes in and out."""
    x, w = gaussian(3, 16, 64).bfloat16(), gaussian(96, 64, seed=1)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = x.to(dtype).requires_grad_(), w.clone().requires_grad_()
        y = linear(*inputs, recipe, rows=torch.arange(48).view(3, 16))
        found.append((y, *torch.autograd.grad(y.float().square().sum(), inputs)))
        assert [t.dtype for t in found[-1]] == [dtype, dtype, torch.float32]
    assert all(relative(a, b) < 0.02 for a, b in zip(*found))
    with pytest.raises(ValueError, match="rows: 40 names for the 48"):
        linear(x, w, recipe, rows=torch.arange(40))
