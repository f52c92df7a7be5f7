"""What is computed from a token set once and kept: its digest, where its documents begin, and how they are packed.

An entry is a file of its own in the cache folder, named by the SHA-256 of its key: everything that its content follows from,
the data's own digest among it. It holds key and content's SHA-256 too, and is used only where both are right, so an entry can
be missing or damaged (then it is made again) but not stale. One process makes it, under an advisory lock that its death frees;
the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from qeffect_lm.data.files import write_atomic
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.errors import QEffectError

FORMAT = 1
_ALIGN = 64
_BLOCK = 1 << 22
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class IndexCache:
    """Entries in ``folder``; None, or a folder that cannot be written: nothing is kept. Another process's making is waited for,
    ``timeout`` seconds at most."""

    folder: Path | None = None
    timeout: float = 1800.0

    def get(self, key: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
        """The arrays of ``key``, mapped and read-only; made by ``make`` where they are not there.

        Raises:
            QEffectError: nobody made them in time, or they cannot be written.
        """
        if self.folder is None:
            return make()
        text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.index"
        if not _writable(self.folder):
            found = _load(path, text)
            return make() if found is None else found
        deadline = time.monotonic() + self.timeout
        while True:
            found = _load(path, text)
            if found is not None:
                return found
            with _lock(path.with_suffix(".lock")) as mine:
                if mine:
                    found = _load(path, text)  # made between the look and the lock
                    if found is None:
                        _store(path, text, make())
                        continue
                    return found
            if time.monotonic() > deadline:
                holder = _holder(path.with_suffix(".lock"))
                raise QEffectError(
                    f"{path} was not made within {self.timeout:g} s (data.cache_timeout) by {holder}: wait longer, or stop "
                    "that process and start again"
                )
            time.sleep(0.05)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@contextmanager
def _lock(path: Path):  # noqa: ANN202 (a context manager of bool)
    """Whether this process has the lock. A file system without locks gives it to everyone: all make the same bytes."""
    try:
        opened = open(path, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
    except OSError:  # another user's: the entry is made all the same
        yield True
        return
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        with suppress(OSError):  # a full disk: the name is for an error of others
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()
        yield True


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"


def _load(path: Path, key: str) -> Arrays | None:
    """The arrays of an entry; None where it is not there, or not whole."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline())
            start = file.tell() + -file.tell() % _ALIGN
            if header["key"] != key or header["sha256"] != _digest(file, start):
                return None
        arrays = {}
        for name, dtype, count, offset in header["arrays"]:
            place: Any = {"dtype": dtype, "mode": "r", "offset": start + offset, "shape": (count,)}
            arrays[name] = np.asarray(np.memmap(path, **place)) if count else np.zeros(0, dtype)
        return arrays
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(file: IO[bytes], start: int) -> str:
    file.seek(start)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def _store(path: Path, key: str, arrays: Arrays) -> None:
    digest, placed, offset = hashlib.sha256(), [], 0
    for name, values in arrays.items():
        placed.append([name, values.dtype.str, len(values), offset])
        offset += values.nbytes + -values.nbytes % _ALIGN
        for part in _padded(values):
            digest.update(part)
    header = json.dumps({"key": key, "sha256": digest.hexdigest(), "arrays": placed}).encode() + b"\n"
    write_atomic(path, header + b" " * (-len(header) % _ALIGN), *(part for v in arrays.values() for part in _padded(v)))


def _padded(values: np.ndarray) -> tuple[memoryview, bytes]:
    return np.ascontiguousarray(values).view(np.uint8).data, b"\0" * (-values.nbytes % _ALIGN)


# ---- entries --------------------------------------------------------------------------------------------------------


def content_hash(dataset: IndexedDataset, cache: IndexCache) -> str:
    """:meth:`~qeffect_lm.data.indexed.IndexedDataset.content_hash`, read once for files of the same name, size, time and inode;
    other changes of a file are found by ``tools.preprocess inspect --verify``."""
    stamps = []
    for path in dataset.files:
        found = path.stat()
        stamps.append([str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino])
    found_hash = cache.get(
        {"what": "sha256", "files": stamps},
        lambda: {"sha256": np.frombuffer(bytes.fromhex(dataset.content_hash()), dtype=np.uint8)},
    )
    return found_hash["sha256"].tobytes().hex()


def document_starts(dataset: IndexedDataset, digest: str, cache: IndexCache) -> npt.NDArray[np.int64]:
    """Where documents begin, in tokens, without the empty ones, and the number of tokens: int64 ``[documents + 1]``, rising."""

    def make() -> Arrays:
        starts = dataset.document_starts()
        keep = np.ones(len(starts), dtype=bool)
        keep[:-1] = starts[1:] > starts[:-1]
        return {"starts": starts[keep]}

    return cache.get({"what": "document starts", "data": digest}, make)["starts"]


def packed(
    starts: npt.NDArray[np.int64], seq_len: int, digest: str, cache: IndexCache
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Whole documents in samples of ``seq_len + 1`` tokens: in the corpus' order, as many as fit, then the next sample.

    A document longer than a sample is cut into pieces of ``seq_len + 1`` tokens, of which neighbours share one, and a rest;
    one of a single token has nothing to predict and is left out.

    Returns:
        int64 ``[documents + 1]``, each document's first piece, and int64 ``[samples + 1]``, each sample's first piece.
    """
    found = cache.get(
        {"what": "whole documents", "data": digest, "seq_len": seq_len}, lambda: _pack(starts, seq_len)
    )
    return found["pieces"], found["samples"]


def _pack(starts: npt.NDArray[np.int64], seq_len: int) -> Arrays:
    pieces = np.zeros(len(starts), dtype=np.int64)
    np.cumsum(pieces_of(np.diff(starts), seq_len), out=pieces[1:])
    ends = _piece_ends(starts, pieces, seq_len)
    # following[i]: the first piece that a sample which begins with piece i has no room for.
    following = np.empty(len(ends), dtype=np.int64)
    for start in range(0, len(ends), _BLOCK):
        begins = np.zeros(min(_BLOCK, len(ends) - start), dtype=np.int64)
        begins[:] = ends[start - 1 : start + len(begins) - 1] if start else np.concatenate([[0], ends[: len(begins) - 1]])
        following[start : start + _BLOCK] = np.searchsorted(ends, begins + seq_len + 1, side="right")
    total, jump = len(ends), following.data  # a memoryview: its numbers are Python's, and quick to get
    firsts, piece = array("q"), 0
    while piece < total:
        firsts.append(piece)
        piece = jump[piece]
    firsts.append(total)
    return {"pieces": pieces, "samples": np.frombuffer(firsts, dtype=np.int64)}


def pieces_of(lengths: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
    """How many pieces documents of ``lengths`` tokens make."""
    made: npt.NDArray[np.int64] = (lengths + seq_len - 2) // seq_len
    return made


def _piece_ends(starts: npt.NDArray[np.int64], pieces: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
    """Tokens of all pieces up to each: int64 ``[pieces]``."""
    sizes = np.full(int(pieces[-1]), seq_len + 1, dtype=np.int64)
    counts, lengths = np.diff(pieces), np.diff(starts)
    some = counts > 0
    last = pieces[1:][some] - 1
    sizes[last] = lengths[some] - (counts[some] - 1) * seq_len
    return np.cumsum(sizes, out=sizes)
