"""Ranks as forked processes that save together, and a disk that records, fails or kills at any of its operations.

The wrappers are made from what :class:`~checkpoint.FileOps` has, so that an operation added there is recorded, failed and
killed at like the others.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint import CheckpointError, FileOps, save_checkpoint
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import whole

OPERATIONS = tuple(name for name, _ in inspect.getmembers(FileOps, inspect.isfunction) if not name.startswith("_"))


@dataclass(frozen=True)
class Operation:
    """One call: its name, the path it is about (of a rename the source), the target of a rename, the bytes of a write."""

    name: str
    path: Path
    target: Path | None = None
    data: bytes = b""

    def __str__(self) -> str:
        shown = self.target or self.path
        place = f"{shown.parent.name}/{shown.name}" if shown.parent.name.startswith(".tmp-") else shown.name
        return f"{self.name} {place}"


def operation(name: str, arguments: Sequence[Any]) -> Operation:
    """What a call of FileOps is about."""
    first = arguments[0]
    path = first if isinstance(first, Path) else Path(first.name)
    target = arguments[1] if name == "rename" else None
    return Operation(name, path, target, bytes(arguments[1]) if name == "write" else b"")


class Watched(FileOps):
    """Calls ``before(number, operation)`` at each operation; may be used by several threads."""

    def __init__(self, before: Callable[[int, Operation], None]) -> None:
        self._before, self._count, self._lock = before, 0, threading.Lock()

    def _reached(self, name: str, arguments: Sequence[Any]) -> None:
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._before(number, operation(name, arguments))


def _watched(name: str) -> Callable[..., Any]:
    def call(self: Watched, *arguments: Any, **named: Any) -> Any:
        self._reached(name, arguments)
        return getattr(FileOps, name)(self, *arguments, **named)

    return call


for _name in OPERATIONS:
    setattr(Watched, _name, _watched(_name))


class Recorder(Watched):
    """Keeps all operations in ``trace``, in the order in which they began."""

    def __init__(self) -> None:
        self.trace: list[Operation] = []
        super().__init__(lambda _, operation: self.trace.append(operation))


def dying(at: int, everyone: bool = False, torn: bool = False) -> FileOps:
    """SIGKILL for this process before operation ``at``, or for its whole process group with ``everyone``.

    With ``torn`` a write at that place gets half of its bytes to the file first.
    """

    def before(number: int, operation: Operation) -> None:
        if number != at:
            return
        if torn:
            _tear(operation)
        if everyone:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    return Watched(before)


def failing(at: int, error: OSError) -> FileOps:
    """Operation ``at`` raises ``error``, once; a write puts half of its bytes into the file first."""

    def before(number: int, operation: Operation) -> None:
        if number == at:
            _tear(operation)
            raise error

    return Watched(before)


def _tear(operation: Operation) -> None:
    if operation.name == "write":
        with open(operation.path, "ab") as file:
            file.write(operation.data[: len(operation.data) // 2])


# --- ranks ---------------------------------------------------------------------------------------------------


class PipeComm:
    """Ranks in processes that rank 0 has a socket to; a lost peer is noticed at once, by its closed socket."""

    def __init__(self, rank: int, world: int, sockets: dict[int, socket.socket]) -> None:
        self.rank, self.world, self._sockets = rank, world, sockets

    def gather(self, obj: Any) -> list[Any] | None:
        if self.rank:
            self._send(0, obj)
            return None
        return [obj, *(self._receive(other) for other in range(1, self.world))]

    def broadcast(self, obj: Any) -> Any:
        if self.rank:
            return self._receive(0)
        for other in range(1, self.world):
            self._send(other, obj)
        return obj

    def barrier(self) -> None:
        self.broadcast(self.gather(None))

    def _send(self, other: int, obj: Any) -> None:
        raw = pickle.dumps(obj)
        try:
            self._sockets[other].sendall(struct.pack("<Q", len(raw)) + raw)
        except OSError as error:
            raise CheckpointError(f"rank {other} was lost, as rank {self.rank} sees it") from error

    def _receive(self, other: int) -> Any:
        (size,) = struct.unpack("<Q", self._exactly(other, 8))
        return pickle.loads(self._exactly(other, size))

    def _exactly(self, other: int, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            try:
                piece = self._sockets[other].recv(size - len(raw))
            except OSError:
                piece = b""
            if not piece:
                raise CheckpointError(f"rank {other} was lost, as rank {self.rank} sees it")
            raw += piece
        return raw


def in_processes(world: int, body: Callable[[PipeComm], object], said: Path) -> None:
    """``body(comm)`` in ``world`` forked processes of one process group; how each ended goes to ``said`` as JSON.

    For each rank: its exit code (negative: the signal), and the message where it raised CheckpointError (code 3) or anything
    else (code 4). To be called in a process without threads.
    """
    for rank in range(world):
        said.with_suffix(f".{rank}").unlink(missing_ok=True)
    pairs = {other: socket.socketpair() for other in range(1, world)}
    ready, go = os.pipe()
    pids: list[int] = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.close(go)
            os.read(ready, 1)  # until all are there, in their group
            _one_rank(rank, world, pairs, body, said)
        pids.append(pid)
        os.setpgid(pid, pids[0])
    for ends in pairs.values():
        for end in ends:
            end.close()
    os.close(go)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    messages = [_read(said.with_suffix(f".{rank}")) for rank in range(world)]
    said.write_text(json.dumps([codes, messages]))


def _one_rank(rank: int, world: int, pairs: dict[int, Any], body: Callable[[PipeComm], object], said: Path) -> None:
    code = 4
    try:
        mine = {other: ends[0] for other, ends in pairs.items()} if rank == 0 else {0: pairs[rank][1]}
        for other, ends in pairs.items():
            ends[rank == 0].close()
            if rank not in (0, other):
                ends[1].close()
            if rank:
                ends[0].close()
        body(PipeComm(rank, world, mine))
        code = 0
    except CheckpointError as error:
        said.with_suffix(f".{rank}").write_text(str(error))
        code = 3
    except BaseException:
        said.with_suffix(f".{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# --- what they save ------------------------------------------------------------------------------------------


def state(rank: int, step: int) -> list[LogicalTensor]:
    """What a rank holds at a step: a tensor of its own, one that rank 0 owns, and its generator; no byte of them is zero."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    noise = torch.randint(1, 256, (3, 64), dtype=torch.uint8, generator=generator)
    return [
        whole(f"param/layers.{rank}.w", noise),
        whole("scale/shared", torch.tensor([step + 0.5]), Role.SCALE, replicated=("pp",)),
        whole(f"rng/rank{rank}", noise[0, :16].clone(), Role.RNG, per_rank=True),
    ]


def save_step(
    root: Path, step: int, comm: Any, keep: int, ops: FileOps | None = None, tensors: list[LogicalTensor] | None = None
) -> Path:
    """Save :func:`state`, or ``tensors``, with a document of each rank."""
    tensors = state(comm.rank, step) if tensors is None else tensors
    return save_checkpoint(
        root, step, tensors, {"step": step}, comm, {"pp": comm.rank}, keep,
        documents={"graphs": f"of rank {comm.rank} at {step}"}, ops=ops,
    )  # fmt: skip
