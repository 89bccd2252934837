"""The corpus, its split and its batches; the tasks, their hold-out and their checker."""

import hashlib
import io
import itertools
import json
import math
import subprocess
import sys
import urllib.error
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data import prepare
from data.prepare import Corpus, load_corpus, pair_counts, random_below, random_bits
from data.task import TASKS, as_row, held_out, task, task_rows

ROOT = Path(__file__).resolve().parent.parent
CHANCE = 0.189  # the share of right answers that `pick` shows in pretraining
ALL_TASKS = pytest.mark.parametrize("t", TASKS.values(), ids=list(TASKS))


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def lines_of(rows: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in rows]


def sentence(call) -> str:
    """The message of the ValueError that `call` raises, which has to be one line."""
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --------------------------------------------------------------------------------------- randomness


def splitmix(keys: list[int], state: int) -> int:
    """random_bits in Python's unbounded integers."""
    for key in keys:
        state ^= key % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state


def test_random_bits_are_the_mixer_of_every_key():
    start = int.from_bytes(hashlib.blake2s(b"stream", digest_size=8).digest(), "big")
    keys = list(itertools.product((0, -1, 2**63 + 5), (7, 8), (0, 1, 10**12)))
    columns = [np.array([key % 2**64 for key in column], np.uint64) for column in zip(*keys)]
    expected = [splitmix(list(key), start) for key in keys]
    assert random_bits("stream", *columns).tolist() == expected
    assert len(set(expected)) == len(keys)
    assert random_bits("stream", -1, 7, 0)[0] == splitmix([-1, 7, 0], start)


def test_random_below_is_even():
    counts = np.bincount(random_below(10, "even", np.arange(100_000)), minlength=10)
    chi_squared = ((counts - 10_000) ** 2 / 10_000).sum()
    assert chi_squared < 27.9  # 9 degrees of freedom, p = 0.001; the draw is fixed


# ------------------------------------------------------------------------------------------ batches


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return load_corpus(None)


def test_batch_is_a_pure_function_of_each_row(stdlib):
    whole = stdlib.batch(3, "train", 5, range(64), 129)
    assert whole.shape == (64, 129) and whole.dtype == np.uint8
    some = [63, 2, 17]
    assert (stdlib.batch(3, "train", 5, some, 129) == whole[some]).all()
    assert (stdlib.batch(3, "train", 5, np.array([9]), 129) == whole[9]).all()
    assert stdlib.batch(3, "train", 5, [], 129).shape == (0, 129)


def test_batches_differ_by_seed_split_step_and_row():
    text = as_bytes(bytes(range(256)) * 256)
    corpus = Corpus("both halves alike", text, text)
    keys = itertools.product((0, 1), ("train", "val"), (0, 1))
    batches = [corpus.batch(seed, split, step, range(8), 300) for seed, split, step in keys]
    starts = random_below(len(text) - 299, "text train", 0, 0, np.arange(8))
    assert (batches[0][:, 0] == text[starts]).all()
    assert len(set(np.concatenate(batches)[:, 0].tolist())) > 40  # of 64 draws from 256 values
    assert len({batch.tobytes() for batch in batches}) == 8


def test_batch_windows_come_from_their_split_and_reach_both_ends():
    corpus = Corpus("small", as_bytes(b"abcdefgh"), as_bytes(b"ABCDE"))
    for split, text in (("train", b"abcdefgh"), ("val", b"ABCDE")):
        windows = {text[i : i + 4] for i in range(len(text) - 3)}
        assert set(lines_of(corpus.batch(0, split, 0, range(200), 4))) == windows
    assert lines_of(corpus.batch(0, "val", 0, [0], 5)) == [b"ABCDE"]


def test_batch_errors():
    corpus = Corpus("small", as_bytes(b"abcdefgh"), as_bytes(b"ABCDE"))
    message = sentence(lambda: corpus.batch(0, "val", 0, [0], 6))
    assert "val half of small holds 5 bytes" in message and "6" in message
    assert "'train' or 'val', not 'test'" in sentence(lambda: corpus.batch(0, "test", 0, [0], 2))


