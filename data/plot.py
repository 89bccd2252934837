"""Pictures of runs and of rounding: SVG written by hand, for light and for dark pages.

    python data/plot.py out                               # a run beside the published ones
    python data/plot.py out-1 out-2 --alone --what bpb reward
    python data/plot.py block                             # a block of 16 numbers being rounded
    python data/plot.py bias                              # rounding to nearest and stochastically
    python data/plot.py compute                           # loss over compute, of the kept runs

Runs that differ in nothing but the seed are drawn as their mean, with a band from the lowest to the
highest. Published runs are those in data/runs; of these, the ones of the same size and task are
drawn beside yours. (A run's folder with the name of a picture, block, is ./block here.)
"""
import argparse
import itertools
import json
import math
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "data" / "runs"


class Refused(Exception):
    """Input that the program does not take; its text is the one sentence to print."""


@dataclass(frozen=True)
class Metric:
    """A curve that a log holds: which field of the rows of which stage."""
    field: str
    stage: str
    title: str
    skip: float = 0.0        # share of the steps at the start that may leave the picture at the top


METRICS = {
    "loss": Metric("text_loss", "pretrain", "Training loss on text, nats per byte", skip=0.05),
    "bpb": Metric("bpb", "pretrain", "Validation text, bits per byte"),
    "reward": Metric("reward", "rl", "Mean reward of an RL step"),
    "pass_rate": Metric("pass_rate", "rl", "Pass rate on held-out problems"),
    "load": Metric("load", "pretrain", "Expert load, largest over mean"),
}

# ---------------------------------------------------------------------------------------------- SVG
# A colour is a class on a group; shapes in it use currentColor. The first set stands where no page
# colour is known. All three have a contrast of 3 or more on white and on a dark page, so that a
# picture stays readable where the page and the reader's settings disagree.
ANY = "#797979 #2078dd #bf5e0a #148962 #cf3e99 #8c61d7 #89790f #db4035 #11849c".split()
LIGHT = "#656565 #1a65b9 #9f4f08 #117453 #b22d81 #7945d1 #73660d #bf2c22 #0e6f82".split()
DARK = "#929292 #4f95e6 #e7720c #18a777 #da6db2 #a481e0 #a69312 #e46f67 #15a0bc".split()
GREY, COLOURS = 0, len(ANY) - 1          # class c0 is the grey of axes; c1, c2 ... are for curves
FONT = 12
CHARACTER = 6.9                          # an upper bound of a character's mean width, pixels


def style():
    def colours(values):
        return "".join(f".c{i}{{color:{v}}}" for i, v in enumerate(values))
    return ("text{font:12px system-ui,sans-serif;fill:currentColor}"
            "path,line,rect,circle{stroke:currentColor;fill:none}"
            ".solid{fill:currentColor;stroke:none}.thin{stroke-width:.6;opacity:.55}"
            f".band{{fill:currentColor;stroke:none;opacity:.2}}{colours(ANY)}"
            f"@media(prefers-color-scheme:light){{{colours(LIGHT)}}}"
            f"@media(prefers-color-scheme:dark){{{colours(DARK)}}}")


def document(width, height, title, parts):
    body = "\n".join(parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img" class="c{GREY}">\n'
            f"<title>{escape(title)}</title><style>{style()}</style>\n{body}\n</svg>\n")


def text(x, y, string, anchor="start", colour=GREY):
    """`anchor`: which part of the string is at x: start, middle or end. y is its middle."""
    return (f'<text class="c{colour}" x="{x:.1f}" y="{y + FONT / 3:.1f}" '
            f'text-anchor="{anchor}">{escape(string)}</text>')


def line(x1, y1, x2, y2, colour=GREY, kind="", width=1.0):
    return (f'<line class="c{colour} {kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" '
            f'y2="{y2:.1f}" stroke-width="{width:g}"/>')


def path(points, colour, kind="", width=1.8, dash=""):
    steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return (f'<path class="c{colour} {kind}" d="M{steps}" stroke-width="{width:g}" '
            f'stroke-linejoin="round"' + (f' stroke-dasharray="{dash}"' if dash else "") + "/>")


def dot(x, y, colour, kind="solid", radius=3.5):
    return f'<circle class="c{colour} {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"/>'


