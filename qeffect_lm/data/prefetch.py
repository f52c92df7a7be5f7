"""Steps read ahead by worker processes (torch's ``DataLoader``), so that the training loop only takes them.

Worker w of W reads every W-th step; what a step holds is a pure function of its first sample, so their number decides nothing.
"""

from __future__ import annotations

import itertools
import queue
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from qeffect_lm.data.loader import StepBatch, StepReader
from qeffect_lm.errors import QEffectError

AHEAD = 2
"""Steps that each worker keeps ready."""


class _Failed:
    """What a worker met instead of a step; or, where it could say nothing any more, what showed that."""

    def __init__(self, error: Exception, died: bool = False) -> None:
        self.error, self.died = error, died


@dataclass(frozen=True)
class _Packed:
    """A step as one buffer: every tensor that crosses processes costs the loop a handshake of its own.

    ``layout`` has for each tensor its field, dtype, shape, and first and last byte; ``rest`` the other fields.
    """

    buffer: torch.Tensor
    layout: tuple[tuple[str, torch.dtype, torch.Size, int, int], ...]
    rest: dict[str, Any]

    @classmethod
    def of(cls, batch: StepBatch) -> _Packed:
        values = {one.name: getattr(batch, one.name) for one in fields(batch)}
        layout, parts, at = [], [], 0
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                flat = value.contiguous().view(-1).view(torch.uint8)
                layout.append((name, value.dtype, value.shape, at, at + flat.numel()))
                parts += [flat, torch.zeros(-flat.numel() % 16, dtype=torch.uint8)]
                at += flat.numel() + len(parts[-1])
        rest = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
        return cls(torch.cat(parts), tuple(layout), rest)

    def pin_memory(self) -> _Packed:
        return replace(self, buffer=self.buffer.pin_memory())

    def batch(self) -> StepBatch:
        """The step, as views of the buffer."""
        views: dict[str, Any] = {
            name: self.buffer[first:last].view(dtype).view(shape) for name, dtype, shape, first, last in self.layout
        }
        return StepBatch(**views, **self.rest)


class _Steps(Dataset[Any]):
    def __init__(self, reader: StepReader) -> None:
        self._reader = reader

    def __getitem__(self, first: int) -> _Packed | _Failed:
        try:
            return _Packed.of(self._reader.step(first))
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
            generator=torch.Generator(),  # else it draws its workers' seed from the generator that checkpoints hold
        )
        usual = signal.getsignal(signal.SIGCHLD)
        self._steps: Any = iter(loader)
        if threading.current_thread() is threading.main_thread():
            # torch's handler would raise anywhere in a step; its wait for a worker finds the death too, within seconds.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if usual is None else usual)
        # What workers hand over is received beside the loop: it takes a handshake with a process that may have to wait for a
        # core.
        self._ready: queue.Queue[_Packed | _Failed] = queue.Queue(maxsize=1)
        self._stop, self._failed = threading.Event(), False
        self._receiver = threading.Thread(target=self._receive, name="data", daemon=True)
        self._receiver.start()

    def _receive(self) -> None:
        """Until told to stop, or an error."""
        made: Any = None
        while not self._stop.is_set() and not isinstance(made, _Failed):
            try:
                made = next(self._steps)
            except Exception as error:  # raised where the step is asked for
                made = _Failed(error, died=True)
            while not self._stop.is_set():
                try:
                    self._ready.put(made, timeout=0.2)
                    break
                except queue.Full:
                    continue

    def next(self) -> StepBatch:
        """The next step.

        Raises:
            QEffectError: a worker died; or what it met while reading.
        """
        if self._failed:
            raise QEffectError("the workers that read data have ended with an error: set the cursor, or start again")
        made = self._ready.get()
        if isinstance(made, _Packed):
            self.following += self._samples
            return made.batch()
        self._failed = True
        if made.died:
            raise QEffectError(
                f"a process that reads data died ({str(made.error).partition(chr(10))[0]}): if memory ran out, use fewer "
                "data.workers; a SIGBUS means that a token file was truncated while it was read (tools.preprocess inspect "
                "--verify)"
            ) from made.error
        raise made.error

    def close(self) -> None:
        """End the workers."""
        self._stop.set()
        self._receiver.join()
        self._steps._shutdown_workers()
