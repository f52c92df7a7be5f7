"""A whole state, too large for memory, through saving, verifying and reading: generated rank by rank and again to compare.

Ranks are threads that take turns: one makes its tensors, writes its shard and lets go of them before the next one makes
its own. So no more than one rank's tensors are there at a time, two decoder layers or one embedding.
"""

from __future__ import annotations

import ctypes
import hashlib
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from checkpoint import open_checkpoint, save_checkpoint
from checkpoint.shards import as_integers
from checkpoint.verify import verify
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.state import LogicalTensor, Role
from tools.benchmarks.checkpoint import GB, KINDS, layer_shapes

HISTORY = 1024  # amax values that each scale keeps
LAYERS = 2  # of one rank
MOST = 2 << 30  # bytes of one rank's tensors


class Spec:
    """What a tensor of the state is, without its values."""

    def __init__(self, name: str, shape: tuple[int, ...], role: Role, dtype: torch.dtype) -> None:
        self.name, self.shape, self.role, self.dtype = name, shape, role, dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def make(self) -> torch.Tensor:
        """Its values: bytes drawn from a generator that its name seeds, so that they can be made again."""
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:7], "big")
        words = -(-self.nbytes // 8)
        drawn = torch.randint(-(2**63), 2**63 - 1, (words,), generator=torch.Generator().manual_seed(seed))
        return drawn.view(torch.uint8)[: self.nbytes].view(self.dtype).view(self.shape)


def ranks(parameters: int) -> list[list[Spec]]:
    """About that many parameters as decoder layers and an embedding, with masters, moments, scales and amax histories."""
    hidden, vocabulary = (2048, 50304) if parameters >= 5 * 10**8 else (256, 1000) if parameters >= 10**6 else (16, 100)
    layers = max(1, round((parameters - vocabulary * hidden) / (12 * hidden**2)))
    made = [_weight("embedding", (vocabulary, hidden))]
    for first in range(0, layers, LAYERS):
        made.append(
            [
                spec
                for layer in range(first, min(layers, first + LAYERS))
                for name, shape in layer_shapes(hidden)
                for spec in (*_weight(f"layers.{layer}.{name}", shape), *_scales(f"layers.{layer}.{name}"))
            ]
        )
    return made


def _weight(name: str, shape: tuple[int, ...]) -> list[Spec]:
    return [Spec(f"{kind}/{name}.weight", shape, role, dtype) for kind, role, dtype in KINDS]


def _scales(name: str) -> list[Spec]:
    return [
        spec
        for of in ("input", "weight", "grad")
        for spec in (
            Spec(f"scale/{name}.{of}", (), Role.SCALE, torch.float32),
            Spec(f"history/{name}.{of}", (HISTORY,), Role.AMAX_HISTORY, torch.float32),
        )
    ]


class _Turns(Sequence[LogicalTensor]):
    """The tensors of one rank, made when they are asked for: when it is this rank's turn."""

    def __init__(self, specs: list[Spec], rank: int, turns: list[threading.Event]) -> None:
        self._specs, self._rank, self._turns = specs, rank, turns

    def __iter__(self) -> Iterator[LogicalTensor]:
        self._turns[self._rank].wait()
        return (LogicalTensor.whole(spec.name, spec.make(), spec.role) for spec in self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("the tensors are made in their order, once")


class _Comm:
    """One rank of several in this process; who reports that its shard is written gives the turn to the next."""

    def __init__(self, rank: int, world: int, cells: list[Any], meet: threading.Barrier, turns: list[threading.Event]) -> None:
        self.rank, self.world = rank, world
        self._cells, self._meet, self._turns = cells, meet, turns

    def gather(self, obj: Any) -> list[Any] | None:
        _give_back()
        self._turns[self.rank + 1].set()
        everything = self._exchange(obj)
        return everything if self.rank == 0 else None

    def broadcast(self, obj: Any) -> Any:
        return self._exchange(obj)[0]

    def barrier(self) -> None:
        self._exchange(None)

    def _exchange(self, obj: Any) -> list[Any]:
        self._cells[self.rank] = obj
        self._meet.wait()
        everything = list(self._cells)
        self._meet.wait()
        return everything


def run(parameters: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Save, verify, read back and compare; seconds, GB/s and the peak of memory.

    Raises:
        QEffectError: what came back is not what was saved.
        UsageError: the disk has no room.
    """
    parts = ranks(parameters)
    nbytes = sum(spec.nbytes for part in parts for spec in part)
    largest = max(sum(spec.nbytes for spec in part) for part in parts)
    if largest > MOST:
        raise AssertionError(f"a rank has {largest} bytes")
    needed = 1.05 * nbytes
    if shutil.disk_usage(folder).free < needed:
        raise UsageError(f"{folder} has no {needed / GB:.1f} GB free: fewer --parameters, or another --dir")
    before = _peak()
    began = time.perf_counter()
    path = _save(parts, folder)
    seconds = {"generate and save": time.perf_counter() - began}
    say(f"saved {nbytes / GB:.2f} GB in {len(parts)} shards: {seconds['generate and save']:.1f} s")
    checkpoint = open_checkpoint(path)
    began = time.perf_counter()
    problems = verify(checkpoint)
    seconds["verify"] = time.perf_counter() - began
    if problems:
        raise QEffectError(f"what was saved is damaged: {problems[0]}")
    say(f"verified in {seconds['verify']:.1f} s")
    began = time.perf_counter()
    reading = 0.0
    for spec in (spec for part in parts for spec in part):
        start = time.perf_counter()
        value = checkpoint.read(spec.name)
        reading += time.perf_counter() - start
        if not torch.equal(as_integers(value), as_integers(spec.make())):
            raise QEffectError(f"{spec.name} came back with other bytes")
    seconds |= {"read": reading, "read, generate again and compare": time.perf_counter() - began}
    say(f"read back and compared in {seconds['read, generate again and compare']:.1f} s")
    return {
        "parameters": sum(torch.Size(s.shape).numel() for part in parts for s in part if s.role is Role.PARAM),
        "tensors": sum(map(len, parts)),
        "bytes": nbytes,
        "ranks": len(parts),
        "largest_rank_bytes": largest,
        "seconds": seconds,
        "gb_per_s": {name: nbytes / GB / s for name, s in seconds.items()},
        "peak_extra_bytes": _peak() - before,
    }


def _save(parts: list[list[Spec]], folder: Path) -> Path:
    world = len(parts)
    turns = [threading.Event() for _ in range(world + 1)]
    cells: list[Any] = [None] * world
    meet = threading.Barrier(world)
    turns[0].set()

    def body(rank: int) -> Path:
        comm = _Comm(rank, world, cells, meet, turns)
        return save_checkpoint(folder, 1, _Turns(parts[rank], rank, turns), {}, comm, {"pp": rank})

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(body, range(world)))[0]


def _give_back() -> None:
    """glibc keeps what a thread freed for that thread, and each rank has one: without this, the ranks' leftovers add up."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _peak() -> int:
    """The most bytes of memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(report: dict[str, Any]) -> str:
    gb, gib = report["bytes"] / GB, 2**30
    lines = [
        f"{report['parameters']:,} parameters, {report['tensors']:,} tensors, {gb:.2f} GB in {report['ranks']} shards",
        f"at most {report['largest_rank_bytes'] / gib:.2f} GiB of tensors at a time",
        f"memory rose by {report['peak_extra_bytes'] / gib:.2f} GiB",
    ]
    for name, seconds in report["seconds"].items():
        lines.append(f"{name:34} {seconds:>8.1f} s {report['gb_per_s'][name]:>7.2f} GB/s")
    return "\n".join(lines)
