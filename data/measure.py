"""Measurements that compare no trained runs, or only look at them: started by experiments.py.

    python data/experiments.py bias       is the mean gradient the gradient of the forward weights?
    python data/experiments.py tile-error what one scale for 16x16 weights costs
    python data/experiments.py memory     bytes of weights and of saved activations
    python data/experiments.py rounded    4 bits after training, against 4 bits in training

Each is a function that returns rows; they are kept in data/runs/NAME.jsonl behind a header.
"""
import json
import platform
import statistics
from dataclasses import replace

import numpy as np
import torch

import quant
import train
from data.prepare import load_corpus
from model import GPT

# ----------------------------------------------------------------------------- bias of the gradient
BACKWARD = ("nvfp4", "nvfp4-nearest", "nvfp4-original", "nvfp4-independent")


def exact_backward(name):
    """The recipe with a backward pass that reads the forward operands as they are, 4-bit numbers
    decoded, and rounds nothing: what gradients should be on average."""
    g = replace(quant.RECIPES[name].experts, dy="bf16", back="bf16", source="copy")
    return quant.Recipe(name, g, last=quant.IN_BF16)


def operand_alone(name):
    """The recipe's second copies of X and W, and nothing else of it rounded in the backward. Then
    the gradient is linear in each of the roundings, which are independent, so where they are
    unbiased it is."""
    g = replace(quant.RECIPES[name].experts, dy="bf16")
    return quant.Recipe(name, g, last=quant.IN_BF16)


def gradients_rounded(name):
    """The same with dY and what crosses the wire in MXFP8, to nearest, as in training."""
    r = quant.RECIPES[name]
    return quant.Recipe(name, r.experts, last=quant.IN_BF16, combine=r.combine)


def expert_gradient(model, rows, seed):
    """The gradient of the mean loss on rows [B, T+1] by the experts that the recipe puts in 4 bits,
    one vector in fp64."""
    model.zero_grad(set_to_none=True)
    model.begin_step(seed)
    train.token_losses(model, rows).mean().backward()
    return torch.cat([p.grad.double().flatten() for b in model.blocks if quant.is_fp4(b.gemms.x)
                      for p in (b.w1, b.w2)])


def model_in(recipe, cfg, weights):
    """A model in a Recipe (which may be in no table), with these weights."""
    quant.RECIPES[recipe.name], kept = recipe, quant.RECIPES[recipe.name]
    try:
        model = GPT(cfg, recipe.name)
    finally:
        quant.RECIPES[recipe.name] = kept
    model.load_state_dict(weights)
    return model


def gradient_bias(name, draws, cfg, rows, weights, part=operand_alone):
    """How far the mean gradient over `draws` seeds is from the exact one, relative L2 norms.

    part: operand_alone or gradients_rounded. error: of the mean. noise: what the mean of so many
    unbiased draws is off by, its standard error. slope: of the mean on the exact gradient; 1 if
    unbiased. single: error of one draw.
    """
    exact = expert_gradient(model_in(exact_backward(name), cfg, weights), rows, 0)
    model = model_in(part(name), cfg, weights)
    if quant.RECIPES[name].experts.rounding == "nearest":
        draws = 1                                        # all draws are alike
    total = squares = torch.zeros_like(exact)
    for seed in range(draws):
        off = expert_gradient(model, rows, seed) - exact
        total, squares = total + off, squares + off.square()
    mean, size = total / draws, exact.norm()
    variance = (squares / draws - mean.square()).clamp(min=0).sum() * draws / max(1, draws - 1)
    return dict(recipe=name, part=part.__name__, draws=draws, error=float(mean.norm() / size),
                noise=float((variance / draws).sqrt() / size),
                slope=float(1 + mean @ exact / exact.square().sum()),
                single=float((squares.sum() / draws).sqrt() / size))


