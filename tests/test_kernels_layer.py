"""The kernels for the rest of a layer: the functions of model.py and moe_comm.py that they stand
for, and the gradients that autograd makes of those.

They run where there is a CUDA GPU, and in Triton's interpreter elsewhere: test_interpreter runs
this file once more, in a process of its own, with TRITON_INTERPRET=1.
"""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import kernels
import model
import moe_comm
import quant
import train
from data.prepare import Corpus

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
runs_kernels = pytest.mark.skipif(kernels.triton is None or not (CUDA or INTERPRETED),
                                  reason="no CUDA GPU; test_interpreter runs it in the interpreter")
DTYPE = torch.bfloat16 if CUDA else torch.float32       # the interpreter cuts where bf16 rounds
CLOSE = dict(rtol=0.02, atol=0.1) if CUDA else dict(rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def what_is_not_written_is_nan():
    """torch.empty fills with NaN, so that a store that is missing is seen."""
    torch.use_deterministic_algorithms(INTERPRETED)
    yield
    torch.use_deterministic_algorithms(False)


def compare(ours, reference, *inputs):
    """The same results and the same gradients, where the result is summed with random weights."""
    found = []
    for f, device in ((ours, DEVICE), (reference, "cpu")):
        args = [t.detach().to(device).requires_grad_(t.requires_grad) for t in inputs]
        out = f(*args)
        torch.manual_seed(1)
        loss = sum((o.float() * torch.randn(o.shape).to(device)).sum()
                   for o in out if o.requires_grad)
        wanted = [a for a in args if a.requires_grad]
        found.append([t.detach().cpu().float() for t in (*out, *torch.autograd.grad(loss, wanted))])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def numbers(*shape, dtype=DTYPE):
    return torch.randn(shape).to(dtype).requires_grad_()


@runs_kernels
@pytest.mark.parametrize("deltas", [0, 1, 2])
@pytest.mark.parametrize("shape", [(7, 48), (2, 19, 160)])
def test_add_norm(shape, deltas):
    torch.manual_seed(0)
    inputs = [numbers(*shape) for _ in range(1 + deltas)]
    weight = numbers(shape[-1], dtype=torch.float32)

    def run(f):
        return lambda w, x, *d: f(x, list(d), w, 1e-5, 3)
    compare(run(kernels.add_norm), run(model.add_norm), weight, *inputs)


@runs_kernels
def test_add_norm_where_only_one_result_is_read():
    torch.manual_seed(0)
    x, d, weight = numbers(9, 32), numbers(9, 32), numbers(32, dtype=torch.float32)
    for i in (0, 2):
        def run(f):
            return lambda x, d, w: f(x, [d], w, 1e-5, 2)[i:i + 1]
        inputs = (x, d, weight) if i else (x, d, weight.detach())
        compare(run(kernels.add_norm), run(model.add_norm), *inputs)


@runs_kernels
@pytest.mark.parametrize("heads, C", [(3, 64), (2, 24)])
def test_norm_rope(heads, C):
    torch.manual_seed(0)
    cos, sin = model.rope_table(torch.arange(11), C, 1e4)
    x, weight = numbers(2, 11, heads * C), numbers(C, dtype=torch.float32)

    def run(f):
        return lambda x, w: (f(x, w, cos.to(x.device), sin.to(x.device), 1e-5),)
    compare(run(kernels.norm_rope), run(model.norm_rope), x, weight)


@runs_kernels
@pytest.mark.parametrize("experts, k", [(4, 2), (24, 6), (32, 1)])
def test_choose(experts, k):
    torch.manual_seed(0)
    logits, bias = numbers(37, experts, dtype=torch.float32), torch.randn(experts)

    def run(f):
        return lambda x: f(x, bias.to(x.device), k, 1.5)
    compare(run(kernels.choose), run(model.choose), logits)


@runs_kernels
@pytest.mark.parametrize("D, k", [(128, 2), (384, 3)])
def test_copies_that_came_packed_are_summed_as_they_are(D, k):
    torch.manual_seed(0)
    T = 9
    slot, gates = torch.randperm(T * k), torch.rand(T, k)
    y, dout = torch.randn(T * k, D).to(DTYPE), torch.randn(T, D).to(DTYPE)
    q = moe_comm.quant.from_payload(moe_comm.quant.payload(y, "mxfp8"), "mxfp8", D)
    out, kept = moe_comm.sum_of_copies(slot, q, gates, "bf16", y.dtype, keep=True)
    wanted = moe_comm.copies_backward(dout, kept, slot, gates, "bf16")
    q = moe_comm.quant.from_payload(moe_comm.quant.payload(y, "mxfp8").to(DEVICE), "mxfp8", D)
    slot, gates, dout = (t.to(DEVICE) for t in (slot, gates, dout))
    got, kept = kernels.sum_of_copies(slot, q, gates, "bf16", y.dtype, keep=True)
    torch.testing.assert_close(got.cpu(), out, **CLOSE)
    for a, b in zip(kernels.copies_backward(dout, kept, slot, gates, "bf16"), wanted):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-4)


