"""Replicas reduce a chunk's gradients as soon as its last writer is done, beside the work that other chunks have left."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.actions import Kind
from pipeline.effects import program
from qeffect_lm.contract.errors import GradSlotError
from qeffect_lm.parallel.mesh import Mesh
from tests.dist.frame import items_of
from tests.dist.test_zero import SHARED, assert_equal_runs, data
from tests.helpers import run_distributed
from tests.tiny import config, train
from tests.unit.effects_recorder import Recorder, words

V: dict[str, Any] = {**SHARED, "pipeline__schedule": "zb-v", "pipeline__w_delay": 0}  # both chunks on the one rank


def _told(rank: int, world: int, variants: list[dict[str, Any]]) -> list[Any]:
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    told = []
    for settings in variants:
        made = config(**{**SHARED, "parallel__dp": world, **settings})
        run = train(made, 3, mesh=mesh, batches=lambda n: data(n, rank, world))
        told.append(((run.losses, run.norms, run.skipped, 0.0), items_of(run.assembly), 0.0))
    return told


def test_bits_are_those_of_a_single_chunk() -> None:
    """One chunk or two in a V, reduced whole or in buckets, eager, action and step graphs: the same bits."""
    host = {"graphs__backend": "host_replay"}
    variants = [
        {"optim__zero": 0},
        {**V, "optim__zero": 0},
        {**V, "optim__zero": 1},
        {**V, "optim__zero": 1, **host},
        {**V, "optim__zero": 1, **host, "graphs__scope": "step"},
        {**V, "optim__zero": 0, **host, "graphs__scope": "step", "graphs__optimizer": "outside"},
    ]
    assert_equal_runs(run_distributed(_told, 2, variants, timeout=300), len(variants))


def _recorded(rank: int, world: int) -> list[Any]:
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    run = train(config(**{**V, "parallel__dp": world}), 1, mesh=mesh, batches=lambda n: data(n, rank, world))
    engine = run.assembly.engine
    recorder = Recorder(run.assembly)
    engine.step(1, data(1, rank, world))
    wanted = words(program(engine.plan, replicas=True).rows[0])
    assert recorder.lines == wanted
    order = [op.name for op in program(engine.plan, replicas=True).rows[0] if op.work in ("W", "REDUCE_G", "REDUCE")]
    assert all(run.assembly.flat.ranges(chunk) for chunk in (0, 1)), "each chunk has gradients of its own to reduce"
    first = next(action for action in engine.actions if action.kind is Kind.W)
    engine._completes = {first: 1}  # reduced when one of its two microbatches is there
    with pytest.raises(GradSlotError, match="replicas would reduce .* with 1 of 2 contributions"):
        engine.step(2, data(2, rank, world))
    return order


def test_the_engine_does_what_the_program_says() -> None:
    """Launches, edges and accesses as written; chunk 1 is reduced before chunk 0's last weight gradients are made."""
    (order, other) = run_distributed(_recorded, 2, timeout=200)
    assert order == other
    assert order[-1] == "REDUCE" and order.index("1REDUCE_G1") < order.index("0W1") < order.index("0REDUCE_G1")