# ------------------------------------------------------------------------------------- corpus facts


def test_bigram_by_hand():
    train, val = b"abracadabra", b"cabbage"
    pairs, firsts = Counter(zip(train, train[1:])), Counter(train[:-1])
    bits = [-math.log2((pairs[a, b] + 1) / (firsts[a] + 256)) for a, b in zip(val, val[1:])]
    corpus = Corpus("tiny", as_bytes(train), as_bytes(val))
    assert corpus.bigram_bpb == pytest.approx(sum(bits) / 6, rel=1e-12)


def test_pair_counts_do_not_depend_on_the_chunk():
    data = as_bytes(random_bits("pairs", np.arange(500)).tobytes())
    assert pair_counts(data).sum() == len(data) - 1
    for chunk in (1, 7, len(data) - 1, len(data)):
        assert (pair_counts(data, chunk) == pair_counts(data)).all()


def test_default_corpus(stdlib):
    assert 6e6 < len(stdlib.train) + len(stdlib.val) < 10e6
    assert 0.05 < len(stdlib.val) / (len(stdlib.train) + len(stdlib.val)) < 0.12
    text = stdlib.train.tobytes() + stdlib.val.tobytes()
    assert stdlib.sha256 == hashlib.sha256(text).hexdigest() == load_corpus(None).sha256
    if (3, 10) <= sys.version_info[:2] <= (3, 13):  # measured on these four
        assert 3.45 <= stdlib.bigram_bpb <= 3.47


def test_default_corpus_leaves_the_named_folders_out(monkeypatch, tmp_path):
    kept = {"a.py": "kept = 1\n" * 9, "sub/b.py": "kept = 2\n", "configparser.py": "kept = 3\n"}
    dropped = ["test/a.py", "sub/tests/a.py", "site-packages/a.py", "_sysconfigdata_x.py"]
    dropped += ["config-3/a.py", "sitecustomize.py", "sub/a.txt", "lib2to3/a.py"]
    write_tree(tmp_path, kept | {path: "dropped\n" for path in dropped})
    monkeypatch.setattr(prepare.sysconfig, "get_path", {"stdlib": tmp_path}.get)
    corpus = load_corpus(None)
    text = corpus.train.tobytes() + corpus.val.tobytes()
    assert b"dropped" not in text and all(kept[path].encode() in text for path in kept)


# ------------------------------------------------------------------------------------------- splits


def write_tree(root: Path, files: dict) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_folder_split_is_by_path_and_stable(tmp_path):
    files = {f"sub{i % 7}/file{i}.txt": f"this is file {i:04}\n" for i in range(300)}
    write_tree(tmp_path, files)
    halves = {True: b"", False: b""}
    for path in sorted(files):
        code = int.from_bytes(hashlib.blake2s(path.encode(), digest_size=8).digest(), "big")
        halves[code * 12 < 2**64] += files[path].encode()
    corpus = load_corpus(str(tmp_path))
    assert corpus.name == tmp_path.name
    assert corpus.train.tobytes() == halves[False] and corpus.val.tobytes() == halves[True]

    write_tree(tmp_path, {"new.txt": "a new file\n", "sub3/other.txt": "another\n"})
    grown = load_corpus(str(tmp_path))
    for old, new in ((corpus.train, grown.train), (corpus.val, grown.val)):
        assert set(old.tobytes().splitlines()) <= set(new.tobytes().splitlines())


@pytest.mark.parametrize("train_bytes, val_bytes", [(990, 10), (700, 300)])
def test_lopsided_folder_splits_its_joined_text(tmp_path, train_bytes, val_bytes):
    names = [f"{i:03}" for i in range(100)]
    val = next(name for name in names if prepare.hash64(name.encode()) < prepare.VAL_BELOW)
    write_tree(tmp_path, {"a": "t" * train_bytes, val: "v" * val_bytes})  # digits sort before a
    corpus = load_corpus(str(tmp_path))
    assert corpus.train.tobytes() == b"v" * val_bytes + b"t" * (900 - val_bytes)
    assert corpus.val.tobytes() == b"t" * 100


