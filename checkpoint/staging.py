"""Copies of a rank's state in host memory, from which a checkpoint is written while training changes the state itself.

The copies lie in one block of memory that is made once, touched and (for a GPU) pinned, and used again by every save: a save in
the steady state allocates nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from checkpoint.layout import CheckpointError
from checkpoint.shards import as_integers
from qeffect_lm.state import LogicalTensor
from qeffect_lm.units import format_bytes

ALIGNMENT = 64  # bytes: each copy begins on a cache line, which suits any element size
PORTABLE = 1  # cudaHostRegisterPortable: pinned for the contexts of all devices


@dataclass(frozen=True)
class Staged:
    """What :meth:`Staging.stage` returns: the same logical tensors over the copies, bytes copied, and what waits for them."""

    tensors: list[LogicalTensor]
    nbytes: int
    wait: Callable[[], None]


class Staging:
    """A block of host memory for the copies of one save.

    Args:
        copying: a context in which the copies are launched. On a GPU it has to make a stream current that runs after the work
            that wrote the state, and to make later work wait for that stream (``Engine.copying_state``).
    """

    def __init__(self, copying: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._copying = copying
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
        """Copy ``tensors``. On a CPU the copies are there on return; on a GPU they are once ``wait`` returns, and whatever is
        launched from now on comes after them.

        The copies before are overwritten: nobody may use them any more.
        """
        self.reserve(tensors)
        copies, at, wait = [], 0, _nothing
        with self._copying(), torch.no_grad():
            for item in tensors:
                source = item.tensor
                copy = self._block[at : at + source.nbytes].view(source.dtype).view(source.shape)
                as_integers(copy).copy_(as_integers(source), non_blocking=True)
                copies.append(replace(item, tensor=copy))
                at += _room(source)
            if any(item.tensor.is_cuda for item in tensors):
                done = torch.cuda.Event()
                done.record()  # on the stream that copied
                wait = done.synchronize
        return Staged(copies, sum(item.tensor.nbytes for item in tensors), wait)


def _nothing() -> None:
    """There is nothing to wait for."""


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _pin(block: torch.Tensor) -> None:
    """Pin memory in place: torch's own pinned memory comes in powers of two, up to twice what is needed."""
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(block.data_ptr(), block.numel(), PORTABLE)))
    weakref.finalize(block, runtime.cudaHostUnregister, block.data_ptr())
