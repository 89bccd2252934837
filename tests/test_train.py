"""The trainer from outside: what it logs and says, kills and resumes, what it refuses."""

import fcntl
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from data import plot, prepare
from data.task import Task
from model import GPT

ROOT = Path(__file__).resolve().parent.parent
TEXT = str(ROOT / "data" / "task.py")
TINY = f"""
    --device cpu --data {TEXT} --precision nvfp4
    --dim 32 --heads 2 --kv-heads 1 --expert-dim 32 --seq-len 32
    --batch 4 --steps 4 --text-share 0.5 --gate 1 --gate-every 2 --warmup 2 --log-every 1
    --save-every 3 --eval-every 3 --eval-rows 1 --eval-problems 8 --task sort4 --rl-lr 1e-3
    --rl-steps 4 --prompts 2 --group 4 --rl-text-rows 2 --rl-eval-every 3 --rl-warmup 2""".split()
TIMINGS = {"seconds", "eval_seconds", "rollout_seconds", "train_seconds", "tokens_per_s", "mfu"}


def even_first_byte(self, prompts, completions):
    """A reward that an untrained model earns half the time, so that RL has something to learn."""
    return (completions[:, 0] % 2 == 0).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def untrained_models_earn_rewards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "rewards", even_first_byte)
        yield


def start(out, *flags):
    return train.main([*TINY, "--out", str(out), *map(str, flags)])


def resume(out, *flags):
    return train.main(["--resume", "--out", str(out), *map(str, flags)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of all stages that nothing interrupted. Tests that write take a copy."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert start(out) == 0
    return out


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "run"
    assert start(out, "--stage", "pretrain") == 0
    return out


def tensors(path):
    """Everything that a checkpoint holds: weights, router biases, AdamW's moments."""
    cfg = train.Config(**json.loads((path / "run.json").read_text())["config"])
    model = GPT(cfg.model(), cfg.precision)
    opt = train.adamw(model, 0.0)
    train.load_tensors(path, model, opt)
    return train.tensors_of(model, opt)


def rewrite(path, change):
    """Change the run.json of a checkpoint, and its sum."""
    state = json.loads((path / "run.json").read_text())
    change(state)
    (path / "run.json").write_text(json.dumps(state))
    sums = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(
        json.dumps(sums | {"run.json": train.digest(path / "run.json")}))


def rows(out):
    """The header and the other rows of a log."""
    header, *others = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return header, others


def without_timings(out):
    header, others = rows(out)
    del header["config"]["out"]
    return [header] + [{k: v for k, v in row.items() if k not in TIMINGS} for row in others]


def assert_same_run(a, b):
    """Bit-identical weights and moments at the end, and the same log but for its timings."""
    assert train.latest_checkpoint(a).name == train.latest_checkpoint(b).name
    x, y = (tensors(train.latest_checkpoint(out)) for out in (a, b))
    assert x.keys() == y.keys() and [k for k in x if not torch.equal(x[k], y[k])] == []
    assert without_timings(a) == without_timings(b)


# ------------------------------------------------------------------------------- killed and resumed


def die(owner, name, call, after):
    """Replace owner.name by a function whose call number `call` kills the process."""
    original, count = getattr(owner, name), 0

    def replacement(*args, **kw):
        nonlocal count
        count += 1
        if count == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kw)
        if count == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, replacement)


def half_a_row(self, **row):
    """What a kill in the middle of a write leaves."""
    if row.get("stage") == "rl" and row.get("step") == 2:
        self.log.write('{"stage": "rl", "st')
        self.log.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    self.original_write(**row)


def doomed(argv, where):
    """In a process of its own: a run that dies at `where`."""
    sys.stdout = open(os.devnull, "w")
    torch.set_num_threads(1)
    Task.rewards = even_first_byte
    if where == "half a row":
        train.Run.original_write, train.Run.write = train.Run.write, half_a_row
    else:
        name, call, after = where
        die(os if name == "replace" else train, name, call, after)
    os._exit(train.main(argv))


