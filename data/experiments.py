"""The experiments behind the claims: what is compared, the runs, and the tables drawn from them.

    python data/experiments.py NAME ... [--device cuda] [--jobs 3] [--seeds 0 1 2] [--data PATH]
    python data/experiments.py NAME ... --table         # of every size that has logs

An experiment is a few arms that differ in one thing, each run with the same seeds: a seed fixes the
initial weights and the order of the data, so differences are taken pair by pair. A finished run is
kept as a log below data/runs and never repeated, also where another experiment asks for it; an
interrupted one goes on from its checkpoint. `--smoke` is all of it at a size for a CPU's minute.
Several names share one queue of runs, and several devices take from it (`--device cuda:0 cuda:1`).
Direct measurements, which train nothing, are in data/measure.py and start the same way.
"""
import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
import train  # noqa: E402
from data.prepare import load_corpus  # noqa: E402


class Unusable(Exception):
    """What is kept cannot be used; its text is the one sentence to print."""


# -------------------------------------------------------------------------------- what is compared
# Flags of train.py. "gpu": 4.0M active parameters of 12.0M, and 20 bytes of text for each of them.
SIZES = {
    "gpu": dict(layers=6, experts=16, top_k=4, seq_len=256, batch=128, warmup=200, eval_rows=2048,
                log_every=100, dim=192, heads=6, kv_heads=2, expert_dim=192, steps=2520, lr=2.5e-3,
                eval_every=630, save_every=1260),
    "cpu": dict(preset="tiny", steps=1200, eval_every=100, save_every=100),
    "smoke": dict(dim=32, layers=2, heads=2, kv_heads=1, experts=4, top_k=2, expert_dim=32,
                  seq_len=32, batch=4, steps=8, warmup=2, eval_rows=4, eval_every=8, save_every=4,
                  log_every=4),
}
TEXT = dict(stage="pretrain", text_share=1.0, mix_lr=0.05)      # text alone; lr falls to a 20th
RL = {      # the default task's own model, as in the README; the shapes come with the checkpoint
    "gpu": dict(preset="tiny", rl_steps=200),
    "cpu": dict(preset="tiny", rl_steps=100),
    "smoke": dict(SIZES["smoke"], rl_steps=4, prompts=2, group=4, rl_text_rows=2, eval_problems=8,
                  rl_eval_every=4, gate_every=4, gate=0.0),
}


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a recipe, a multiple of the size's steps, and other flags."""
    precision: str
    budget: float = 1.0
    flags: dict = field(default_factory=dict)
    first: str = ""         # precision of the run from whose checkpoint this one starts (RL)
    seeds: int = field(default=99, compare=False)       # at most so many of the experiment's seeds


@dataclass(frozen=True)
class Experiment:
    """arms: name -> Arm; each is compared with the first of its budget. also: further pairs to
    compare, (arm, reference). metric: see result()."""
    claim: str
    arms: dict
    seeds: tuple = (0, 1, 2)
    metric: str = "bpb"
    also: tuple = ()

    def comparisons(self):
        """(arm, reference) of all differences that are taken."""
        for arm, a in self.arms.items():
            first = next(n for n, b in self.arms.items() if b.budget == a.budget)
            if arm != first:
                yield arm, first
        yield from self.also


def recipes(*names, budget=1.0, **flags):
    return {n: Arm(n, budget, flags) for n in names}


# Budgets at which mxfp8's loss is known, so that it is a function of compute, and how many of the
# seeds run there: long runs are dear.
SEEDS = {0.25: 10, 0.5: 10, 1: 12, 2: 2}


def budgets(*pairs):
    return {f"{p}-x{b:g}": Arm(p, b, seeds=SEEDS[b]) for p, b in pairs}


def ablation(claim, *names, also=(), **flags):
    """At a quarter of the budget: the shorter a pair of runs, the less they differ by chance, and
    the more of them can be made."""
    return Experiment(claim, recipes(*names, budget=0.25, **flags), tuple(range(6)), also=also)


