"""Bytes on their way: written past the page cache or not, hashed in pieces, read in blocks; always the same bytes."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from checkpoint import CheckpointError, SingleProcess, digests, load_into, open_checkpoint, save_checkpoint, shards, stream
from checkpoint.digests import PIECE, Range, opened, read_whole, sha256_of
from checkpoint.fileops import FileOps
from checkpoint.stream import BLOCK, Stream
from tests.checkpoint_support import ScriptedOps, whole

ROOM = 2 * BLOCK


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BUFFER", ROOM)


class _Watched(FileOps):
    """Says which writes went past the page cache; can be a file system that does not do that, or does it badly."""

    def __init__(self, kind: str) -> None:
        self.kind, self.past, self.threads = kind, [], set[int]()
        self.is_direct = False

    def direct(self, file: BinaryIO, wanted: bool) -> bool:
        if self.kind == "refused":
            return False
        self.is_direct = super().direct(file, wanted)
        return self.is_direct

    def write(self, file: BinaryIO, data: memoryview) -> int:
        self.threads.add(threading.get_ident())
        if self.is_direct:
            address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
            assert address % BLOCK == 0 and len(data) % BLOCK == 0 and file.tell() % BLOCK == 0
            if self.kind == "larger blocks":
                raise OSError(errno.EINVAL, "Invalid argument")
            if self.kind == "not supported":
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        self.past.append(self.is_direct)
        if self.kind != "short writes":
            return super().write(file, data)
        super().direct(file, False)  # which would take no such length
        written = super().write(file, data[: max(1, len(data) // 3)])
        super().direct(file, self.is_direct)
        return written


@pytest.mark.parametrize("kind", ["sound", "refused", "larger blocks", "not supported", "short writes"])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, ROOM, ROOM + 1, 3 * ROOM, 5 * ROOM + BLOCK + 7])
def test_a_stream_writes_what_it_is_given(tmp_path: Path, kind: str, size: int) -> None:
    """Whatever the pieces, the length and the file system; the caller's memory may change as soon as ``append`` returns."""
    content = random.Random(size).randbytes(size)
    ops, path = _Watched(kind), tmp_path / "file"
    with open(path, "wb", buffering=0) as file, Stream(ops, file, size) as out:
        for at, n in _cuts(size):
            piece = bytearray(content[at : at + n])
            out.append(memoryview(piece))
            piece[:] = bytes(n)
        out.finish()
    assert path.read_bytes() == content
    assert len(ops.threads) <= 1 and threading.get_ident() not in ops.threads
    if kind == "sound" and size >= BLOCK:
        assert ops.past[0] and (size % BLOCK == 0 or not ops.past[-1])


def _cuts(size: int) -> list[tuple[int, int]]:
    marks = sorted({0, size, *(random.Random(1).randrange(size + 1) for _ in range(7))})
    return [(a, b - a) for a, b in itertools.pairwise(marks)]


def test_a_full_disk_is_an_error_and_nothing_more_is_written(tmp_path: Path) -> None:
    ops = ScriptedOps(fail_at=3, only="write", error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CheckpointError, match=r"No space left on device \(ENOSPC\)"):
        save_checkpoint(tmp_path, 1, [whole("w", torch.zeros(40 * ROOM))], {}, SingleProcess(), {}, ops=ops)
    assert os.listdir(tmp_path) == [] and not [name for name, _ in ops.log if name == "fsync"]


# --- digests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [-3, 0, 5])
def test_a_long_slice_has_the_digest_of_its_pieces(tmp_path: Path, extra: int) -> None:
    """Of what is not longer than a piece the plain SHA-256, as any tool makes it; else that of the pieces' digests."""
    tensor = torch.arange(2 * PIECE + extra, dtype=torch.int32).to(torch.uint8)[: 2 * PIECE + extra]
    short = tensor[:PIECE]
    path = save_checkpoint(tmp_path, 1, [whole("long", tensor), whole("short", short)], {}, SingleProcess(), {})
    raw = tensor.numpy().tobytes()
    parts = b"".join(hashlib.sha256(raw[at : at + PIECE]).digest() for at in range(0, len(raw), PIECE))
    checkpoint = open_checkpoint(path)
    assert checkpoint.entry("long").slices[0].sha256 == hashlib.sha256(parts).hexdigest() == checkpoint.digest_of(tensor)
    assert checkpoint.entry("short").slices[0].sha256 == hashlib.sha256(raw[:PIECE]).hexdigest()
    assert checkpoint.verify() == []
    file = path / "rank00000.safetensors"
    content = bytearray(file.read_bytes())
    content[checkpoint.entry("long").slices[0].offset + PIECE] ^= 1  # the first byte of the second piece
    file.write_bytes(content)
    (problem,) = checkpoint.verify()
    assert problem.tensor == "long"
    with pytest.raises(CheckpointError, match="'long'"):
        checkpoint.read("long", (0,), (1,))


