"""What low precision is worth: a model of one page, from operations, bytes and rates.

    python data/cost.py

A step takes the sum of operations / rate and of bytes / bandwidth. Published speed-ups depend on
one more number, which nobody publishes: the share of a step that is no matrix product. It is
*assumed* here, and printed beside each figure with the range in which the published one comes out.
The last part predicts this trainer's own step on an H200, where the rates were measured.

Letters as in model.py: N tokens a step, T row length, D width, F expert width, k experts a token,
S shared experts, E experts, L layers. All rates are per second, per GPU and dense.
"""
import inspect
import json
from dataclasses import dataclass
from pathlib import Path

RUNS = Path(__file__).resolve().parent / "runs"


@dataclass(frozen=True)
class Gpu:
    """Published peaks: operations/s, and bytes/s of memory and of NVLink in one direction."""
    bf16: float
    fp8: float
    fp4: float
    memory: float
    link: float


# NVIDIA's data sheets of GB200 NVL72 and GB300 NVL72: a rack's figures / 72, without sparsity;
# NVLink 5 has 1.8 TB/s in both directions together.
GB200 = Gpu(2.5e15, 5e15, 10e15, 8e12, 0.9e12)
GB300 = Gpu(2.5e15, 5e15, 15e15, 8e12, 0.9e12)


# --------------------------------------------------------------------------- what others published
def scout(bf16_rate=0.81e15, gain=1.709, attention_rate=1.0e15, rest=0.32):
    """MXFP8 over BF16, Llama 4 Scout on 256 GB200: time ratio - 1, as measured.

    Scout: D 5120, F 8192, 48 layers, 40 heads of 128 and 8 of keys and values, 16 experts top-1 and
    a shared one, vocabulary 202,048 (its config.json). Rows of 8,192, a row a GPU, all activations
    computed twice; in MXFP8: everything but k, v, router and head (PyTorch's post).
    bf16_rate, gain: forward and backward of a grouped GEMM with Scout's shapes, rounding included
    (TorchAO's moe_training README, B200: means of 1, 2, 4, 8 experts; gain 1.64 to 1.81,
    which alone moves the result from 28 to 33 %).
    attention_rate: assumed; FlashAttention-4 reports up to 1.6e15 on a B200.
    rest: ASSUMED share of the BF16 step that is neither GEMM nor attention, chosen to give the
    measured gain; that it also gives the possible gain is then a check.
    """
    rounded, plain = scout_times(bf16_rate, attention_rate)
    total = (rounded + plain) / (1 - rest)
    return total / (total - rounded * (1 - 1 / gain)) - 1


def scout_times(bf16_rate, attention_rate):
    """Seconds a step in BF16 of (what MXFP8 makes faster, the other GEMMs and attention)."""
    D, F, L, T = 5120, 8192, 48, 8192
    rounded = L * (2 * D * D + 2 * 3 * D * F)                   # q, o, a routed and a shared expert
    plain = 8 * L * 2 * D * 1024 + 6 * D * 202_048              # k and v; the head, computed once
    attention = 4.5 * L * 2 * T * D                             # causal; 1 + 1 + 2.5 forward passes
    return 8 * T * rounded / bf16_rate, T * (plain / bf16_rate + attention / attention_rate)


def scout_possible(bf16_rate=0.81e15, attention_rate=1.0e15, rest=0.32, bf16=GB200.bf16,
                   fp8=GB200.fp8, memory=GB200.memory):
    """The same with GEMMs as much faster as the peaks are, and rounding at the full bandwidth."""
    D, F, L, T = 5120, 8192, 48, 8192
    rounded, plain = scout_times(bf16_rate, attention_rate)
    total = (rounded + plain) / (1 - rest)
    # X is read and written three times (twice forward, once along T), dY read once, written twice.
    inputs, outputs = 2 * D + 2 * (D + F), 2 * D + 2 * (2 * F + D)
    rounding = L * T * (3 * 3.03 * inputs + 4.06 * outputs) / memory
    return total / (total - rounded * (1 - bf16 / fp8) + rounding) - 1


def pretraining(fp8=GB300.fp8, fp4=GB300.fp4, link=GB300.link, reached=1.67e15, width=5120,
                seen=0.5):
    """NVFP4 forward over all-MXFP8, 594B/17B MoE (48 layers, 384 experts top-8) on GB300.

    Sizes and expert counts give the routed share of the active weights. Forward GEMMs reach .746 of
    the peak (TorchAO's table of kernels, MXFP8 on a B200); FP4 is given the same (Triton, B200,
    8192 cubed: .53 in MXFP8, .54 in NVFP4). The last 15 % of the layers stay in MXFP8.
    Traffic: dispatch in 4.5 instead of 8.25 bits; results in 8.25 in both.
    reached: by the closest published run, DeepSeek-V3 671B, MXFP8, 256 GB300 (Megatron-Bridge pull
    request 4330), in operations of the model a second and GPU.
    width, seen: ASSUMED width, and share of the traffic that no computation hides. From none to
    all of it the gain goes from 6.5 to 8.2 %.
    """
    L, experts, k, total, active = 48, 384, 8, 594e9, 17e9
    routed = k * (total - active) / (experts - k)               # active weights in routed experts
    step = 6 * active / reached                                 # a token's seconds
    four = round(0.85 * L) / L
    saved = four * (2 * routed / 0.746 * (1 / fp8 - 1 / fp4) +
                    seen * L * k * width * (8.25 - 4.5) / 8 / link)
    return step / (step - saved) - 1


