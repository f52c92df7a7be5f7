"""Memory as planned for layouts that cut layers, experts and sequences, beside what the allocator of real ranks counted."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from qeffect_lm.app.assemble import make_plan
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import COMPUTE, OPTIMIZER, START, Memory
from qeffect_lm.app.rehearsal import rehearse
from qeffect_lm.config import Config
from qeffect_lm.parallel.mesh import Mesh
from tests.helpers import run_distributed
from tests.tiny import config
from tests.unit.test_plan_memory import SIZES, measured

MOE: dict[str, Any] = {
    "model__family": "mixtral", "model__moe": {"num_experts": 8}, "model__ffn_size": 176,
    "model__hidden_size": 64, "model__num_layers": 2, "data__seq_len": 512,
}  # fmt: skip


CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"tp": 2}, {}),
    "cp, ZeRO, recompute": ({"cp": 2}, {"optim__zero": 1, "model__recompute": "full"}),
    "ep": ({"ep": 2}, MOE),
    "ep, coalesced": ({"ep": 2}, {**MOE, "pipeline__coalesce_w": 2}),
    "three replicas": ({"dp": 3}, {}),  # with a buffer for sums in order of rank
    "ep, tapes": ({"ep": 2}, {**MOE, "data__seq_len": 128, "graphs__backend": "host_replay"}),
}


def _settings(case: str) -> Config:
    sizes, keys = CASES[case]
    layout = {f"parallel__{axis}": size for axis, size in sizes.items()}
    return config(**SIZES | layout | {"pipeline__microbatches": 2} | keys)


def _of(world: int) -> list[str]:
    return [case for case, (sizes, _) in CASES.items() if prod(sizes.values()) == world]


def _peaks(rank: int, world: int) -> dict[str, dict[str, int]]:
    found = {}
    for case in _of(world):
        sizes, _ = CASES[case]
        mesh = Mesh(sizes, rank)
        mesh.create_groups()
        found[case] = measured(_settings(case), mesh)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_peaks_of_ranks(world: int) -> None:
    """Within 10 % in every phase: experts' rows as routing gives them in eager, the most that there could be on a tape."""
    ranks = run_distributed(_peaks, world, timeout=500)
    for case in _of(world):
        settings = _settings(case)
        told = Memory(Layout(settings), make_plan(settings), rehearse(settings, "cpu"), "cpu").of(0).phases
        for got in (rank[case] for rank in ranks):
            if settings.graphs.backend != "eager":
                got.pop(OPTIMIZER)  # a tape knows no spans
            for name, size in got.items():
                assert told[name] < 1.1 * size, (case, name, told, got)
                if name in (START, COMPUTE):  # in the others little is held, and what gloo's threads freed last counts still
                    assert told[name] > 0.9 * size, (case, name, told, got)