def killed(argv, where):
    """Run main(argv) until SIGKILL at `where`, in a copy of a process that has torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "pytest"])
    process = context.Process(target=doomed, args=(argv, where))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


# Saves come at pretrain 0, 3, 4 and rl 0, 3, 4; evaluations at pretrain 3, 4 and rl 0, 3, 4.
KILLS = {
    "before the first step": ("pretrain_step", 1, False),
    "after a step, before its row": ("pretrain_step", 2, True),
    "with the tensors written": ("dcp", 2, True),
    "before the rename": ("replace", 3, False),
    "after the rename": ("replace", 2, True),
    "before RL's first step": ("rl_step", 1, False),
    "between two saves of RL": ("rl_step", 3, False),
    "while writing a row of RL": "half a row",
    "after an evaluation that is not saved": ("evaluate", 4, True),
    "at the very end": ("replace", 6, True),
}


@pytest.mark.parametrize("where", KILLS.values(), ids=list(KILLS))
def test_killed_and_resumed_a_run_ends_as_the_unbroken_one(finished, tmp_path, where):
    out = tmp_path / "run"
    killed([*TINY, "--out", str(out)], where)
    assert resume(out) == 0
    assert_same_run(out, finished)


@pytest.mark.parametrize("where", [("pretrain_step", 2, False), ("pretrain_step", 4, True)])
def test_resumed_a_run_of_pretraining_alone_stays_one(pretrained, tmp_path, where):
    out = tmp_path / "run"
    killed([*TINY, "--stage", "pretrain", "--out", str(out)], where)
    assert resume(out) == 0
    assert_same_run(out, pretrained)


def test_resumed_a_run_of_rl_alone_stays_one(pretrained, tmp_path):
    flags = ["--stage", "rl", "--init-from", str(pretrained), "--rl-steps", "2"]
    assert start(tmp_path / "whole", *flags) == 0
    for name, call in (("replace", 1), ("rl_step", 2)):     # the first save, and before the next
        out = tmp_path / name
        killed([*TINY, *flags, "--out", str(out)], (name, call, True))
        assert resume(out) == 0
        assert_same_run(out, tmp_path / "whole")


def test_rl_of_a_pretrained_run_killed_before_its_first_step_is_resumed(pretrained, tmp_path):
    out = Path(shutil.copytree(pretrained, tmp_path / "run"))
    killed(["--stage", "rl", "--out", str(out)], ("rl_step", 1, False))
    assert resume(out) == 0
    assert train.latest_checkpoint(out).name == "rl-000004"


def test_killed_in_its_first_save_a_run_starts_anew_with_the_same_command(finished, tmp_path):
    out = tmp_path / "run"
    killed([*TINY, "--out", str(out)], ("dcp", 1, True))
    assert start(out) == 0
    assert_same_run(out, finished)


def test_killed_again_and_again_a_run_still_arrives(finished, tmp_path):
    out = tmp_path / "run"
    killed([*TINY, "--out", str(out)], ("pretrain_step", 2, False))
    for where in (("pretrain_step", 2, True), ("replace", 1, False), ("rl_step", 2, True),
                  ("dcp", 3, True)):
        killed(["--resume", "--out", str(out)], where)
    assert resume(out) == 0
    assert_same_run(out, finished)


def test_stage_after_stage_is_the_run_of_all_stages(finished, pretrained, tmp_path):
    out = Path(shutil.copytree(pretrained, tmp_path / "run"))
    assert train.main(["--stage", "rl", "--out", str(out)]) == 0
    a, b = (tensors(train.latest_checkpoint(run)) for run in (out, finished))
    assert all(torch.equal(a[k], b[k]) for k in b)


# ------------------------------------------------------------------------------ stopped by the user


def interrupt_in(monkeypatch, name, call, times=1):
    original, count = getattr(train, name), 0

    def step(*args):
        nonlocal count
        count += 1
        for _ in range(times if count == call else 0):
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(train, name, step)


@pytest.mark.parametrize("name, call, saved", [("pretrain_step", 2, "pretrain-000002"),
                                               ("rl_step", 1, "rl-000001")])
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_resume(
        finished, tmp_path, capsys, monkeypatch, name, call, saved):
    out = tmp_path / "run"
    interrupt_in(monkeypatch, name, call)
    assert start(out) == 130
    assert train.latest_checkpoint(out).name == saved
    assert f"python train.py --resume --out {out}" in capsys.readouterr().out
    monkeypatch.undo()
    assert resume(out) == 0
    assert_same_run(out, finished)


def test_a_second_ctrl_c_stops_at_once_and_the_last_save_stays(
        finished, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    interrupt_in(monkeypatch, "pretrain_step", 4, times=2)
    assert start(out) == 130
    assert train.latest_checkpoint(out).name == "pretrain-000003"
    assert one_sentence(capsys.readouterr().err)
    monkeypatch.undo()
    assert resume(out) == 0
    assert_same_run(out, finished)


def test_main_leaves_the_signals_as_they_were(tmp_path, monkeypatch):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    interrupt_in(monkeypatch, "pretrain_step", 1, times=2)
    assert start(tmp_path / "run") == 130
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_ctrl_c_at_a_real_process(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "train.py", *TINY, "--steps", "100000", "--text-share", "1",
               "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (
            (out / "log.jsonl").is_file() and len(rows(out)[1]) > 3):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == ""
    assert f"--resume --out {out}" in output
    step = int(train.latest_checkpoint(out).name.split("-")[1])
    assert rows(out)[1][-1]["step"] == step


# ------------------------------------------------------------------------- what a run logs and says


def test_the_log_begins_with_a_header(finished):
    header, _ = rows(finished)
    cfg = train.Config(**header["config"])
    assert (cfg.precision == "nvfp4" and cfg.dim == 32
            and cfg.preset == "tiny" and cfg.out == str(finished))
    model, corpus = GPT(cfg.model(), cfg.precision), prepare.load_corpus(TEXT)
    assert (header["parameters"], header["active"]) == model.parameters_active()
    assert header["device"] == "cpu" and "reference" in header["backend"]
    assert header["torch"] == torch.__version__ and sys.version.startswith(header["python"])
    assert header["corpus"] == "task.py" and header["corpus_sha256"] == corpus.sha256
    assert header["bigram_bpb"] == pytest.approx(corpus.bigram_bpb, rel=1e-5)


PRETRAIN_KEYS = {"lr", "loss", "text_loss", "grad_norm", "load", "seconds", "tokens_per_s"}
RL_KEYS = {"lr", "loss", "reward", "reward_std", "all_wrong", "all_right", "entropy", "k1", "k3",
           "logp_diff", "logp_diff_median", "logp_diff_max", "logp_diff_share", "truncated",
           "grad_norm", "no_stop", "load", "rollout_seconds", "train_seconds", "seconds",
           "tokens_per_s"}
EVAL_KEYS = {"val_loss", "bpb", "eval_seconds"}


def test_each_step_and_each_evaluation_has_its_row(finished):
    _, others = rows(finished)
    steps = [(r["stage"], r["step"]) for r in others if "loss" in r]
    evals = [(r["stage"], r["step"]) for r in others if "bpb" in r]
    assert steps == [("pretrain", i) for i in (1, 2, 3, 4)] + [("rl", i) for i in (1, 2, 3, 4)]
    assert evals == [("pretrain", 3), ("pretrain", 4), ("rl", 0), ("rl", 3), ("rl", 4)]
    for row in others:
        is_eval = "bpb" in row
        wanted = EVAL_KEYS if is_eval else RL_KEYS if row["stage"] == "rl" else PRETRAIN_KEYS
        assert wanted <= row.keys()
        if is_eval:
            assert row["val_loss"] == pytest.approx(row["bpb"] * math.log(2), rel=1e-4)
            assert ("pass_rate" in row) == (row["stage"] == "rl" or row["step"] == 4)
        elif row["stage"] == "pretrain":
            assert row["phase"] == ("text" if row["step"] <= 2 else "mix")
            assert ("task_loss" in row) == (row["phase"] == "mix")
            parts = [row[k] for k in ("text_loss", "task_loss") if k in row]
            assert 0 < min(parts) - 1e-5 < row["loss"] < max(parts) + 1e-5     # a weighted mean
    first, last = ([r for r in others if "pass_rate" in r][i] for i in (0, -1))
    assert {"greedy", "pass_at_8", "problems"} <= first.keys() & last.keys()


def test_rl_on_a_cpu_agrees_with_its_rollouts(finished):
    for row in rows(finished)[1]:
        if "k3" in row:
            assert row["logp_diff_max"] == 0 and row["grad_norm"] > 0


@pytest.mark.parametrize("stage, tokens", [("pretrain", 128), ("rl", 8 * 9)])
def test_evaluations_and_the_gate_do_not_slow_a_run_down_in_its_log(
        tmp_path, monkeypatch, capsys, stage, tokens):
    """By a clock of our own: a step takes a second, what is measured minutes. Between two rows lie
    evaluations and measurements of the gate."""
    now = [0.0]
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    costs = dict(pretrain_step=1, rl_step=1, text_bpb=100, attempt=1000)
    for name, seconds in costs.items():
        def taking(*args, original=getattr(train, name), seconds=seconds, **kw):
            now[0] += seconds
            return original(*args, **kw)
        monkeypatch.setattr(train, name, taking)
    assert start(tmp_path / "run", "--steps", 10, "--log-every", 4, "--rl-eval-every", 1) == 0
    steps = [r for r in rows(tmp_path / "run")[1] if r["stage"] == stage and "loss" in r]
    assert [r["seconds"] for r in steps] == ([4, 4, 2] if stage == "pretrain" else [1] * 4)
    assert {r["tokens_per_s"] for r in steps} == {tokens}
    if stage == "pretrain":     # text to 5, then the gate at 7 and 9, evaluations at 3, 6, 9 and 10
        assert [r.get("eval_seconds") for r in steps] == [None, 1000, 1000]
        assert "pretrain: 10 steps in 5410 s" in capsys.readouterr().out    # 3 of them attempts


def test_no_terminal_no_progress_bar_but_a_summary_with_a_curve(tmp_path):
    command = [sys.executable, "train.py", *TINY, "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "" and "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert "nvfp4" in lines[0] and "bigram" in lines[0] and "128 tokens a step" in lines[0]
    summaries = [line for line in lines if re.match(r"(pretrain|rl): 4 steps in", line)]
    assert (len(summaries) == 2
            and "bits per byte (bigram" in summaries[0] and "pass rate" in summaries[1])
    curves = [line for line in lines if re.match(
        r"(loss|reward) -?\d+\.\d\d [▁▂▃▄▅▆▇█]{4} -?\d+\.\d\d$", line)]
    assert len(curves) == 2
    assert any("the gate of 1.0 was not reached" in line for line in lines)


def test_a_sparkline_is_as_high_as_its_values_and_no_longer_than_asked():
    assert train.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert train.sparkline([5.0, 5.0]) == "▁▁"
    assert train.sparkline([3.0]) == "▁"
    for n in (39, 40, 41, 900):
        assert len(train.sparkline(list(range(n)), 40)) <= 40
    assert train.sparkline(list(range(900)))[::39] == "▁█"


def test_where_the_gate_is_reached_pretraining_ends(tmp_path, capsys):
    assert start(tmp_path / "run", "--gate", 0, "--stage", "pretrain", "--steps", 20) == 0
    # Text to 10, then a measurement every 2.
    assert train.latest_checkpoint(tmp_path / "run").name == "pretrain-000012"
    assert "was not reached" not in capsys.readouterr().out


def test_the_size_of_an_evaluation_does_not_change_the_run(tmp_path, monkeypatch):
    asked, original = [], train.pass_rate
    monkeypatch.setattr(train, "pass_rate", lambda run, draw, n, split="test", **kw: (
        asked.append((split, n)), original(run, draw, n, split, **kw))[1])
    for n in (8, 16):
        assert start(tmp_path / f"{n}", "--stage", "pretrain", "--eval-problems", n) == 0
    assert [n for split, n in asked if split == "train"] == [train.GATE_PROBLEMS] * 2


def test_text_alone_has_no_task_and_no_rl(tmp_path):
    assert start(tmp_path / "run", "--text-share", 1, "--steps", 2) == 0
    _, others = rows(tmp_path / "run")
    assert ({r["stage"] for r in others} == {"pretrain"}
            and not any("pass_rate" in r for r in others))


# ----------------------------------------------------------------------- data, schedule, evaluation


@pytest.mark.parametrize("kind", ["file", "folder", "prepared"])
def test_data_is_a_file_a_folder_or_a_prepared_folder(tmp_path, kind):
    source = {"file": TEXT, "folder": str(ROOT / "data"), "prepared": str(tmp_path / "ready")}[kind]
    if kind == "prepared":
        prepare.main(["--data", TEXT, "--out", source])
    assert start(tmp_path / "run", "--data", source, "--steps", 1, "--stage", "pretrain") == 0
    header, _ = rows(tmp_path / "run")
    assert header["corpus_sha256"] == prepare.load_corpus(source).sha256


def test_the_order_of_the_data_does_not_depend_on_the_micro_batch(monkeypatch, tmp_path):
    seen, original = [], train.token_losses
    monkeypatch.setattr(train, "token_losses", lambda model, rows, first_token=0: (
        seen.append(rows) or original(model, rows, first_token)))
    for size in (0, 1, 3):
        flags = ("--micro-batch", size, "--stage", "pretrain", "--steps", 4, "--eval-every", 9)
        assert start(tmp_path / f"{size}", *flags) == 0
    whole, ones, threes = torch.cat(seen).view(3, -1, 33)
    assert torch.equal(whole, ones) and torch.equal(whole, threes)


def test_the_learning_rate_warms_up_falls_to_the_mixture_and_then_to_a_tenth_of_that():
    cfg = train.Config(steps=100, warmup=10, lr=1.0, mix_lr=0.4)
    lr = [train.pretrain_lr(cfg, step, 40) for step in range(100)]
    assert lr[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert lr[10] == 1.0 and lr[25] == pytest.approx(0.7) and lr[40] == pytest.approx(0.4)
    assert lr[99] == pytest.approx(0.4 * 0.1, abs=0.01) and lr[10:] == sorted(lr[10:], reverse=True)


def test_the_learning_rate_of_rl_falls_to_0(finished):
    lr = [r["lr"] for r in rows(finished)[1] if r["stage"] == "rl" and "lr" in r]
    assert lr == pytest.approx([1e-3 * f for f in (0.5, 0.75, 0.5, 0.25)])


def test_a_model_that_knows_nothing_has_8_bits_per_byte():
    run = train.Run(train.Config(data=TEXT, dim=32, seq_len=32), torch.device("cpu"))
    with torch.no_grad():
        run.model.head.zero_()
    assert train.text_bpb(run, 70) == pytest.approx(8, rel=1e-6)


def test_pass_at_8_counts_problems_that_any_of_8_answers_solves(monkeypatch):
    run = train.Run(train.Config(data=TEXT, dim=32, seq_len=32, task="sort4"), torch.device("cpu"))
    table = np.zeros((6, 8), np.float32)
    table[[0, 0, 3, 5], [1, 2, 7, 0]] = 1

    def attempt(run, problems, draw):
        different = run.task.problems(0, "test", np.arange(6))
        assert (problems.reshape(6, 8, -1) == different[:, None]).all()     # as table.reshape
        return None, table.ravel()

    monkeypatch.setattr(train, "attempt", attempt)
    assert train.pass_at(run, 0, 8, 6) == 0.5


# --------------------------------------------------------------------------- stages that read a run


def contents(out):
    return {p.relative_to(out): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def test_eval_measures_again_what_the_log_says_and_writes_nothing(copy, capsys):
    before, last = contents(copy), rows(copy)[1][-1]
    assert train.main(["--stage", "eval", "--out", str(copy)]) == 0
    assert contents(copy) == before
    output = capsys.readouterr().out
    assert (f"bits per byte {last['bpb']:.3f}" in output
            and f"pass rate {last['pass_rate']:.3f}" in output)


def sampled(capfdbinary, out, *flags):
    flags = ["--stage", "sample", "--out", str(out), "--new", "40", "--prompt", "import ", *flags]
    assert train.main(flags) == 0
    return capfdbinary.readouterr().out


def test_sample_continues_the_prompt_past_the_length_of_a_row(copy, capfdbinary):
    before = contents(copy)
    text = sampled(capfdbinary, copy)
    assert text.startswith(b"import ") and len(text) == len(b"import ") + 40  # 47, rows have 32
    assert text == sampled(capfdbinary, copy) and text != sampled(capfdbinary, copy, "--seed", "1")
    greedy = [sampled(capfdbinary, copy, "--temperature", "0", "--seed", s) for s in "01"]
    assert greedy[0] == greedy[1] == sampled(capfdbinary, copy, "--sample-top-k", "1")
    assert contents(copy) == before


def test_rl_in_a_new_folder_starts_from_the_weights_of_another(pretrained, tmp_path):
    out = tmp_path / "run"
    assert start(out, "--stage", "rl", "--init-from", pretrained, "--rl-steps", 1) == 0
    first = next(r for r in rows(out)[1] if "bpb" in r)
    assert first["stage"] == "rl" and first["step"] == 0
    assert first["bpb"] == next(r["bpb"] for r in reversed(rows(pretrained)[1]) if "bpb" in r)


def test_a_finished_run_goes_on_with_more_steps(copy, finished, tmp_path):
    assert resume(copy) == 0
    assert_same_run(copy, finished)  # nothing left to do
    assert resume(copy, "--rl-steps", 5) == 0
    assert train.latest_checkpoint(copy).name == "rl-000005"
    for share in (0.5, 1):
        out = tmp_path / f"{share}"
        assert start(out, "--stage", "pretrain", "--steps", 3, "--text-share", share) == 0
        assert resume(out, "--steps", 5) == 0
        assert train.latest_checkpoint(out).name == "pretrain-000005"
        phases = [r["phase"] for r in rows(out)[1] if "phase" in r]
        assert phases == ["text"] * 5 if share == 1 else ["text"] * 2 + ["mix"] * 3


@pytest.mark.parametrize("known", [True, False], ids=["new checkpoint", "one without text_steps"])
def test_more_steps_do_not_throw_a_mixture_back_to_text(tmp_path, monkeypatch, known):
    out = tmp_path / "run"
    interrupt_in(monkeypatch, "pretrain_step", 3)
    assert start(out, "--stage", "pretrain") == 130
    monkeypatch.undo()
    if not known:
        rewrite(train.latest_checkpoint(out), lambda state: state["at"].pop("text_steps"))
    for steps in (8, 12):
        assert resume(out, "--steps", steps) == 0
    phases = [r["phase"] for r in rows(out)[1] if "phase" in r]
    assert phases == ["text"] * 2 + ["mix"] * 10


@pytest.mark.parametrize("steps", [2, 3])
def test_with_no_more_steps_than_it_made_a_run_ends_its_pretraining_there(
        tmp_path, monkeypatch, capsys, steps):
    out = tmp_path / "run"
    interrupt_in(monkeypatch, "pretrain_step", 4)
    assert start(out, "--steps", 6, "--gate-every", 1, "--text-share", 0.3) == 130
    monkeypatch.undo()
    assert resume(out, "--steps", steps + 1) == 0
    assert "pretrain: 4 steps in" in capsys.readouterr().out
    final = [r["step"] for r in rows(out)[1] if r["stage"] == "pretrain" and "pass_rate" in r]
    assert final == [4] and train.latest_checkpoint(out).name == "rl-000004"


def test_the_latest_checkpoint_is_that_of_the_most_steps(tmp_path):
    for name in ("pretrain-1000000", "pretrain-999900", "rl-000003"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [p.name for p in train.checkpoints(tmp_path)] == [
        "pretrain-999900", "pretrain-1000000", "rl-000003"]


@pytest.mark.parametrize("here", [1, 2])
def test_a_resumed_run_keeps_its_device_where_it_exists(copy, monkeypatch, here):
    def device(*flags):
        return str(train.parse([*flags, "--out", str(copy)])[2])

    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number=0: capability[0])
    assert device("--stage", "pretrain") == "cuda"      # no run that goes on
    assert device("--resume") == device("--stage", "rl") == "cpu"
    assert device("--resume", "--device", "cuda") == "cuda"
    rewrite(train.latest_checkpoint(copy), lambda state: state["config"].update(device="cuda:1"))
    assert device("--resume") == ("cuda:1" if here == 2 else "cuda")
    capability[0] = (7, 5)
    assert device("--resume") == device("--stage", "pretrain") == "cpu"
    with pytest.raises(train.Refused, match="--device cuda: has no bf16 tensor cores"):
        device("--device", "cuda")


def test_other_entries_among_the_checkpoints_do_no_harm(copy):
    for name in ("my-notes", "rl-000009.tmp", "pretrain", ".DS_Store"):
        (copy / "checkpoints" / name).mkdir()
    assert train.latest_checkpoint(copy).name == "rl-000004"
    assert resume(copy) == 0


# ---------------------------------------------------------------------------------- what is refused


def one_sentence(errors):
    """The text of a refusal, which has to be one line that names the program."""
    line, = errors.splitlines()
    assert line.startswith("train.py: ") and "Traceback" not in line
    return line.removeprefix("train.py: ")


def refused(capsys, argv, code=2):
    capsys.readouterr()
    assert train.main([str(a) for a in argv]) == code
    captured = capsys.readouterr()
    return one_sentence(captured.err)


def failed(capsys, argv):
    """A run that could not go on: another exit code, also in one sentence."""
    return refused(capsys, argv, code=1)


@pytest.mark.parametrize("flags, parts", [
    (["--learning-rate", 3], ["--learning-rate"]),
    (["--prec", "nvfp4"], ["--prec"]),  # no abbreviations: the next flag could change their meaning
    (["--precision", "fp4"], ["--precision", "'fp4'", "nvfp4"]),
    (["--preset", "huge"], ["--preset", "'huge'", "tiny", "base"]),
    (["--stage", "test"], ["--stage", "'test'", "pretrain"]),
    (["--task", "chess"], ["'chess'", "sort6"]),
    (["--device", "tpu"], ["--device tpu", "cpu"]),
    (["--device", "cpu:7"], ["--device cpu:7", "cpu:0"]),
    (["--device", "cpu:"], ["--device cpu:", "allowed are"]),
    (["--device", "cpu:00"], ["--device cpu:00", "allowed are"]),
    (["--steps", "many"], ["--steps", "'many'"]),
    (["--steps", 0], ["--steps 0", "at least 1"]),
    (["--seed", 10 ** 20], ["--seed 1000", "below 2 ** 63"]),
    (["--data", "a" * 300], ["a" * 300]),
    (["--init-from", "a" * 300], ["a" * 300]),
    (["--group", 1], ["--group 1", "at least 2"]),
    (["--lr", "nan"], ["--lr nan", "at least 0"]),
    (["--clip", 0], ["--clip 0", "above 0"]),
    (["--gate", 2], ["--gate 2", "0 to 1"]),
    (["--dim", 48, "--heads", 3], ["dim 48", "multiple of 32"]),
    (["--expert-dim", 40], ["expert_dim 40", "multiple of 32"]),
    (["--top-k", 5], ["top_k 5", "number of experts, 4"]),
    (["--kv-heads", 3], ["kv_heads 3", "divide heads 2"]),
    (["--heads", 128, "--kv-heads", 1], ["head_dim 0"]),
    (["--seq-len", 8], ["--seq-len 8", "sort4", "10"]),
    (["--init-from", "nowhere"], ["--init-from nowhere"]),
    (["--resume"], ["no checkpoint", "--resume"]),
    (["--stage", "rl"], ["no checkpoint", "--stage rl"]),
    (["--stage", "eval"], ["no checkpoint", "--stage eval"]),
    (["--stage", "sample"], ["no checkpoint", "--stage sample"]),
], ids=lambda v: (" ".join(map(str, v))
                  if isinstance(v, list) and str(v[0]).startswith("--") else ""))
def test_a_wrong_flag_is_one_sentence_and_writes_nothing(capsys, tmp_path, flags, parts):
    sentence = refused(capsys, [*TINY, "--out", tmp_path / "run", *flags])
    assert [part for part in parts if part not in sentence] == []
    assert not (tmp_path / "run").exists()


def test_two_processes_do_not_write_into_one_folder(capsys, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    with open(out / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process" in refused(capsys, [*TINY, "--out", out])
    assert train.main([*map(str, TINY), "--out", str(out), "--stage", "pretrain"]) == 0


def test_a_damaged_log_is_named(capsys, tmp_path):
    out = tmp_path / "run"
    assert train.main([*map(str, TINY), "--out", str(out), "--stage", "pretrain"]) == 0
    log = out / "log.jsonl"
    log.write_text("{" + log.read_text())
    assert "log.jsonl is damaged: move it away" in refused(capsys, ["--resume", "--out", out])
    log.rename(tmp_path / "damaged.jsonl")
    assert resume(out, "--steps", 5) == 0
    header, others = rows(out)
    assert header["config"]["steps"] == 5 and others[0]["step"] == 5
    assert plot.read_run(log).config == header["config"]


@pytest.mark.parametrize("name, data, parts", [
    ("missing.txt", None, ["does not exist"]),
    ("empty.txt", b"", ["0 bytes"]),
    ("short.txt", b"a line of text\n" * 10, ["val", "33"]),
    ("image.png", b"\x89PNG\0\0" * 100, ["no text"]),
    ("val.bin", b"x" * 100, ["train.bin", "missing"]),
])
def test_data_that_is_missing_empty_short_or_no_text_is_refused(
        capsys, tmp_path, name, data, parts):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    source = tmp_path if name == "val.bin" else path
    sentence = refused(capsys, [*TINY, "--data", source, "--out", tmp_path / "run"])
    assert [part for part in parts if part not in sentence] == []
    assert not (tmp_path / "run").exists()


def test_a_real_process_refuses_with_exit_code_2(tmp_path):
    done = subprocess.run([sys.executable, "train.py", "--top-k", "9", "--device", "cpu",
                           "--out", str(tmp_path / "run")],
                          cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert "top_k 9" in one_sentence(done.stderr)


@pytest.mark.parametrize("flags, parts", [
    ([*TINY], ["another run", "--resume", "--out"]),
    ([*TINY, "--stage", "pretrain"], ["another run"]),
    (["--resume", "--dim", 64], ["--dim 64", "32"]),
    (["--resume", "--precision", "mxfp8"], ["--precision mxfp8", "nvfp4"]),
    (["--resume", "--seed", 3], ["--seed 3", "0"]),
    (["--resume", "--preset", "base"], ["--preset base", "tiny"]),
    (["--stage", "rl", "--task", "add2"], ["--task add2", "sort4"]),
    (["--stage", "eval", "--layers", 4], ["--layers 4", "2"]),
    (["--resume", "--save-every", 0], ["--save-every 0", "at least 1"]),
], ids=lambda v: " ".join(map(str, v[-2:])) if str(v[0]).startswith("--") else "")
def test_a_folder_that_holds_another_run_is_left_alone(capsys, copy, flags, parts):
    before = contents(copy)
    sentence = refused(capsys, [*flags, "--out", copy])
    assert [part for part in parts if part not in sentence] == []
    assert contents(copy) == before


def test_a_file_is_no_output_folder(capsys, tmp_path):
    (tmp_path / "notes").write_text("mine")
    assert str(tmp_path / "notes") in refused(capsys, [*TINY, "--out", tmp_path / "notes"])
    assert (tmp_path / "notes").read_text() == "mine"
    for out in (tmp_path / "notes" / "run", tmp_path / ("a" * 300)):
        assert str(out) in refused(capsys, [*TINY, "--out", out])


def test_another_model_in_init_from_is_refused(capsys, finished, tmp_path):
    sentence = refused(capsys, [*TINY, "--dim", 64, "--init-from", finished,
                                "--out", tmp_path / "run"])
    assert "--dim 64" in sentence and "32" in sentence and not (tmp_path / "run").exists()


def test_a_text_that_has_changed_since_is_refused(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(Path(TEXT).read_bytes())
    assert start(tmp_path / "run", "--data", text, "--steps", 1, "--stage", "pretrain") == 0
    text.write_bytes(text.read_bytes() + b"one more line\n")
    before = contents(tmp_path / "run")
    assert "sha256" in refused(capsys, ["--resume", "--out", tmp_path / "run"])
    assert contents(tmp_path / "run") == before
    other = tmp_path / "other.txt"
    other.write_bytes(Path(TEXT).read_bytes())
    text.unlink()
    assert "does not exist" in refused(capsys, ["--resume", "--out", tmp_path / "run"])
    assert resume(tmp_path / "run", "--data", other, "--steps", 2) == 0     # moved, but the same
    assert resume(tmp_path / "run") == 0                                    # and remembered


def test_a_run_inside_its_text_can_be_resumed(capsys, tmp_path):
    text = Path(shutil.copytree(ROOT / "data", tmp_path / "text",
                                ignore=shutil.ignore_patterns("runs", "__pycache__")))
    assert "--out" in refused(capsys, [*TINY, "--data", text, "--out", text])
    flags = ("--data", text, "--stage", "pretrain", "--steps", 1)
    assert start(text / "out", *flags) == 0 and start(text / "sub" / "out2", *flags) == 0
    assert resume(text / "out", "--steps", 2) == 0
    assert rows(text / "out")[0]["corpus_sha256"] == rows(text / "sub" / "out2")[0]["corpus_sha256"]


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit in the tensors": lambda p: flip_a_byte(p / "__0_0.distcp"),
    "a flipped bit in the configuration": lambda p: flip_a_byte(p / "run.json"),
    "a flipped bit in the sums": lambda p: flip_a_byte(p / "manifest.json"),
    "a file cut short": lambda p: os.truncate(p / "__0_0.distcp", 1000),
    "a missing file": lambda p: (p / ".metadata").unlink(),
    "no sums": lambda p: (p / "manifest.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=list(DAMAGE))
def test_a_damaged_checkpoint_is_refused(capsys, copy, damage):
    path = train.latest_checkpoint(copy)
    damage(path)
    before = contents(copy)
    for stage in (["--resume"], ["--stage", "sample"]):
        sentence = refused(capsys, [*stage, "--out", copy])
        assert str(path) in sentence and "damaged" in sentence
    assert contents(copy) == before


def test_with_the_damaged_checkpoint_deleted_the_run_goes_on_from_the_one_before(copy, finished):
    shutil.rmtree(train.latest_checkpoint(copy))
    assert train.latest_checkpoint(copy).name == "pretrain-000004"
    assert resume(copy) == 0
    assert_same_run(copy, finished)


def test_tensors_of_another_model_are_refused(capsys, copy, finished):
    path = train.latest_checkpoint(copy)
    rewrite(path, lambda state: state["config"].update(expert_dim=64))
    sentence = refused(capsys, ["--resume", "--out", copy])
    assert str(path) in sentence and "another model" in sentence


# --------------------------------------------------------------------------------- what stops a run


@pytest.mark.parametrize("flags, stage", [(["--lr", 1e30], "pretrain"), (["--rl-lr", 1e30], "rl")])
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_last_good_checkpoint(
        capsys, tmp_path, flags, stage):
    out = tmp_path / "run"
    sentence = failed(capsys, [*TINY, *flags, "--save-every", 1, "--log-every", 5, "--out", out])
    step = int(re.search(rf"{stage} step (\d+) is (nan|inf)", sentence)[1])
    named = Path(sentence.split()[-1])
    assert named == train.latest_checkpoint(out) == out / "checkpoints" / f"{stage}-{step - 1:06d}"
    assert all(t.isfinite().all() for t in tensors(named).values())


@contextmanager
def disk_of(n):
    """Meanwhile no file grows beyond n bytes, as on a disk that is nearly full; the limit ends
    before the test does, because pytest's own output may be a longer file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays_good(copy, capsys):
    good = train.latest_checkpoint(copy)
    with disk_of(100_000):  # enough for the log, not for the tensors
        sentence = failed(capsys, ["--resume", "--rl-steps", 5, "--out", copy])
    assert "rl step 5" in sentence
    assert str(good) in sentence and train.latest_checkpoint(copy) == good
    train.read_checkpoint(good)
    assert [p.name for p in (copy / "checkpoints").iterdir() if p.suffix] == []


def test_a_disk_without_room_for_the_log_is_one_sentence(tmp_path, capsys):
    with disk_of(100):
        sentence = failed(capsys, [*TINY, "--out", tmp_path / "run"])
    assert "log.jsonl" in sentence


def test_an_error_of_the_checkpoint_library_is_one_sentence(copy, capsys, monkeypatch):
    def full(verb, *args):
        raise OSError(28, "No space left on device")

    original = train.dcp
    monkeypatch.setattr(train, "dcp", lambda verb, *args:
                        (full if verb == "save" else original)(verb, *args))
    sentence = failed(capsys, ["--resume", "--rl-steps", 5, "--out", copy])
    assert "No space left on device" in sentence and "rl-000004" in sentence


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(train.flag(name) in text for name in vars(train.Config()))
