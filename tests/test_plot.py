"""Pictures: labels do not overlap, colours can be read, bad input is one sentence."""
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from data import plot

ROOT = Path(__file__).resolve().parent.parent
RUNS = sorted((ROOT / "data" / "runs").glob("cpu-tiny-*.jsonl"))
H200 = [run for pattern in ("convergence/bf16-*", "efficiency/mxfp8-x1-*", "efficiency/nvfp4-x1-*")
        for run in sorted((ROOT / "data" / "runs").glob(pattern))]
RL = [run for arm in ("mxfp8", "nvfp4", "nvfp4-tensor")
      for run in sorted((ROOT / "data" / "runs" / "rl").glob(f"{arm}-seed*"))]


def luminance(colour):
    parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_every_colour_can_be_read_on_a_light_and_on_a_dark_page(page):
    for colour in plot.ANY + plot.LIGHT + plot.DARK:
        assert contrast(colour, page) >= 3


@pytest.mark.parametrize("wanted", [[], [50], [50, 50, 50, 50], [0, 1, 99, 100], [100] * 5,
                                    [10, 90, 11, 89, 12]])
def test_labels_keep_their_order_their_distance_and_the_edges(wanted):
    places = plot.spread(wanted, 15, 0, 100)
    ordered = sorted(places)
    assert all(b - a >= 15 - 1e-9 for a, b in zip(ordered, ordered[1:]))
    assert all(0 <= p <= 100 for p in places)
    assert sorted(range(len(wanted)), key=lambda i: (wanted[i], i)) == sorted(
        range(len(wanted)), key=lambda i: places[i])


@pytest.mark.parametrize("low, high", [(0, 1), (0.31, 0.97), (-60, 60), (1.9, 4.1), (0, 647),
                                       (0, 20000), (0.99999, 1.00001)])
def test_ticks_are_few_round_and_inside(low, high):
    found = plot.ticks(low, high)
    assert 3 <= len(found) <= 8
    assert all(low - 1e-9 <= v <= high + 1e-9 for v in found)


def drawing(*args, tmp_path):
    out = tmp_path / "picture.svg"
    assert plot.main([*map(str, args), "-o", str(out)]) == 0
    ElementTree.fromstring(out.read_text())                 # well-formed
    return out.read_text()


def test_published_runs_of_the_same_size_are_drawn_beside_yours(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "log.jsonl").write_text(RUNS[0].read_text())
    beside = drawing(mine, "--what", *plot.METRICS, tmp_path=tmp_path)
    assert beside.count(">mine: bf16<") == beside.count(">nvfp4<") == len(plot.METRICS)
    alone = drawing(mine, "--alone", "--what", "loss", tmp_path=tmp_path)
    assert ">mine: bf16<" in alone and ">nvfp4<" not in alone


def test_the_line_is_the_mean_of_the_seeds_and_the_band_their_range():
    runs = [plot.Run("a", {"seed": s}, 1, [dict(stage="rl", step=1, reward=s)], False)
            for s in (1, 2, 6)]
    (label, group), = plot.groups(runs)
    assert label == "a and 2 more"
    assert plot.mean_and_band(group, plot.METRICS["reward"]) == ([(1, 3)], [(1, 1, 6)])


def test_a_last_row_that_is_being_written_is_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(RUNS[0].read_text()[:-30])
    assert len(plot.read_run(log).rows) == len(plot.read_run(RUNS[0]).rows) - 1


@pytest.mark.parametrize("text, words", [
    (None, "neither a log.jsonl nor a run's folder"), ("", "is no log"), ("[]\n", "is no log"),
    ('{"config": {}}\nrubbish\n', "line 2 is no JSON"), ('{"config": {}}\n', "none of the runs"),
    ('{"config": {}, "parameters": []}\n{"stage": "pretrain", "step": "x", "text_loss": 1}\n',
     "none of the runs"),
])
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, capsys, text, words):
    log = tmp_path / "run.jsonl"
    if text is not None:
        log.write_text(text)
    assert plot.main([str(log), "-o", str(tmp_path / "x.svg")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("plot.py: ") and error.count("\n") == 1
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize("args", [[], ["x", "--what", "weather"], ["x", "--wat", "loss"]])
def test_a_wrong_flag_is_one_sentence_and_exit_code_2(capsys, args):
    assert plot.main(args) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name, args", [
    ("loss", [*RUNS, "--what", "loss", "reward"]), ("block", ["block"]), ("bias", ["bias"]),
    ("compute", ["compute"]), ("h200", [*H200, "--what", "loss", "bpb"]),
    ("rl", [*RL, "--alone", "--what", "reward", "pass_rate"])])
def test_the_pictures_in_the_tree_are_what_the_program_draws(tmp_path, name, args):
    """But for the last digit: another machine may sum in another order."""
    drawn, kept = drawing(*args, tmp_path=tmp_path), (ROOT / "data" / f"{name}.svg").read_text()
    number = re.compile(r"-?\d+(?:\.\d+)?")
    assert number.sub("", drawn) == number.sub("", kept)
    found, wanted = (list(map(float, number.findall(t))) for t in (drawn, kept))
    assert all(abs(a - b) < 0.3 for a, b in zip(found, wanted))


def test_curves_are_drawn_without_torch():
    """As a reader of somebody else's log would: with Python alone."""
    code = ("import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
            "from data import plot; sys.exit(plot.main([sys.argv[1], '-o', sys.argv[2]]))")
    done = subprocess.run([sys.executable, "-c", code, str(RUNS[0]), "/dev/null"], cwd=ROOT)
    assert done.returncode == 0


def test_logs_in_the_tree_are_named_after_what_they_hold():
    for file in RUNS:
        config = json.loads(file.read_text().split("\n", 1)[0])["config"]
        assert file.stem == f"cpu-tiny-{config['precision']}-seed{config['seed']}"


def test_a_precision_has_one_colour_in_every_picture():
    assert plot.numbered(["bf16", "mxfp8", "nvfp4"]) == [0, 1, 2]
    assert plot.numbered(["mxfp8", "mine: nvfp4", "nvfp4", "nvfp4-tensor"]) == [1, 3, 2, 4]
    assert plot.numbered(["mine", "yours"]) == [0, 1]
