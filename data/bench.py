"""What a step costs.

On a CPU, `python data/bench.py` interleaves the steps of `python train.py` (preset tiny), so that a
noisy machine disturbs all alike: the mixture against a dense model of equal active FLOPs, and each
precision against bf16. On a GPU it trains models A and B on random bytes, and generates; on
several, `torchrun --nproc_per_node N data/bench.py --models B --ep 1 N`, with experts spread over
--ep.
"""
import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import quant  # noqa: E402
import train  # noqa: E402
from model import Decoder  # noqa: E402
from moe_comm import Mesh, join, who  # noqa: E402


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
    print(f"\n{threads} thread(s), torch {torch.__version__}, "
          f"median of {repeats} interleaved steps, ms")
    print(f"{'':8s}{'text':>8s}{'mix':>8s}{'rl':>8s}")
    for name in runs:
        print(f"{name:8s}" + "".join(f"{1e3 * statistics.median(times[name, k]):8.0f}"
                                     for k in ("text", "mix", "rl")))
    print(f"bf16 over dense, text      {ratio(times['bf16', 'text'], times['dense', 'text'])}")
    weights = dict(text=tiny.text_share * tiny.steps, mix=tiny.text_share * tiny.steps,
                   rl=tiny.rl_steps)
    whole = {n: [sum(w * times[n, k][i] for k, w in weights.items()) for i in range(repeats)]
             for n in runs}
    for name in ("mxfp8", "nvfp4"):
        print(f"{name} over bf16, whole run {ratio(whole[name], whole['bf16'])}")


# ---------------------------------------------------------------------------------------------- GPU
MODELS = {
    "A": dict(dim=768, layers=12, heads=12, kv_heads=3, experts=32, top_k=4, expert_dim=512,
              shared=1, seq_len=1024, batch=32),
    "B": dict(dim=2048, layers=8, heads=16, kv_heads=4, experts=64, top_k=6, expert_dim=1408,
              shared=2, seq_len=2048, batch=16),
}


class OnDevice(train.GPT):
    """A GPT whose weights are drawn on the GPU: drawing billions of them on a CPU takes minutes.
    Every process draws the same ones."""

    def init_weights(self, seed):
        torch.manual_seed(seed)
        for p in self.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)


def random_run(name, precision, device, ep):
    """A run of model A or B that needs no corpus, with the model's batch on each GPU."""
    cfg = train.Config(precision=precision, text_share=1.0, lr=1e-4, **MODELS[name])
    cfg.batch *= who()[1]
    with torch.device(device):
        model = OnDevice(cfg.model(), precision, mesh=Mesh(ep, "cuda"))
    run = train.Run(cfg, device, model)
    run.opt = train.adamw(model, cfg.weight_decay)
    return run