EXPERIMENTS = {
    "convergence": Experiment("MXFP8 converges as BF16", recipes("bf16", "mxfp8"),
                              seeds=tuple(range(12))),
    "efficiency": Experiment("an NVFP4 forward in the experts costs about 2 % of the compute",
                             budgets(*((p, b) for b in SEEDS for p in ("mxfp8", "nvfp4")
                                       if (p, b) != ("nvfp4", 2))), seeds=tuple(range(12))),
    "more-fp4": ablation("4 bits in the backward pass, or in every layer, hurt more",
                         "mxfp8", "nvfp4", "nvfp4-fp4", "nvfp4-all",
                         also=(("nvfp4-fp4", "nvfp4"), ("nvfp4-all", "nvfp4"))),
    # With top-2, one shared expert and 5 of 6 layers in 4 bits, both arms have the same operations
    # there: 5 * 2 * 3DF in routed experts, 6 * (2DD + 3DF) in q, o and shared experts; D = F.
    "layers": ablation("experts bear 4 bits better than other layers",
                       "mxfp8", "nvfp4", "nvfp4-dense", also=(("nvfp4-dense", "nvfp4"),), top_k=2),
    "backward": ablation("a second copy rounded to nearest drifts, a stochastic one does not",
                         "nvfp4", "nvfp4-nearest", "nvfp4-original", "nvfp4-independent"),
    "tiles": ablation("16x16 tiles of weights are too coarse", "nvfp4", "nvfp4-tile"),
    "last": ablation("the experts of the last layer are better kept at 8 bits",
                     "mxfp8", "nvfp4", "nvfp4-last-none", "nvfp4-last-half",
                     also=(("nvfp4-last-none", "nvfp4"), ("nvfp4-last-half", "nvfp4"))),
    "four-six": ablation("a largest number of 6 or 4, block by block, helps",
                         "nvfp4", "nvfp4-46"),
    "combine": ablation("expert results at 8.25 bits cost nothing",
                        "nvfp4-bf16-combine", "nvfp4"),
    "calibration": ablation("a 4-bit copy needs no calibration", "bf16", "nvfp4"),
    "rl": Experiment("NVFP4 earns the reward of MXFP8 in RL",
                     {p: Arm(p, first="mxfp8") for p in ("mxfp8", "nvfp4", "nvfp4-tensor")},
                     seeds=tuple(range(16)), metric="reward", also=(("nvfp4-tensor", "nvfp4"),)),
}


# ----------------------------------------------------------------------------------------- the runs
def flags_of(arm, size):
    """The flags of train.py that make this arm, but for its seed and where it runs."""
    if arm.first:
        return dict(RL[size], stage="rl", precision=arm.precision, **arm.flags)
    flags = dict(SIZES[size], **TEXT, precision=arm.precision) | arm.flags
    return flags | dict(steps=max(2, round(arm.budget * flags["steps"])))


# Flags that change what is reported of a run, not the run; and the preset, whose shapes a log has.
REPORTING = {"preset", "eval_rows", "eval_every", "save_every", "log_every"}


