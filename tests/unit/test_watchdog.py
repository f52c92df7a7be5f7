"""The completion watchdog: silent while work completes, ends the process with the peers' names when it does not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from qeffect_lm.runtime.watchdog import CompletionWatchdog


def watched(seconds: float, *works):
    """The messages for works, each a callable that says whether it is done."""
    messages, called = [], threading.Event()

    def end(message: str) -> None:
        messages.append(message)
        called.set()

    dog = CompletionWatchdog(seconds, [1, 3], end)
    for number, work in enumerate(works):
        dog.watch(work, f"step {number}")
    called.wait(5 * seconds)
    dog.close()
    return messages


def test_silent_while_everything_completes():
    began = time.monotonic()
    late = lambda: time.monotonic() - began > 0.15  # noqa: E731
    assert watched(0.4, lambda: True, late, lambda: True) == []


def test_names_the_work_and_the_peers():
    (message,) = watched(0.1, lambda: True, lambda: False, lambda: True)
    assert message.startswith("step 1 is not done after 0.1 s: rank 1 or rank 3 was lost")


def test_time_counts_from_the_end_of_the_work_before():
    """Three works queued at once, each done 0.2 s after the one before: none is late, though the last ends after 0.6 s."""
    began = time.monotonic()
    works = [lambda n=n: time.monotonic() - began > 0.2 * n for n in (1, 2, 3)]
    assert watched(0.4, *works) == []


def test_short_works_do_not_pile_up():
    """A hundred works that are done, then one that never is: noticed in its time, not after a pause for each (5 s in all)."""
    (message,) = watched(0.5, *[lambda: True] * 100, lambda: False)
    assert message.startswith("step 100 is not done after 0.5 s")


def test_a_device_failure_is_told():
    def failed() -> bool:
        raise RuntimeError("an illegal memory access")

    assert watched(0.2, failed) == ["step 0 failed on the device: an illegal memory access"]


def test_ends_the_process_while_the_main_thread_is_stuck():
    code = (
        "import time\nfrom qeffect_lm.runtime.watchdog import CompletionWatchdog\n"
        "dog = CompletionWatchdog(0.1, [1])\ndog.watch(lambda: False, 'step 7')\ntime.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1 and "qeffect: error: step 7 is not done after 0.1 s: rank 1 was lost" in ended.stderr
