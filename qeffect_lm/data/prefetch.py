"""Steps read ahead by worker processes (torch's ``DataLoader``), so that the training loop only takes them.

Worker w of W reads every W-th step; what a step holds is a pure function of its first sample, so their number decides nothing.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from qeffect_lm.data.loader import StepBatch, StepReader
from qeffect_lm.errors import QEffectError

AHEAD = 2
"""Steps that each worker keeps ready."""


class _Failed:
    """What a worker met instead of a step."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Steps(Dataset[Any]):
    def __init__(self, reader: StepReader) -> None:
        self._reader = reader

    def __getitem__(self, first: int) -> StepBatch | _Failed:
        try:
            return self._reader.step(first)
        except Exception as error:  # told where the step is asked for, as itself
            return _Failed(error.with_traceback(None))


class _From(Sampler[int]):
    """First samples of steps, without an end."""

    def __init__(self, first: int, samples: int) -> None:
        self._numbers = itertools.count(first, samples)

    def __iter__(self) -> Iterator[int]:
        return self._numbers


def _begin(worker: int) -> None:
    """Signals that ask for an orderly stop reach the whole job; the trainer answers them, and then ends its workers."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)


class Prefetch:
    """Steps from sample ``first`` on. ``following`` is the first sample of the one that :meth:`next` gives."""

    def __init__(self, reader: StepReader, first: int, workers: int, pinned: bool) -> None:
        self.following, self._samples = first, reader.shape.samples
        loader: DataLoader[Any] = DataLoader(
            _Steps(reader),
            sampler=_From(first, self._samples),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=AHEAD,
            pin_memory=pinned,
            multiprocessing_context="spawn",
            worker_init_fn=_begin,
        )
        self._steps: Any = iter(loader)

    def next(self) -> StepBatch:
        """The next step.

        Raises:
            QEffectError: a worker died; or what it met while reading.
        """
        try:
            made = next(self._steps)
        except RuntimeError as error:
            raise QEffectError(
                f"a process that reads data died ({str(error).splitlines()[0]}): if memory ran out, use fewer data.workers; a "
                "SIGBUS means that a token file was truncated while it was read (tools.preprocess inspect --verify)"
            ) from error
        if isinstance(made, _Failed):
            raise made.error
        self.following += self._samples
        return made

    def close(self) -> None:
        """End the workers."""
        self._steps._shutdown_workers()
