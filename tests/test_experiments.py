"""The experiments: runs are kept and not repeated, the statistics are right, the biases are."""

import json
import math

import numpy as np
import pytest
import torch

import train
from data import experiments, measure
from data.experiments import EXPERIMENTS, SIZES, Arm, Experiment, Place
from data.prepare import load_corpus
from model import GPT

TEXT = str(experiments.HERE / "task.py")

# A stand-in for train.py: the run named by STOP is interrupted after its first checkpoint.
STUB = '''
import json, os, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
with open(out.parent.parent / "calls.txt", "a") as f:
    f.write(f"{out.name} {'resumed' if '--resume' in sys.argv else 'begun'}\\n")
(out / "checkpoints" / "pretrain-000004").mkdir(parents=True, exist_ok=True)
if out.name == os.environ.get("STOP"):
    sys.exit(130)
data = sys.argv[sys.argv.index("--data") + 1] if "--data" in sys.argv else ""
rows = [dict(config=dict(out=str(out), data=data), corpus="text"),
        dict(stage="pretrain", step=4, bpb=2.5), dict(stage="pretrain", step=8, bpb=2.0)]
(out / "log.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
'''


@pytest.fixture
def place(tmp_path):
    return Place("smoke", work=tmp_path / "work", runs=tmp_path / "runs")


@pytest.fixture
def stub(tmp_path, place, monkeypatch):
    """The calls that the runner has made of the stand-in."""
    (tmp_path / "train.py").write_text(STUB)
    monkeypatch.setattr(experiments, "ROOT", tmp_path)
    calls = place.work / "smoke" / "calls.txt"
    return lambda: calls.read_text().splitlines() if calls.exists() else []


# ----------------------------------------------------------------------------------------- the runs
def test_a_finished_run_is_kept_and_not_repeated(stub, place):
    assert experiments.run(place, ["convergence"], [0, 1], jobs=2) == 0
    assert sorted(stub()) == [f"{arm}-seed{s} begun" for arm in ("bf16", "mxfp8") for s in (0, 1)]
    assert experiments.run(place, ["convergence"], [0, 1]) == 0
    assert len(stub()) == 4
    assert experiments.run(place, ["convergence"], [0, 1, 2]) == 0
    assert len(stub()) == 6


def test_an_interrupted_run_goes_on_and_the_others_are_made(stub, place, monkeypatch):
    monkeypatch.setenv("STOP", "mxfp8-seed0")
    assert experiments.run(place, ["convergence"], [0]) == 1
    assert not place.log("convergence", "mxfp8", 0).exists()
    assert place.log("convergence", "bf16", 0).exists()
    monkeypatch.delenv("STOP")
    assert experiments.run(place, ["convergence"], [0]) == 0
    assert stub() == ["bf16-seed0 begun", "mxfp8-seed0 begun", "mxfp8-seed0 resumed"]


def test_no_run_begins_after_its_minutes(stub, place):
    assert experiments.run(place, ["convergence"], [0, 1], minutes=0) == 0
    assert stub() == []


def test_an_equal_run_of_another_experiment_is_taken(stub, place):
    experiments.run(place, ["convergence"], [0])
    assert place.find("efficiency", "mxfp8-x1", 0) == ("convergence", "mxfp8")
    assert place.find("layers", "mxfp8", 0) is None             # of another shape
    assert place.find("efficiency", "mxfp8-x2", 0) is None      # of another length


def test_a_run_of_an_earlier_definition_is_not_taken(stub, place, monkeypatch):
    experiments.run(place, ["convergence"], [0])
    log = place.log("convergence", "mxfp8", 0)
    _, *rows = log.read_text().splitlines()
    monkeypatch.setitem(SIZES, "smoke", dict(SIZES["smoke"], lr=0.5))
    for lr in (0.5, 0.125):
        log.write_text("\n".join([json.dumps(dict(config=dict(lr=lr))), *rows]))
        assert bool(place.find("convergence", "mxfp8", 0)) == (lr == 0.5)


def test_a_folder_of_other_settings_or_another_text_is_not_resumed(stub, place, monkeypatch):
    monkeypatch.setenv("STOP", "mxfp8-seed0")
    assert experiments.run(place, ["convergence"], [0]) == 1
    state = place.out("convergence", "mxfp8", 0) / "checkpoints" / "pretrain-000004" / "run.json"
    flags = experiments.flags_of(EXPERIMENTS["convergence"].arms["mxfp8"], "smoke")
    monkeypatch.delenv("STOP")
    for changed in (dict(steps=99), dict(data="/a/b/other")):
        config = flags | dict(data="") | changed
        state.write_text(json.dumps(dict(config=config)))
        with pytest.raises(experiments.Unusable, match="other settings or another text"):
            experiments.run(place, ["convergence"], [0])
    state.write_text(json.dumps(dict(config=dict(flags, data=""))))
    assert experiments.run(place, ["convergence"], [0]) == 0
    assert stub()[-1] == "mxfp8-seed0 resumed"