def ticks(low, high, most=7):
    """Round numbers from low to high, `most` of them at most."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(f * power for f in (1, 2, 2.5, 5, 10, 20) if (high - low) / (f * power) < most)
    whole = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [round(i * step, 12) for i in whole]


def spread(wanted, gap, low, high):
    """Places near the wanted ones, in [low, high] where they fit, none closer than gap."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [wanted[i] for i in order]
    for _ in range(100):                                    # neighbours push each other apart
        for k in range(1, len(places)):
            push = max(0.0, gap - (places[k] - places[k - 1])) / 2
            places[k - 1], places[k] = places[k - 1] - push, places[k] + push
    for k in range(len(places)):                            # then the upper edge, exactly ...
        places[k] = max(places[k], places[k - 1] + gap if k else low)
    for k in reversed(range(len(places))):                  # ... and the lower edge
        places[k] = min(places[k], places[k + 1] - gap if k + 1 < len(places) else high)
    return [place for _, place in sorted(zip(order, places))]


@dataclass
class Axes:
    """A rectangle of the picture in which data are drawn; log: both axes are logarithmic."""
    left: float
    top: float
    width: float
    height: float
    xs: tuple
    ys: tuple
    log: bool = False

    def at(self, x, y):
        """Pixels of a data point."""
        (x0, x1), (y0, y1) = self.xs, self.ys
        if self.log:
            x, x0, x1, y, y0, y1 = (math.log(max(v, 1e-30)) for v in (x, x0, x1, y, y0, y1))
        return (self.left + self.width * (x - x0) / (x1 - x0),
                self.top + self.height * (y1 - y) / (y1 - y0))

    def frame(self, title, x_title, x_ticks=None, y_ticks=None, percent=False):
        bottom, parts = self.top + self.height, [text(self.left, self.top - 16, title)]
        parts.append(f'<clipPath id="{self.clip()}"><rect x="{self.left:g}" y="{self.top:g}" '
                     f'width="{self.width:g}" height="{self.height:g}"/></clipPath>')
        for v in y_ticks or ticks(*self.ys):
            y = self.at(self.xs[0], v)[1]
            label = f"{v:.3%}".rstrip("0%").rstrip(".") + " %" if percent else f"{v:g}"
            parts += [line(self.left, y, self.left + self.width, y, kind="thin"),
                      text(self.left - 6, y, label, "end")]
        for v in x_ticks or ticks(*self.xs):
            x = self.at(v, self.ys[0])[0]
            parts += [line(x, bottom, x, bottom + 4), text(x, bottom + 14, f"{v:g}", "middle")]
        parts.append(line(self.left, bottom, self.left + self.width, bottom))
        return parts + [text(self.left + self.width / 2, bottom + 32, x_title, "middle")]

    def clip(self):
        return f"axes-{self.left:.0f}"

    def inside(self, shape):
        """A shape of which nothing shows above, below or beside the axes."""
        return f'<g clip-path="url(#{self.clip()})">{shape}</g>'

    def curve(self, points, colour, dash="", width=1.8):
        return self.inside(path([self.at(*p) for p in points], colour, "", width, dash))

    def band(self, points, colour):
        """The area between low and high of points (x, low, high)."""
        edge = [(x, high) for x, _, high in points] + [(x, low) for x, low, _ in points[::-1]]
        return self.inside(path([self.at(*p) for p in edge], colour, "band"))

    def end_labels(self, named):
        """Labels (text, last point, colour) right of the axes, at their curves' ends."""
        places = spread([self.at(*p)[1] for _, p, _ in named], FONT + 2.5,
                        self.top, self.top + self.height)
        parts, x = [], self.left + self.width + 14
        for (label, point, colour), y in zip(named, places):
            end = self.at(*point)
            parts += [line(end[0] + 2, end[1], x - 3, y, colour, "thin"),
                      text(x, y, label, colour=colour)]
        return parts


# --------------------------------------------------------------------------------------------- runs
@dataclass
class Run:
    name: str
    config: dict
    parameters: int
    rows: list
    published: bool

    @property
    def precision(self):
        return str(self.config.get("precision", ""))

    @property
    def kind(self):
        """Equal for runs that can be compared."""
        return str(self.parameters), str(self.config.get("task"))

    def points(self, metric):
        """[(step, value)] that the log holds."""
        found = {r["step"]: r[metric.field] for r in self.rows
                 if r.get("stage") == metric.stage and metric.field in r
                 and isinstance(r.get("step"), int)}
        return {x: y for x, y in found.items()
                if isinstance(y, (int, float)) and math.isfinite(y)}

    def likeness(self):
        """Equal for runs that differ in nothing but the seed and where they lie."""
        where = ("seed", "out", "resume", "device")
        kept = {k: v for k, v in self.config.items() if k not in where}
        return self.published, json.dumps(kept, sort_keys=True)


