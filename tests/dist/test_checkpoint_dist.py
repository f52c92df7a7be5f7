"""Two gloo processes save and load together; one fails in the middle, or dies."""

from __future__ import annotations

import errno
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from checkpoint import (
    CheckpointError,
    GroupCommunicator,
    compare,
    find_resumable,
    load_into,
    open_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import ScriptedOps, whole
from tests.helpers import run_distributed, start_distributed


def _state(rank: int, value: float) -> list[LogicalTensor]:
    """Two pipeline stages: each its own layer, a scale on both replicas, RNG of the rank."""
    return [
        whole(f"param/layers.{rank}.w", torch.full((64, 3), value + rank)),
        whole(f"history/layers.{rank}.w", torch.full((16,), value), Role.AMAX_HISTORY),
        whole(f"rng/rank{rank}", torch.tensor([rank], dtype=torch.uint8), Role.RNG, per_rank=True),
    ]


def _save(root: Path, rank: int, step: int, ops: Any = None) -> Path:
    return save_checkpoint(
        root,
        step,
        _state(rank, float(step)),
        {"step": step},
        GroupCommunicator(),
        {"pp": rank},
        2,
        {"r": rank},
        ops=ops,
    )


def _together(rank: int, world: int, folder: str) -> dict[str, Any]:
    root = Path(folder)
    comm = GroupCommunicator()
    comm.barrier()
    paths = [str(_save(root, rank, step)) for step in (9, 10, 100)]
    checkpoint = open_checkpoint(root / "step_00000100")
    live = _state(rank, 0.0)
    load_into(checkpoint, live, comm=comm)
    loaded = all(torch.equal(a.tensor, b.tensor) for a, b in zip(live, _state(rank, 100), strict=True))

    errors = []
    for failing, only in ((0, "write"), (1, "write"), (1, "fsync"), (0, "rename")):
        ops = (
            ScriptedOps(0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), only)
            if rank == failing
            else None
        )
        began = time.monotonic()
        try:
            _save(root, rank, 110, ops)
            errors.append("saved")
        except CheckpointError as error:
            errors.append(str(error))
        assert time.monotonic() - began < 20
    return {"paths": paths, "rank": comm.rank, "world": comm.world, "loaded": loaded, "errors": errors}


def test_two_ranks_save_load_and_fail_together(tmp_path: Path) -> None:
    """C7, C9 over gloo: one message on both ranks, no hang, the previous checkpoint and `latest` as they
    were.
    """
    results = run_distributed(_together, 2, str(tmp_path), timeout=90)
    assert [(r["rank"], r["world"], r["loaded"]) for r in results] == [(0, 2, True), (1, 2, True)]
    assert results[0]["paths"] == results[1]["paths"] == [f"{tmp_path}/step_{s:08d}" for s in (9, 10, 100)]
    assert results[0]["errors"] == results[1]["errors"]
    for rank, message in zip((0, 1, 1, 0), results[0]["errors"], strict=True):
        assert f"rank {rank}: cannot " in message and f"{tmp_path}/.tmp-step_00000110" in message
        assert (
            "ENOSPC" in message and f"{tmp_path}/step_00000100 survives and `latest` is unchanged" in message
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_00000010", "step_00000100"]
    assert find_resumable(tmp_path) == tmp_path / "step_00000100"
    checkpoint = open_checkpoint(tmp_path / "step_00000100")
    assert checkpoint.verify() == [] and checkpoint.meta == {"step": 100}
    assert [checkpoint.rank_meta(r) for r in (0, 1)] == [{"r": 0}, {"r": 1}]
    assert checkpoint.names() == sorted(item.name for rank in (0, 1) for item in _state(rank, 0))


def _one_dies(rank: int, world: int, folder: str) -> str:
    import torch.distributed as dist

    group = dist.new_group(timeout=timedelta(seconds=10))
    root = Path(folder)

    class Dying(ScriptedOps):
        def write(self, file: Any, data: memoryview) -> int:
            os.kill(os.getpid(), signal.SIGKILL)
            return 0

    comm = GroupCommunicator(group)
    save_checkpoint(root, 1, _state(rank, 1), {}, comm, {"pp": rank})
    try:
        save_checkpoint(root, 2, _state(rank, 2), {}, comm, {"pp": rank}, ops=Dying() if rank == 1 else None)
    except CheckpointError as error:
        message = str(error)
    (root / "message").write_text(message)
    os._exit(3)


def test_a_rank_that_dies_while_writing_does_not_hang_the_other(tmp_path: Path) -> None:
    """C7, P8 for the save: the survivor gets an error in time; what was committed before is whole."""
    results = start_distributed(_one_dies, 2, str(tmp_path), timeout=60).wait(check=False)
    assert [r.returncode for r in results] == [3, -signal.SIGKILL], [r.output for r in results]
    assert "rank 1 was lost during the exchange of checkpoint state, as rank 0 sees it" in (tmp_path / "message").read_text()
    assert find_resumable(tmp_path) == tmp_path / "step_00000001"
    assert verify_checkpoint(tmp_path / "step_00000001") == []
    assert compare(
        open_checkpoint(tmp_path / "step_00000001"), open_checkpoint(tmp_path / "step_00000001")
    ).same