@pytest.mark.parametrize("args, words", [
    (["combine", "--jobs", "0"], "--jobs 0"), (["combine", "--seeds", "-1"], "--seeds -1"),
    (["combine", "--device", "nonsense"], "--device nonsense"),
    (["combine", "--data", "/nowhere"], "/nowhere"), (["weather"], "weather")])
def test_bad_input_is_one_sentence_before_anything_runs(capsys, tmp_path, args, words):
    try:
        code = experiments.main([*args, "--smoke", "--runs", str(tmp_path / "runs")])
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and words in error and "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_a_kept_log_names_no_path_and_has_its_command(stub, place):
    place.data = "/a/b/text"
    experiments.run(place, ["convergence"], [0])
    text = place.log("convergence", "mxfp8", 0).read_text()
    head = json.loads(text.splitlines()[0])
    assert "/" not in text.replace("validation/", "") and head["config"] == {"data": "text"}
    for words in ("python train.py", "--precision mxfp8", "--seed 0", "--data text"):
        assert words in head["command"]
    assert experiments.result(place.log("convergence", "mxfp8", 0), "bpb") == 2.0


def test_a_real_run_and_its_table(place, monkeypatch, capsys):
    one = Experiment("it runs", dict(nvfp4=Arm("nvfp4")))
    monkeypatch.setitem(EXPERIMENTS, "one", one)
    place.data = TEXT
    assert experiments.run(place, ["one"], [0]) == 0
    experiments.table(place, "one")
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__}" in shown and "| nvfp4 | " in shown
    assert "--precision nvfp4 --data task.py --seed 0" in shown
    assert str(place.work) not in place.log("one", "nvfp4", 0).read_text()


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("size", SIZES)
def test_all_flags_are_of_train_and_allowed(name, size):
    for arm in EXPERIMENTS[name].arms.values():
        flags = experiments.flags_of(arm, size)
        words = [w for k, v in flags.items() for w in ("--" + k.replace("_", "-"), str(v))]
        cfg, given, _ = train.parse(words)
        train.check(cfg)
        assert {"stage", "precision"} <= given
        assert cfg.stage == ("rl" if arm.first else "pretrain")


def test_the_size_is_what_the_comment_says():
    cfg = train.parse(["--precision", "bf16", *words_of(SIZES["gpu"])])[0]
    total, active = parameters(cfg)
    assert (total / 1e6, active / 1e6) == pytest.approx((12.0, 4.03), rel=0.02)
    assert cfg.steps * cfg.batch * cfg.seq_len >= 20 * active


def words_of(flags):
    return [w for k, v in flags.items() for w in ("--" + k.replace("_", "-"), str(v))]


class Unmade(GPT):
    def init_weights(self, seed):
        pass


def parameters(cfg):
    with torch.device("meta"):
        return Unmade(cfg.model()).parameters_active()


def test_layers_compares_equal_shares_of_the_operations():
    shares = []
    for arm in ("nvfp4", "nvfp4-dense"):
        flags = experiments.flags_of(EXPERIMENTS["layers"].arms[arm], "gpu")
        cfg = train.parse(words_of(flags))[0]
        with torch.device("meta"):
            model = Unmade(cfg.model(), cfg.precision)
        four = 0
        for block in model.blocks:
            for name, gemms in block.linears().items():
                w = getattr(block, name)
                four += w.numel() * (gemms.x == "nvfp4") * (
                    cfg.top_k / cfg.experts if w.dim() == 3 else 1)
        shares.append(four / model.parameters_active()[1])
    assert shares[0] == shares[1] > 0.3


# --------------------------------------------------------------------------------------- the tables
def test_student_t_for_one_and_two_degrees_of_freedom_in_closed_form():
    p = 0.975
    assert experiments.T95[0] == pytest.approx(math.tan(math.pi * (p - 0.5)), abs=5e-4)
    assert experiments.T95[1] == pytest.approx((2 * p - 1) * (2 / (4 * p * (1 - p))) ** 0.5,
                                               abs=5e-4)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 10, 20, 29, 30])
