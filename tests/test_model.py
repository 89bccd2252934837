"""The model: what a row may depend on, generation, routing, counts, when weights are rounded."""

import math

import pytest
import torch
import torch.nn.functional as F

import model as model_file
import quant
import train
from model import GPT, NEWLINE, PAD, ModelConfig

SMALL = dict(dim=32, layers=2, heads=2, kv_heads=1, expert_dim=32, seq_len=32)
RECIPES = pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
CONTROL = "nvfp4-tensor"  # one scale for all tokens: what the exact claims below must not survive


def small(recipe="nvfp4", seed=1, **changes):
    return GPT(ModelConfig(**SMALL | changes), recipe, seed)


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, rows):
    with torch.no_grad():
        return model(rows)


# --------------------------------------------------------------- what a row's numbers may depend on


def earlier_logits_changed(recipe):
    """Of 12 rows, those whose first half gets other logits when the second gets other bytes."""
    model, changed = small(recipe), 0
    for i in range(12):
        length = (2, 7, 13, 32)[i % 4]
        half, rows = length // 2, random_bytes(1, length, seed=i)
        other = torch.cat([rows[:, :half], random_bytes(1, length - half, seed=100 + i)], 1)
        changed += not torch.equal(logits(model, rows)[:, :half], logits(model, other)[:, :half])
    return changed


@RECIPES
def test_later_bytes_change_no_bit_of_earlier_logits(recipe):
    assert earlier_logits_changed(recipe) == 0


def test_with_one_scale_for_all_tokens_later_bytes_do_change_them():
    assert earlier_logits_changed(CONTROL) >= 9


def rows_that_see_their_batch(recipe):
    model, seen = small(recipe), 0
    for batch, length in ((2, 1), (3, 3), (8, 13), (5, 32)):
        rows = random_bytes(batch, length, seed=length)
        together = logits(model, rows)
        seen += sum(not torch.equal(together[i], logits(model, rows[i : i + 1])[0])
                    for i in range(batch))
    return seen


@RECIPES
def test_a_row_has_the_same_bits_alone_and_in_a_batch(recipe):
    assert rows_that_see_their_batch(recipe) == 0


def test_with_one_scale_for_all_tokens_a_row_does_see_its_batch():
    assert rows_that_see_their_batch(CONTROL) >= 15  # of 18


# ------------------------------------------------- generation with a cache against one forward pass


def cached_against_full(recipe):
    """log pi(full forward) - log pi(cached decoding) [B, 24] of sampled bytes."""
    model, prompt = small(recipe), random_bytes(16, 8)
    answers, logp, _ = model.generate(prompt, 24)
    full = F.log_softmax(logits(model, torch.cat([prompt, answers], 1)[:, :-1])[:, 7:], -1)
    return full.gather(-1, answers[..., None])[..., 0] - logp


@RECIPES
def test_cached_generation_computes_the_full_forward(recipe):
    stats = train.agreement(torch.zeros(16, 24), cached_against_full(recipe),
                            torch.ones(16, 24).bool())
    # Not the mean or the largest: a number on a rounding boundary moves one token by up to 0.04.
    assert stats["logp_diff_median"] < 1e-6
    assert stats["logp_diff_share"] <= 0.01
    assert stats["k3"] < 1e-5


def test_with_one_scale_for_all_tokens_it_does_not():
    assert 0.01 < cached_against_full(CONTROL).abs().mean() < 0.1


# ------------------------------------------------------------------------------------ what is drawn


def test_greedy_takes_the_likeliest_byte_whatever_the_seed():
    model, prompt = small(), random_bytes(4, 8)
    answers, logp, _ = model.generate(prompt, 12, temperature=0, seed=1)
    again, _, _ = model.generate(prompt, 12, temperature=0, seed=2)
    best = F.log_softmax(logits(model, torch.cat([prompt, answers], 1)), -1)[:, 7:-1].max(-1)
    assert torch.equal(answers, again) and torch.equal(answers, best.indices)
    assert torch.allclose(logp, best.values, atol=1e-5)


