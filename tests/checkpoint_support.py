"""What the checkpoint tests share: ranks as threads, a disk that fails or dies on demand, the golden state.

``python -m tests.checkpoint_support FOLDER`` writes the golden checkpoint anew (only for a new format
number).
"""

from __future__ import annotations

import errno
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from checkpoint import FileOps, save_checkpoint
from qeffect_lm.state import LogicalTensor, Role


def whole(name: str, tensor: torch.Tensor, role: Role = Role.PARAM, **kwargs: Any) -> LogicalTensor:
    return LogicalTensor.whole(name, tensor, role, **kwargs)


class _ThreadComm:
    """One rank of several in this process; a call returns when all ranks have made it."""

    def __init__(self, rank: int, world: int, cells: list[Any], meet: threading.Barrier) -> None:
        self.rank, self.world, self._cells, self._meet = rank, world, cells, meet

    def gather(self, obj: Any) -> list[Any] | None:
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


def on_ranks(world: int, body: Callable[[Any], Any]) -> list[Any]:
    """``body(comm)`` on every rank, in threads; results or errors in rank order. A hang ends after 20 s."""
    meet = threading.Barrier(world, timeout=20)
    cells: list[Any] = [None] * world
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = body(_ThreadComm(rank, world, cells, meet))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may run an ``except Exception`` on it."""


class ScriptedOps(FileOps):
    """Counts operations; at number ``fail_at`` (and, for a kill, after it) raises ``error`` instead.

    ``only`` restricts counting to operations of that name; ``log`` lists (name, file name) of all of them.
    """

    def __init__(
        self, fail_at: int | None = None, error: BaseException | None = None, only: str | None = None
    ) -> None:
        self.fail_at, self.only, self.count = fail_at, only, 0
        self.error = error or OSError(errno.EIO, "Input/output error")
        self.log: list[tuple[str, str]] = []

    def _step(self, name: str, what: Any) -> None:
        path = Path(getattr(what, "name", what)) if not isinstance(what, Path) else what
        self.log.append((name, path.name))
        if self.only is not None and name != self.only:
            return
        number, self.count = self.count, self.count + 1
        dead = isinstance(self.error, Killed) and self.fail_at is not None and number > self.fail_at
        if number == self.fail_at or dead:
            raise self.error

    def mkdir(self, path: Path, parents: bool = False) -> None:
        self._step("mkdir", path)
        super().mkdir(path, parents)

    def create(self, path: Path) -> BinaryIO:
        self._step("create", path)
        return super().create(path)

    def write(self, file: BinaryIO, data: memoryview) -> int:
        self._step("write", file)
        return super().write(
            file, data[: max(1, len(data) // 2)]
        )  # a short write, as a nearly full disk makes

    def fsync(self, file: BinaryIO) -> None:
        self._step("fsync", file)
        super().fsync(file)

    def fsync_dir(self, path: Path) -> None:
        self._step("fsync_dir", path)
        super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename", target)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._step("unlink", path)
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._step("rmdir", path)
        super().rmdir(path)


GOLDEN_META = {"tokens": 4096, "loss": 2.718281828459045, "layout": {"dp": 1, "tp": 2}, "note": "größer"}
GOLDEN_DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]


def golden_state(rank: int) -> list[LogicalTensor]:
    """What rank ``rank`` of two (tp 2) holds in the golden checkpoint; the same in every version."""
    items = []
    for i, name in enumerate(GOLDEN_DTYPES):
        value = (torch.arange(6) + i).reshape(2, 3).to(getattr(torch, name))
        items.append(whole(f"kinds/{name}", value, Role.COUNTER))
    weight = torch.arange(5 * 3, dtype=torch.float32).reshape(5, 3) / 7  # 5 rows on 2 ranks: 3 and 2
    start, rows = (0, 3) if rank == 0 else (3, 2)
    cut = LogicalTensor(
        "param/layers.0.attention.qkv.weight",
        weight[start : start + rows].clone(),
        Role.PARAM,
        (5, 3),
        (start, 0),
        ("tp", None),
        replicated=("dp",),
    )
    items += [
        cut,
        replace(cut, name="moment/layers.0.attention.qkv.weight", tensor=-cut.tensor, role=Role.MOMENT),
        whole("scale/layers.0.attention.qkv.weight", torch.tensor(448.0), Role.SCALE),
        whole("history/empty", torch.empty(0, 16), Role.AMAX_HISTORY),
        whole(
            "special",
            torch.tensor([0x7FC00001, -0x80000000], dtype=torch.int32).view(torch.float32),
            Role.SCALE,
        ),
        whole(f"rng/rank{rank}", torch.arange(8, dtype=torch.uint8) + rank, Role.RNG, per_rank=True),
    ]
    return items


def write_golden(root: Path) -> list[Any]:
    """Save the golden state from two ranks."""
    return on_ranks(
        2,
        lambda comm: save_checkpoint(
            root,
            3,
            golden_state(comm.rank),
            GOLDEN_META,
            comm,
            {"tp": comm.rank},
            rank_meta={"draws": comm.rank},
        ),
    )


if __name__ == "__main__":
    print(write_golden(Path(sys.argv[1])))
