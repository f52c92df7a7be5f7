"""How long the training loop stands still for a checkpoint: saved in the background, and at once, on the same disk in one run.

The two ways take turns. A synchronous save stands still for all of it: hashing, writing, fsync, commit. In the background the
loop stands still for the request (launching copies, and making those of what a step changes first), and at its next optimizer
step for what is left of the copies by then. How much is left depends on how long forward and backward take: they are played
by a loop of small operations and products for a given time, and the stall with no time at all is told too. The same loop shows
what the writing thread takes from training afterwards: its share of processors, memory and the interpreter's lock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoint import SingleProcess, save_checkpoint
from checkpoint.background import STAGED, AsyncSaver, SaveEvent
from checkpoint.staging import Staging
from qeffect_lm.state import LogicalTensor, Role

PIECE = 32 << 20  # bytes of a large tensor
SMALL = 256  # tensors of a few bytes, as scales are
TARGET = 0.05  # of a synchronous save


def state(nbytes: int, device: str) -> list[LogicalTensor]:
    """Random tensors of ``nbytes`` in all, of which no two are equal."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, 256, (PIECE,), dtype=torch.uint8, generator=generator)
    items = []
    for number, begin in enumerate(range(0, nbytes, PIECE)):
        data = noise[: nbytes - begin].roll(number + 1).to(device)
        items.append(LogicalTensor.whole(f"master/{number}", data, Role.MASTER))
    small = [LogicalTensor.whole(f"scale/{i}", torch.full((), float(i), device=device), Role.SCALE) for i in range(SMALL)]
    return [*items, *small]


class Order:
    """Orders copies and the loop as the engine does (:class:`pipeline.saving.StateCopies`)."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._done: Callable[[], object] = lambda: None

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def at_once(self) -> Iterator[None]:
        with self._copying():
            yield
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def until_update(self, done: Callable[[], object]) -> Iterator[None]:
        with self._copying():
            yield
        self._done = done if self._stream is None else self._stream.synchronize

    def before_update(self) -> float:
        """Seconds that the optimizer waits for copies."""
        began = time.perf_counter()
        self._done()
        return time.perf_counter() - began


class Loop:
    """Something like a step's work: many small operations of the host, then a product."""

    def __init__(self, device: str) -> None:
        self._small = torch.zeros(8, device=device)
        self._large = torch.ones(512, 512, device=device)

    def step(self) -> float:
        """Seconds that one took."""
        began = time.perf_counter()
        for _ in range(200):
            self._small.add_(1.0)
        float((self._large @ self._large)[0, 0])
        return time.perf_counter() - began

    def run(self, seconds: float) -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            self.step()

    def run_while(self, saver: AsyncSaver) -> list[float]:
        """Step until nothing is being written any more; the seconds of the steps that were over before that."""
        steps = []
        while saver.busy:
            steps.append(self.step())
        return steps[:-1]


def measure_stall(
    nbytes: int, folder: Path, rounds: int, device: str, forward: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Save ``nbytes`` ``rounds`` times each way to ``folder``, after one of each that does not count.

    Args:
        forward: seconds that forward and backward of the step after a request take.

    Returns: seconds of every round: ``sync``; ``stall`` with such a step; ``copy``, the stall with a step that takes no time
    before its optimizer; ``durable``; the ratio of the medians ``stall / sync`` and ``copy / sync``; bytes of the copy; and the
    loop's seconds per step while the thread writes and while it does not.
    """
    items, order, loop = state(nbytes, device), Order(device), Loop(device)
    staged: list[SaveEvent] = []
    staging = Staging(order)
    staging.reserve(items)
    saver = AsyncSaver(staging, lambda event: staged.append(event) if event.what == STAGED else None)
    found: dict[str, list[float]] = {name: [] for name in ("sync", "stall", "copy", "durable", "writing", "quiet")}
    for number in range(rounds + 1):
        first, second, third = (3 * number + i for i in range(3))
        began = time.perf_counter()
        _write(folder, first, items)
        sync = time.perf_counter() - began
        began = time.perf_counter()
        saver.save(second, items, partial(_write, folder, second))
        copy = time.perf_counter() - began + order.before_update()
        saver.wait()
        began = time.perf_counter()
        saver.save(third, items, partial(_write, folder, third))
        stall = time.perf_counter() - began
        loop.run(forward)
        stall += order.before_update()
        writing = loop.run_while(saver)
        saver.wait()
        durable = time.perf_counter() - began
        quiet = [loop.step() for _ in range(max(10, min(len(writing), 100)))]
        if number:
            for name, value in (("sync", sync), ("stall", stall), ("copy", copy), ("durable", durable)):
                found[name].append(value)
            found["writing"] += writing
            found["quiet"] += quiet
            say(f"round {number}: {sync:.2f} s at once, stall {stall:.3f} s ({stall / sync:.1%}), all copies {copy:.3f} s")
    sync = statistics.median(found["sync"])
    return {
        "bytes": nbytes,
        "device": device,
        "forward": forward,
        "copy_bytes": staging.nbytes,
        **{name: found[name] for name in ("sync", "stall", "copy", "durable")},
        "ratio": statistics.median(found["stall"]) / sync,
        "copy_ratio": statistics.median(found["copy"]) / sync,
        "target": TARGET,
        "loop_step_writing": statistics.fmean(found["writing"]) if found["writing"] else None,
        "loop_step_quiet": statistics.fmean(found["quiet"]),
    }


def _write(folder: Path, step: int, items: list[LogicalTensor]) -> Path:
    return save_checkpoint(folder, step, items, {}, SingleProcess(), {}, keep=1)


def table(found: dict[str, Any]) -> str:
    """For people."""
    gb = found["bytes"] / 1e9
    sync, stall, copy, durable = (statistics.median(found[name]) for name in ("sync", "stall", "copy", "durable"))
    lines = [
        f"state of {gb:.2f} GB on {found['device']}, its copy {found['copy_bytes'] / 1e9:.2f} GB of host memory; medians",
        f"synchronous save   {sync:8.3f} s  {gb / sync:6.2f} GB/s",
        f"in the background  {durable:8.3f} s until it is durable",
        f"the loop's stall   {stall:8.3f} s, {found['ratio']:.2%} of a synchronous save (wanted: {found['target']:.0%}), "
        f"where forward and backward take {found['forward']:g} s",
        f"                   {copy:8.3f} s, {found['copy_ratio']:.2%}, where they take none (all copies, {gb / copy:.1f} GB/s)",
    ]
    if found["loop_step_writing"] is not None:
        slower = found["loop_step_writing"] / found["loop_step_quiet"] - 1
        lines.append(
            f"the loop while the thread writes: {1000 * found['loop_step_writing']:.2f} ms a step, else "
            f"{1000 * found['loop_step_quiet']:.2f} ms ({slower:+.0%})"
        )
    return "\n".join(lines)