def test_a_draw_depends_on_seed_id_and_position_but_not_on_the_batch():
    model, prompt, order = small(), random_bytes(6, 8), torch.tensor([3, 0, 5, 1, 4, 2])
    answers, logp, _ = model.generate(prompt, 12, seed=5)
    shuffled, logp2, _ = model.generate(prompt[order], 12, seed=5, ids=order)
    assert torch.equal(shuffled, answers[order]) and torch.equal(logp2, logp[order])
    for half in (slice(0, 2), slice(2, 6)):
        part, _, _ = model.generate(prompt[half], 12, seed=5, ids=torch.arange(6)[half])
        assert torch.equal(part, answers[half])


def test_other_seeds_ids_and_positions_draw_other_bytes():
    flat = torch.zeros(1, 256)

    def draw(seed, i, n):
        return int(model_file.sample(flat, 1.0, 0, seed,
                                     torch.tensor([[i]], dtype=torch.int32), n)[0])

    for axis in ([(s, 0, 0) for s in range(50)], [(0, i, 0) for i in range(50)],
                 [(0, 0, n) for n in range(50)]):
        # 50 draws of 256 values: 45.5 distinct ones on average, standard deviation 1.9.
        assert len({draw(*key) for key in axis}) >= 38


def test_what_cannot_be_generated_is_a_sentence():
    model = small()
    with pytest.raises(ValueError, match="0 new bytes: must be at least 1"):
        model.generate(random_bytes(1, 8), 0)
    with pytest.raises(ValueError, match=r"prompts of shape \(1, 0\)"):
        model.generate(random_bytes(1, 0), 4)
    with pytest.raises(ValueError, match="recipe 'fp3': there are bf16, mxfp8"):
        small("fp3")


def test_two_streams_of_one_shape_keep_to_themselves(monkeypatch):
    """Also where decoders are kept for the next batch, as on a GPU."""
    model, prompts = small(), [random_bytes(2, 8, seed=i) for i in range(2)]
    alone = [torch.stack([t for t, _ in model.stream(p, 40)]) for p in prompts]
    monkeypatch.setattr(GPT, "release", lambda self, d: d and self.decoders.update({d.key: d}))
    for _ in range(2):                              # the second time with the decoders of the first
        pairs = zip(*(model.stream(p, 40) for p in prompts))
        together = zip(*[(a, b) for (a, _), (b, _) in pairs])
        assert all(torch.equal(a, torch.stack(b)) for a, b in zip(alone, together))


def test_the_same_prompt_gets_different_answers_in_one_batch():
    answers, _, _ = small().generate(random_bytes(1, 8).repeat(8, 1), 12)
    assert len({tuple(a) for a in answers.tolist()}) == 8


def draws(logits, n=20_000, **kw):
    """(byte, log-probability) [n] of n draws from one row of logits."""
    kw = dict(temperature=1.0, top_k=0) | kw
    ids = torch.arange(n, dtype=torch.int32)[:, None]
    return model_file.sample(logits.expand(n, -1), kw["temperature"], kw["top_k"], 3, ids, 0)


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 0), (1.0, 5)])
def test_draws_follow_the_softmax(temperature, top_k):
    row = torch.randn(1, 24, generator=torch.Generator().manual_seed(0)) * 1.5
    token, logp = draws(row, temperature=temperature, top_k=top_k)
    scaled = row[0] / temperature
    if top_k:
        scaled[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    p = scaled.double().softmax(-1)
    count, kept = torch.bincount(token, minlength=24), p > 0
    assert count[~kept].sum() == 0
    expected = p[kept] * len(token)
    chi2, freedom = ((count[kept] - expected) ** 2 / expected).sum(), int(kept.sum()) - 1
    assert abs(chi2 - freedom) < 4 * math.sqrt(2 * freedom)
    assert torch.allclose(logp, p.log()[token].float(), atol=1e-5)


def test_log_probabilities_are_those_of_the_softmax():
    model, prompt = small("bf16"), random_bytes(4, 8)
    (token, logp), = model.stream(prompt, 1)
    full = F.log_softmax(logits(model, prompt)[:, -1], -1)
    assert torch.equal(logp, full.gather(1, token[:, None])[:, 0])


# ----------------------------------------------------------------------------- where an answer ends


class Script(GPT):
    """A model that says what it is told: row b's byte n comes with probability 1."""

    def __init__(self, lines):
        super().__init__(ModelConfig(**SMALL))
        self.lines, self.calls = lines, 0

    def forward(self, idx, cache=None, first_token=0):
        said = [line[min(self.calls, len(line) - 1)] for line in self.lines]
        self.calls += 1
        return 1000.0 * F.one_hot(torch.tensor(said), 256)[:, None].float()


def test_an_answer_ends_with_its_first_stop_byte_and_then_pads():
    answers, logp, mask = Script([b"ab\ncd", b"\nxxxx", b"abcde"]).generate(
        random_bytes(3, 4), 5, stop=NEWLINE)
    assert answers.tolist() == [[97, 98, 10, PAD, PAD], [10] + [PAD] * 4, list(b"abcde")]
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1] * 5]
    assert logp[~mask].eq(0).all()