def test_folder_takes_text_only(tmp_path):
    files = {"a.txt": "plain\n" * 20, "b.bin": b"bin\0ary", ".git/c.txt": "hidden", "d": ""}
    late = b"x" * 9000 + b"\0"  # past the first read
    write_tree(tmp_path, files | {"e.so": late})
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    corpus = load_corpus(str(tmp_path))
    assert corpus.train.tobytes() + corpus.val.tobytes() == b"plain\n" * 20
    assert len(corpus.val) == 12  # one file cannot be split by path


def test_folders_of_runs_are_no_text(tmp_path):
    write_tree(tmp_path, {"a.txt": "plain\n" * 20, "sub/log.jsonl": "a log that is text\n"})
    before = load_corpus(str(tmp_path)).sha256
    for out, names in dict(a=["lock", "log.jsonl"], b=["log.jsonl", "checkpoints/p/run.json"],
                           c=["lock", "checkpoints/p/run.json", "moved-log.jsonl"]).items():
        write_tree(tmp_path, {f"sub/{out}/{name}": "of a run\n" for name in names})
        assert load_corpus(str(tmp_path)).sha256 == before


def test_text_file_keeps_its_last_tenth_for_val(tmp_path):
    write_tree(tmp_path, {"a.txt": bytes(range(1, 206))})
    corpus = load_corpus(str(tmp_path / "a.txt"))
    assert corpus.train.tolist() == list(range(1, 186))
    assert corpus.val.tolist() == list(range(186, 206))


def test_every_wrong_source_is_one_sentence(tmp_path):
    write_tree(tmp_path, {"empty": "", "short": "x" * 19, "zero": b"text\0" * 9})
    write_tree(tmp_path, {"binary/a": b"\0" * 99, "half/train.bin": "xx", "none/val.bin": ""})
    write_tree(tmp_path, {"none/train.bin": "xx"})
    expected = {
        "missing": "missing does not exist",
        "empty": "empty holds 0 bytes of text",
        "short": "short holds 19 bytes of text, and a corpus needs 20",
        "zero": "zero is no text",
        "binary": "binary holds 0 bytes of text",
        "half": "val.bin is missing or empty",
        "none": "val.bin is missing or empty",
    }
    for name, message in expected.items():
        said = sentence(lambda name=name: load_corpus(str(tmp_path / name)))
        assert message in said and str(tmp_path / name) in said and "train.bin and val.bin" in said


# ---------------------------------------------------------------------------------------- preparing