def gpu_step(run, i, rows, ones):
    """Milliseconds of one optimizer step."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run.begin(train.PRETRAIN, i)
    train.set_lr(run, 1e-4)
    run.pretrain_update(rows, ones[:, 1:], ones[:, :1])
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure_gpu(model, precisions, repeats, device, ep=1):
    """Train a model in each precision, a step of each in turn."""
    (rank, world), runs, memory = who(), {}, {}
    for precision in precisions:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        runs[precision] = run = random_run(model, precision, device, ep)
        torch.manual_seed(rank)
        rows = torch.randint(0, 256, (run.cfg.batch // world, run.cfg.seq_len + 1), device=device)
        ones = torch.ones_like(rows)
        for i in range(5):                                  # warm up and capture
            gpu_step(run, i, rows, ones)
        memory[precision] = (torch.cuda.max_memory_allocated() - before) / 2 ** 30
    times = {precision: [] for precision in runs}
    for i in range(repeats):
        for precision, run in runs.items():
            times[precision].append(gpu_step(run, 5 + i, rows, ones))
    if rank == 0:
        report(model, runs, times, memory, world, ep)
    return runs


def report(model, runs, times, memory, world, ep):
    cfg, model_of_all = next(iter(runs.values())).cfg, next(iter(runs.values())).model
    total, active = model_of_all.parameters_active()
    many = f", {world} GPUs, experts over {ep}" if world > 1 else ""
    print(f"{model}: {total / 1e6:.0f}M parameters, {active / 1e6:.0f}M active, "
          f"{cfg.batch} x {cfg.seq_len} tokens a step, n={len(next(iter(times.values())))}{many}")
    for precision in runs:
        q = statistics.quantiles(times[precision], n=4)
        speed = cfg.batch * cfg.seq_len / q[1] * 1e3
        share = speed * model_of_all.flops_per_token() / 989e12 / world
        over = ("" if precision == "bf16" or "bf16" not in runs else
                f", over bf16 {ratio(times[precision], times['bf16'])}")
        print(f"{precision:7s}{q[1]:7.1f} ms a step ({q[0]:.1f} to {q[2]:.1f}), {speed / 1e3:.0f}k "
              f"tokens/s, {share:.1%} of 989 TFLOP/s, peak memory {memory[precision]:.1f} "
              f"GiB{over}", flush=True)


@torch.no_grad()
def seconds_to_generate(decoder, prompt, new):
    torch.cuda.synchronize()
    start = time.perf_counter()
    decoder.start(prompt, torch.arange(len(prompt)), 0, 0)
    for _ in range(new - 1):
        decoder.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_generation(precision, repeats, batch=512, new=256, copy=4.24e12):
    """Generate with model A, as captured steps and with a launch for each kernel, in turn. A token
    can take no less than reading the weights once: those of one token, or, since a batch has a
    token for nearly every expert, all; the keys and values come on top."""
    with torch.device("cuda"):
        model = OnDevice(train.Config(**MODELS["A"]).model(), precision)
    prompt = torch.randint(0, 256, (batch, 16), device="cuda")
    graphed, eager = (Decoder(model, batch, prompt.shape[1] + new, 1.0, 0) for _ in range(2))
    eager.replay = eager.advance
    for decoder in (graphed, eager):
        seconds_to_generate(decoder, prompt, 8)                 # warm up and capture
    times = [[seconds_to_generate(d, prompt, new) for d in (graphed, eager)]
             for _ in range(repeats)]
    fast, slow = zip(*times)
    token = statistics.median(fast) / new
    weights = [(name, t.nbytes) for layer in model.operands for name, w in layer.items()
               for t in quant.storage(w.forward)]
    touched = sum(size for _, size in weights)
    routed = sum(size for name, size in weights if name in ("w1", "w2"))
    active = touched - routed + routed * model.cfg.top_k // model.cfg.experts
    cache = sum(t.nbytes for t in graphed.cache.keys + graphed.cache.values)
    print(f"A {precision:6s} generates {new} tokens of {batch} sequences: {1e3 * token:.2f} ms a "
          f"token, {batch / token / 1e3:.0f}k tokens/s, n={repeats}; eager over graphed "
          f"{ratio(slow, fast)}; over reading the weights once "
          f"{token / (active / copy):.1f} (active for one token, {active / 1e9:.2f} GB), "
          f"{token / (touched / copy):.1f} (touched by the batch, {touched / 1e9:.2f} GB), "
          f"{token / ((touched + cache) / copy):.1f} (and keys and values, "
          f"{cache / 1e9:.2f} GB)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", nargs="*", default=["A", "B"], choices=MODELS)
    parser.add_argument("--precisions", nargs="*", default=["bf16", "mxfp8", "nvfp4"])
    parser.add_argument("--ep", type=int, nargs="+", default=[1], help="under torchrun")
    parser.add_argument("--generate", nargs="*", default=["bf16", "nvfp4"],
                        help="precisions in which to generate (one GPU)")
    args = parser.parse_args()
    if torch.cuda.is_available():
        device = join(torch.device("cuda"))
        for precision in args.generate if who()[1] == 1 else ():
            measure_generation(precision, 3)
        for model, ep in itertools.product(args.models, args.ep):
            # Of model B only one fits: no ratios measured side by side.
            for precisions in [args.precisions] if model == "A" else [[p] for p in args.precisions]:
                measure_gpu(model, precisions, args.repeats, device, ep)
                gc.collect()                # a run and its captured step refer to each other
                torch.cuda.empty_cache()
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    train.keep_freed_memory()
    for threads in args.threads:
        measure(threads, args.repeats)


if __name__ == "__main__":
    main()
