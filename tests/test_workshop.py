"""The workshop as it is written: every exercise runs, and its answer is right."""
import codeop
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "data" / "workshop.md").read_text()
EXERCISES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))


def script_of(exercise):
    """The blocks of an exercise as one Python program, run for three seeds where it names one."""
    blocks = []
    for language, code in re.findall(r"^```(python|sh)\n(.*?)^```", exercise, re.M | re.S):
        if language == "sh":
            code = ("import os, subprocess\nsubprocess.run(['bash', '-ec', 'python() { \"$PYTHON\" "
                    f"\"$@\"; }}; ' + {code!r}], check=True)")
        blocks.append(f"exec({code!r}, names)")
    seeds = (0, 1, 2) if "\nseed = 0\n" in exercise else (0,)
    return "\n".join("names = {'__name__': 'exercise'}\n" + "\n".join(blocks).replace(
        "\\nseed = 0\\n", f"\\nseed = {seed}\\n") for seed in seeds)


@pytest.mark.parametrize("name", EXERCISES, ids=lambda name: re.sub(r"\W+", "-", name))
def test_an_exercise_ends_as_its_answer_says(name, tmp_path):
    """In a folder of links to the repository, so that out/ is not that of the reader; an earlier
    try has left its runs there. On a CPU, whose numbers the answers give."""
    for path in ROOT.iterdir():
        if path.name != "out":
            (tmp_path / path.name).symlink_to(path)
    for out in re.findall(r"--out (out/[\w-]+)", EXERCISES[name]):
        (tmp_path / out / "checkpoints" / "pretrain-000008").mkdir(parents=True)
    environment = dict(os.environ, PYTHON=sys.executable, OMP_NUM_THREADS="1", PYTHONPATH=".",
                       CUDA_VISIBLE_DEVICES="")
    done = subprocess.run([sys.executable, "-c", script_of(EXERCISES[name])], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S))
def test_a_block_can_be_pasted_into_the_prompt(code):
    """Which takes an indented block as ended by an empty line only, and reads line by line."""
    statement = []
    for line in [*code.splitlines(), ""]:
        statement.append(line)
        if codeop.compile_command("\n".join(statement), symbol="single"):
            statement = []
    assert statement == []


def test_the_shell_need_not_split_words():
    """As zsh does not."""
    for code in re.findall(r"^```sh\n(.*?)^```", TEXT, re.M | re.S):
        assert re.findall(r'(?<!")\$', code) == []


def test_there_are_exercises_and_each_has_an_answer_that_is_checked():
    assert len(EXERCISES) >= 6
    for exercise in EXERCISES.values():
        question, answer = exercise.split("<details><summary>Answer</summary>")
        assert "```" in question and "assert " in answer and "assert " not in question


def test_the_walk_takes_90_minutes():
    assert sum(map(int, re.findall(r"^\| (\d+) \|", TEXT, re.M))) == 90


def test_functions_that_the_walk_names_exist():
    found = re.findall(r"`(quant|model|moe_comm|kernels|train)\.([\w.]+)`", TEXT)
    assert len(found) > 20
    for module, name in found:
        if name != "py":
            thing = importlib.import_module(module)
            for part in name.split("."):
                thing = getattr(thing, part)