@runs_kernels
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
@pytest.mark.parametrize("D, k", [(96, 2), (320, 3)])
def test_copies_are_summed_and_their_gradient_sent_back(wire, D, k):
    torch.manual_seed(0)
    T, E = 21, 5
    plan = moe_comm.route(torch.rand(T, E).topk(k).indices, E)
    y, gates, dout = torch.randn(len(plan.copy), D), torch.rand(T, k), torch.randn(T, D)
    y[plan.slot[3], 40] = torch.nan                     # makes its block NaN, and only that
    y, dout = y.to(DTYPE), dout.to(DTYPE)
    out, kept = moe_comm.sum_of_copies(plan.slot, y, gates, wire, y.dtype, keep=True)
    dgates, dy = moe_comm.copies_backward(dout, kept, plan.slot, gates, wire)
    y, gates, dout, slot = (t.to(DEVICE) for t in (y, gates, dout, plan.slot))
    y, gates = torch.cat([y, y], 1)[:, :D], gates.T.contiguous().T          # neither is contiguous
    got, kept = kernels.sum_of_copies(slot, y, gates, wire, y.dtype, keep=True)
    got_dgates, got_dy = kernels.copies_backward(dout, kept, slot, gates, wire)
    torch.testing.assert_close(got.cpu(), out, equal_nan=True, **CLOSE)
    torch.testing.assert_close(got_dgates.cpu(), dgates, equal_nan=True, rtol=1e-4, atol=1e-4)
    real = plan.slot
    assert torch.equal(got_dy.cpu()[real], dy[real])    # products and roundings: the same bits
    if wire == "bf16":
        return
    codes, scales = (t.cpu() for t in kept)
    q = moe_comm.quant.quantize(y.cpu(), wire)
    assert torch.equal(codes[real], q.codes.view(torch.uint8)[real])
    assert torch.equal(scales[real], q.scales[real])