def test_generation_stops_early_where_all_have_stopped():
    answers, _, mask = Script([b"a\n", b"\n"]).generate(random_bytes(2, 4), 9, stop=NEWLINE)
    assert answers.tolist() == [[97, 10], [10, PAD]] and mask.int().tolist() == [[1, 1], [1, 0]]


def test_without_a_stop_byte_nothing_is_masked():
    answers, _, mask = Script([b"\n\n\n"]).generate(random_bytes(1, 4), 3)
    assert answers.tolist() == [[10, 10, 10]] and mask.all()


@pytest.mark.parametrize("prompt_length", [1, 31, 32, 50])
def test_past_seq_len_the_window_slides_by_half(prompt_length):
    model, prompt = small("bf16", seq_len=32), random_bytes(2, prompt_length)
    answers, logp, _ = model.generate(prompt, 60, temperature=0)
    text, start = torch.cat([prompt, answers], 1), max(0, prompt_length - 32)
    for n in range(60):
        end = prompt_length + n
        if end - start > 32:
            start = end - 16
        window = F.log_softmax(logits(model, text[:, start:end])[:, -1], -1)
        assert torch.allclose(window.max(-1).values, logp[:, n], atol=1e-5), n


# --------------------------------------------------------------------------------------- the router


def routed(model=None, tokens=64):
    layer = (model or small()).blocks[0]
    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        scores = torch.sigmoid(x @ layer.router.T)
        logits = model_file.router_logits(x, layer.router)
        return layer, scores, *model_file.choose(logits, layer.bias, 2, layer.cfg.route_scale)


def test_experts_are_chosen_on_score_plus_bias_and_gates_come_from_the_scores():
    model = small(route_scale=2.5)
    model.blocks[0].bias.copy_(torch.tensor([0.4, -0.4, 0.1, 0.0]))
    layer, scores, experts, gates = routed(model)
    biased = (scores + layer.bias).topk(2, -1).indices
    assert torch.equal(experts.sort(-1).values, biased.sort(-1).values)
    assert not torch.equal(biased.sort(-1).values, scores.topk(2, -1).indices.sort(-1).values)
    kept = scores.gather(1, experts)
    assert torch.allclose(gates, 2.5 * kept / kept.sum(-1, keepdim=True), rtol=1e-6)
    assert torch.allclose(gates.sum(-1), torch.tensor(2.5))


def test_the_bias_gets_no_gradient_and_the_router_does():
    model = small()
    model(random_bytes(2, 8)).logsumexp(-1).sum().backward()
    for block in model.blocks:
        assert block.router.grad.abs().sum() > 0
        assert not block.bias.requires_grad and "bias" in block.state_dict()


