"""The multi-process helper itself: results in rank order, the child's error in ours, nothing left running."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from tests.helpers import DistributedError, run_distributed, start_distributed


def _sum(rank: int, world: int, offset: int) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return rank, value.item()


def _fail_on_one(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("rank one gives up")
    dist.all_reduce(torch.zeros(1))  # would wait for ever


def _hang(rank: int, world: int) -> None:
    print("about to hang", flush=True)
    time.sleep(600)


def _pid_then_wait(rank: int, world: int) -> int:
    if rank == 0:
        time.sleep(600)
    return os.getpid()


def _exit_code(rank: int, world: int) -> None:
    sys.exit(2 + rank)


@pytest.mark.long
def test_results_come_in_rank_order() -> None:
    assert run_distributed(_sum, 2, 10) == [(0, 21.0), (1, 21.0)]


def test_the_failing_rank_is_named_with_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(DistributedError, match="rank one gives up"):
        run_distributed(_fail_on_one, 2, timeout=60)
    assert time.monotonic() - started < 40


@pytest.mark.long
def test_a_hang_ends_at_the_timeout_and_shows_where() -> None:
    for timeout in (12, 60):  # on a machine that is very busy a rank still imports torch after the first
        started = time.monotonic()
        with pytest.raises(DistributedError, match="time ran out") as caught:
            run_distributed(_hang, 1, timeout=timeout, init=False)
        assert time.monotonic() - started < timeout + 8
        if "about to hang" in str(caught.value):
            break
    assert re.search("(?s)about to hang.*in _hang", str(caught.value))


def test_single_ranks_can_be_killed() -> None:
    run = start_distributed(_pid_then_wait, 2, init=False, timeout=60)
    run.processes[1].wait(timeout=40)
    run.kill(0)
    first, second = run.wait(check=False)
    assert first.returncode == -signal.SIGKILL and first.value is None
    assert second.finished and second.value == run.processes[1].pid


@pytest.mark.long
def test_exit_codes_are_kept() -> None:
    results = start_distributed(_exit_code, 2, init=False, timeout=60).wait(check=False)
    assert [r.returncode for r in results] == [2, 3]


def test_local_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="module level"):
        run_distributed(lambda rank, world: None, 1)
