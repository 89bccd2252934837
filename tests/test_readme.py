"""The README and the workshop against the tree: what they name exists, what they count is counted.

`python tests/test_readme.py --write` brings line counts, results and the worked example up to date.
"""
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import quant  # noqa: E402
import train  # noqa: E402
from data import experiments  # noqa: E402

README = ROOT / "README.md"
TEXTS = {name: (ROOT / name).read_text() for name in ("README.md", "data/workshop.md")}


# ------------------------------------------------------------------------------- what the tree says
def line_count(name):
    return f"{len((ROOT / name).read_text().splitlines()):,}"


def evaluations(precision, seed):
    """The evaluations of RL in a published run, the first one being before its first step."""
    log = ROOT / "data" / "runs" / f"cpu-tiny-{precision}-seed{seed}.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [r for r in rows if r.get("stage") == "rl" and "bpb" in r]


def results_row(precision):
    """The row of the results table: three seeds in each cell."""
    runs = [evaluations(precision, seed) for seed in range(3)]
    before, after = [r[0] for r in runs], [r[-1] for r in runs]
    passed = [sum(e["pass_rate"] for e in r[-3:]) / 3 for r in runs]

    def cell(values):
        return " / ".join(f"{v:.3f}".removeprefix("0") for v in values)
    cells = [precision, "0 / 1 / 2", cell(r["bpb"] for r in before), cell(r["bpb"] for r in after),
             cell(r["pass_rate"] for r in before), cell(passed),
             cell(r["pass_at_8"] for r in before), cell(r["pass_at_8"] for r in after)]
    return f"| {' | '.join(cells)} |"


def example_rows():
    """What becomes of quant.EXAMPLE: forward in NVFP4, backward in MXFP8 along the other axis."""
    q = quant.quantize(quant.EXAMPLE, "nvfp4")
    scale, decoded = (q.scales.float() * q.outer).item(), q.dequantize()
    codes = [c for byte in q.codes.tolist() for c in (byte & 15, byte >> 4)]
    again = [quant.cast(decoded.repeat(32, 1), "mxfp8", axis=-2, rounding="stochastic", seed=i)[0]
             for i in range(100)]
    for i, x in enumerate(quant.EXAMPLE.tolist()):
        backward = sorted({a[i].item() + 0.0 for a in again}, key=abs)
        yield (f"| {x:g} | {x / scale:.3f} | {decoded[i] / scale:g} | {codes[i]:x} "
               f"| {decoded[i]:g} | {' or '.join(f'{b:g}' for b in backward)} |\n")


def up_to_date(text):
    """The README with all that can be computed computed."""
    text = re.sub(r"\[([\w./]+)\]\(\1\) \| [\d,]+ \|",
                  lambda m: f"[{m[1]}]({m[1]}) | {line_count(m[1])} |", text)
    text = re.sub(r"^\| (bf16|mxfp8|nvfp4) \| 0 / 1 / 2 \|.*$",
                  lambda m: results_row(m[1]), text, flags=re.M)
    return re.sub(r"(\| x \| x / 9 \|.*\n\|[-|]+\n)(?:\|.*\n)*",
                  lambda m: m[1] + "".join(example_rows()), text)


DIFFERENCE, SHARE = r"[+-]\.\d{4} \(\+-\.\d{4}\)", r"[\d.]+ % \(\+-[\d.]+\)"


def short(figure):
    """+0.0063 as the README writes it, +.0063."""
    return re.sub(r"\b0\.", ".", figure)


def differences(place, name):
    """(+.0063 (+-.0013), pairs) of each comparison of an experiment whose runs are kept."""
    found = experiments.results(place, name)
    for arm, other in experiments.EXPERIMENTS[name].comparisons():
        if d := experiments.paired(found[other], found[arm]):
            yield short("{:+.4f} (+-{:.4f})".format(*experiments.interval(d))), str(len(d))


def claims(size):
    """NAMES -> (what is seen, pairs) in the table of claims of a size; rows of a NAME joined."""
    section = README.read_text().split("\n## Claims, measured")[1].split("\n## ")[0]
    gpu, cpu = section.split("**On a CPU**")
    found = {}
    table = gpu if size == "gpu" else cpu
    for cell, seen, pairs in re.findall(r"^\|.+\|(.+)\|(.+)\|(.*)\|$", table, re.M):
        names = tuple(re.findall(r"`([\w-]+)`", cell))
        found[names] = found.get(names, ("",))[0] + seen, pairs
    return {names: row for names, row in found.items()
            if names and {*names} <= {*experiments.EXPERIMENTS}}