@dataclass
class Place:
    """Where runs are made, and where their logs are kept. data: as in train.py; None is any text,
    where nothing is to run."""
    size: str
    devices: tuple = ("cpu",)
    data: str | None = ""
    work: Path = ROOT / "out" / "experiments"
    runs: Path = HERE / "runs"

    @property
    def device(self):
        return self.devices[0]

    def folder(self, name):
        """Where logs of a name are kept; a size other than the GPU's has its own folder."""
        return self.runs / (name if self.size == "gpu" else f"{name}-{self.size}")

    def log(self, name, arm, seed):
        return self.folder(name) / f"{arm}-seed{seed}.jsonl"

    def find(self, name, arm, seed):
        """(experiment, arm) under which this run, or an equal one, is kept; None if it is not. What
        has been kept of an earlier definition does not count."""
        wanted = EXPERIMENTS[name].arms[arm]
        for other, e in {name: EXPERIMENTS[name], **EXPERIMENTS}.items():
            for n, a in e.arms.items():
                log = self.log(other, n, seed)
                if a == wanted and log.exists() and self.alike(read_log(log)[0]["config"],
                                                               flags_of(a, self.size)):
                    return other, n
        return None

    def alike(self, config, flags):
        """Is this the configuration that the flags, and the text, would give?"""
        if self.data is not None:
            flags, config = flags | dict(data=named(self.data)), dict(config)
            config["data"] = named(config.get("data", ""))
        return all(config.get(k, v) == v for k, v in flags.items() if k not in REPORTING)

    def out(self, name, arm, seed):
        return self.work / self.size / name / f"{arm}-seed{seed}"


def command(flags, place, out, seed, device):
    """(the call of train.py that begins this run or goes on with it, what a reader would type)."""
    if place.data:
        flags = flags | dict(data=place.data)
    flags = flags | dict(seed=seed, device=device, out=str(out))
    words = [w for k, v in flags.items() for w in ("--" + k.replace("_", "-"), str(v))]
    if checkpoint := train.latest_checkpoint(out):
        words = ["--resume", "--out", str(out), "--stage", flags["stage"], "--device", device]
        state = checkpoint / "run.json"
        kept = json.loads(state.read_text())["config"] if state.exists() else {}
        skip = ("out", "device", "init_from", "data")
        if not place.alike(kept, {k: v for k, v in flags.items() if k not in skip}):
            raise Unusable(f"{out} holds a run of other settings or another text: delete that "
                           "folder to begin anew")
    shown = "python train.py " + " ".join(f"--{k.replace('_', '-')} {named(v)}"
                                          for k, v in flags.items() if k != "out")
    return [sys.executable, str(ROOT / "train.py"), *words], shown


def read_log(log):
    """The rows of a log, the first of which has the configuration; Unusable where it is none."""
    try:
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        if len(rows) > 1 and all(isinstance(row, dict) for row in rows) and "config" in rows[0]:
            return rows
    except ValueError:
        pass
    raise Unusable(f"{log}: is no whole log of a run; delete it to make that run again")


def named(value):
    """A value without the folders of the machine that it was used on."""
    return Path(value).name if isinstance(value, str) and os.sep in value else value


def keep_log(log, out, shown):
    """Copy a finished run's log to where it is kept, without paths of this machine."""
    head, *rows = read_log(out / "log.jsonl")
    head["config"] = {k: named(v) for k, v in head["config"].items() if k != "out"}
    log.parent.mkdir(parents=True, exist_ok=True)
    temporary = log.with_suffix(".tmp")
    lines = (json.dumps(row) + "\n" for row in (dict(head, command=shown), *rows))
    temporary.write_text("".join(lines))
    os.replace(temporary, log)


def start(place, name, arm, seed, device):
    """Start one run: (process, what to do when it has succeeded)."""
    arm_, out = EXPERIMENTS[name].arms[arm], place.out(name, arm, seed)
    flags = flags_of(arm_, place.size)
    if arm_.first:
        flags |= dict(init_from=str(first_run(place, arm_)))
    call, shown = command(flags, place, out, seed, device)
    return launch(call, out), lambda: keep_log(place.log(name, arm, seed), out, shown)


