"""Text to bytes: find a corpus, split it into train and val, and cut batches out of it.

The default corpus is Python's own standard library, so that a first run needs no network.
`python data/prepare.py --data PATH --out FOLDER` writes a corpus that later runs map from disk.
"""
import argparse
import hashlib
import http.client
import io
import json
import os
import platform
import sysconfig
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

# Left out of the standard library: tests and tables, which read like no program that anybody
# writes, and packages that some systems or Python versions do not have.
OMITTED_FOLDERS = {
    "test", "tests", "encodings", "pydoc_data", "idlelib", "tkinter", "distutils", "lib2to3",
    "turtledemo", "ensurepip", "site-packages", "dist-packages", "__pycache__"}
# These are written when a Python is built or packaged, and differ from machine to machine.
OMITTED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")

VAL_BELOW = 2 ** 64 // 12    # one file in twelve is val: 8 to 10 % of the default corpus's bytes
SMALLEST = 20                # bytes; the tenth that becomes val then still holds a pair of bytes

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_BYTES = 100_000_000
ENWIK8_SHA1 = "57b8363b814821dc9d47aa4d41f58733519076b2"

SOURCES = ("--data takes a text file, a folder of text files, a prepared folder with train.bin and "
           "val.bin, or the word enwik8")
PREPARED_FILES = ("train.bin", "val.bin", "meta.json")
RUN_FILES = ("lock", "log.jsonl", "checkpoints")        # of a run of train.py, in its --out


# ------------------------------------------------------------------------- randomness without state
def hash64(key):
    """64 bits that depend on the bytes `key` alone; Python's hash() differs between processes."""
    return int.from_bytes(hashlib.blake2s(key, digest_size=8).digest(), "big")