def reinforcement(rollouts=0.7, weights=0.45, trainer=0.08):
    """The same model in RL. ASSUMED: the share of the time in rollouts (up to .9 is reported: arXiv
    2509.18521), and the share of a rollout that reads expert weights, now at 4.5 instead of 8.25
    bits; the second is chosen to give the published gain (it needs .57 at rollouts .5, .39 at .9).
    trainer: the gain of the rest, as published for pretraining."""
    rollout = 1 - weights * (1 - 4.5 / 8.25)
    return 1 / (rollouts * rollout + (1 - rollouts) / (1 + trainer)) - 1


def operations_per_byte(fp4=GB300.fp4, link=GB300.link):
    """Operations in the time of one byte over NVLink."""
    return fp4 / link


def scout_share(gain=1.709, rest=0.32):
    """Measured over possible gain."""
    return scout(gain=gain, rest=rest) / scout_possible(rest=rest)


@dataclass(frozen=True)
class Claim:
    """A published figure, the relative error within which the model gives it, and the assumption
    that carries it, with the bounds of what is plausible."""
    name: str
    model: callable
    published: float
    error: float
    assumed: str = ""
    bounds: tuple = ()


CLAIMS = (
    Claim("MXFP8 over BF16, Scout, GB200", scout, 0.302, 0.05, "rest", (0.1, 0.6)),
    Claim("... the possible gain", scout_possible, 0.37, 0.05, "rest", (0.1, 0.6)),
    Claim("... share of the possible", scout_share, 0.81, 0.05, "rest", (0.1, 0.6)),
    Claim("NVFP4 forward, pretraining", pretraining, 0.08, 0.10, "reached", (0.8e15, 3e15)),
    Claim("NVFP4 forward, RL", reinforcement, 0.20, 0.05, "weights", (0.1, 1.0)),
    Claim("operations in an NVLink byte", operations_per_byte, 16_000, 0.05),
)


def defaults(f):
    return {n: p.default for n, p in inspect.signature(f).parameters.items()}


def sensitivity(f, h=1e-3):
    """[(input, relative change of f per relative change of it)], the largest first: central
    differences."""
    base = defaults(f)
    slope = {n: (f(**base | {n: v * (1 + h)}) - f(**base | {n: v * (1 - h)})) / (2 * h * f(**base))
             for n, v in base.items()}
    return sorted(slope.items(), key=lambda item: -abs(item[1]))


def needed(claim, steps=2000):
    """Smallest and largest value of the assumption that gives the published figure within the
    stated error, all other inputs as they are."""
    low, high = claim.bounds
    values = [low + (high - low) * i / steps for i in range(steps + 1)]
    good = [v for v in values
            if abs(claim.model(**{claim.assumed: v}) / claim.published - 1) <= claim.error]
    return min(good), max(good)


# ------------------------------------------------------------------- this trainer's step on an H200
# Measured there (data/runs/h200-profile.txt, model A in bf16, and the benchmark of the kernels).
RATES = dict(experts=680e12, dense=630e12, attention=250e12, copy=4.24e12, swiglu=4.2e12,
             adamw=3.5e12)
PASSES = 0.75       # ASSUMED: share of the copy bandwidth of all other passes over activations
LAUNCHES = 3e-4     # ASSUMED: seconds a layer in small kernels (top-k, sort, counts, norms' gains)
# Shares of the copy bandwidth. Where random bits are drawn, they are what takes the time, whatever
# is read: as long as 4 bytes a number at 0.57 of the bandwidth.
ROUNDING = dict(row=0.97, column=0.9, random=0.57, fp4=0.77)


def active_flops(m):
    """Operations a step of (routed experts, other matrices, attention)."""
    D, N, C = m["dim"], m["batch"] * m["seq_len"], m["dim"] // m["heads"]
    expert = 3 * D * m["expert_dim"]
    other = m["layers"] * (2 * D * D + 2 * D * C * m["kv_heads"] + m["shared"] * expert) + 256 * D
    attention = 3.5 * 2 * m["seq_len"] * D * m["layers"]
    return 6 * N * m["layers"] * m["top_k"] * expert, 6 * N * other, N * attention