def test_student_t_by_integration(n):
    """The density of Student's t from -t to t has 95 % of the mass."""
    c = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
    x = np.linspace(0, experiments.T95[n - 1], 20001)
    y = c * (1 + x * x / n) ** (-(n + 1) / 2)
    assert 2 * float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum()) == pytest.approx(0.95, abs=1e-4)


def test_paired_interval_of_three_by_hand():
    a, b = {0: 1.0, 1: 2.0, 2: 4.0, 7: 9.0}, {0: 1.1, 1: 2.3, 2: 4.2, 5: 0.0}
    d = experiments.paired(a, b)
    assert d == pytest.approx([0.1, 0.3, 0.2])
    mean, half = experiments.interval(d)                        # sd 0.1, t 4.303, root of 3
    assert mean == pytest.approx(0.2) and half == pytest.approx(0.24843, abs=2e-5)
    assert experiments.interval([3.0]) == (3.0, math.inf)


def test_compute_lost_finds_the_compute_that_was_taken_away():
    """Losses on a power law; the other recipe has that of 98 % of the compute."""
    arms = {f"m{b}": Arm("mxfp8", b) for b in (0.25, 0.5, 1, 2)} | {"n": Arm("nvfp4", 1)}
    found = {n: {s: (1 + 0.01 * s) * (a.budget * (0.98 if n == "n" else 1)) ** -0.08
                 for s in range(3)} for n, a in arms.items()}
    slopes, errors = zip(*experiments.slopes(found, arms).values())
    assert slopes == pytest.approx([-0.08] * 4) and errors == pytest.approx([0] * 4, abs=1e-12)
    lost = experiments.compute_lost(found, arms)
    assert list(lost) == [1] and lost[1] == pytest.approx((0.02, 0, 3), abs=1e-9)


def test_the_error_of_the_slope_is_in_the_interval():
    arms = {"m1": Arm("mxfp8", 1), "m2": Arm("mxfp8", 2), "n": Arm("nvfp4", 2)}
    found = dict(m1={0: 1.0, 1: 1.0}, m2={0: 2 ** -0.1, 1: 2 ** -0.3})
    found["n"] = {s: v * 1.01 for s, v in found["m2"].items()}        # no error of its own
    mean, half, n = experiments.compute_lost(found, arms)[2]
    assert mean == pytest.approx(1 - 1.01 ** -5) and n == 2           # slope -.2 with error .1
    t = experiments.T95[0]                              # two pairs of runs give the slope
    assert half == pytest.approx(t * 0.1 * math.log(1.01) / 0.2 ** 2)


def test_runs_on_different_texts_are_not_compared(stub, place, capsys):
    experiments.run(place, ["convergence"], [0])
    log = place.log("convergence", "mxfp8", 0)
    head, *rows = log.read_text().splitlines()
    log.write_text("\n".join([json.dumps(dict(json.loads(head), corpus_sha256="x")), *rows]))
    with pytest.raises(experiments.Unusable, match="different texts"):
        experiments.table(place, "convergence")
    place.data = "/a/b/other"
    assert place.find("convergence", "bf16", 0) is None
    log.write_text("rubbish")
    with pytest.raises(experiments.Unusable, match="is no whole log"):
        place.find("convergence", "mxfp8", 0)


def test_a_row_is_over_the_seeds_of_both_arms_and_says_what_was_not_measured():
    e = Experiment("", dict(a=Arm("bf16"), b=Arm("mxfp8"), c=Arm("nvfp4")), also=(("b", "c"),))
    found = {"a": {0: 1.0, 1: 2.0, 2: 4.0, 3: 9.0}, "b": {0: 1.1, 1: 2.3, 2: 4.2, 4: 0.0}, "c": {}}
    assert list(experiments.lines_of_table(found, e)) == [
        "| a | 4.0000 | 3.5590 |  |  |  | 4 |",
        "| b | 2.5333 | 1.5631 | a | 2.3333 | +0.2000 +- 0.2484 | 3 |",
        "| c | not measured |  | a |  |  | 0 |", "| b | not measured |  | c |  |  | 0 |"]
    found["c"] = {0: 1.0, 4: -0.1}
    assert list(experiments.lines_of_table(found, e))[-1].startswith("| b | 0.5500 | 0.7778 | c |")


def test_pairs_that_are_compared_are_arms():
    for e in EXPERIMENTS.values():
        assert {arm for pair in e.comparisons() for arm in pair} <= e.arms.keys()
    assert list(EXPERIMENTS["layers"].comparisons())[-1] == ("nvfp4-dense", "nvfp4")