def read_run(where):
    """The run in a folder, or in a log.jsonl. A last line that is still being written is left."""
    file = Path(where)
    file = file / "log.jsonl" if file.is_dir() else file
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        raise Refused(f"{where}: neither a log.jsonl nor a run's folder that holds one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file} could not be read: {error}") from None
    rows = []
    for number, row in enumerate(lines, 1):
        try:
            rows.append(json.loads(row))
        except ValueError:
            if number == len(lines) and not row.endswith("\n"):
                break
            raise Refused(f"{file}: line {number} is no JSON") from None
    header = rows[0] if rows and isinstance(rows[0], dict) else {}
    if not isinstance(header.get("config"), dict) or not all(isinstance(r, dict) for r in rows):
        raise Refused(f"{file}: is no log of train.py, whose first line holds the configuration")
    name = file.parent.resolve().name if file.name == "log.jsonl" else file.stem
    return Run(name, header["config"], header.get("parameters", 0), rows[1:],
               PUBLISHED in file.resolve().parents)


def with_published(runs):
    """`runs` and the published ones of the same size and task."""
    kinds = {r.kind for r in runs}
    given = {r.name for r in runs if r.published}
    others = [read_run(file) for file in sorted(PUBLISHED.glob("*.jsonl"))
              if '"config"' in file.open().readline()]          # the others are measurements
    return runs + [r for r in others if r.kind in kinds and r.name not in given]


def groups(runs):
    """[(label, runs)]: the published ones first, seeds together."""
    found = {}
    for run in sorted(runs, key=lambda r: (not r.published, r.name if r.published else "")):
        found.setdefault(run.likeness(), []).append(run)
    precisions = [g[0].precision for g in found.values() if g[0].published]

    def label(group):
        first, precision = group[0], group[0].precision
        if first.published and precisions.count(precision) == 1:
            return precision
        name = first.name if len(first.name) < 25 else first.name[:11] + "…" + first.name[-12:]
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        return f"{name}{more}" + ("" if precision in name else f": {precision}")
    return [(label(g), g) for g in found.values()]


def mean_and_band(group, metric):
    """([(step, mean)], [(step, lowest, highest)]) over the seeds, at the steps that all have."""
    curves = [c for c in (run.points(metric) for run in group) if c]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    values = [[c[x] for c in curves] for x in steps]
    mean = [(x, sum(v) / len(v)) for x, v in zip(steps, values)]
    return mean, [(x, min(v), max(v)) for x, v in zip(steps, values)] if len(curves) > 1 else []