def random_bits(stream, *keys):
    """uint64 random bits, one for each combination of the integer `keys`, which broadcast.

    A pure function of its arguments: asking for more, fewer or other keys changes no result.
    """
    state = np.array([hash64(stream.encode())], np.uint64)      # 1-d: scalars warn of overflow
    for key in keys:
        # splitmix64's finaliser is a bijection, so two keys never collide under one prefix.
        state = state ^ np.asarray(key).astype(np.uint64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def random_below(limit, stream, *keys):
    """int64 in [0, limit), as `random_bits`; the bias of the remainder is below limit / 2**64."""
    return (random_bits(stream, *keys) % np.uint64(limit)).astype(np.int64)


# --------------------------------------------------------------------------------------- the corpus
@dataclass(frozen=True, eq=False)
class Corpus:
    """A text as bytes (uint8 arrays; memory maps where the corpus was prepared)."""
    name: str
    train: np.ndarray
    val: np.ndarray

    @cached_property
    def sha256(self):
        """Of the bytes of train followed by those of val."""
        digest = hashlib.sha256(self.train)
        digest.update(self.val)
        return digest.hexdigest()

    @cached_property
    def bigram_bpb(self):
        """Bits per byte of val when each byte is guessed from the one before it.

        The guess is train's pair counts plus one. A model that does no better has only learned
        which byte follows which, so this is the bar on a corpus that nobody else has.
        """
        counts = pair_counts(self.train) + 1
        bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
        pairs = pair_counts(self.val)
        return float((pairs * bits).sum() / pairs.sum())

    def batch(self, seed, split, step, rows, length):
        """uint8 [len(rows), length]: a random window of the split for each global row number.

        A row's window depends on (seed, split, step, row) only. So a resumed run sees what the
        unbroken one would have seen, and any number of processes may share out the rows.
        """
        if split not in ("train", "val"):
            raise ValueError(f"split is 'train' or 'val', not {split!r}")
        data = self.train if split == "train" else self.val
        if len(data) < length:
            raise ValueError(f"the {split} half of {self.name} holds {len(data)} bytes, fewer than "
                             f"the {length} of one row: take a longer text or a shorter context")
        starts = random_below(len(data) - length + 1, f"text {split}", seed, step, rows)
        return np.lib.stride_tricks.sliding_window_view(data, length)[starts]


def pair_counts(data, chunk=1 << 20):
    """int64 [256, 256]: how often byte b (column) follows byte a (row)."""
    counts = np.zeros(256 * 256, np.int64)
    for start in range(0, len(data) - 1, chunk):        # bincount needs 8 bytes for each of ours
        piece = data[start:start + chunk + 1].astype(np.int64)
        counts += np.bincount(piece[:-1] * 256 + piece[1:], minlength=256 * 256)
    return counts.reshape(256, 256)


# ------------------------------------------------------------------------ where a corpus comes from
def load_corpus(source=None):
    """The corpus at `source` (see SOURCES), or the standard library's for None.

    ValueError, in one sentence, for anything that is no such source.
    """
    if source is None:
        return standard_library()
    if source == "enwik8":
        return enwik8()
    path = Path(source)
    if not path.exists():
        raise ValueError(f"{path} does not exist; {SOURCES}")
    if path.is_file():
        return text_file(path)
    if any((path / half).exists() for half in ("train.bin", "val.bin")):
        return prepared(path)
    return text_folder(path)


def standard_library():
    """The sources of this Python's standard library, without what the constants above leave out.

    On Python 3.10 to 3.13: 7.6 to 8.0 MB, bigram 3.456 to 3.464 bits per byte.
    """
    def omit(name):
        return name in OMITTED_FOLDERS or name.startswith(OMITTED_PREFIXES)
    root = Path(sysconfig.get_path("stdlib"))
    files = {path: text for path, text in read_texts(root, omit) if path.endswith(".py")}
    return Corpus(f"python-{platform.python_version()}-stdlib", *split_files(files, root))


def text_folder(root):
    """Every file below `root` that is text; what is hidden and folders of runs stay out."""
    files = dict(read_texts(root, omit=lambda name: name.startswith(".")))
    return Corpus(root.resolve().name, *split_files(files, root))


def text_file(path):
    data = np.fromfile(path, np.uint8)
    if not data.all():
        raise ValueError(f"{path} is no text, for it holds zero bytes; {SOURCES}")
    return Corpus(path.name, *split_tail(data, path))


def prepared(folder):
    """A folder that main() wrote. Its halves are mapped, so that processes share one copy."""
    for half in (folder / "train.bin", folder / "val.bin"):
        if not half.is_file() or half.stat().st_size < 2:
            raise ValueError(f"{half} is missing or empty: a prepared folder holds train.bin and "
                             "val.bin, each of at least two bytes")
    train, val = (np.memmap(folder / half, np.uint8, "r") for half in ("train.bin", "val.bin"))
    return Corpus(folder.resolve().name, train, val)


def read_texts(root, omit):
    """Yield (relative path with '/', bytes) of the text files below root, in no order.

    A file with a zero byte is no text. `omit` says which names of files and folders to pass over.
    """
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders
                         if not omit(name) and not holds_run(Path(folder, name))]
        for name in names:
            path = Path(folder, name)
            if omit(name) or not path.is_file():                # no broken links, pipes or sockets
                continue
            with path.open("rb") as file:
                text = file.read(8192)      # enough to pass over a library of a gigabyte
                text += b"" if b"\0" in text else file.read()
            if b"\0" not in text:
                yield path.relative_to(root).as_posix(), text


def holds_run(folder):
    """A run inside the text that it reads must not change it. Two of its files are enough: it may
    be about to begin, or its log moved away."""
    return sum((folder / name).exists() for name in RUN_FILES) >= 2


def split_files(files, root):
    """(train, val) of files, {relative path: bytes}: whole ones, each where its path's hash says.

    So the two halves share no file, and adding one moves no other. A hash means little for a
    handful of files: where val gets under 2 % or over 25 % of the bytes, its last tenth is val.
    """
    halves = {False: [], True: []}
    for path in sorted(files):
        halves[hash64(os.fsencode(path)) < VAL_BELOW].append(files[path])
    train, val = (np.frombuffer(b"".join(halves[is_val]), np.uint8) for is_val in (False, True))
    if len(train) + len(val) >= SMALLEST and 0.02 <= len(val) / (len(train) + len(val)) <= 0.25:
        return train, val
    joined = b"".join(files[path] for path in sorted(files))
    return split_tail(np.frombuffer(joined, np.uint8), root)