def test_balance_moves_the_bias_by_the_sign_of_the_load_error():
    model = small()
    for block in model.blocks:
        block.load.copy_(torch.tensor([10, 30, 20, 20]))
    assert model.balance(0.01) == 1.5  # the largest load over the mean
    for block in model.blocks:
        assert torch.allclose(block.bias, torch.tensor([0.01, -0.01, 0.0, 0.0]))
        assert block.load.eq(0).all()


def test_balance_evens_out_a_skewed_load():
    model, rows = small(), random_bytes(8, 32)
    for block in model.blocks:
        block.bias.copy_(torch.tensor([0.3, 0.0, 0.0, -0.3]))
    loads = []
    for _ in range(60):
        model(rows)
        loads.append(float(model.balance(0.01)))
    assert loads[0] > 1.6 and loads[-1] < 1.25


def test_at_rate_0_the_bias_is_frozen():
    model = small()
    model(random_bytes(4, 32))
    before = [block.bias.clone() for block in model.blocks]
    model.balance(0.0)
    assert all(torch.equal(a, block.bias) for a, block in zip(before, model.blocks))


def test_the_load_counts_every_copy_in_training_and_none_elsewhere():
    model, rows = small(), random_bytes(4, 32)
    model(rows)
    model(rows)
    assert [int(block.load.sum()) for block in model.blocks] == [2 * 4 * 32 * 2] * 2  # none dropped
    model.balance(0.0)
    logits(model, rows)
    model.generate(rows[:, :4], 3)
    assert all(block.load.eq(0).all() for block in model.blocks)


# ------------------------------------------------------------------------------------------- counts


def on_meta(recipe="bf16", **sizes):
    """A model without storage, for counting."""
    with torch.device("meta"):
        return Shape(ModelConfig(**sizes), recipe)


class Shape(GPT):
    def init_weights(self, seed):
        pass


MODEL_A = dict(dim=768, layers=12, heads=12, kv_heads=3, experts=32, top_k=4, expert_dim=512,
               shared=1, seq_len=1024)
MODEL_B = dict(dim=2048, layers=8, heads=16, kv_heads=4, experts=64, top_k=6, expert_dim=1408,
               shared=2, seq_len=1024)


@pytest.mark.parametrize("sizes, total, active",
                         [(MODEL_A, 486e6, 89e6), (MODEL_B, 4.65e9, 0.64e9)], ids=["A", "B"])
def test_parameter_counts_of_the_published_shapes(sizes, total, active):
    assert on_meta(**sizes).parameters_active() == (pytest.approx(total, rel=0.01),
                                                    pytest.approx(active, rel=0.01))


def test_flops_are_the_same_in_every_precision():
    assert len({on_meta(recipe, **MODEL_A).flops_per_token() for recipe in quant.RECIPES}) == 1


def test_flops_are_those_of_the_matrices_a_token_meets_and_of_its_attention():
    D, H, C, G, F_, E = 32, 2, 16, 1, 32, 4
    matrices = 2 * (2 * H * C * D + 2 * G * C * D + E * D + 3 * D * F_ * (2 + 1)) + 256 * D
    attention = 2 * 2 * 2 * H * C * 16  # layers, GEMMs, 2 a multiplication; 16 positions on average
    assert small().flops_per_token() == pytest.approx(3 * (2 * matrices + attention), rel=0.01)


