"""Launching: torchrun's, SLURM's and no variables, the layout's world, signals, the shared folder."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qeffect_lm.config import ParallelConfig
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.runtime.launch import (
    SLURM_PORTS,
    LaunchEnv,
    StopSignals,
    check_world,
    expand_hostlist,
    init_process_group,
    shared_folder_check,
)
from tests.helpers import launch_environment, run_distributed

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "node[09-10]",
    "SLURM_JOB_ID": "123456",
}


def test_no_variables_is_one_process() -> None:
    assert LaunchEnv.from_mapping({}) == LaunchEnv(rank=0, world=1, launcher="single")
    # An allocation's shell (salloc): no task of a step, so no SLURM_PROCID.
    assert LaunchEnv.from_mapping({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8"}).world == 1


def test_torchrun() -> None:
    env = LaunchEnv.from_mapping(launch_environment(1, 2, 4567) | {"TORCHELASTIC_RESTART_COUNT": "3"})
    assert env == LaunchEnv(1, 2, 1, "127.0.0.1", 4567, 3, "torchrun", agent_store=True)


def test_torchrun_inside_srun_wins() -> None:
    env = LaunchEnv.from_mapping(SLURM | launch_environment(0, 2, 4567))
    assert (env.launcher, env.world) == ("torchrun", 2)


def test_slurm() -> None:
    env = LaunchEnv.from_mapping(SLURM)
    assert (env.rank, env.world, env.local_rank, env.master_addr) == (3, 4, 1, "node09")
    assert env.master_port in SLURM_PORTS and env.launcher == "slurm"
    same = LaunchEnv.from_mapping(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert same.master_port == env.master_port
    other = LaunchEnv.from_mapping(SLURM | {"SLURM_STEP_ID": "1"})
    assert other.master_port != env.master_port
    step = LaunchEnv.from_mapping(SLURM | {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "gpu7"})
    assert (step.world, step.master_addr) == (5, "gpu7")
    chosen = LaunchEnv.from_mapping(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "99"})
    assert (chosen.master_addr, chosen.master_port) == ("head", 99)


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"RANK": "0"}, "RANK set but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT missing"),
        (launch_environment(0, 2, 1) | {"RANK": "2"}, "rank 2 of world size 2"),
        (launch_environment(0, 2, 1) | {"RANK": "-1"}, "RANK is '-1'"),
        (launch_environment(0, 2, 1) | {"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        (launch_environment(0, 2, 1) | {"LOCAL_RANK": "1"}, "local rank 1 of global rank 0"),
        (SLURM | {"SLURM_NTASKS": "2"}, "rank 3 of world size 2"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_NTASKS"}, "SLURM_NTASKS missing"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_NODELIST"}, "SLURM_NODELIST is missing"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_JOB_ID"}, "SLURM_JOB_ID is missing"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID is ''"),
    ],
)
def test_contradicting_variables(environ: dict[str, str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        LaunchEnv.from_mapping(environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,7],gpu5", ["node01", "node02", "node03", "node7", "gpu5"]),
        ("a", ["a"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[01-02].x", ["r1n01.x", "r1n02.x", "r2n01.x", "r2n02.x"]),
        ("a-[1,3-4]-ib,b", ["a-1-ib", "a-3-ib", "a-4-ib", "b"]),
    ],
)
def test_hostlist(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[1", "n1]", "n[2-1]", "n[a-b]", "n[]", "n[[1]]", "n[1-]", "n[1-999999]"]
)
def test_malformed_hostlist(text: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        expand_hostlist(text)


@given(
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 12)), min_size=1, max_size=5), st.integers(1, 4)
)
def test_hostlist_expands_what_slurm_would_compress(spans: list[tuple[int, int]], width: int) -> None:
    ranges = [f"{a:0{width}d}-{a + n:0{width}d}" if n else f"{a:0{width}d}" for a, n in spans]
    expected = [f"n{i:0{width}d}" for a, n in spans for i in range(a, a + n + 1)]
    assert expand_hostlist(f"n[{','.join(ranges)}]") == expected


def test_the_world_must_fit_the_layout() -> None:
    check_world(ParallelConfig(pp=2, dp=2), 4)
    with pytest.raises(UsageError) as caught:
        check_world(ParallelConfig(pp=2, dp=3), 4)
    text = str(caught.value)
    assert "pp 2 x dp 3 x ep 1 x cp 1 x tp 1 = 6, but WORLD_SIZE = 4" in text
    assert "torchrun --nproc-per-node 6" in text and "or set parallel.dp=2" in text
    with pytest.raises(UsageError, match=r"WORLD_SIZE = 3.*start one process") as caught:
        check_world(ParallelConfig(), 3)
    with pytest.raises(UsageError) as caught:
        check_world(ParallelConfig(pp=2), 3)
    assert "parallel.dp=" not in str(caught.value)


def test_signals_are_noted_and_handlers_restored() -> None:
    before = {s: signal.getsignal(s) for s in StopSignals.SIGNALS}
    with StopSignals() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGUSR1"
    assert {s: signal.getsignal(s) for s in StopSignals.SIGNALS} == before
    with pytest.raises(KeyError), StopSignals():
        raise KeyError
    assert {s: signal.getsignal(s) for s in StopSignals.SIGNALS} == before


def test_the_folder_of_one_process(tmp_path: Path) -> None:
    shared_folder_check(tmp_path / "a" / "b", LaunchEnv())
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write to the folder .*file/sub"):
        shared_folder_check(tmp_path / "file" / "sub", LaunchEnv())


def _check_folders(rank: int, world: int, cases: list[list[str]]) -> list[str | None]:
    found: list[str | None] = []
    for folders in cases:
        try:
            shared_folder_check(folders[rank], LaunchEnv(rank, world), patience=0.5)
            found.append(None)
        except UsageError as error:
            found.append(str(error))
    return found


def test_a_folder_that_not_all_ranks_see(tmp_path: Path) -> None:
    """Both ranks raise, and name rank 1 and its machine; a shared folder passes and stays clean."""
    one, two, broken = (str(tmp_path / name) for name in ("one", "two", "file/x"))
    (tmp_path / "file").write_text("")
    results = run_distributed(_check_folders, 2, [[one, two], [one, one], [broken, broken]])
    for folder, (separate, shared, unwritable) in zip((one, two), results, strict=True):
        assert separate is not None and folder in separate
        assert f"rank 1 (on {socket.gethostname()}) cannot see" in separate
        assert shared is None
        assert unwritable is not None and "cannot write to the folder" in unwritable
    assert os.listdir(one) == []


def _slurm_sum(rank: int, world: int, job: str) -> tuple[float, str, int]:
    import torch
    import torch.distributed as dist

    env = LaunchEnv.from_mapping(
        {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(world),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODELIST": "localhost",
            "SLURM_JOB_ID": job,
        }
    )
    assert init_process_group(env, timeout=40)
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return value.item(), env.launcher, dist.get_rank()


def _free_port() -> int:
    """A free port among those that SLURM jobs use here; the process id keeps parallel workers apart."""
    for offset in range(100):
        port = SLURM_PORTS[(os.getpid() + 1000 * offset) % len(SLURM_PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def test_two_slurm_tasks_meet() -> None:
    """Two processes that only have (faked) SLURM_* variables form one group on the derived port."""
    env: dict[str, Any] = dict.fromkeys(launch_environment(0, 2, 1))
    results = run_distributed(_slurm_sum, 2, str(_free_port() - SLURM_PORTS.start), init=False, env=env)
    assert results == [(3.0, "slurm", 0), (3.0, "slurm", 1)]


def _torchrun_rank(rank: int, world: int) -> tuple[bool, int]:
    import torch.distributed as dist

    return init_process_group(LaunchEnv.from_mapping(os.environ), timeout=40), dist.get_world_size()


def test_torchrun_variables_form_a_group_and_one_process_does_not() -> None:
    assert run_distributed(_torchrun_rank, 2, init=False) == [(True, 2)] * 2
    assert init_process_group(LaunchEnv()) is False


def test_a_peer_that_never_comes_is_an_error_within_the_timeout() -> None:
    env = LaunchEnv(0, 2, 0, "localhost", _free_port(), launcher="slurm")
    with pytest.raises(QEffectError, match=r"rank 0 of 2 did not meet the others .* within 1 s.*srun python"):
        init_process_group(env, timeout=1)