def launch(call, out):
    """The process of a run, whose words go to output.txt in its folder."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "output.txt", "a") as output:
        return subprocess.Popen(call, stdout=output, stderr=subprocess.STDOUT,
                                env=dict(os.environ, OMP_NUM_THREADS="1"))


def first_run(place, arm):
    """The folder of the pretraining run from which all arms of an RL experiment start; made once,
    as it is needed."""
    out = place.work / place.size / "rl-start" / arm.first
    log = place.log("rl", f"start-{arm.first}", 0)
    if not (log.exists() and (out / "checkpoints").exists()):
        flags = dict(RL[place.size], stage="pretrain", precision=arm.first)
        call, shown = command(flags, place, out, 0, place.device)
        process = launch(call, out)
        try:
            process.wait()
        finally:
            process.terminate()             # it saves, and goes on next time
            process.wait()
        if process.returncode:
            raise Unusable(f"rl: the run from which all arms start failed: see {out}/output.txt")
        keep_log(log, out, shown)
    return out


def queue(names, seeds=()):
    """(experiment, arm, seed) of all runs, a seed of every arm before the next seed."""
    for name in names:
        e = EXPERIMENTS[name]
        for seed in seeds or e.seeds:
            yield from ((name, n, seed) for n, arm in e.arms.items() if seeds or seed < arm.seeds)


def run(place, names, seeds=(), jobs=1, minutes=math.inf):
    """Make the runs of some experiments that are missing, `jobs` at a time on each device,
    beginning none after `minutes`; return the number that failed."""
    waiting, running, failed, begun = list(queue(names, seeds)), {}, 0, time.monotonic()

    def is_made(name, arm, seed):
        wanted = EXPERIMENTS[name].arms[arm], seed
        return place.find(name, arm, seed) or any(
            (EXPERIMENTS[n].arms[a], s) == wanted for n, a, s in running)
    try:
        while waiting or running:
            while waiting and len(running) < jobs * len(place.devices):
                key = waiting.pop(0)
                if is_made(*key) or time.monotonic() - begun > 60 * minutes:
                    continue
                busy = [device for *_, device in running.values()]
                device = min(place.devices, key=busy.count)
                running[key] = *start(place, *key, device), device
                print("{}: {} seed {} started".format(*key), flush=True)
            time.sleep(0.1)
            for key in [k for k, (p, *_) in running.items() if p.poll() is not None]:
                process, finish, _ = running.pop(key)
                failed += process.returncode != 0
                if process.returncode == 0:
                    finish()
                print("{}: {} seed {} ".format(*key) +
                      ("done" if process.returncode == 0 else
                       f"failed: see {place.out(*key)}/output.txt"), flush=True)
    finally:
        for process, *_ in running.values():        # train.py saves, and --resume goes on
            process.terminate()
        for process, *_ in running.values():
            process.wait()
    return failed


# --------------------------------------------------------------------------------------- the tables
# Student's t, two-sided 95 %, for 1 to 30 degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
       2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
       2.052, 2.048, 2.045, 2.042)


def interval(values):
    """(mean, half the width of its 95 % interval): Student's t; infinite for one value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return mean, math.inf
    t = T95[n - 2] if n <= 31 else 1.96 + 2.4 / (n - 1)
    return mean, t * statistics.stdev(values) / math.sqrt(n)