def split_tail(data, path):
    """(train, val): the last tenth is val.

    One cut rather than many chunks: no window of either half then spans a seam, and no val byte
    sits between train bytes that give it away.
    """
    if len(data) < SMALLEST:
        raise ValueError(f"{path} holds {len(data)} bytes of text, and a corpus needs {SMALLEST}; "
                         f"{SOURCES}")
    cut = len(data) - len(data) // 10
    return data[:cut], data[cut:]


# ------------------------------------------------------------ a larger corpus that others report on
def enwik8():
    """The first 10^8 bytes of an English Wikipedia, split as in the literature: 90 % train, the
    next 5 % val, and the last 5 % left alone.

    36 MB come over the network, unless the working directory has the file `enwik8`.
    """
    try:
        text = Path("enwik8").read_bytes() if Path("enwik8").is_file() else download_enwik8()
    except (OSError, http.client.HTTPException, zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ValueError(f"enwik8 could not be fetched from {ENWIK8_URL} ({error}): prepare it "
                         "where there is a network and pass that folder as --data, or leave --data "
                         "out") from error
    sha1 = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    if len(text) != ENWIK8_BYTES or sha1 != ENWIK8_SHA1:
        raise ValueError(f"this is not enwik8, which has {ENWIK8_BYTES} bytes and SHA-1 "
                         f"{ENWIK8_SHA1}, but {len(text)} bytes with SHA-1 {sha1}")
    data = np.frombuffer(text, np.uint8)
    train_end, val_end = len(data) * 90 // 100, len(data) * 95 // 100
    return Corpus("enwik8", data[:train_end], data[train_end:val_end])


def download_enwik8():
    with zipfile.ZipFile(io.BytesIO(fetch(ENWIK8_URL))) as archive:
        return archive.read("enwik8")


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as reply:
        return reply.read()


# ------------------------------------------------------------------------------------- command line
def write_corpus(corpus, out):
    """Write train.bin, val.bin and meta.json into `out`, which may hold nothing else."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: --out takes a new, an empty or a prepared folder")
    out.mkdir(parents=True, exist_ok=True)
    # The .tmp names are what a run that was killed left behind.
    known = {name + ending for name in PREPARED_FILES for ending in ("", ".tmp")}
    others = sorted(path.name for path in out.iterdir() if path.name not in known)
    if others:
        raise ValueError(f"{out} holds other files ({others[0]}): --out takes a new, an empty or a "
                         "prepared folder")
    meta = dict(name=corpus.name, train_bytes=len(corpus.train), val_bytes=len(corpus.val),
                sha256=corpus.sha256, bigram_bpb=corpus.bigram_bpb)
    corpus.train.tofile(out / "train.bin.tmp")
    corpus.val.tofile(out / "val.bin.tmp")
    (out / "meta.json.tmp").write_text(json.dumps(meta, indent=2) + "\n")
    # With val.bin gone, a run killed between the renames leaves no mix of two corpora to load.
    (out / "val.bin").unlink(missing_ok=True)
    for name in ("train.bin", "meta.json", "val.bin"):
        os.replace(out / f"{name}.tmp", out / name)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Write a corpus as train.bin and val.bin.")
    parser.add_argument("--data", help=SOURCES.removeprefix("--data takes ")
                        + " (default: the standard library)")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    args = parser.parse_args(argv)
    try:
        corpus = load_corpus(args.data)
        write_corpus(corpus, args.out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"prepare.py: {error}") from None
    print(f"{args.out}: {corpus.name}, {len(corpus.train):,} bytes train, {len(corpus.val):,} val, "
          f"bigram {corpus.bigram_bpb:.3f} bits per byte, sha256 {corpus.sha256[:16]}")


if __name__ == "__main__":
    main()
