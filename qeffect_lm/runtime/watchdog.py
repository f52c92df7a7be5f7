"""A watchdog for work that the host cannot wait for with a time limit: a whole step as one graph, transfers included.

Inside a replayed graph NCCL's own watchdog sees nothing: if a peer dies, its kernels wait for ever, and so does the first host
read of the step's results. A thread watches the completion of every step instead, and ends the process with the peers' names.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class _Watched:
    done: Callable[[], bool]
    what: str
    since: float


def end_process(message: str) -> None:
    """The main thread may be stuck in the driver: nothing but leaving the process is sure to work."""
    print(f"qeffect: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


class CompletionWatchdog:
    """Ends the process when watched work is not done in time.

    Args:
        seconds: from when the work before it was done, or from its launch if that is later.
        peers: world ranks that the work waits for.
        end: called with the message from the watchdog's thread; ends the process.
    """

    def __init__(self, seconds: float, peers: Sequence[int], end: Callable[[str], None] = end_process) -> None:
        self._seconds, self._peers, self._end = seconds, list(peers), end
        self._poll = min(0.2, seconds / 10)
        self._watched: deque[_Watched] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="completion watchdog", daemon=True)
        self._thread.start()

    def watch(self, done: Callable[[], bool], what: str) -> None:
        """Watch work just launched: ``done`` is asked from another thread, and may raise if the device failed."""
        with self._changed:
            self._watched.append(_Watched(done, what, time.monotonic()))
            self._changed.notify()

    def close(self) -> None:
        """Stop watching."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._watched)
                if self._closed:
                    return
                head = self._watched[0]
            message = self._verdict(head)
            if message is not None:
                self._end(message)
                return

    def _verdict(self, head: _Watched) -> str | None:
        """What is wrong with the oldest work; forgets it once it is done, else waits before it is asked again."""
        try:
            done = head.done()
        except RuntimeError as error:
            return f"{head.what} failed on the device: {error}"
        now = time.monotonic()
        if done:  # and no pause: steps shorter than one would pile up, and a lost peer would be noticed hours late
            with self._changed:
                self._watched.popleft()
                if self._watched:
                    self._watched[0].since = max(self._watched[0].since, now)
            return None
        if now - head.since <= self._seconds:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._poll)
            return None
        names = " or ".join(f"rank {peer}" for peer in self._peers)
        return (
            f"{head.what} is not done after {self._seconds:g} s: {names} was lost, or is stuck. Restart from the last "
            "checkpoint (launch.timeout_seconds is the limit)"
        )
