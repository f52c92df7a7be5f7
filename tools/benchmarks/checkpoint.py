"""Saving, loading and verifying beside what the same disk does with plain writes and reads, taking turns.

The state is one flat buffer seen as the tensors of decoder layers: FP32 masters, two FP32 moments, BF16 parameters.
Plain writes write the same bytes in one file, once through the page cache and once past it (``O_DIRECT``), each with
its fsync; plain reads read that file, with one reader and with as many as loading has. Files are dropped from the page
cache before each reading.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from checkpoint import Problem, SingleProcess, load_into, open_checkpoint, save_checkpoint
from checkpoint.digests import PIECE, TASK, cpus, fill, opened, pieces, readers, sha256_of, writers
from checkpoint.digests import READ as BLOCK
from checkpoint.fileops import FileOps, write_all
from checkpoint.shards import host_bytes
from checkpoint.stream import BUFFER
from checkpoint.verify import verify
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.state import LogicalTensor, Role

KINDS = (
    ("master", Role.MASTER, torch.float32),
    ("moment1", Role.MOMENT, torch.float32),
    ("moment2", Role.MOMENT, torch.float32),
    ("param", Role.PARAM, torch.bfloat16),
)
BYTES = 14  # of state per parameter
GB = 1e9
WRITE, DIRECT, READ, MANY = "write + fsync", "the same past the cache", "read", "read on several threads"


def layer_shapes(hidden: int) -> list[tuple[str, tuple[int, int]]]:
    """Names and shapes of a decoder layer's weights: 12 hidden² parameters."""
    return [
        ("attention.qkv", (3 * hidden, hidden)),
        ("attention.out", (hidden, hidden)),
        ("mlp.up", (4 * hidden, hidden)),
        ("mlp.down", (hidden, 4 * hidden)),
    ]


def state(gib: float) -> tuple[torch.Tensor, list[LogicalTensor]]:
    """About ``gib`` GiB of layers in one flat buffer of random bytes, and its tensors."""
    hidden = 2048
    while hidden > 64 and 12 * hidden**2 * BYTES > gib * 2**30 / 4:
        hidden //= 2
    layers = max(1, round(gib * 2**30 / (12 * hidden**2 * BYTES)))
    flat = torch.frombuffer(mmap.mmap(-1, layers * 12 * hidden**2 * BYTES), dtype=torch.uint8)  # pages of its own
    drawn = torch.Generator().manual_seed(1)
    block = torch.randint(256, (min(len(flat), 64 << 20),), dtype=torch.uint8, generator=drawn)
    for at in range(0, len(flat), len(block)):
        flat[at : at + len(block)] = block[: len(flat) - at]
    items, at = [], 0
    for layer in range(layers):
        for name, shape in layer_shapes(hidden):
            for kind, role, dtype in KINDS:
                n = shape[0] * shape[1] * dtype.itemsize
                tensor = flat[at : at + n].view(dtype).view(shape)
                items.append(LogicalTensor.whole(f"{kind}/layers.{layer}.{name}", tensor, role))
                at += n
    return flat, items


def measure(gib: float, folder: Path, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """GB/s of each round, their medians, ratios of the medians and the peaks of memory.

    Args:
        gib: size of the state.
        folder: a folder on the disk to measure; what is written there is removed.
        rounds: how often everything takes its turn; who begins changes from round to round.
        say: called with a line per round.
    """
    needed = 2.2 * gib * 2**30
    if shutil.disk_usage(folder).free < needed:
        raise UsageError(f"{folder} has no {needed / GB:.1f} GB free: a smaller --gib, or another --dir")
    bench = _Bench(folder, *state(gib))
    rates: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for number in range(rounds):
        for listed in (bench.writes, bench.reads):
            turns = listed()
            first = number % len(turns)
            for name, prepare, body in turns[first:] + turns[:first]:
                prepare()
                with _peak(peaks, name):
                    began = time.perf_counter()
                    body()
                    seconds = time.perf_counter() - began
                rates.setdefault(name, []).append(bench.nbytes / seconds / GB)
        bench.compare()
        say(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in rates.items()) + " GB/s")
    bench.remove()
    return {"bytes": bench.nbytes, "rounds": rounds, **_summary(rates, peaks), "gb_per_s": rates, **_settings()}


Turn = tuple[str, Callable[[], object], Callable[[], object]]  # name, what comes before it, and what is timed


