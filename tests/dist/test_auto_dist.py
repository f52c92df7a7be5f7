"""``auto`` over real processes: measured, broadcast, saved, reused on resume; another plan on one rank ends all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.auto import auto
from qeffect_lm.app import auto_plan, run
from qeffect_lm.app.profile import Part, Profile
from qeffect_lm.config import load_config
from qeffect_lm.errors import QEffectError
from qeffect_lm.runtime.launch import LaunchEnv
from tests.helpers import run_distributed
from tests.runs import checkpoint_of, metrics_of, overrides, run_here, write_config

AUTO = ("parallel.pp=2", "pipeline.schedule=auto", "pipeline.w_delay=0", "graphs.backend=eager", "pipeline.memory_limit=2")
LAYER = Part(t_f=3.0, t_i=3.0, t_w=2.0, m_b=100.0, m_w=40.0)
CLOCKS = {
    "first": Profile(LAYER, {True: LAYER}, LAYER, 0.0),
    "other": Profile(LAYER, {True: Part(1.0, 9.0, 9.0, 100.0, 90.0)}, Part(50.0, 9.0, 1.0, 100.0, 90.0), 0.0),
}


def _train(rank: int, world: int, folder: Path, name: str, more: tuple[str, ...], clock: str | None) -> tuple[Any, list[str]]:
    """One rank of a run, with what it says; ``clock``: a clock that gives these costs, None: the real one."""
    if clock is not None:
        auto_plan.profile = lambda config, batch: CLOCKS[clock]  # type: ignore[assignment]
    said: list[str] = []
    config = load_config(folder / "tiny.yaml", overrides(folder, name, *more))
    return run.train_run(config, LaunchEnv.from_mapping(os.environ), said.append), said


def launched(folder: Path, name: str, *more: str, clock: str | None = None) -> list[str]:
    results = run_distributed(_train, 2, folder, name, (*AUTO, *more), clock, timeout=300, init=False)
    assert [code for code, _ in results] == [0, 0]
    return results[0][1]


def _disagree(rank: int, world: int, folder: Path) -> str:
    plan_of = run.plan_of
    if rank == 1:  # the fault: this rank was given another plan
        run.plan_of = lambda *_: auto(2, 4, 1.0, 1.0, 1.0, shapes=("v",)).plan  # type: ignore[assignment]
    else:
        run.plan_of = lambda *_: auto(2, 4, 1.0, 1.0, 1.0, shapes=("linear",)).plan  # type: ignore[assignment]
    try:
        _train(rank, world, folder, "disagree", AUTO, None)
    except QEffectError as error:
        return f"{type(error).__name__} {error.exit_code}: {error}"
    finally:
        run.plan_of = plan_of
    return "trained"


def test_another_plan_on_one_rank(tmp_path):
    """An error on every rank before step one, with both ranks and hashes; nothing is written."""
    write_config(tmp_path)
    first, second = run_distributed(_disagree, 2, tmp_path, timeout=200, init=False)
    assert first == second and first.startswith("PlanError 1: the ranks have different plans")
    assert "rank 0: " in first and "rank 1: " in first
    assert not list((tmp_path / "disagree").glob("**/step_*")) and not (tmp_path / "disagree" / "metrics.jsonl").exists()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_measured_once_and_saved(tmp_path):
    """Fresh: measured by the real clock, said, and trained to one process's losses. Resumed under a clock that would choose
    another plan: the saved plan, bit for bit, with nothing measured; a fresh run under each clock shows that they do choose.
    """
    write_config(tmp_path)
    said = launched(tmp_path, "real", "train.steps=3")
    assert said[0].startswith("auto: T_F T_I T_W per rank, measured") and any("predicted bubble" in line for line in said)
    code, _ = run_here(tmp_path, "one", "train.steps=3", "graphs.backend=eager")
    assert code == 0
    assert [m.loss for m in metrics_of(tmp_path, "real")] == [m.loss for m in metrics_of(tmp_path, "one")]
    for metrics in metrics_of(tmp_path, "real"):
        assert len(metrics.extra["bubble_per_rank"]) == 2 and 0 < metrics.extra["bubble"] < 1
        assert metrics.extra["peak_leases"] == metrics.extra["peak_leases_predicted"]

    launched(tmp_path, "a", "train.steps=3", clock="first")
    plan = checkpoint_of(tmp_path, "a").meta["plan"]
    said = launched(tmp_path, "a", "train.steps=6", clock="other")
    assert "auto: the checkpoint's plan, nothing is measured" in said and not any("measured:" in line for line in said)
    assert checkpoint_of(tmp_path, "a").step == 6 and checkpoint_of(tmp_path, "a").meta["plan"] == plan
    launched(tmp_path, "b", "train.steps=3", clock="other")
    assert checkpoint_of(tmp_path, "b").meta["plan"] != plan