def bias(place, draws=64, batches=3, batch=8):
    """gradient_bias of each backward operand, on a few batches of text and initial weights."""
    cfg = train.Config(layers=4, precision="nvfp4").model()
    if place.size == "smoke":
        draws, batches = 8, 1
    corpus, found = load_corpus(place.data or None), []
    for i in range(batches):
        rows = corpus.batch(0, "train", i, np.arange(batch), cfg.seq_len + 1)
        rows, weights = torch.from_numpy(rows).long(), GPT(cfg, "bf16", seed=i).state_dict()
        found += [dict(batch=i, **gradient_bias(n, draws, cfg, rows, weights, part))
                  for part in (operand_alone, gradients_rounded) for n in BACKWARD]
    return found


# ------------------------------------------------------------------------------- error of the tiles
def tile_error(place, seeds=5, size=1024):
    """Relative L2 error of weights [size, size] in each NVFP4 variant, for Gaussian numbers and for
    heavy tails (Student's t with 3 degrees of freedom)."""
    found = []
    for seed in range(seeds):
        g = torch.Generator().manual_seed(seed)
        normal = torch.randn(5, size, size, generator=g)
        tails = normal[0] / normal[1:4].square().mean(0).sqrt()
        for kind, w in (("Gaussian", normal[4]), ("heavy tails", tails)):
            for fmt in ("nvfp4", "nvfp4_tile", "nvfp4_46", "mxfp8"):
                outer = quant.weight_outer(w, fmt) if quant.is_fp4(fmt) else None
                error = (quant.cast(w, fmt, outer=outer) - w).norm() / w.norm()
                found.append(dict(weights=kind, format=fmt, seed=seed, error=float(error)))
    return found


# ------------------------------------------------------------------------------------------- memory
def saved_bytes(model, rows):
    """Bytes that autograd keeps between forward and backward, each storage once; not weights."""
    mine = [model.parameters(), model.buffers()] + [
        w.storage() for layer in model.operands for w in layer.values()]
    skip = {t.untyped_storage().data_ptr() for ts in mine for t in ts}
    seen = {}

    def pack(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = train.token_losses(model, rows).mean()    # alive, so that no storage is used twice
    del loss
    return sum(n for pointer, n in seen.items() if pointer not in skip)


def expert_input_bytes(gemms, device, rows=1024, width=512):
    """Bytes that one expert GEMM keeps of X [rows, width] for its backward pass."""
    x = torch.randn(rows, width, device=device, requires_grad=True)
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    w, kept = torch.randn(1, 64, width, device=device), []
    counts = torch.tensor([rows], dtype=torch.int32, device=device)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t)
    with hooks:
        quant.grouped_linear(x, w, counts, gemms)
    return sum(t.numel() * t.element_size() for t in kept if t.dtype != torch.int32)


def stored_bits(w, fmt):
    """Bits a number of a weight w [E, N, K] as stored in `fmt`, its scales included."""
    if fmt == "bf16":
        return 16
    q = quant.quantize(w, fmt, outer=quant.weight_outer(w, fmt) if quant.is_fp4(fmt) else None)
    return 8 * sum(t.untyped_storage().nbytes() for t in q.tensors() if t is not None) / w.numel()


def memory(place):
    """Bits a number of expert weights as stored and of X as kept for the backward pass; bytes that
    a whole model keeps a token. The type of unrounded tensors is fp32 on a CPU, bf16 on a GPU."""
    cfg, device = train.Config(layers=4).model(), torch.device(place.device)
    rows = torch.randint(0, 256, (32, cfg.seq_len + 1), device=device)
    found, w = [], GPT(cfg).blocks[0].w1.detach()
    for name in ("bf16", "mxfp8", "nvfp4"):
        model = GPT(cfg, name).to(device)
        model.prepare()
        bits, recipe = stored_bits(w, name), quant.RECIPES[name]
        found.append(dict(
            recipe=name, dtype=str(model.dtype), bits_of_weights=bits, fewer_than_bf16=16 / bits,
            bits_of_saved_x=8 * expert_input_bytes(recipe.experts, device) / (1024 * 512),
            saved_a_token=saved_bytes(model, rows) / (rows.numel() - len(rows))))
    return found


