"""Jobs on worker processes, each started anew (spawn), so that nothing of this process is shared with them.

A worker that dies ends the whole run with an error that names its job; a parent that dies ends its workers, which notice that
their pipe is closed.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from qeffect_lm.errors import QEffectError

Job = Callable[[Any, Callable[[int], object]], Any]


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    number: int | None = None  # the job it is at


def run_jobs(
    function: Job, jobs: Sequence[Any], workers: int, progress: Callable[[int], object]
) -> Iterator[tuple[int, Any]]:
    """``(number, function(job, progress))`` as jobs end. With one worker, or one job, it runs in this process.

    After a job failed no further one is begun; those before it, in their order, are waited for, and the first failure is
    raised, so that which one is told does not depend on the workers.

    Raises:
        QEffectError: a worker died.
    """
    if min(workers, len(jobs)) <= 1:
        for number, job in enumerate(jobs):
            yield number, function(job, progress)
        return
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    try:
        for _ in range(min(workers, len(jobs))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(function, theirs), daemon=True)
            process.start()
            theirs.close()
            pool.append(_Worker(process, ours))
        yield from _drive(pool, jobs, progress)
    finally:
        for worker in pool:
            worker.pipe.close()
            worker.process.terminate()
        for worker in pool:
            worker.process.join()


def _drive(pool: list[_Worker], jobs: Sequence[Any], progress: Callable[[int], object]) -> Iterator[tuple[int, Any]]:
    following, failures = 0, dict[int, BaseException]()
    for worker in pool:
        following = _give(worker, following, jobs)
    while True:
        first = min(failures, default=len(jobs))
        busy = [worker for worker in pool if worker.number is not None and worker.number < first]
        if not busy:
            break
        for pipe in wait([worker.pipe for worker in busy]):
            worker = next(one for one in busy if one.pipe is pipe)
            assert worker.number is not None
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, OSError):
                raise _death(worker, jobs) from None
            if kind == "progress":
                progress(value)
                continue
            number, worker.number = worker.number, None
            if kind == "failed":
                failures[number] = value
            else:
                yield number, value
            if not failures:
                following = _give(worker, following, jobs)
    if failures:
        raise failures[min(failures)]


def _give(worker: _Worker, number: int, jobs: Sequence[Any]) -> int:
    if number < len(jobs):
        worker.number = number
        try:
            worker.pipe.send(jobs[number])
        except OSError:
            raise _death(worker, jobs) from None
        return number + 1
    return number


def _death(worker: _Worker, jobs: Sequence[Any]) -> QEffectError:
    worker.process.join(5)
    code = worker.process.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
    job = None if worker.number is None else jobs[worker.number]
    return QEffectError(
        f"worker process {worker.process.pid} {how} at {getattr(job, 'label', job)}; SIGKILL often means that the memory "
        "ran out: use fewer workers. What is finished is kept: the same command goes on from there"
    )


def _serve(function: Job, pipe: Connection) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us

    def progress(count: int) -> None:
        pipe.send(("progress", count))

    with suppress(EOFError, OSError):
        while True:
            job = pipe.recv()
            try:
                made = function(job, progress)
            except (EOFError, BrokenPipeError):
                return
            except Exception as error:
                error.__traceback__ = None
                pipe.send(("failed", error))
            else:
                pipe.send(("done", made))
