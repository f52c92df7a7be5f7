"""A step's data on the device that computes: staged once a step into storages that never move.

Graphs read tokens, targets and random keys of every microbatch from here, so that a whole step can be one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.layers.dropout import host_key
from qeffect_lm.parallel.context import ContextParallel


class StepInput(Protocol):
    """One optimizer step of this DP rank: ``inputs``, ``targets`` ``[m, b, s]`` int64, ``loss_mask`` ``[m, b, s]`` float32,
    the DP-global number of valid ``tokens``, and ``starts`` ``[m, b, s]`` int32, where each token's document begins in its row
    (None: documents see each other)."""

    @property
    def inputs(self) -> torch.Tensor: ...
    @property
    def targets(self) -> torch.Tensor: ...
    @property
    def loss_mask(self) -> torch.Tensor: ...
    @property
    def tokens(self) -> int: ...
    @property
    def starts(self) -> torch.Tensor | None: ...


class StepBuffers:
    """A rank's storages for one step's data. Steps come with whole rows; where sequences are cut over ranks (``cp``), s is a
    rank's part of a row.

    Attributes:
        inputs: ``[m, b, s]`` int64 where the rank holds the first chunk, else None.
        targets, loss_mask: ``[m, b, s]`` int64 and float32 where it holds the last, else None; the mask also where ``masked``,
            on stages whose own losses count valid tokens.
        starts: ``[m, b, s]`` int32 where documents are kept apart, on every rank, else None.
        keys: ``[m]`` int64, the random key of every microbatch: of its place in the step over all replicas, so that the same
            samples draw the same numbers whatever the number of replicas.
        divisor: 0-dim, the step's number of valid tokens.
        shape: of a whole step, ``(m, b, row)``.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        divisor: torch.Tensor,
        *,
        first: bool,
        last: bool,
        seed: int,
        replica: int,
        replicas: int,
        masked: bool = False,
        documents: bool = False,
        cp: ContextParallel | None = None,
    ) -> None:
        self.divisor, self.shape, self._cp = divisor, shape, cp
        self._seed, self._replica, self._replicas = seed, replica, replicas
        here = shape if cp is None else (*shape[:2], shape[2] // cp.size)

        def made(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(here, dtype=dtype, device=divisor.device)

        self.keys = torch.zeros(shape[0], dtype=torch.int64, device=divisor.device)
        self.inputs = made(torch.int64) if first else None
        self.targets = made(torch.int64) if last else None
        self.loss_mask = made(torch.float32) if last or masked else None
        self.starts = made(torch.int32) if documents else None

    def load(self, step: int, batch: StepInput) -> None:
        """Stage ``batch`` for optimizer step ``step``. On a GPU the host does not wait for the copies.

        Raises:
            UsageError: microbatches of another number or shape than the buffers'.
        """
        check_starts(batch, self.starts)
        names = ["inputs", "targets", "loss_mask", *["starts"] * (self.starts is not None)]
        for name in names:  # a copy would spread a smaller one over all of its buffer
            found = list(getattr(batch, name).shape)
            if found != list(self.shape):
                raise UsageError(
                    f"a step of {found} {'tokens' if name == 'inputs' else name} (microbatches, sequences, length), the plan "
                    f"and its buffers are made for {list(self.shape)}"
                )
        places = (microbatch * self._replicas + self._replica for microbatch in range(self.shape[0]))
        keys = [host_key(self._seed, step, place) for place in places]
        self._stage(self.keys, torch.tensor(keys, dtype=torch.int64))
        for name in names:
            mine = getattr(self, name)
            if mine is not None:
                self._stage(mine, self.part(getattr(batch, name)))
        self.divisor.fill_(batch.tokens)

    def part(self, rows: torch.Tensor) -> torch.Tensor:
        """``[…, row]`` → what this rank has of each row."""
        return rows if self._cp is None else self._cp.local(rows)

    def elsewhere(self, batch: StepInput) -> StepInput:
        """A batch of any number of microbatches where the pipeline computes, this rank's part of it, for what runs outside a
        step (calibration, evaluation)."""
        device = self.divisor.device
        if device.type == "cpu" and self._cp is None:
            return batch

        def there(rows: torch.Tensor) -> torch.Tensor:
            mine = self.part(rows)
            return mine if device.type == "cpu" else mine.pin_memory().to(device, non_blocking=True)

        starts = None if batch.starts is None else there(batch.starts)
        return _DeviceBatch(there(batch.inputs), there(batch.targets), there(batch.loss_mask), batch.tokens, starts)

    @staticmethod
    def _stage(mine: torch.Tensor, given: torch.Tensor) -> None:
        mine.copy_(given.pin_memory() if mine.is_cuda and not given.is_cuda else given, non_blocking=True)


def check_starts(batch: StepInput, mine: torch.Tensor | None) -> None:
    """Raise UsageError unless the data says where documents begin exactly where the pipeline wants to know (``mine``)."""
    if (batch.starts is None) != (mine is None):
        wanted = "does not say where documents begin" if batch.starts is None else "says where documents begin"
        raise UsageError(f"the data {wanted}, which the pipeline was not made for: set data.documents as the data has it")


@dataclass(frozen=True)
class _DeviceBatch:
    inputs: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    tokens: int
    starts: torch.Tensor | None