# --------------------------------------------------------------------------- 4 bits after training
def bits_per_byte(place, folder, precision=""):
    """Bits per byte of a model in `folder`, a run or an export, on the final evaluation's rows."""
    from data.experiments import SIZES
    flags = dict(stage="eval", init_from=folder, device=place.device, out=place.work / "nowhere",
                 eval_rows=SIZES[place.size].get("eval_rows"), data=place.data, precision=precision)
    argv = [w for k, v in flags.items() if v for w in ("--" + k.replace("_", "-"), str(v))]
    run, _ = train.open_run(*train.parse(argv))
    run.begin(train.EVAL, 0)
    return train.text_bpb(run, run.cfg.eval_rows * 4)


def rounded(place, seeds=range(100)):
    """The runs of the experiment `calibration`: the 4-bit export of what was trained in NVFP4, and
    the run in bf16 evaluated in NVFP4. Both are without any calibration."""
    found = []
    for seed in seeds:
        keys = [place.find("calibration", p, seed) for p in ("bf16", "nvfp4")]
        if not all(keys):
            continue
        bf16, nvfp4 = (place.out(*key, seed) for key in keys)
        if not all((folder / "checkpoints").exists() for folder in (bf16, nvfp4)):
            continue                        # kept, but trained elsewhere
        export = nvfp4 / "export-nvfp4"
        if not export.exists():
            train.main(["--stage", "export", "--export-format", "nvfp4", "--out", str(nvfp4),
                        "--device", place.device])
        bpb = dict(trained=bits_per_byte(place, nvfp4), exported=bits_per_byte(place, export),
                   bf16=bits_per_byte(place, bf16),
                   bf16_in_nvfp4=bits_per_byte(place, bf16, "nvfp4"))
        found.append(dict(seed=seed, **bpb, export_off=bpb["exported"] - bpb["trained"],
                          rounding_gap=bpb["bf16_in_nvfp4"] - bpb["bf16"]))
    return found


# ---------------------------------------------------------------------------------- keep and print
MEASUREMENTS = {"bias": bias, "tile-error": tile_error, "memory": memory, "rounded": rounded}
# What is averaged over, and what names a line of the table.
REPEATS = {"bias": "batch", "tile-error": "seed", "rounded": "seed"}


def header(name, place):
    """Where and with what it was measured; what is about bits alone is computed on a CPU."""
    cuda = place.device.startswith("cuda") and name in ("memory", "rounded")
    return dict(measurement=name, size=place.size, python=platform.python_version(),
                torch=torch.__version__,
                command=f"python data/experiments.py {name} --size {place.size}",
                device_name=torch.cuda.get_device_name() if cuda else platform.machine())


def grouped(rows, repeat):
    """Rows that differ in `repeat` alone, as (labels, {figure: its values})."""
    found = {}
    for row in rows:
        labels = tuple(str(v) for k, v in row.items() if isinstance(v, str) or k == "draws")
        figures = found.setdefault(labels, {})
        for k, v in row.items():
            if k not in (repeat, "draws") and not isinstance(v, str):
                figures.setdefault(k, []).append(v)
    return found


def table(name, rows):
    """Each figure's mean, and its standard deviation over n repeats."""
    for labels, figures in grouped(rows, REPEATS.get(name)).items():
        n = len(next(iter(figures.values())))
        sd = {k: f" (sd {statistics.stdev(v):.2g})" if n > 1 else "" for k, v in figures.items()}
        parts = [f"{k} {statistics.fmean(v):.5g}{sd[k]}" for k, v in figures.items()]
        print("  ".join((*labels, f"n {n}", *parts)))


def main(name, place, only_table):
    """Measure, unless the table alone is asked for; keep the rows; print them."""
    path = place.folder(name).with_suffix(".jsonl")
    if not only_table:
        torch.set_num_threads(1)
        rows = MEASUREMENTS[name](place)
        if not rows:
            raise SystemExit(f"{name}: no checkpoints of the runs that it looks at are here; make "
                             "them by the experiment calibration with --runs FOLDER, and give that "
                             "folder here too")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(r) + "\n" for r in (header(name, place), *rows)))
    if not path.exists():
        return print(f"{name}: not measured")
    try:
        head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    except ValueError:
        raise SystemExit(f"{path}: is not what {name} writes; delete it to measure anew") from None
    print(", ".join(f"{k} {v}" for k, v in head.items()))
    table(name, rows)