def parameters(m):
    D, kv = m["dim"], m["kv_heads"] * (m["dim"] // m["heads"])
    experts = (m["experts"] + m["shared"]) * 3 * D * m["expert_dim"] + m["experts"] * D
    return m["layers"] * (2 * D * D + 2 * D * kv + experts) + 2 * 256 * D


def activation_bytes(m):
    """bf16 bytes a token and layer of (SwiGLU, all other passes), forward and backward."""
    D, k, q = m["dim"], m["top_k"], m["dim"] + m["kv_heads"] * (m["dim"] // m["heads"])
    swiglu = 8 * (k + m["shared"]) * m["expert_dim"]
    norms, rope, sums, router = 19 * D, 5 * q, 12 * D, 3 * D
    return 2 * swiglu, 2 * (norms + rope + sums + router + 5 * (k + 1) * D)


def rounding_seconds(m, precision):
    """What an emulated precision adds: reading, rounding, and writing decoded bf16 numbers. Where
    SwiGLU, a gather or a sum rounds in passing, only what it moves beyond bf16's counts."""
    D, F, k, S = m["dim"], m["expert_dim"], m["top_k"], m["shared"]
    t = {name: share * RATES["copy"] for name, share in ROUNDING.items()}
    dense = (4 * 3 * D / t["row"] +                                             # X of q, o, v1
             (6 * 3 * D + 4 * S * F + 4 * 3 * D + 6 * S * F) / t["column"])     # dY both ways, X
    wire = 2.4 * k * D / t["row"]                           # results: codes; and both gradients
    back = (4 * k * D + 4 * k * F) / t["column"]            # dY of w2 along T; of w1 both ways
    eight = 4 * D / t["row"] + (4 * k * D + 6 * k * F) / t["column"]            # X of w1 and w2
    four = 2.6 * D / t["fp4"] + 0.6 * k * F / t["fp4"]
    four += 4 * k * (D + F) / t["random"]                   # X again, from 4 bits
    weights = 2 / t["column"]                               # a second copy, along the other axis
    if precision == "nvfp4":                                # amax; codes; again, from codes
        weights = 4 / RATES["copy"] + 0.6 / t["fp4"] + 4 / t["random"]
    share = 0 if precision == "mxfp8" else round(0.85 * m["layers"]) / m["layers"]
    layer = dense + wire + back + share * four + (1 - share) * eight
    return m["batch"] * m["seq_len"] * m["layers"] * layer + parameters(m) * weights


def h200_step(m, precision="bf16"):
    """name -> seconds of each part of a training step of model m (data/bench.py's MODELS)."""
    experts, dense, attention = active_flops(m)
    swiglu, passes = activation_bytes(m)
    rows, n = m["batch"] * m["seq_len"] * m["layers"], parameters(m)
    parts = {"expert GEMMs": experts / RATES["experts"], "other GEMMs": dense / RATES["dense"],
             "attention": attention / RATES["attention"], "SwiGLU": rows * swiglu / RATES["swiglu"],
             "AdamW": n * 28 / RATES["adamw"],                      # p, m, v both ways, g
             "clip, cast": n * 10 / RATES["copy"],                  # g for its norm; p to bf16
             "passes": rows * passes / (PASSES * RATES["copy"]),
             "small kernels": LAUNCHES * m["layers"]}
    if precision != "bf16":
        parts["rounding"] = rounding_seconds(m, precision)
    return parts


def measured():
    """Rows of data/runs/h200_step.jsonl: measured milliseconds a step, with where and how."""
    return [json.loads(line) for line in (RUNS / "h200_step.jsonl").read_text().splitlines()]


def show_claim(c):
    value, base = c.model(), defaults(c.model)
    published, model = (f"{v:.1%}" if v < 10 else f"{v:,.0f}" for v in (c.published, value))
    print(f"{c.name:30}{published:>8}{model:>9}{value / c.published - 1:>+7.1%}{c.error:>6.0%}   "
          + (f"{c.assumed} {base[c.assumed]:.3g}; {needed(c)[0]:.3g} to {needed(c)[1]:.3g}"
             if c.assumed else ""))
    print("     1 % more " + ", ".join(f"{n} {s:+.2f} %" for n, s in sensitivity(c.model)[:4]))


def show_step(row, m):
    parts = h200_step(m, row["precision"])
    total = 1e3 * sum(parts.values())
    print(f"{row['model']} {row['precision']:6}{row['ms']:9.1f}{total:8.1f}"
          f"{total / row['ms'] - 1:>+8.1%}   "
          + ", ".join(f"{n} {1e3 * s:.0f}" for n, s in parts.items()))


def main():
    from bench import MODELS
    print(f"{'':30}{'figure':>8}{'model':>9}{'off':>7}{'said':>6}   assumed; needed for that")
    for claim in CLAIMS:
        show_claim(claim)
    print("\nthis trainer on an H200\n          measured   model     off   ms in each part")
    for row in measured():
        show_step(row, MODELS[row["model"]])


if __name__ == "__main__":
    main()
