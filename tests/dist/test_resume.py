"""Killed equals uninterrupted, bit for bit; stopping and launching in every supported way."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qeffect_lm.app.run_folder import read_scales, read_timelines
from tests.runs import CONFIG, assert_same_run, checkpoint_of, metrics_of, overrides, run_here, write_config
from tools.common import TRAIN, children, kill_after, last_step, launch

WATCHED = ("logging.watch_every=3", "logging.scales_every=3", "logging.underflow_every=6", "logging.timeline_every=6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with corpus, configuration and one uninterrupted run of 12 steps, ``whole``."""
    path = tmp_path_factory.mktemp("resume")
    write_config(path)
    code, said = run_here(path, "whole", *WATCHED)
    assert code == 0 and said[-1] == "ran 1…12 of 12"
    scales = [checkpoint_at(path, step).read("scale/layers.0.mlp.down.input") for step in (3, 6, 9, 12)]
    assert len({float(scale) for scale in scales}) == 4  # the scales that are compared below do move
    return path


def checkpoint_at(folder: Path, step: int):
    from checkpoint import open_checkpoint, step_name

    return open_checkpoint(folder / "whole" / "checkpoints" / step_name(step))


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST_"))}
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


@pytest.mark.long
def test_killed_at_ten_random_moments(folder):
    """Promise 4: SIGKILL at ten random moments (a moment, not a step boundary), each time started again."""
    moments = random.Random(5)
    killed = 0
    args = overrides(folder, "ten", "train.steps=60", "checkpoint.every=2", "data.microbatch_size=8")
    for _ in range(40):
        run = launch(folder / "tiny.yaml", args, 1, environment())
        before = last_step(folder / "ten" / "metrics.jsonl")
        while run.running and last_step(folder / "ten" / "metrics.jsonl") <= max(before, 0):
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.15))
        if run.running and killed < 10:
            run.kill()
            killed += 1
            run.wait()
            continue
        code, output = run.wait()
        assert code == 0, output
        break
    assert killed == 10
    code, _ = run_here(folder, "ten-whole", "train.steps=60", "checkpoint.every=2", "data.microbatch_size=8")
    assert code == 0
    assert assert_same_run(folder, "ten-whole", "ten") > 200


def test_killed_at_ten_random_steps_in_one_process(folder):
    """Promise 4, the state's part: new objects from the checkpoint of ten random steps go on bit for bit.

    (A real SIGKILL at random moments is in the long suite and in ``make demo``.)
    """
    steps = random.Random(3).sample(range(1, 12), 10)
    code, _ = run_here(folder, "every", "checkpoint.every=1")
    assert code == 0
    for step in steps:
        name = f"from-{step}"
        source = folder / "every" / "checkpoints" / f"step_{step:08d}"
        code, said = run_here(folder, name, f"checkpoint.resume={source}")
        assert code == 0 and f"resumed at {step}, ran {step + 1}…12 of 12" in said
        rows = {m.step: (m.loss, m.grad_norm, m.lr) for m in metrics_of(folder, "every")}
        resumed = {m.step: (m.loss, m.grad_norm, m.lr) for m in metrics_of(folder, name)}
        assert sorted(resumed) == list(range(step + 1, 13))
        assert all(rows[s] == values for s, values in resumed.items())
        from checkpoint import compare

        keys = ["contract", "data", "tokens", "plan_fingerprint", "graph_fingerprints"]
        assert compare(checkpoint_of(folder, "every"), checkpoint_of(folder, name), meta_keys=keys).same


def test_two_stages_killed_and_restarted_by_torchrun(folder):
    """``torchrun --max-restarts``: one rank is killed with SIGKILL; the job resumes unaided and equals one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    args = overrides(folder, "restarted", "parallel.pp=2", "train.steps=40", "checkpoint.every=4")
    agent = subprocess.Popen(
        [*command, str(TRAIN), str(folder / "tiny.yaml"), *args],
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while last_step(folder / "restarted" / "metrics.jsonl") < 9:
            assert agent.poll() is None, agent.communicate()[0]
            time.sleep(0.002)
        os.kill(children(agent.pid)[1], signal.SIGKILL)
        output, _ = agent.communicate(timeout=200)
    finally:
        agent.kill()
    assert agent.returncode == 0, output
    assert "resumed at" in output and "…40 of 40" in output
    code, _ = run_here(folder, "restarted-one-process", "train.steps=40", "checkpoint.every=4")
    assert code == 0
    assert_same_run(folder, "restarted-one-process", "restarted", same_layout=False)


@pytest.mark.long
def test_experts_killed_over_two_stages(tmp_path):
    """Mixtral in FP8, with dropout, windows and the balance loss: both ranks killed with SIGKILL three times, each time started
    again; what comes out is one process's uninterrupted run."""
    moe = "num_layers: 4, family: mixtral, sliding_window: 5, moe: {num_experts: 5, aux_loss_coef: 0.05}"
    write_config(tmp_path, CONFIG.replace("num_layers: 4", moe).replace("{every: 3", "{every: 2"))
    for kill in (3, 6, 10, None):
        run = launch(tmp_path / "tiny.yaml", overrides(tmp_path, "killed", "parallel.pp=2"), 2, environment())
        if kill is not None:
            assert kill_after(run, tmp_path / "killed" / "metrics.jsonl", kill)
        code, output = run.wait()
        assert (code == 0) == (kill is None), output
    assert run_here(tmp_path, "whole")[0] == 0
    assert assert_same_run(tmp_path, "whole", "killed", same_layout=False) > 400


