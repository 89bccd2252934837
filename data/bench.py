"""What a step costs on this CPU: the mixture against a dense model, and each precision against bf16.

`python data/bench.py` runs the steps of `python train.py` (preset tiny) in turn, interleaved, so that
a noisy machine disturbs all alike, and prints medians and ratios with their quartiles.
"""
import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402


def prepare(folder, name, precision, **changes):
    """A run in its own folder that is ready for any step."""
    cfg = train.Config(precision=precision, out=str(Path(folder) / name), **changes)
    run = train.Run(cfg, torch.device("cpu"))
    run.opt = train.adamw(run.model, cfg.weight_decay)
    return run


def seconds(run, kind, i):
    start = time.perf_counter()
    if kind == "rl":
        train.rl_step(run, i, 1e-4)
    else:
        train.pretrain_step(run, i, kind == "mix", 1e-4)
    return time.perf_counter() - start


def ratio(times, base):
    """Median and quartiles of the ratios measured side by side."""
    q = statistics.quantiles([a / b for a, b in zip(times, base)], n=4)
    return f"{q[1]:.2f} ({q[0]:.2f} to {q[2]:.2f})"


def measure(threads, repeats):
    torch.set_num_threads(threads)
    tiny = train.Config()
    dense = dict(dense_layers=tiny.layers, dense_dim=(tiny.top_k + tiny.shared) * tiny.expert_dim)
    with tempfile.TemporaryDirectory() as folder:
        runs = {"dense": prepare(folder, "dense", "bf16", **dense)}
        runs |= {p: prepare(folder, p, p) for p in ("bf16", "mxfp8", "nvfp4")}
        times = {(name, kind): [] for name in runs for kind in ("text", "mix", "rl")}
        for i in range(repeats + 1):
            for name, kind in times:
                times[name, kind].append(seconds(runs[name], kind, i))
    times = {k: v[1:] for k, v in times.items()}           # the first of each warms up
    print(f"\n{threads} thread(s), torch {torch.__version__}, median of {repeats} interleaved steps, ms")
    print(f"{'':8s}{'text':>8s}{'mix':>8s}{'rl':>8s}")
    for name in runs:
        print(f"{name:8s}" + "".join(f"{1e3 * statistics.median(times[name, k]):8.0f}"
                                     for k in ("text", "mix", "rl")))
    print(f"bf16 over dense, text      {ratio(times['bf16', 'text'], times['dense', 'text'])}")
    weights = dict(text=tiny.text_share * tiny.steps, mix=tiny.text_share * tiny.steps, rl=tiny.rl_steps)
    whole = {n: [sum(w * times[n, k][i] for k, w in weights.items()) for i in range(repeats)] for n in runs}
    for name in ("mxfp8", "nvfp4"):
        print(f"{name} over bf16, whole run {ratio(whole[name], whole['bf16'])}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    train.keep_freed_memory()
    for threads in args.threads:
        measure(threads, args.repeats)


if __name__ == "__main__":
    main()