def test_prepared_folder_round_trip(tmp_path, capsys):
    write_tree(tmp_path, {"a.txt": "some text to keep\n" * 50})
    plain, out = load_corpus(str(tmp_path / "a.txt")), tmp_path / "out"
    arguments = ["--data", str(tmp_path / "a.txt"), "--out", str(out)]
    prepare.main(arguments)
    prepare.main(arguments)  # its own folder may be written again
    back = load_corpus(str(out))
    assert (back.train == plain.train).all() and (back.val == plain.val).all()
    assert back.sha256 == plain.sha256 and back.bigram_bpb == plain.bigram_bpb
    assert (back.batch(1, "val", 2, range(4), 30) == plain.batch(1, "val", 2, range(4), 30)).all()
    assert sorted(path.name for path in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    assert json.loads((out / "meta.json").read_text()) == {
        "name": "a.txt",
        "train_bytes": 810,
        "val_bytes": 90,
        "sha256": plain.sha256,
        "bigram_bpb": plain.bigram_bpb,
    }
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and "810 bytes train, 90 val" in printed[0]


def test_prepare_leaves_other_folders_alone(tmp_path):
    write_tree(tmp_path, {"a.txt": "text " * 50, "full/notes.md": "mine", "full/train.bin": "mine"})
    for out, message in (("full", r"other files \(notes.md\)"), ("a.txt", "is a file")):
        with pytest.raises(SystemExit, match=message):
            prepare.main(["--data", str(tmp_path / "a.txt"), "--out", str(tmp_path / out)])
    assert (tmp_path / "full/train.bin").read_text() == "mine"
    with pytest.raises(SystemExit, match="does not exist"):
        prepare.main(["--data", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_prepare_runs_as_a_script(tmp_path):
    write_tree(tmp_path, {"a.txt": "text " * 50})
    script = [sys.executable, "data/prepare.py"]
    arguments = ["--data", tmp_path / "a.txt", "--out", tmp_path / "o"]
    subprocess.run(script + arguments, cwd=ROOT, check=True, capture_output=True)
    assert load_corpus(str(tmp_path / "o")).val.tobytes() == b"text " * 5


# ------------------------------------------------------------------------------------------- enwik8


def zipped(text: bytes, name: str = "enwik8") -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr(name, text)
    return archive.getvalue()


def offline(url):
    raise urllib.error.URLError("no route to host")


@pytest.mark.parametrize(
    "fetch", [offline, lambda url: b"no zip", lambda url: zipped(b"", "other")]
)
def test_enwik8_without_a_download(monkeypatch, tmp_path, fetch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "fetch", fetch)
    message = sentence(lambda: load_corpus("enwik8"))
    assert prepare.ENWIK8_URL in message and "leave --data out" in message


def test_enwik8_is_checked_then_split(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = bytes(range(1, 201))
    monkeypatch.setattr(prepare, "fetch", lambda url: zipped(text))
    assert "200 bytes" in sentence(lambda: load_corpus("enwik8"))
    monkeypatch.setattr(prepare, "ENWIK8_BYTES", 200)
    assert "SHA-1" in sentence(lambda: load_corpus("enwik8"))  # the right size, the wrong bytes

    monkeypatch.setattr(prepare, "ENWIK8_SHA1", hashlib.sha1(text).hexdigest())
    corpus = load_corpus("enwik8")
    assert corpus.train.tobytes() == text[:180] and corpus.val.tobytes() == text[180:190]
    monkeypatch.setattr(prepare, "fetch", offline)
    (tmp_path / "enwik8").write_bytes(text)  # a copy in the working directory saves the download
    assert load_corpus("enwik8").sha256 == corpus.sha256


# ---------------------------------------------------------------- tasks, recomputed in plain Python


def right_answers(t, prompt: bytes) -> set[bytes]:
    text = prompt.decode()
    if t.name.startswith("sort"):
        return {"".join(sorted(text[:-1])).encode() + b"\n"}
    if t.name.startswith("add"):
        first, second = text[:-1].split("+")
        assert len(first) == len(second) == t.digits
        return {f"{int(first) + int(second):0{t.digits + 1}}"[::-1].encode() + b"\n"}
    row, target = text[:-1].split(":")
    pairs = itertools.combinations(row, 2)
    return {f"{a}{b}\n".encode() for a, b in pairs if int(a) + int(b) == int(target)}


def answers_of(t, prompts) -> np.ndarray:
    """A right answer to each prompt, the first where there are more."""
    choices, right = t.choices(prompts)
    return choices[np.arange(len(prompts)), right.argmax(axis=1)]


def answer_of(t, prompt: bytes) -> bytes:
    return answers_of(t, as_row(prompt)).tobytes()


def reward_of(t, prompt: bytes, completion: bytes) -> float:
    return float(t.rewards(as_row(prompt), as_row(completion))[0])


def canonical(t, prompt: bytes) -> bytes:
    text = prompt[:-1]
    if t.name.startswith("add"):
        return b"+".join(sorted(text.split(b"+")))
    row, colon, target = text.partition(b":")
    return bytes(sorted(row)) + colon + target


def test_formats():
    assert answer_of(task("sort6"), b"314159>") == b"113459\n"
    assert answer_of(task("sort4"), b"3141>") == b"1134\n"
    assert answer_of(task("add2"), b"12+45=") == b"750\n"
    assert answer_of(task("add3"), b"999+999=") == b"8991\n"
    assert answer_of(task("pick"), b"37482:15>") == b"78\n"
    assert reward_of(task("pick"), b"37482:11>", b"74\n") == 1.0  # two ways to make eleven
    assert reward_of(task("pick"), b"37482:11>", b"38\n") == 1.0
    assert "there is no task 'sort5': choose one of sort6, " in sentence(lambda: task("sort5"))


@ALL_TASKS
@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_right(t, split):
    prompts = t.problems(0, split, range(300))
    assert prompts.shape == (300, t.prompt_len) and prompts.dtype == np.uint8
    for prompt, answer in zip(lines_of(prompts), lines_of(answers_of(t, prompts))):
        assert answer in right_answers(t, prompt)
        assert answer_of(t, prompt) == answer and len(answer) == t.answer_len
        assert canonical(t, prompt) == t.canonical(as_bytes(prompt)[None]).tobytes()


def near_misses(answer: bytes) -> list[bytes]:
    """No stop, text around the answer, wrong counts, and every change of one byte."""
    digits = answer[:-1]
    wrong = [digits, digits + b"\0", digits + b" \n", digits + b"\r\n", digits[:-1] + b"\n"]
    wrong += [answer + b"1", answer + b"\n", answer + b"\0x", answer + b" ", digits * 2 + b"\n"]
    wrong += [b" " + answer, b"\0" + answer, b"0" + answer, answer[:1] + answer, answer[1:]]
    wrong += [b"", b"\n", b"\0" * len(answer)]
    for place, byte in itertools.product(range(len(answer)), range(256)):
        wrong.append(answer[:place] + bytes([byte]) + answer[place + 1 :])
    return wrong


@ALL_TASKS
def test_checker_against_every_near_miss(t):
    for prompt in lines_of(t.problems(1, "train", range(20))):
        allowed = right_answers(t, prompt)
        wrong = set().union(*map(near_misses, allowed)) - allowed
        for _, group in itertools.groupby(sorted(wrong, key=len), key=len):
            completions = np.array([list(text) for text in group], np.uint8)  # of one length
            prompts = np.tile(as_bytes(prompt), (len(completions), 1))
            assert t.rewards(prompts, completions).sum() == 0
        for answer in allowed:
            assert reward_of(t, prompt, answer) == reward_of(t, prompt, answer + b"\0\0\0") == 1.0
            assert reward_of(t, prompt, b"") == reward_of(t, prompt, answer[:-1]) == 0.0


def test_pick_takes_each_digit_once_and_in_order():
    pick = task("pick")
    assert reward_of(pick, b"37482:15>", b"87\n") == 0.0  # out of order
    assert reward_of(pick, b"37482:14>", b"77\n") == 0.0  # one seven only
    assert reward_of(pick, b"37482:15>", b"69\n") == 0.0  # the sum of digits not in the row
    assert reward_of(pick, b"37472:14>", b"77\n") == 1.0


@ALL_TASKS
def test_rewards_are_the_single_rewards(t):
    prompts = t.problems(2, "test", range(64))
    completions = np.pad(answers_of(t, prompts), ((0, 0), (0, 3)))
    completions[::3, 0] += 1
    completions[1::5, -1] = ord("7")
    together = t.rewards(prompts, completions)
    alone = [reward_of(t, p, c) for p, c in zip(lines_of(prompts), lines_of(completions))]
    assert together.dtype == np.float32 and together.tolist() == alone
    assert 0 < together.mean() < 1
    as_tokens = completions.astype(np.int64)
    as_tokens[::2, 1] += 256  # no byte: equal to one only where a cast would wrap
    assert t.rewards(prompts, as_tokens)[::2].sum() == 0


# ----------------------------------------------------------------------------------------- hold-out


@pytest.mark.parametrize("name", ["sort4", "sort6"])
def test_no_multiset_is_in_both_splits(name):
    """Over all problems: every order of a multiset falls into the half of its sorted form."""
    t = task(name)
    prompts = t.prompts(np.arange(t.count()))
    in_test = t.in_test(prompts)
    multiset = np.sort(prompts[:, :-1], axis=1) @ 10 ** np.arange(t.digits)
    assert not set(multiset[in_test]) & set(multiset[~in_test])
    ways = list(itertools.combinations_with_replacement(b"0123456789", t.digits))
    tests = sum(held_out(bytes(way)) for way in ways)
    assert len(set(multiset[in_test])) == tests and len(set(multiset)) == len(ways)
    assert 0.10 < tests / len(ways) < 0.15


def test_no_pair_or_row_is_in_both_splits():
    add2 = task("add2")
    in_test = add2.in_test(add2.prompts(np.arange(add2.count()))).reshape(100, 100)
    assert (in_test == in_test.T).all() and 0.10 < in_test.mean() < 0.15
    pick = task("pick")
    halves = {}
    for order in itertools.permutations(b"37482"):
        halves.setdefault(pick.in_test(as_bytes(bytes(order) + b":15>")[None])[0], []).append(order)
    assert len(halves) == 1


@ALL_TASKS
def test_problems_stay_in_their_split(t):
    for split in ("train", "test"):
        prompts = lines_of(t.problems(5, split, range(400)))
        assert {held_out(canonical(t, prompt)) for prompt in prompts} == {split == "test"}
    assert "'train' or 'test', not 'val'" in sentence(lambda: t.problems(0, "val", [0]))


@ALL_TASKS
def test_problems_are_a_pure_function_of_each_id(t):
    for split in ("train", "test"):
        whole = t.problems(7, split, range(200))
        assert (t.problems(7, split, [150, 3]) == whole[[150, 3]]).all()
        assert (t.problems(8, split, range(200)) != whole).any(axis=1).mean() > 0.9
        assert len(set(lines_of(whole))) > 100
        assert t.problems(7, split, []).shape == (0, t.prompt_len)


# ----------------------------------------------------------------------------- rows for pretraining


@ALL_TASKS
def test_task_rows_hold_train_problems_and_mask_answers(t):
    width = t.prompt_len + t.answer_len
    text, mask = task_rows(t, 0, 4, range(32), 10 * width + t.prompt_len + 1)
    assert text.shape == mask.shape == (32, 10 * width + t.prompt_len + 1)
    assert text.dtype == np.uint8 and mask.dtype == bool
    rewards = []
    for row, row_mask in zip(lines_of(text), mask):
        for start in range(0, 10 * width, width):
            prompt = row[start : start + t.prompt_len]
            answer = row[start + t.prompt_len : start + width]
            assert not held_out(canonical(t, prompt)) and answer.endswith(b"\n")
            rewards.append(reward_of(t, prompt, answer))
        assert row_mask.tolist() == [i % width >= t.prompt_len for i in range(len(row))]
        assert row[10 * width + t.prompt_len - 1 :][:1] in b">="  # the cut line starts whole
    shown = CHANCE if t.name == "pick" else 1
    error = math.sqrt(shown * (1 - shown) / len(rewards))
    assert abs(np.mean(rewards) - shown) <= 4 * error
    assert len(set(lines_of(text))) == 32


def test_pick_shows_chance():
    """The share of a prompt's ten pairs that make its target, over all problems."""
    pick = task("pick")
    _, right = pick.choices(pick.prompts(np.arange(pick.count())))
    assert round(right.mean(), 3) == CHANCE

    lines = lines_of(task_rows(pick, 0, 0, range(600), 12)[0])
    lines = [line for line in lines if len(set(line[:5])) == 5]  # where a digit names its place
    places = Counter((line.index(line[9]), line.index(line[10])) for line in lines)
    assert set(places) == set(itertools.combinations(range(5), 2))


@ALL_TASKS
def test_task_rows_are_a_pure_function_of_each_row(t):
    text, mask = task_rows(t, 1, 2, range(16), 129)
    some_text, some_mask = task_rows(t, 1, 2, [11, 4], 129)
    assert (some_text == text[[11, 4]]).all() and (some_mask == mask[[11, 4]]).all()
    assert (task_rows(t, 1, 2, range(16), 60)[0] == text[:, :60]).all()
    for seed, step in ((2, 2), (1, 3)):
        assert (task_rows(t, seed, step, range(16), 129)[0] != text).any(axis=1).all()