# ------------------------------------------------------------------------------ direct measurements
@pytest.fixture(scope="module")
def case():
    """A small model in which two layers of three have experts in 4 bits, and text."""
    cfg = train.Config(layers=3, seq_len=64).model()
    rows = load_corpus(TEXT).batch(0, "train", 0, np.arange(8), 65)
    return cfg, torch.from_numpy(rows).long(), GPT(cfg, "bf16", seed=0).state_dict()


def test_a_stochastic_second_copy_is_unbiased_and_a_nearest_one_is_not(case):
    stochastic = measure.gradient_bias("nvfp4", 16, *case)
    assert stochastic["error"] < 1.5 * stochastic["noise"]      # what an unbiased mean is off by
    assert stochastic["error"] < 0.4 * stochastic["single"]     # averaging helps: 1/4 at 16 draws
    nearest = measure.gradient_bias("nvfp4-nearest", 16, *case)
    assert nearest["noise"] == 0 and nearest["error"] > 3 * stochastic["noise"]
    for name in ("nvfp4-original", "nvfp4-independent"):
        assert measure.gradient_bias(name, 1, *case)["error"] > 3 * nearest["error"]


def test_the_bias_is_a_function_of_its_arguments(case):
    assert measure.gradient_bias("nvfp4", 2, *case) == measure.gradient_bias("nvfp4", 2, *case)


def test_tiles_cost_more_on_heavy_tails_than_on_gaussians(place):
    error = {(r["weights"], r["format"]): r["error"]
             for r in measure.tile_error(place, seeds=1, size=256)}
    worse = {k: error[k, "nvfp4_tile"] / error[k, "nvfp4"] for k in ("Gaussian", "heavy tails")}
    assert 1.1 < worse["Gaussian"] < 1.25 and worse["heavy tails"] > 1.4
    assert error["Gaussian", "nvfp4_46"] < error["Gaussian", "nvfp4"]


def test_bits_and_bytes(place):
    rows = {r["recipe"]: r for r in measure.memory(place)}
    assert rows["mxfp8"]["bits_of_weights"] == 8.25
    assert 4.5 < rows["nvfp4"]["bits_of_weights"] < 4.51
    assert rows["nvfp4"]["bits_of_saved_x"] == 4.5 + 32 / 512    # and an outer scale a row
    assert rows["nvfp4"]["saved_a_token"] < rows["bf16"]["saved_a_token"]


def test_rounding_after_training_is_not_exporting(place, monkeypatch):
    """The export of a run has its loss bit for bit; a bf16 run evaluated in 4 bits has another."""
    monkeypatch.setitem(EXPERIMENTS, "calibration",
                        Experiment("", {p: Arm(p) for p in ("bf16", "nvfp4")}))
    place.data = TEXT
    for p in ("bf16", "nvfp4"):
        out = place.out("calibration", p, 0)
        flags = experiments.flags_of(Arm(p), "smoke") | dict(data=TEXT)
        where = ["--out", str(out), "--seed", "0", "--device", "cpu"]
        assert train.main([*words_of(flags), *where]) == 0
        experiments.keep_log(place.log("calibration", p, 0), out, "")
    row, = measure.rounded(place)
    assert row["export_off"] == 0 and row["bf16_in_nvfp4"] != row["bf16"]
    last = json.loads((place.out("calibration", "nvfp4", 0) / "log.jsonl").read_text()
                      .splitlines()[-1])
    assert row["trained"] == pytest.approx(last["bpb"], abs=1e-5)


def test_a_table_is_of_every_size_that_is_kept_unless_one_is_named(capsys):
    def shown(*args):
        assert experiments.main([*args, "--table"]) == 0
        out = capsys.readouterr().out
        return [word for word in ("H200", "x86_64", "not measured") if word in out]
    assert shown("calibration") == ["H200", "x86_64"] and shown("memory") == ["x86_64"]
    assert shown("calibration", "--size", "gpu") == ["H200"]
    assert shown("calibration", "--device", "cuda") == ["H200"]
    assert shown("calibration", "--device", "cpu") == ["x86_64"]
    assert shown("layers") == ["H200"] and shown("layers", "--size", "cpu") == ["not measured"]


def test_the_command_line(place, capsys, monkeypatch):
    monkeypatch.setattr(experiments, "Place", lambda *a, **kw: place)
    assert experiments.main(["memory", "--smoke"]) == 0
    assert experiments.main(["memory", "--smoke", "--table"]) == 0
    assert "bits_of_weights 8.25" in capsys.readouterr().out
    assert experiments.main(["tiles", "--table"]) == 0
    assert "not measured" in capsys.readouterr().out