@runs_kernels
@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_clipped_step(clip):
    torch.manual_seed(0)
    weights, results = [torch.randn(33, 70), torch.randn(5)], []
    for step, device in ((kernels.clipped_step, DEVICE), (train.clipped_step.__wrapped__, "cpu")):
        torch.manual_seed(1)
        params = [torch.nn.Parameter(w.clone().to(device)) for w in weights]
        groups = [dict(params=[p], weight_decay=d) for p, d in zip(params, (0.1, 0.0))]
        opt = torch.optim.AdamW(groups, lr=torch.tensor(0.01, device=device), betas=(0.9, 0.95))
        opt.mine = params
        for p in params:
            opt.state[p] = dict(step=torch.zeros((), device=device),
                                exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape).to(device)
            step(torch.nn.utils.get_total_norm([p.grad for p in params]), opt, clip)
        results.append([t.detach().cpu() for p in params for t in (p, *opt.state[p].values())])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def loss_path(device, precision, steps, monkeypatch):
    """The losses of the preset tiny on a text made here."""
    text = b"".join(b"%d apples and %d pears are %d\n" % (i % 97, i % 89, i % 97 + i % 89)
                    for i in range(8000))
    text = np.frombuffer(text, np.uint8)
    monkeypatch.setattr(train, "load_corpus", lambda _: Corpus("sums", text[5000:], text[:5000]))
    run = train.Run(train.Config(precision=precision), torch.device(device))
    run.opt = train.adamw(run.model, run.cfg.weight_decay)
    return torch.tensor([float(train.pretrain_step(run, i, False, train.pretrain_lr(
        run.cfg, i, 300))["loss"]) for i in range(steps)])


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_the_reference_runs_on_a_gpu(precision, monkeypatch):
    found = [loss_path("cuda", precision, 6, monkeypatch)]
    kernels.use("reference")
    try:
        found.append(loss_path("cuda", precision, 6, monkeypatch))
    finally:
        kernels.use("auto")
    assert (found[0] - found[1]).abs().max() < 0.05


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
def test_the_gradient_of_the_embedding_is_summed_in_fp32():
    dy = torch.randn(1, 4000, 64, device="cuda").bfloat16()
    idx, table = torch.randint(3, (1, 4000), device="cuda"), torch.randn(256, 64, device="cuda")
    found, = torch.autograd.grad(model._Embed.apply(table.requires_grad_(), idx, torch.bfloat16),
                                 table, dy)
    right = torch.zeros(256, 64, dtype=torch.float64, device="cuda").index_add_(
        0, idx[0], dy[0].double())
    assert (found - right).norm() < 1e-5 * right.norm()


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
def test_two_streams_at_once_do_not_share_a_cache():
    gpt = model.GPT(model.ModelConfig(), "bf16").to("cuda")
    prompts = [torch.randint(256, (2, 8), device="cuda") for _ in range(2)]
    alone = [torch.stack([t for t, _ in gpt.stream(p, 12)]) for p in prompts]
    together = [torch.stack(ts) for ts in zip(*[
        (a.clone(), b.clone()) for (a, _), (b, _) in zip(*(gpt.stream(p, 12) for p in prompts))])]
    assert all(torch.equal(a, b) for a, b in zip(alone, together))
    assert 1 <= len(gpt.decoders) <= 2


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", ["bf16", "mxfp8", "nvfp4", "nvfp4-tensor"])
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_rollouts_have_the_probabilities_of_the_trainer(preset, precision):
    """Bit for bit, at the shapes of RL; not where one scale serves all tokens."""
    cfg = train.parse(["--preset", preset])[0]
    gpt = model.GPT(cfg.model(), precision, 3).to("cuda")
    with torch.no_grad():
        for p in gpt.parameters():          # far from how they start
            p.mul_(1.5) if p.dim() > 1 else p.add_(0.2 * torch.randn_like(p))
    gpt.weights_changed()
    prompts = torch.randint(256, (512, 7), device="cuda")
    answers, logp, _ = gpt.generate(prompts, 8, seed=5)
    right = train.policy_terms(gpt, prompts, answers)[0].detach()
    assert torch.equal(logp, right) == (precision != "nvfp4-tensor")


@pytest.mark.skipif(not CUDA, reason="compares a CUDA GPU with a CPU")
@pytest.mark.parametrize("precision", quant.RECIPES)
def test_a_gpu_learns_what_a_cpu_learns(precision, monkeypatch):
    steps = 50 if precision in ("bf16", "mxfp8", "nvfp4") else 8        # 3 warm up, 1 is captured
    ours, right = (loss_path(d, precision, steps, monkeypatch) for d in ("cuda", "cpu"))
    print(precision, "largest difference", (ours - right).abs().max(), "last", right[-1])
    assert (ours - right).abs().max() < 0.05       # bf16 activations there, fp32 here


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_run_on_the_second_gpu_has_the_losses_of_the_first(monkeypatch):
    paths = [loss_path(train.pick_device(f"cuda:{i}"), "nvfp4", 6, monkeypatch) for i in (0, 1)]
    train.pick_device("cuda:0")
    assert torch.equal(*paths)


@pytest.mark.skipif(kernels.triton is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(CUDA, reason="the kernels ran on the GPU")
def test_interpreter():
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-rs", "-x", __file__],
                         env={**os.environ, "TRITON_INTERPRET": "1"}, text=True,
                         capture_output=True)
    ran = " passed" in run.stdout and "no CUDA GPU" not in run.stdout
    assert run.returncode == 0 and ran, run.stdout[-3000:]
