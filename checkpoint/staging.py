"""Copies of a rank's state in host memory, from which a checkpoint is written while training changes the state itself.

The copies lie in one block of memory that is made once, touched and (for a GPU) pinned, and used again by every save: a save in
the steady state allocates nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from checkpoint.layout import CheckpointError
from checkpoint.shards import as_integers
from qeffect_lm.state import LogicalTensor, Role
from qeffect_lm.units import format_bytes

UNTIL_UPDATE = (Role.PARAM, Role.MASTER, Role.MOMENT, Role.CACHED_WEIGHT)
"""What nothing changes before the next optimizer step."""

ALIGNMENT = 64  # bytes: each copy begins on a cache line, which suits any element size
PORTABLE = 1  # cudaHostRegisterPortable: pinned for the contexts of all devices


class Copies(Protocol):
    """Who orders copies and training (:class:`pipeline.saving.StateCopies`): contexts to launch copies in."""

    def at_once(self) -> AbstractContextManager[object]:
        """They come before whatever is launched later."""
        ...

    def until_update(self, done: Callable[[], object]) -> AbstractContextManager[object]:
        """They come before the next optimizer step, which calls ``done`` first: it returns when they are made."""
        ...


@dataclass(frozen=True)
class Staged:
    """The same logical tensors over the copies, and the bytes copied.

    ``complete`` has to be called once, by any thread: on a CPU it makes what is left of the copies, on a GPU it waits for them.
    """

    tensors: list[LogicalTensor]
    nbytes: int
    complete: Callable[[], None]


class Staging:
    """A block of host memory for the copies of one save.

    Args:
        copies: orders copies and training. None: all copies are made at once, and nobody else orders them.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies
        self._block = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self._block.numel()

    def reserve(self, tensors: Sequence[LogicalTensor]) -> None:
        """Make the block large enough for ``tensors`` now, so that no save has to. Raises CheckpointError if it cannot."""
        size = sum(_room(item.tensor) for item in tensors)
        if size <= self.nbytes:
            return
        pinned = any(item.tensor.is_cuda for item in tensors)
        self._block = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        try:
            block = torch.zeros(size, dtype=torch.uint8)  # written to, so that the pages are there
            if pinned:
                _pin(block)
        except RuntimeError as error:  # torch's errors for host memory and for the driver
            first = (str(error).splitlines() or [""])[0]
            raise CheckpointError(
                f"asynchronous saves need {format_bytes(size)} of {'pinned ' if pinned else ''}host memory for this rank's "
                f"copy, which cannot be had ({first}): set checkpoint.async_save=false"
            ) from error
        self._block = block

    def stage(self, tensors: Sequence[LogicalTensor]) -> Staged:
        """Begin to copy ``tensors``. On return training may go on; the copies before are overwritten, nobody may use them
        any more."""
        self.reserve(tensors)
        pairs, at = [], 0
        for item in tensors:
            source = item.tensor
            pairs.append((source, self._block[at : at + source.nbytes].view(source.dtype).view(source.shape)))
            at += _room(source)
        made = [replace(item, tensor=copy) for item, (_, copy) in zip(tensors, pairs, strict=True)]
        later = [self._copies is not None and item.role in UNTIL_UPDATE for item in tensors]
        with nullcontext() if self._copies is None else self._copies.at_once():
            event = _copy([pair for pair, wait in zip(pairs, later, strict=True) if not wait])
        complete = _nothing if event is None else event.synchronize
        if self._copies is not None and any(later):
            complete = self._during_the_step([pair for pair, wait in zip(pairs, later, strict=True) if wait], self._copies)
        return Staged(made, sum(item.tensor.nbytes for item in tensors), complete)

    def _during_the_step(self, pairs: list[Pair], copies: Copies) -> Callable[[], None]:
        """Copies that the next optimizer step waits for: a GPU makes them itself, on a CPU whoever completes them does."""
        if any(source.is_cuda for source, _ in pairs):
            with copies.until_update(_nothing):
                event = _copy(pairs)
            assert event is not None  # it comes after that of the copies made at once: they share a stream
            return event.synchronize
        copied = threading.Event()
        with copies.until_update(copied.wait):
            pass

        def complete() -> None:
            try:
                _copy(pairs)
            finally:
                copied.set()  # whatever happened: the optimizer does not wait for ever

        return complete


Pair = tuple[torch.Tensor, torch.Tensor]  # the live tensor, and the place of its copy


def _copy(pairs: Sequence[Pair]) -> torch.cuda.Event | None:
    """Copy bits; on a GPU returns an event after the copies, on the current stream."""
    with torch.no_grad():
        for source, copy in pairs:
            as_integers(copy).copy_(as_integers(source), non_blocking=True)
    if not any(source.is_cuda for source, _ in pairs):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _nothing() -> None:
    """There is nothing to wait for."""


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _pin(block: torch.Tensor) -> None:
    """Pin memory in place: torch's own pinned memory comes in powers of two, up to twice what is needed."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(block.data_ptr(), block.numel(), PORTABLE)))
    weakref.finalize(block, runtime.cudaHostUnregister, block.data_ptr())