def thinned(points, most=200):
    """At most `most` points: means of neighbours."""
    size = -(-len(points) // most) or 1
    chunks = [points[i:i + size] for i in range(0, len(points), size)]
    return [tuple(sum(column) / len(chunk) for column in zip(*chunk)) for chunk in chunks]


def limits(curves, metric):
    """((x0, x1), (y0, y1)) with some air; what the metric skips sets no limit."""
    last = max(x for mean, _ in curves for x, *_ in mean)
    seen = [y for mean, band in curves for x, *ys in mean + band
            if x >= metric.skip * last for y in ys]
    low, high = min(seen), max(seen)
    air = 0.05 * (high - low) or abs(high) or 1.0
    first = min(x for mean, _ in curves for x, *_ in mean)
    return (0 if first < 0.2 * last else first, max(last, first + 1)), (low - air, high + air)


def numbered(labels):
    """A number for each label, from which its colour follows: the same in every picture for the
    three precisions, and another for what stands beside them."""
    fixed = ("bf16", "mxfp8", "nvfp4")
    free = itertools.count(3 if {*fixed} & {*labels} else 0)
    return [fixed.index(label) if label in fixed else next(free) for label in labels]


def panel(named, metric, left, width, height):
    """One metric of all groups: its parts, and the pixels that its labels need."""
    numbers = numbered([label for label, _ in named])
    drawn = [(label, i, 1.6 if group[0].published else 2.4,
              *map(thinned, mean_and_band(group, metric)))
             for i, (label, group) in zip(numbers, named)]
    drawn = [d for d in drawn if d[3]]
    if not drawn:
        raise Refused(f"none of the runs has {metric.field} in stage {metric.stage} at a step that "
                      "its seeds share")
    axes = Axes(left, 40, width, height, *limits([d[3:] for d in drawn], metric))
    parts = axes.frame(metric.title, "RL step" if metric.stage == "rl" else "pretraining step")
    parts += [axes.band(band, 1 + i % COLOURS) for _, i, _, _, band in drawn if band]
    for _, i, width, mean, _ in drawn:
        parts.append(axes.curve(mean, 1 + i % COLOURS, "5 3" if i >= COLOURS else "", width))
    labels = [(label, mean[-1], 1 + i % COLOURS) for label, i, _, mean, _ in drawn]
    return (parts + axes.end_labels(labels),
            20 + CHARACTER * max(len(label) for label, _, _ in labels))


def runs_picture(runs, what, width=330, height=230):
    """SVG of one panel for each metric, side by side."""
    named, parts, left = groups(runs), [], 60
    for name in what:
        drawn, room = panel(named, METRICS[name], left, width, height)
        parts, left = parts + drawn, left + width + room + 60
    seeds = max(len(group) for _, group in named)
    note = f"Line: mean of up to {seeds} seeds; band: lowest to highest." if seeds > 1 else ""
    parts.append(text(10, height + 92, note))
    return document(max(left - 50, 2 * 10 + CHARACTER * len(note)), height + (105 if note else 80),
                    ", ".join(METRICS[name].title for name in what), parts)


# ----------------------------------------------------------------------------------------- rounding
def block_picture():
    """One block of 16: each number, the grid that its scale makes, and where it goes."""
    import quant
    q = quant.quantize(quant.EXAMPLE, "nvfp4")
    scale, decoded = (q.scales.float() * q.outer).item(), q.dequantize().tolist()
    grid = [s * v * scale for v in quant.E2M1 for s in (1, -1)]
    axes = Axes(70, 40, 620, 300, (-0.6, 15.6), (-60, 60))
    parts = [text(70, 18, f"16 numbers that share a scale of {scale:g} = 54 / 6. "
                          "Ring: the number. Dot: where it is rounded to.")]
    for value in sorted(set(grid)):
        x, y = axes.at(axes.xs[0], value)
        parts.append(line(x, y, x + axes.width, y, kind="thin"))
        if abs(value / scale) != 0.5:                   # too close to 0 for labels of their own
            parts += [text(x - 8, y, f"{value:g}", "end"),
                      text(x + axes.width + 8, y, f"{value / scale:g}")]
    right = axes.left + axes.width + 8
    parts += [text(axes.left - 8, 34, "decoded", "end"), text(right, 34, "element")]
    for i, (x, d) in enumerate(zip(quant.EXAMPLE.tolist(), decoded)):
        (px, start), (_, end) = axes.at(i, x), axes.at(i, d)
        parts += [line(px, start, px, end, 2, width=2), dot(px, start, 1, "", 5),
                  dot(px, end, 2), text(px, 356, f"{x:g}", "middle", 1),
                  text(px, 372, f"{d:g}", "middle", 2)]
    return document(750, 390, "A block of 16 numbers rounded to NVFP4", parts)


def one_number(axes):
    """What numbers from 0 to 6 become on average."""
    import torch
    import quant
    x = torch.linspace(0, 6, 121)
    u = quant.uniform(0, torch.arange(1000, dtype=torch.int32)[:, None],
                      torch.arange(121, dtype=torch.int32))
    nearest = quant.round_elements(x, quant.NVFP4)
    mean = quant.round_elements(x.expand(1000, -1).contiguous(), quant.NVFP4, u).mean(0)
    parts = axes.frame("What 4 bits make of a number, on average", "number")
    for y, colour, name in ((nearest, 2, "nearest"), (mean, 1, "stochastic")):
        parts.append(axes.curve(list(zip(x.tolist(), y.tolist())), colour))
        at = axes.at(*((3.2, 2.0) if name == "nearest" else (1.6, 3.2)))
        parts.append(text(*at, f"{name}", colour=colour))
    return parts


def second_copies(axes):
    """The mean of n backward copies of a weight, against the weight of the forward pass."""
    import torch
    import quant
    w = torch.randn(1, 64, 256, generator=torch.Generator().manual_seed(0))
    counts, named, parts = [2 ** i for i in range(9)], [], []
    parts += axes.frame("Backward weights, mean of n steps: distance from the forward ones",
                        "n", counts[::2], (0.002, 0.005, 0.01, 0.02, 0.05, 0.1), percent=True)
    recipes = ("nvfp4-independent", "nvfp4-original", "nvfp4-nearest", "nvfp4")
    for colour, name in zip((4, 3, 2, 1), recipes):
        total, points = 0, []
        for n in range(1, counts[-1] + 1):
            weight = quant.prepare(w, quant.RECIPES[name].experts, seed=n)
            total = total + weight.backward
            if n in counts:
                error = (total / n - weight.forward).norm() / weight.forward.norm()
                points.append((n, error.item()))
        parts.append(axes.curve(points, colour))
        named.append((name, points[-1], colour))
    return parts + axes.end_labels(named)


def bias_picture():
    """Rounding to nearest errs the same way at each step; stochastic rounding averages out."""
    return document(930, 330, "Rounding to nearest and stochastically", [
        *one_number(Axes(40, 40, 300, 230, (0, 6.2), (0, 6.2))),
        *second_copies(Axes(450, 40, 330, 230, (1, 256), (0.0015, 0.2), log=True))])


# --------------------------------------------------------------------------------------- the claims
def compute_picture():
    """The loss of two recipes over compute, and their differences pair by pair."""
    from data import experiments
    place, arms = experiments.Place("gpu", data=None), experiments.EXPERIMENTS["efficiency"].arms
    try:
        found = experiments.results(place, "efficiency")
    except experiments.Unusable as fault:
        raise Refused(str(fault)) from None
    found = {n: runs for n, runs in found.items() if runs}
    if not {"mxfp8-x0.25", "nvfp4-x0.25"} <= found.keys():
        raise Refused("compute: data/runs has no runs of the experiment efficiency")
    left = Axes(60, 40, 330, 260, (0.2, 2.5), (0.8, 1.25), log=True)
    right = Axes(540, 40, 300, 260, (0.1, 1.2), (-0.012, 0.015))
    budgets = sorted({arms[n].budget for n in found})
    parts = left.frame("Validation text, bits per byte", "budget: 1 is 82.6 million bytes", budgets,
                       (0.8, 0.9, 1.0, 1.1, 1.2))
    parts += right.frame("NVFP4 minus MXFP8, same seed", "budget", (0.25, 0.5, 1))
    named = []
    for precision, colour in (("mxfp8", 2), ("nvfp4", 3)):
        mean = [(b, sum(v.values()) / len(v)) for b in budgets
                if (v := found.get(f"{precision}-x{b:g}"))]
        parts += [left.curve(mean, colour), *(dot(*left.at(*p), colour) for p in mean)]
        named.append((precision, mean[-1], colour))
    for b in budgets:
        d = experiments.paired(*(found.get(f"{p}-x{b:g}", {}) for p in ("mxfp8", "nvfp4")))
        if len(d) > 1:
            mean, half = experiments.interval(d)
            parts += [right.inside(dot(*right.at(b, v), 3, "thin", 3)) for v in d]
            x, y = right.at(b, mean)
            low, high = (right.at(b, mean + sign * half)[1] for sign in (-1, 1))
            parts += [dot(x + 10, y, 3), right.inside(line(x + 10, low, x + 10, high, 3))]
    _, zero = right.at(1, 0)
    parts += [line(right.left, zero, right.left + right.width, zero), *left.end_labels(named),
              text(10, 356, "Right, rings: pairs of runs. Dots: their mean, its 95 % interval.")]
    return document(860, 370, "Loss over compute in MXFP8 and NVFP4", parts)


# ------------------------------------------------------------------------------------- command line
PICTURES = {"block": block_picture, "bias": bias_picture, "compute": compute_picture}


def parse(argv):
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise Refused(message)
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
               allow_abbrev=False)
    p.add_argument("runs", nargs="+", metavar="RUN",
                   help=f"a run's folder or its log.jsonl; or one of {', '.join(PICTURES)}")
    p.add_argument("-o", "--out", metavar="FILE", help="the SVG to write (default: WHAT.svg)")
    p.add_argument("--what", nargs="+", default=["loss"], choices=METRICS, metavar="WHAT",
                   help=f"the curves: {', '.join(METRICS)} (default: loss)")
    p.add_argument("--alone", action="store_true", help="without the published runs")
    return p.parse_args(argv)


def picture(args):
    """(SVG, the name of its file where none is given)."""
    if len(args.runs) == 1 and args.runs[0] in PICTURES:
        return PICTURES[args.runs[0]](), f"{args.runs[0]}.svg"
    runs = [read_run(r) for r in args.runs]
    runs = runs if args.alone else with_published(runs)
    return runs_picture(runs, args.what), f"{'-'.join(args.what)}.svg"


def main(argv=None):
    """Returns the exit code: 0, or 2 for refused input."""
    try:
        args = parse(argv)
        svg, name = picture(args)
        out = Path(args.out or name)
        try:
            out.write_text(svg, encoding="utf-8")
        except OSError as error:
            raise Refused(f"{out} could not be written: {error.strerror}") from None
        print(out)
        return 0
    except Refused as refusal:
        print(f"plot.py: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
