"""The GPU's matrix of parity over two pipeline ranks, here over gloo; and a run killed and resumed as it does it."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint import GroupCommunicator
from qeffect_lm.parallel.mesh import Mesh
from tests.helpers import run_distributed
from tools.proofs import lockstep
from tools.proofs.cells import Cell
from tools.proofs.killed import Job, Runs, check


def _cells(rank: int, world: int) -> list[dict[str, Any]]:
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    wanted = [Cell("zb-v", "step", 64, 4, 2, dropout=0.1), Cell("1f1b", "microbatch", 64, 4, 2)]
    return [lockstep.check(cell, mesh, GroupCommunicator(), "cpu", 3) for cell in wanted]


@pytest.mark.long
def test_lock_step_on_two_ranks():
    results = run_distributed(_cells, 2, timeout=300)
    for one, other in zip(*results, strict=True):
        assert one["first"] is None and one["control_first"] and len(set(one["fingerprints"])) == 2
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.long
@pytest.mark.parametrize("pp", [1, 2])
def test_killed_at_a_random_step(pp, tmp_path):
    small = ["model.hidden_size=64", "model.ffn_size=64", "data.seq_len=32"]
    report = check(Job("1f1b", "step", pp), Runs(tmp_path, "cpu", 12, small))
    assert report["ok"], report
    assert report["resumed"].startswith("resumed at ") and report["resumed"].endswith("12 of 12")
    assert report["control_first"].startswith("step ") and report["tensors"] > 12 * 200
