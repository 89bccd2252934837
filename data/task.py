"""Problems for reinforcement learning whose answers are checked exactly, as bytes.

A line is a prompt of fixed length, an answer of fixed length and the newline that stops it.
One hash of a problem, whatever the order of its parts, holds it out of pretraining and RL alike.
"""
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from data.prepare import hash64, random_below, random_bits

HELD_OUT_BELOW = 2 ** 64 // 8       # one problem in eight is kept for the test
PAIRS = np.array(list(combinations(range(5), 2)))       # [10, 2]: which two of five digits to pick


@lru_cache(1 << 16)         # pretraining asks for the same few thousand problems at every step
def held_out(canonical):
    """Does the problem belong to the test split?

    `canonical` writes a problem in one way however its parts are ordered: a model that has seen
    123+456 or 654321 sorted has seen 456+123 and 123456 too.
    """
    return hash64(canonical) < HELD_OUT_BELOW


# ------------------------------------------------------------------------------------- ASCII digits
def ascii_digits(numbers, count):
    """int64 [n] -> uint8 [n, count], with leading zeros."""
    powers = 10 ** np.arange(count - 1, -1, -1)
    return (numbers[:, None] // powers % 10 + ord("0")).astype(np.uint8)


def value(digits):
    """uint8 [n, count] -> int64 [n], the inverse of ascii_digits."""
    return (digits.astype(np.int64) - ord("0")) @ 10 ** np.arange(digits.shape[1] - 1, -1, -1)


def beside(*parts):
    """uint8 [n, width]: arrays [n, w], and bytes that every row repeats, from left to right."""
    n = next(len(part) for part in parts if isinstance(part, np.ndarray))
    rows = [as_row(part) if isinstance(part, bytes) else part for part in parts]
    return np.concatenate([np.broadcast_to(row, (n, row.shape[1])) for row in rows], axis=1)


def as_row(text):
    """Bytes as uint8 [1, len(text)]."""
    return np.frombuffer(text, np.uint8)[None]


# -------------------------------------------------------------------------------------------- tasks
@dataclass(frozen=True)
class Task:
    """What all tasks share. A kind of task adds four methods:

    count()             how many problems there are; they are numbered from 0
    prompts(numbers)    int64 [n] -> uint8 [n, prompt_len]
    canonical(prompts)  uint8 [n, width]: what `held_out` hashes
    choices(prompts)    (uint8 [n, k, answer_len], bool [n, k]): k well-formed answers to each
                        prompt, newline included, and which of them are right
    """
    name: str
    digits: int             # in the row, or in each of the two numbers
    prompt_len: int
    answer_len: int         # newline included

    def problems(self, seed, split, ids):
        """uint8 [n, prompt_len]: the prompt of each id, of the split "train" or "test".

        A pure function of (seed, split, id): an id draws again, by a counter of its own, until
        the problem belongs to the split.
        """
        if split not in ("train", "test"):
            raise ValueError(f"split is 'train' or 'test', not {split!r}")
        ids, stream = np.asarray(ids), f"{self.name} {split}"
        prompts = np.zeros((len(ids), self.prompt_len), np.uint8)
        todo, attempt = np.arange(len(ids)), 0
        while len(todo):
            numbers = random_below(self.count(), stream, seed, ids[todo], attempt)
            prompts[todo] = self.prompts(numbers)
            todo = todo[self.in_test(prompts[todo]) != (split == "test")]
            attempt += 1
        return prompts

    def in_test(self, prompts):
        """Which of the prompts belong to the test split, bool [n]."""
        keys = self.canonical(prompts)
        text, width = keys.tobytes(), keys.shape[1]
        starts = range(0, len(text), width)
        return np.array([held_out(text[start:start + width]) for start in starts], bool)

    def rewards(self, prompts, completions):
        """float32 [n]: 1 where completions [n, any width] hold a right answer and its newline,
        with nothing but zeros after it, else 0."""
        choices, right = self.choices(prompts)
        completions = np.asarray(completions)
        missing = max(0, self.answer_len - completions.shape[1])
        completions = np.pad(completions, ((0, 0), (0, missing)))       # a zero matches no answer
        same = (choices == completions[:, None, :self.answer_len]).all(axis=2)          # [n, k]
        ended = (completions[:, self.answer_len:] == 0).all(axis=1)                     # [n]
        return ((same & right).any(axis=1) & ended).astype(np.float32)


class Sort(Task):
    """314159> is answered 113459."""

    def count(self):
        return 10 ** self.digits

    def prompts(self, numbers):
        return beside(ascii_digits(numbers, self.digits), b">")

    def canonical(self, prompts):
        return np.sort(prompts[:, :self.digits], axis=1)

    def choices(self, prompts):
        answers = beside(self.canonical(prompts), b"\n")
        return answers[:, None], np.ones((len(prompts), 1), bool)


class Add(Task):
    """123+456= is answered 9750: the sum backwards, so that each digit's carry is known by then."""

    def count(self):
        return 100 ** self.digits

    def prompts(self, numbers):
        first, second = np.divmod(numbers, 10 ** self.digits)
        return beside(ascii_digits(first, self.digits), b"+",
                      ascii_digits(second, self.digits), b"=")

    def terms(self, prompts):
        """Two int64 [n]."""
        return value(prompts[:, :self.digits]), value(prompts[:, self.digits + 1:-1])

    def canonical(self, prompts):
        first, second = self.terms(prompts)
        low, high = np.minimum(first, second), np.maximum(first, second)
        return beside(ascii_digits(low, self.digits), b"+", ascii_digits(high, self.digits))

    def choices(self, prompts):
        first, second = self.terms(prompts)
        total = ascii_digits(first + second, self.digits + 1)
        return beside(total[:, ::-1], b"\n")[:, None], np.ones((len(prompts), 1), bool)


class Pick(Task):
    """37482:15> is answered 78: two digits of the row, in its order, that make the target.

    Pretraining sees any two digits of the row, whether or not they make the target. It teaches
    the form of an answer and nothing about sums; what is learned beyond chance, reward taught.
    """

    def count(self):
        return 9 ** self.digits * len(PAIRS)

    def prompts(self, numbers):
        row, pair = np.divmod(numbers, len(PAIRS))
        row = row[:, None] // 9 ** np.arange(self.digits) % 9 + 1       # [n, digits], each 1 to 9
        target = np.take_along_axis(row, PAIRS[pair], axis=1).sum(axis=1)
        return beside((row + ord("0")).astype(np.uint8), b":", ascii_digits(target, 2), b">")

    def canonical(self, prompts):
        return beside(np.sort(prompts[:, :self.digits], axis=1), prompts[:, self.digits:-1])

    def choices(self, prompts):
        answers = np.full((len(prompts), len(PAIRS), 3), ord("\n"), np.uint8)
        answers[:, :, :2] = prompts[:, PAIRS]                                           # [n, 10, 2]
        total = (answers[:, :, :2].astype(np.int64) - ord("0")).sum(axis=2)             # [n, 10]
        return answers, total == value(prompts[:, self.digits + 1:-1])[:, None]


TASKS = {task.name: task for task in (
    Sort("sort6", digits=6, prompt_len=7, answer_len=7),
    Sort("sort4", digits=4, prompt_len=5, answer_len=5),
    Add("add2", digits=2, prompt_len=6, answer_len=4),
    Add("add3", digits=3, prompt_len=8, answer_len=5),
    Pick("pick", digits=5, prompt_len=9, answer_len=3),         # right by chance: 18.9 %
)}


def task(name):
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}: choose one of {', '.join(TASKS)}")
    return TASKS[name]


def task_rows(task, seed, step, rows, length):
    """(uint8 [n, length], bool [n, length]): rows of lines for pretraining, the last one cut off.

    Only problems of the train split; the mask is true at the bytes of answers, newlines included.
    A row depends on (seed, step, row) only, as in Corpus.batch.
    """
    width = task.prompt_len + task.answer_len
    lines = -(-length // width)                         # in a row, the cut one included
    ids = random_bits(f"{task.name} rows", step, np.asarray(rows)[:, None], np.arange(lines))
    ids = ids.ravel()                                   # [n * lines]
    prompts = task.problems(seed, "train", ids)
    choices, _ = task.choices(prompts)
    shown = random_below(choices.shape[1], f"{task.name} shown", seed, ids)
    text = beside(prompts, choices[np.arange(len(ids)), shown])         # [n * lines, width]
    mask = np.tile(np.arange(width) >= task.prompt_len, (len(rows), lines))
    return text.reshape(len(rows), lines * width)[:, :length], mask[:, :length]