# -------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("size", ["gpu", "cpu"])
def test_a_row_of_the_claims_has_the_differences_of_its_logs_in_their_order(size):
    place, rows = experiments.Place(size, data=None), claims(size)
    assert {name for names in rows for name in names} == {
        name for name in experiments.EXPERIMENTS if size in experiments.sizes_kept(place, name)}
    for names, (seen, pairs) in rows.items():
        figures, counts = zip(*(d for name in names for d in differences(place, name)))
        assert re.findall(DIFFERENCE, seen) == [*figures], names
        assert re.findall(r"\d+", pairs) == [*dict.fromkeys(counts)], names


def test_the_shares_of_the_compute_are_those_of_the_logs():
    found = experiments.results(experiments.Place("gpu", data=None), "efficiency")
    lost = experiments.compute_lost(found, experiments.EXPERIMENTS["efficiency"].arms)
    assert re.findall(SHARE, claims("gpu")["efficiency",][0]) == [
        short(f"{100 * mean:.1f} % (+-{100 * half:.1f})") for mean, half, _ in lost.values()]


def test_counts_results_and_the_worked_example_are_those_of_the_tree():
    """Where this fails: python tests/test_readme.py --write."""
    text = README.read_text()
    assert len(re.findall(r"\) \| [\d,]+ \|", text)) >= 11
    assert len(re.findall(r"^\| \w+ \| 0 / 1 / 2 \|", text, re.M)) == 3
    assert text == up_to_date(text)


def test_the_first_screen_has_a_sentence_a_picture_a_command_a_test_and_the_hardware():
    lines = README.read_text().splitlines()
    at = {what: next(i for i, line in enumerate(lines, 1) if what in line)
          for what in ("data/loss.svg", "python train.py", "pytest", "GB200, GB300")}
    assert at["python train.py"] <= 20 and max(at.values()) <= 40


def flags_of(program):
    """The flags that a program of the repository takes."""
    if program == "train.py":
        return {train.flag(f.name) for f in dataclasses.fields(train.Config)} | {"--help"}
    return set(re.findall(r'"(--[a-z][a-z-]*)"', (ROOT / program).read_text()))


def test_every_program_that_is_named_exists_and_takes_the_flags_that_follow():
    launchers = {"--nproc_per_node", "--standalone"}                # torchrun's
    for text in TEXTS.values():
        for line in text.splitlines():
            named = re.findall(r"(?:python|torchrun[^`#]*?) ([\w/]+\.py)([^`#]*)", line)
            for program, rest in named:
                assert (ROOT / program).is_file(), line
                flags = set(re.findall(r"--[a-z][\w-]*", rest))
                assert flags <= flags_of(program) | launchers, line


@pytest.mark.parametrize("name", TEXTS)
def test_every_flag_that_is_named_is_one_of_train_py_or_of_another_program(name):
    programs = [p.relative_to(ROOT) for p in (*ROOT.glob("*.py"), *ROOT.glob("data/*.py"))]
    known = set().union(*(flags_of(str(p)) for p in (*programs, "tests/test_readme.py")))
    known |= {"--nproc_per_node", "--standalone"}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", TEXTS[name]))
    assert named and named <= known, named - known


@pytest.mark.parametrize("name", TEXTS)
def test_every_path_that_is_named_exists(name):
    text = TEXTS[name]
    links = [t for t in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in t]
    paths = re.findall(r"`((?:data|tests)/[\w./-]*|\w+\.(?:py|txt|md))`", text)
    paths += re.findall(r"(?<![\w/`.-])((?:data|tests)/[\w./-]*\w)", text)
    assert links and all(((ROOT / name).parent / t).exists() for t in links)
    assert paths and all((ROOT / p).exists() for p in paths), [
        p for p in paths if not (ROOT / p).exists()]


def test_headings_that_are_linked_exist():
    text = README.read_text()
    headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
                for h in re.findall(r"^#+ (.+)$", text, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_every_recipe_is_named_and_every_function_in_the_sources_exists():
    text = README.read_text()
    assert [name for name in quant.RECIPES if f"`{name}`" not in text] == []
    import model
    for module, name in re.findall(r"`(quant|model|train)\.([\w.]+)`", text):
        if name != "py":
            thing = dict(quant=quant, model=model, train=train)[module]
            for part in name.split("."):
                thing = getattr(thing, part)


@pytest.mark.parametrize("name", [name for name in ("quant.py", "model.py", "moe_comm.py")
                                  if "__main__" in (ROOT / name).read_text()])
def test_a_file_run_by_itself_is_a_lesson_of_one_screen(name):
    run = subprocess.run([sys.executable, ROOT / name], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert 10 <= len(lines) <= 45 and max(map(len, lines)) <= 100


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("test_readme.py: the only flag is --write; to test, use pytest")
    README.write_text(up_to_date(README.read_text()))