@pytest.mark.parametrize("sizes, sentence", [
    (dict(top_k=5), "top_k 5: must be at most the number of experts, 4"),
    (dict(dim=0), "dim 0: must be at least 1"),
    (dict(vocab=0), "vocab 0: must be at least 1"),
    (dict(layers=-1), "layers -1: must be at least 1"),
    (dict(heads=3, kv_heads=2, dim=96), "kv_heads 2: must divide heads 3"),
    (dict(heads=4, dim=36), "head_dim 9: must be even"),
    (dict(heads=128, dim=64, kv_heads=1), "head_dim"),
    (dict(head_dim=-2), "head_dim -2"),
    (dict(dense_layers=3), "dense_layers 3: must be"),
    (dict(dense_layers=1, dense_dim=-8), "dense_dim -8"),
    (dict(shared=-1), "shared -1: must be at least 0"),
])
def test_a_wrong_shape_is_a_sentence_with_the_value_and_what_is_allowed(sizes, sentence):
    with pytest.raises(ValueError) as caught:
        ModelConfig(**sizes)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes, sentence", [
    (dict(dim=48, heads=3, kv_heads=1), "dim 48: must be a multiple of 32 in nvfp4"),
    (dict(expert_dim=80), "expert_dim 80: must be a multiple of 32 in nvfp4"),
    (dict(heads=2, head_dim=24), "heads * head_dim 48: must be a multiple of 32 in nvfp4"),
])
def test_a_dimension_that_no_block_divides_is_refused_where_blocks_are_used(sizes, sentence):
    with pytest.raises(ValueError, match="must be a multiple of 32") as caught:
        small("nvfp4", **sizes)
    assert str(caught.value).startswith(sentence)
    small("bf16", **sizes)


def test_blocks_of_experts_alone_bind_the_sides_of_experts_alone():
    mine = quant.Recipe("mine", quant.IN_NVFP4)
    ModelConfig(heads=2, head_dim=24, dense_dim=48).check_blocks(mine)
    with pytest.raises(ValueError, match="^expert_dim 80: must be a multiple of 32 in mine"):
        ModelConfig(expert_dim=80).check_blocks(mine)
    wire = quant.Recipe("wire", combine="mxfp8")
    ModelConfig(expert_dim=80).check_blocks(wire)
    with pytest.raises(ValueError, match="^dim 48: must be a multiple of 32 in wire"):
        ModelConfig(dim=48).check_blocks(wire)


# ------------------------------------------------------------------------ what is rounded, and when


def gemms_by_layer(recipe, layers=8, **sizes):
    return [block.linears()
            for block in on_meta(recipe, **SMALL | dict(layers=layers) | sizes).blocks]


def test_nvfp4_rounds_routed_experts_but_those_of_the_last_layers():
    for i, names in enumerate(gemms_by_layer("nvfp4")):
        experts = quant.IN_NVFP4 if i < 7 else quant.IN_MXFP8  # 15 % of 8 layers is one
        assert names["w1"] == names["w2"] == experts
        assert {names[n] for n in ("wq", "wo", "v1", "v2")} == {quant.IN_MXFP8}
    last = [names["w1"] for names in gemms_by_layer("nvfp4", layers=20)]
    assert last == [quant.IN_NVFP4] * 17 + [quant.IN_MXFP8] * 3


def test_mxfp8_rounds_all_but_k_and_v_and_bf16_rounds_nothing():
    for names in gemms_by_layer("mxfp8"):
        assert {g for name, g in names.items() if name not in ("wk", "wv")} == {quant.IN_MXFP8}
    assert {g for names in gemms_by_layer("bf16") for g in names.values()} == {quant.IN_BF16}


@pytest.mark.parametrize("recipe", quant.RECIPES)
def test_no_recipe_rounds_k_v_router_embedding_or_head(recipe):
    for names in gemms_by_layer(recipe):
        assert names["wk"] == names["wv"] == quant.IN_BF16 and "router" not in names
    model = small(recipe)
    model.prepare()
    assert torch.equal(model.operands[-1]["head"].forward[0], model.head)
    assert torch.equal(model_file._Embed.apply(model.embed, torch.tensor([[7]]),
                                               torch.float32)[0, 0],
                       model.embed[7])


def test_leading_dense_layers_have_no_experts():
    first, second = gemms_by_layer("nvfp4", layers=2, dense_layers=1)
    assert "w1" not in first and first["v1"] == quant.IN_MXFP8 and "w1" in second
    model = small(dense_layers=1, dense_dim=64)
    model(random_bytes(2, 8)).sum().backward()
    assert (model.blocks[0].v1.shape == (128, 32)
            and all(p.grad is not None for p in model.parameters()))


def test_without_shared_experts_there_is_no_dense_path():
    model = small(shared=0)
    assert (not hasattr(model.blocks[0], "v1")
            and torch.isfinite(logits(model, random_bytes(2, 8))).all())


