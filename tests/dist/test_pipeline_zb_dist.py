"""ZB-H1 and ZB-H2 train bit for bit as 1F1B does in one process: on one rank, and over gloo on two and three."""

from __future__ import annotations

import pytest

from qeffect_lm.errors import UsageError
from qeffect_lm.parallel.mesh import Mesh
from tests.helpers import run_distributed
from tests.tiny import assert_moved, config, differing, merged, train

STEPS = 3


def _settings(schedule: str, backend: str = "eager") -> dict:
    return {"pipeline__schedule": schedule, "pipeline__w_delay": 0, "graphs__backend": backend, "model__dropout": 0.1}


@pytest.fixture(scope="module")
def reference():
    run = train(config(model__dropout=0.1, pipeline__w_delay=0), STEPS)
    assert_moved(run)
    return run


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_one_rank(schedule, reference):
    run = train(config(**_settings(schedule, "host_replay")), STEPS)
    assert run.losses == reference.losses and run.norms == reference.norms
    assert differing(run.tensors, reference.tensors) == []


def _train(rank: int, world: int, settings: dict):
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    run = train(config(**settings, parallel__pp=world), STEPS, mesh=mesh)
    return run.losses, run.norms, run.tensors, run.assembly.plan.schedule


@pytest.mark.parametrize(
    ("schedule", "ranks", "backend"),
    [("zb-h1", 2, "host_replay"), pytest.param("zb-h2", 3, "eager", marks=pytest.mark.long)],
)
def test_pipelines(schedule, ranks, backend, reference):
    """FP8 with dropout; four microbatches, on three ranks one less than ZB-H2 is published for."""
    results = run_distributed(_train, ranks, _settings(schedule, backend), timeout=240)
    assert all(result[0] == reference.losses and result[1] == reference.norms for result in results)
    assert differing(merged([result[2] for result in results]), reference.tensors) == []
    assert {result[3] for result in results} == {schedule}


def test_their_lag_is_not_a_choice():
    with pytest.raises(UsageError, match="set pipeline.w_delay=0"):
        train(config(**{**_settings("zb-h1"), "pipeline__w_delay": 1}), 1)