def test_sigterm_saves_and_exits(folder):
    """SIGTERM and SIGUSR1: save after the running step, exit with the requeue code; the next start goes on."""
    args = overrides(folder, "stopped", "train.steps=40", "checkpoint.every=0", "checkpoint.requeue_exit_code=85")
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        run = launch(folder / "tiny.yaml", args, 1, environment())
        before = max(last_step(folder / "stopped" / "metrics.jsonl"), 0)
        while last_step(folder / "stopped" / "metrics.jsonl") < before + 2:
            assert run.running, run.wait()
            time.sleep(0.002)
        run.processes[0].send_signal(signum)
        code, output = run.wait()
        assert code == 85 and f"stopped by {signum.name}" in output, output
    code, _ = run_here(folder, "stopped", "train.steps=40", "checkpoint.every=0")
    assert code == 0
    code, _ = run_here(folder, "unstopped", "train.steps=40", "checkpoint.every=0")
    assert_same_run(folder, "unstopped", "stopped")


def test_max_minutes(folder):
    """``train.max_minutes``: stops with a checkpoint once the time is over."""
    limits = ["train.max_minutes=0.0000001", "checkpoint.requeue_exit_code=3", "train.steps=1000"]
    code, said = run_here(folder, "minutes", *limits)
    assert code == 3 and "ran no step" in said[-1]
    assert any("max_minutes" in line for line in said)


def test_slurm_launch(folder):
    """Two ranks as srun starts them: ranks, size and master from SLURM_*. They see the FP8 tensors that one process sees."""
    from tools.common import free_port

    port = free_port()
    args = overrides(folder, "slurm", "parallel.pp=2", *WATCHED)
    processes = [
        subprocess.Popen(
            [sys.executable, str(TRAIN), str(folder / "tiny.yaml"), *args],
            env=environment(
                SLURM_PROCID=str(rank),
                SLURM_NTASKS="2",
                SLURM_LOCALID=str(rank),
                SLURM_NODELIST="localhost",
                SLURM_JOB_ID="77",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert_same_run(folder, "whole", "slurm", same_layout=False)
    scales = read_scales(folder / "slurm")
    assert scales == read_scales(folder / "whole") and [line.step for line in scales] == [3, 6, 9, 12]
    assert [line.underflow is not None for line in scales] == [False, True, False, True]
    told = {m.step: m.extra.get("work_ms", []) for m in metrics_of(folder, "slurm")}
    assert [step for step, work in told.items() if len(work) == 2] == [3, 6, 9, 12]
    lines = read_timelines(folder / "slurm")
    assert [one.step for one in lines] == [1, 6, 12] and all(len(one.measured) == 2 for one in lines)
    for one in lines:  # a stage's first F begins when that of the stage before has ended
        (_, _, end), (action, begin, _) = one.measured[0][0], one.measured[1][0]
        assert str(action) == "1F0" and begin >= end > 0


def test_checkpoint_of_two_stages_resumes_on_one(folder):
    """Another pipeline layout: the logical state is byte-equal after the restore, and training goes on bit for bit."""
    args = overrides(folder, "half", "parallel.pp=2", "train.steps=12")
    run = launch(folder / "tiny.yaml", args, 2, environment())
    kill_after(run, folder / "half" / "metrics.jsonl", 7)
    run.wait()
    code, said = run_here(folder, "half")
    assert code == 0 and any("parallel.pp" in line for line in said)
    assert_same_run(folder, "whole", "half", same_layout=False)


def test_wrong_world_size_and_dead_peer_messages(folder):
    """World size that does not fit: exit 2 and the remedy, on every rank."""
    run = launch(folder / "tiny.yaml", overrides(folder, "world"), 2, environment())
    code, output = run.wait()
    assert code == 2 and "WORLD_SIZE = 2" in output and "Traceback" not in output