def result(path, metric):
    """The figure by which a run is judged: bits per byte of its last evaluation, or the mean reward
    over the last quarter of its RL steps."""
    rows = read_log(path)[1:]
    if metric == "reward":
        steps = [r["reward"] for r in rows if "reward" in r]
        return statistics.fmean(steps[-max(1, len(steps) // 4):])
    return [r["bpb"] for r in rows if "bpb" in r][-1]


def kept(place, name, arm):
    """seed -> log of the kept runs of an arm."""
    keys = {seed: place.find(name, arm, seed) for seed in range(100)}
    return {seed: place.log(*key, seed) for seed, key in keys.items() if key}


def results(place, name):
    """arm -> {seed: figure} of an experiment's kept runs."""
    e = EXPERIMENTS[name]
    return {arm: {seed: result(log, e.metric) for seed, log in kept(place, name, arm).items()}
            for arm in e.arms}


def sizes_kept(place, name):
    """The sizes at which something of that name is kept. Each experiment has runs of its own."""
    folders = {size: replace(place, size=size).folder(name) for size in SIZES}
    return [size for size, folder in folders.items()
            if any(folder.glob("*.jsonl")) or folder.with_suffix(".jsonl").exists()]


def paired(a, b):
    """b - a for the seeds that both have."""
    return [b[s] - a[s] for s in sorted(a.keys() & b.keys())]


def log_figures(found, arms, baseline):
    """budget -> {seed: log figure} of the arms in mxfp8, the baseline, or of the others."""
    return {a.budget: {s: math.log(v) for s, v in found[n].items()} for n, a in arms.items()
            if (a.precision == "mxfp8") == baseline}


def slopes(found, arms):
    """budget -> (d log figure / d log compute of the baseline, half of its 95 % interval), seed by
    seed: from the budget below to that one, since what reaches a worse figure is less compute; for
    the lowest, from it to the next."""
    base = log_figures(found, arms, baseline=True)
    b = sorted(base)
    rise = [interval([d / math.log(high / low) for d in paired(base[low], base[high])])
            for low, high in zip(b, b[1:])]
    return dict(zip(b, rise[:1] + rise))


def compute_lost(found, arms):
    """budget -> (share of the compute that the baseline does without at the other recipe's loss,
    half of its 95 % interval, pairs). At equal compute the losses differ by d log L, worth
    d log L / slope of log C; both have few pairs, and each enters with the t of its own."""
    base, other = (log_figures(found, arms, baseline) for baseline in (True, False))
    slope, lost = slopes(found, arms), {}
    for c in sorted(other):
        if d := paired(base[c], other[c]):
            (mean, half), (b, half_b) = interval(d), slope[c]
            lost[c] = (1 - math.exp(mean / b), math.hypot(half / b, half_b * mean / b ** 2), len(d))
    return lost


HEADER = """\
| arm | mean | spread | minus | its mean | difference, 95 % interval | n |
|---|---|---|---|---|---|---|"""
NOTE = "n: seeds. In a row with a difference, all is over the n seeds that its two arms share."


def lines_of_table(found, experiment):
    """A row for each arm that is compared with none, over all of its seeds, and one for each
    comparison, over the seeds that both arms have: so that no row contradicts itself."""
    pairs = list(experiment.comparisons())
    for arm, other in [(arm, "") for arm in experiment.arms if arm not in dict(pairs)] + pairs:
        mine, its = found[arm], found[other or arm]
        seeds = sorted(mine.keys() & its.keys())
        cells = [arm, "not measured", "", other, "", "", "0"]
        if seeds:
            (m, half), values = interval(paired(its, mine)), [mine[s] for s in seeds]
            cells[1] = f"{statistics.fmean(values):.4f}"
            cells[2] = f"{statistics.stdev(values):.4f}" if len(seeds) > 1 else ""
            if other:
                cells[4] = f"{statistics.fmean(its[s] for s in seeds):.4f}"
                cells[5] = f"{m:+.4f} +- {half:.4f}"
            cells[6] = str(len(seeds))
        yield f"| {' | '.join(cells)} |"


def rl_lines(logs):
    """One line for each arm: held-out pass rate at the end, and how far rollout and trainer are
    apart (k3 estimates the KL divergence, per byte)."""
    for arm, paths in logs.items():
        runs = [read_log(p) for p in paths.values()]
        if runs:
            rate = statistics.fmean([r["pass_rate"] for r in rows if "pass_rate" in r][-1]
                                    for rows in runs)
            k3 = [r["k3"] for rows in runs for r in rows if "k3" in r]
            yield (f"{arm}: pass rate {rate:.3f} at the end, k3 {statistics.fmean(k3):.2g} on "
                   f"average and {max(k3):.2g} at most")


def table(place, name):
    """Print an experiment as a Markdown table, with what it was run on and the exact command."""
    e = EXPERIMENTS[name]
    logs = {arm: kept(place, name, arm) for arm in e.arms}
    if not any(logs.values()):
        return print(f"{name}: {e.claim}: not measured")
    found = results(place, name)
    heads = [read_log(log)[0] for runs in logs.values() for log in runs.values()]
    if len({head.get("corpus_sha256") for head in heads}) > 1:
        raise Unusable(f"{name}: its kept runs are on different texts, of which no differences can "
                       "be taken; --runs FOLDER makes all of them anew")
    head = heads[0]
    unit = dict(bpb="bits per byte of validation text",
                reward="mean reward, last quarter of the steps")[e.metric]
    print(f"**{e.claim}** ({unit}; {head['device_name']}, torch {head['torch']}, Python "
          f"{head['python']}; {head['parameters']:,} parameters, {head['active']:,} active; text "
          f"{head['corpus']}, bigram {head['bigram_bpb']:.3f})\n")
    print("\n".join((HEADER, *lines_of_table(found, e))) + f"\n\n{NOTE}")
    if name == "efficiency" and all(found.values()):
        slope = slopes(found, e.arms)
        print("\n| budget | slope of log loss | compute lost, 95 % interval | n |\n"
              + 4 * "|---" + "|")
        for c, (mean, half, n) in compute_lost(found, e.arms).items():
            print("| {} | {:.4f} +- {:.4f} | {:.2%} +- {:.2%} | {} |".format(
                c, *slope[c], mean, half, n))
    if e.metric == "reward":
        print("\n" + "\n".join(rl_lines(logs)))
    print(f"\n`{head['command']}`\n")


# ------------------------------------------------------------------------------------- command line
def begin(place):
    """Unusable or train.Refused where no run could work: before any of them has begun."""
    for device in place.devices:
        train.pick_device(device)
    try:
        load_corpus(place.data or None)
        place.runs.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise Unusable(str(error)) from None


def main(argv=None):
    from data import measure
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("name", nargs="+", choices=[*EXPERIMENTS, *measure.MEASUREMENTS])
    p.add_argument("--device", nargs="+", help="default: cpu")
    p.add_argument("--jobs", type=int, default=1, help="runs at a time on each device")
    p.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    p.add_argument("--seeds", type=int, nargs="+", help="default: those of the experiment")
    p.add_argument("--data", default="", help="as in train.py")
    p.add_argument("--runs", type=Path, default=HERE / "runs",
                   help="where logs are kept; a new folder makes all runs anew, in it")
    p.add_argument("--size", choices=SIZES, help="gpu on a GPU, else cpu; of tables, all")
    p.add_argument("--smoke", action="store_true", help="a minute on a CPU; logs go to out/")
    p.add_argument("--table", action="store_true", help="print the kept results, run nothing")
    args = p.parse_args(argv)
    if args.jobs < 1:
        p.error(f"--jobs {args.jobs}: must be at least 1")
    if not all(0 <= seed < 100 for seed in args.seeds or ()):
        p.error(f"--seeds {' '.join(map(str, args.seeds))}: must be 0 to 99")
    all_sizes = args.table and not (args.smoke or args.size or args.device)
    devices = tuple(args.device or ["cpu"])
    size = "smoke" if args.smoke else args.size or ("gpu" if "cuda" in devices[0] else "cpu")
    place = Place(size, devices, None if args.table else args.data, runs=args.runs)
    if args.runs != HERE / "runs":
        place.work = args.runs / "work"
    elif args.smoke:
        place.runs = place.work / "kept"
    names, failed = [n for n in args.name if n in EXPERIMENTS], 0
    try:
        if not args.table:
            begin(place)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs end too
            failed = run(place, names, args.seeds or (0, 1) * args.smoke, args.jobs, args.minutes)
        for name in args.name:
            for size in all_sizes and sizes_kept(place, name) or [place.size]:
                if name in names:
                    table(replace(place, size=size), name)
                else:
                    measure.main(name, replace(place, size=size), args.table)
    except (Unusable, train.Refused) as fault:
        print(f"experiments.py: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("experiments.py: stopped; the runs have saved, and the same command goes on",
              file=sys.stderr)
        return 130
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