class _Bench:
    """The state, and everything that is done with it."""

    def __init__(self, folder: Path, flat: torch.Tensor, items: list[LogicalTensor]) -> None:
        self._flat, self._items = flat, items
        self._sha256 = sha256_of(host_bytes(flat))
        self._plain = folder / "plain"
        self._root = folder / "checkpoints"
        self.nbytes = flat.numel()

    def writes(self) -> list[Turn]:
        return [
            (WRITE, self._clear_plain, lambda: self._write(direct=False)),
            (DIRECT, self._clear_plain, lambda: self._write(direct=True)),
            ("save", self._clear_root, lambda: save_checkpoint(self._root, 1, self._items, {}, SingleProcess(), {})),
        ]

    def reads(self) -> list[Turn]:
        checkpoint = open_checkpoint(self._root / "step_00000001")
        return [
            (READ, self._cold, lambda: self._read(1)),
            (MANY, self._cold, lambda: self._read(readers())),
            ("load", self._cold_and_zero, lambda: load_into(checkpoint, self._items)),
            ("verify", self._cold, lambda: _sound(verify(checkpoint))),
            ("SHA-256 in memory", lambda: None, self._hash),
        ]

    def compare(self) -> None:
        """After a load: every byte is what it was."""
        if sha256_of(host_bytes(self._flat)) != self._sha256:
            raise QEffectError("what was loaded is not what was saved")

    def remove(self) -> None:
        self._clear_plain()
        self._clear_root()

    def _clear_plain(self) -> None:
        self._plain.unlink(missing_ok=True)

    def _clear_root(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def _cold(self) -> None:
        for path in (self._plain, *self._root.rglob("*.safetensors")):
            with opened(path) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _cold_and_zero(self) -> None:
        self._cold()
        self._flat.zero_()

    def _write(self, direct: bool) -> None:
        ops, data = FileOps(), host_bytes(self._flat)
        with ops.create(self._plain) as file:
            if direct:
                ops.direct(file, True)  # its memory begins at a page
            for at in range(0, len(data), BUFFER):
                write_all(ops, file, data[at : at + BUFFER])
            ops.fsync(file)

    def _read(self, workers: int) -> None:
        """The plain file once, in tasks of the size that loading has, each thread with a buffer of its own."""
        places = iter(range(0, self.nbytes, TASK if workers > 1 else self.nbytes))
        lock = threading.Lock()

        def reader(descriptor: int) -> None:
            buffer = memoryview(bytearray(BUFFER if workers == 1 else BLOCK))
            while True:
                with lock:
                    at = next(places, None)
                if at is None:
                    return
                end = min(self.nbytes, at + TASK) if workers > 1 else self.nbytes
                while at < end:
                    at += fill(descriptor, at, buffer[: end - at])

        with opened(self._plain) as descriptor, ThreadPoolExecutor(workers) as pool:
            list(pool.map(reader, [descriptor] * workers))

    def _hash(self) -> None:
        data = host_bytes(self._flat)
        parts = [data[at : at + n] for at, n in pieces(len(data))]
        with ThreadPoolExecutor(cpus()) as pool:
            list(pool.map(hashlib.sha256, parts))


def _sound(problems: list[Problem]) -> None:
    if problems:
        raise QEffectError(f"what was saved is damaged: {problems[0]}")


@contextmanager
def _peak(peaks: dict[str, float], name: str) -> Iterator[None]:
    """Keeps, under ``name``, the most MB that this process had beyond what it had at the beginning."""
    before, stop = _resident(), threading.Event()
    most = before

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.005):
            most = max(most, _resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    peaks[name] = max(peaks.get(name, 0.0), (most - before) / 1e6)


def _resident() -> int:
    """Bytes of memory of this process that are in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _summary(rates: dict[str, list[float]], peaks: dict[str, float]) -> dict[str, Any]:
    median = {name: statistics.median(values) for name, values in rates.items()}
    hashing = median["SHA-256 in memory"]
    return {
        "median_gb_per_s": median,
        "ratios": {
            "save / write": median["save"] / median[WRITE],
            "save / faster write": median["save"] / max(median[WRITE], median[DIRECT]),
            "load / read": median["load"] / median[READ],
            "load / faster read": median["load"] / max(median[READ], median[MANY]),
            "verify / slower of faster read and SHA-256": median["verify"] / min(hashing, max(median[READ], median[MANY])),
        },
        "peak_extra_mb": peaks,
    }


def _settings() -> dict[str, Any]:
    return {
        "cpus": cpus(),
        "threads_that_hash_while_saving": writers(),
        "threads_that_load_and_verify": readers(),
        "piece_bytes": PIECE,
        "buffers": f"2 of {BUFFER} bytes",
    }


def table(report: dict[str, Any]) -> str:
    lines = [f"{'':24} {'GB/s':>7} {'lowest':>7} {'highest':>8} {'MB more':>8}"]
    for name, median in report["median_gb_per_s"].items():
        values, extra = report["gb_per_s"][name], report["peak_extra_mb"][name]
        lines.append(f"{name:24} {median:>7.2f} {min(values):>7.2f} {max(values):>8.2f} {extra:>8.0f}")
    lines += [f"{name:44} {ratio:>6.2f}" for name, ratio in report["ratios"].items()]
    return "\n".join(lines)
