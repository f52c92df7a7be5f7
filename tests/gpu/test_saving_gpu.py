"""Saves in the background on a real GPU: copies on a stream of their own, beside captured steps; sums of the state.

    python -m pytest -q tests/gpu/test_saving_gpu.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint import sums
from checkpoint.sums import Summer
from qeffect_lm.state import LogicalTensor, Role
from tools.proofs.killed import Job, Runs, compare_runs

pytestmark = pytest.mark.gpu
STEPS = 12


@pytest.mark.parametrize("scope", ["action", "step"])
@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs"))])
def test_saved_beside_training_as_saved_at_once(pp: int, scope: str, tmp_path: Path) -> None:
    """C6: after every step a save, none of which holds anything that a later step wrote; losses, states and generators are
    those of a run that saves at once."""
    job, runs = Job("1f1b", "step", pp, scope), Runs(tmp_path, "cuda", STEPS)
    runs.run(job, "at-once")
    runs.run(job, "beside", "checkpoint.async_save=true")
    tensors, first = compare_runs(runs, "at-once", "beside")
    assert first is None and tensors > 50 * STEPS
    events = [json.loads(line) for line in (tmp_path / "beside" / "events.jsonl").read_text().splitlines()]
    for what in ("save_requested", "save_staged", "save_durable"):
        assert [one["step"] for one in events if one["event"] == what] == list(range(1, STEPS + 1))
    at_once = (tmp_path / "at-once" / "events.jsonl").read_text()
    assert at_once.count('"save_durable"') == STEPS and "save_staged" not in at_once


def test_sums_on_a_gpu_are_those_on_the_host():
    """Of large and small tensors, taken together, generators in host memory among them."""
    generator = torch.Generator().manual_seed(0)
    host = {f"t{n}": torch.randn(n, generator=generator) for n in (1, 7, sums.SMALL, sums.SMALL + 1, 3 * sums.ON_DEVICE)}
    here = [LogicalTensor.whole(name, tensor, Role.MASTER) for name, tensor in host.items()]
    there = [LogicalTensor.whole(name, tensor.cuda(), Role.MASTER) for name, tensor in host.items()]
    rng = LogicalTensor.whole("rng/0/cpu", torch.get_rng_state(), Role.RNG)
    assert Summer().own([*there, rng], {}) == Summer().own([*here, rng], {})