@pytest.mark.parametrize("workers", [1, 3])
def test_digests_of_ranges(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, over each other, in several files, from small buffers; beyond the end and not there at all."""
    monkeypatch.setattr(digests, "READ", 5)
    monkeypatch.setattr(digests, "TASK", 40)
    monkeypatch.setattr(digests, "MOST", 3)
    draw = random.Random(workers)
    content = {name: draw.randbytes(100) for name in "ab"}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    wanted, expected = [], []
    for _ in range(60):
        name, at = draw.choice("ab"), draw.randrange(100)
        n, piece = draw.randrange(101 - at), draw.choice([4, 7, 1000])
        wanted.append(Range(name, at, n, piece))
        expected.append(sha256_of(memoryview(content[name][at : at + n]), piece))
    wanted += [Range("a", 90, 11, 1000), Range("b", 95, 20, 4)]
    assert digests.digests(tmp_path, wanted, workers) == [*expected, None, None]
    (found,) = digests.digests(tmp_path, [Range("c", 0, 1, 1)], workers)
    assert isinstance(found, FileNotFoundError)


def test_tensors_made_one_by_one_are_gone_before_the_next(tmp_path: Path) -> None:
    """A state larger than memory is written as it is made."""
    made: list[weakref.ref[torch.Tensor]] = []

    def states() -> Iterator[torch.Tensor]:
        for number in range(4):
            assert all(one() is None for one in made)
            tensor = torch.full((BLOCK,), float(number))
            made.append(weakref.ref(tensor))
            yield tensor
            del tensor

    segments = [shards.Segment(f"w{number}", "float32", (BLOCK,), number * 4 * BLOCK) for number in range(4)]
    shards.write_shard(FileOps(), tmp_path / "w.safetensors", segments, states())
    assert len(made) == 4


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(b"12345")
    assert read_whole(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are read"):
        read_whole(path, 4)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Not what a link leads to, not a folder, and a pipe does not make the reader wait for a writer."""
    (tmp_path / "outside").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("link", "a symbolic link"), ("pipe", "not a regular file"), (".", "not a regular file")):
        with pytest.raises(OSError, match=words), opened(tmp_path / name):
            pass


# --- blocks -------------------------------------------------------------------------------------------------


def test_blocks_come_out_as_indexing_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any block of any slice, through a buffer that is smaller than a row, into storages of any stride."""
    monkeypatch.setattr(shards, "PIECE", 40)
    draw = random.Random(5)
    path = tmp_path / "file"
    for _ in range(150):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(4)))
        value = torch.randint(1000, shape, dtype=torch.int64)
        path.write_bytes(b"head" + value.numpy().tobytes())
        take = tuple(slice(a, draw.randrange(a, n + 1)) for n in shape for a in [draw.randrange(n)])
        wanted = value[take]
        out = torch.zeros(wanted.shape, dtype=torch.int64)
        if draw.random() < 0.5:  # the same shape, the last dimension's stride the largest
            out = torch.zeros(wanted.shape[::-1], dtype=torch.int64).permute(tuple(reversed(range(wanted.dim()))))
        with opened(path) as file:
            assert shards.read_block(file, 4, shape, take, out)
        assert torch.equal(out, wanted)
    with open(path, "r+b") as file:
        file.truncate(2)
    with opened(path) as descriptor:
        for out in (torch.zeros(7, dtype=torch.int64), torch.zeros(14, dtype=torch.int64)[::2]):
            assert not shards.read_block(descriptor, 4, (9,), (slice(2, 9),), out)


def test_a_file_cut_short_after_it_was_checked_is_an_error(tmp_path: Path) -> None:
    """Files are not mapped: nobody who shortens one can kill the process that reads it."""
    item = whole("w", torch.arange(5.0))
    path = save_checkpoint(tmp_path, 1, [item], {}, SingleProcess(), {})
    checkpoint = open_checkpoint(path)
    os.truncate(path / "rank00000.safetensors", 20)
    with pytest.raises(CheckpointError, match="'w'"):
        checkpoint.read_into("w", (0,), torch.zeros(5))


def test_loading_goes_through_strided_storages(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    path = save_checkpoint(tmp_path, 1, [whole("w", tensor)], {}, SingleProcess(), {})
    live = torch.zeros(6, 4).T
    load_into(open_checkpoint(path), [whole("w", live)])
    assert torch.equal(live, tensor) and live.stride() == (1, 4)