@pytest.fixture
def prepared(monkeypatch):
    """Counts how often each model makes its operands."""
    calls, original = [], GPT.prepare
    monkeypatch.setattr(GPT, "prepare", lambda self: (calls.append(self), original(self)))
    return calls


def test_weights_are_rounded_once_for_all_micro_batches_and_generated_bytes(prepared):
    model, rows = small(), random_bytes(4, 16)
    model.begin_step(0)
    model.generate(rows, 10)
    for i in range(4):
        model(rows[i : i + 1], first_token=i * 16).sum().backward()
    assert len(prepared) == 1


def one_update(model, rows):
    """A step of the trainer's own optimizer and update."""
    run = train_run(model)
    train.set_lr(run, 1e-2)
    train.update(run, [model(rows).logsumexp(-1).mean()])


def train_run(model):
    run = train.Run(train.Config(), torch.device("cpu"), model)
    run.opt = train.adamw(model, 0.0)
    return run


@RECIPES
def test_after_an_optimizer_step_the_next_forward_reads_the_new_weights(recipe, prepared):
    model, rows = small(recipe), random_bytes(2, 16)
    one_update(model, rows)
    fresh = small(recipe, seed=9)
    fresh.load_state_dict(model.state_dict())
    prepared.clear()
    assert torch.equal(logits(model, rows), logits(fresh, rows))
    assert prepared == [model, fresh]


@pytest.mark.parametrize("recipe", quant.RECIPES)
def test_in_every_recipe_each_parameter_gets_a_gradient(recipe):
    model, rows = small(recipe), random_bytes(4, 32)
    F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all() and p.grad.any(), name


@pytest.mark.parametrize("sizes", [
    dict(layers=1), dict(experts=1, top_k=1), dict(top_k=4), dict(kv_heads=2), dict(head_dim=32),
    dict(shared=2), dict(dense_layers=2), dict(seq_len=1), dict(vocab=17),
], ids=str)
def test_shapes_at_the_edge_of_what_is_allowed_train(sizes):
    model, rows = small(**sizes), random_bytes(4, 32) % 17
    model(rows).logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.balance(1e-3)
    assert model.generate(rows[:, :1], 3)[0].shape == (4, 3)


def test_a_step_draws_its_stochastic_rounding_anew():
    model, rows, grads = small(), random_bytes(2, 16), []
    for seed in (1, 2, 1):
        model.begin_step(seed)
        model.zero_grad()
        model(rows).logsumexp(-1).sum().backward()
        grads.append(model.blocks[0].w1.grad.clone())
    assert torch.equal(grads[0], grads[2]) and not torch.equal(grads[0], grads[1])


def test_a_step_draws_the_bits_that_a_gpu_reads_from_its_memory():
    """There the seed is a tensor, and labels are folded beside it."""
    model, seed = small(), quant.fold(7, 1, 5)
    model.begin_step(seed)
    gpus = torch.full((), quant.seed_bits(seed), dtype=torch.int32)
    at = torch.arange(40, dtype=torch.int32)
    for labels in ((), (3,), (0, 16)):
        draws = [quant.random_bits(quant.fold(s, *labels), at, at) for s in (model.seed, gpus)]
        assert torch.equal(*draws)


def test_the_embedding_gradient_sums_repeated_bytes_and_repeats_bit_for_bit():
    table = torch.randn(256, 32, requires_grad=True)
    idx, dy = random_bytes(4, 100) % 7, torch.randn(4, 100, 32)
    grads = []
    for _ in range(3):
        table.grad = None
        model_file._Embed.apply(table, idx, torch.float32).backward(dy)
        grads.append(table.grad)
    exact = torch.zeros(256, 32, dtype=torch.float64).index_add_(
        0, idx.flatten(), dy.double().flatten(0, 1))
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    assert torch.allclose(grads[0].double(), exact, atol=1e-5)


def test_equal_seeds_make_equal_models():
    a, b, c = (small(seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["embed"], c["embed"])
