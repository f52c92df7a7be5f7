"""Copying a checkpoint into live storages, all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from checkpoint.comm import Communicator, SingleProcess
from checkpoint.digests import writers
from checkpoint.layout import Box, CheckpointError, describe, natural_key
from checkpoint.reader import Checkpoint
from checkpoint.shards import dtype_name
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.state import LogicalTensor


def load_into(
    checkpoint: Checkpoint,
    tensors: Sequence[LogicalTensor],
    *,
    strict: bool = True,
    comm: Communicator | None = None,
) -> None:
    """Copy the saved values into the storages of ``tensors``, in place: addresses stay, strides may differ.

    Everything is checked before the first write, the SHA-256 of each slice to be read included: names, roles,
    global shapes, dtypes and, when ``strict``, that the checkpoint holds no further tensor of the roles in
    ``tensors``. Nothing is ever defaulted or cast. With ``comm`` (all ranks call together) "further" is
    judged against the tensors of all ranks, and a failure on one rank is raised on all of them before any of
    them writes; without it, ``tensors`` has to be the whole state of its roles.

    Raises :class:`ResumeError` naming the tensor and the two things that disagree.
    """
    comm = comm or SingleProcess()
    fault = _first_fault(lambda: _check(checkpoint, tensors))
    reports = comm.gather((fault, {item.name for item in tensors}, {item.role for item in tensors}))
    verdict = None
    if reports is not None:
        verdict = _common([report[0] for report in reports])
        if verdict is None and strict:
            names = set().union(*(report[1] for report in reports))
            verdict = _extras(checkpoint, names, set().union(*(report[2] for report in reports)))
    _raise(comm.broadcast(verdict))

    fault = _first_fault(lambda: _copy(checkpoint, tensors))
    faults = comm.gather(fault)
    verdict = None if faults is None else _common(faults)
    _raise(comm.broadcast(verdict and f"{verdict}. The state in memory is incomplete now: end this process"))


def _check(checkpoint: Checkpoint, tensors: Sequence[LogicalTensor]) -> None:
    blocks: list[tuple[str, Box]] = []
    for item in tensors:
        entry = checkpoint.manifest.tensors.get(item.name)
        if entry is None:
            checkpoint_has = [n for n, e in checkpoint.manifest.tensors.items() if e.role == item.role]
            raise CheckpointError(
                f"tensor {item.name!r} ({item.role}) is needed but {checkpoint.path} does not hold it "
                f"(it holds {len(checkpoint_has)} of that role); missing state is never made up"
            )
        for what, saved, live in (
            ("role", entry.role.value, item.role.value),
            ("shape", list(entry.shape), list(item.global_shape)),
            ("dtype", entry.dtype, dtype_name(item.tensor.dtype)),
        ):
            if saved != live:
                raise CheckpointError(
                    f"tensor {item.name!r}: its {what} is {saved} in {checkpoint.path} and {live} in this run"
                )
        blocks.append((item.name, checkpoint.box(item.name, item.start, tuple(item.tensor.shape))))
    checkpoint.check(blocks)


def _copy(checkpoint: Checkpoint, tensors: Sequence[LogicalTensor]) -> None:
    """Straight into the storages, from the pages that the check has just read; threads copy side by side."""

    def one(item: LogicalTensor) -> None:
        with torch.no_grad():
            checkpoint.read_into(item.name, item.start, item.tensor)

    with ThreadPoolExecutor(writers()) as pool:
        list(pool.map(one, tensors))


def _extras(checkpoint: Checkpoint, names: set[str], roles: set[str]) -> str | None:
    extra = [n for n, e in checkpoint.manifest.tensors.items() if e.role in roles and n not in names]
    if not extra:
        return None
    first = min(extra, key=natural_key)
    role = checkpoint.manifest.tensors[first].role
    more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
    return f"tensor {first!r} ({role}){more} is in {checkpoint.path} but this run has no place for it"


def _first_fault(work: Callable[[], None]) -> str | None:
    try:
        work()
    except Exception as error:  # reported to all ranks: leaving here would let the others wait for ever
        return describe(error)
    return None


def _common(faults: Sequence[str | None]) -> str | None:
    """The first rank's fault; which rank is said only where there are several."""
    for rank, fault in enumerate(faults):
        if fault is not None:
            return fault if len(faults) == 1 else f"rank {rank}: {fault}"
    return None


def _raise(verdict: str | None) -> None:
    if verdict is not None:
        raise ResumeError(verdict)
