"""Experts spread over gloo ranks against one process.

In float64 the sums' order is all that differs: losses and norms agree to 1e-12 and masters (about 1) to 1e-9 after three steps.
Under FP8 what must be equal bit for bit is one layout in several ways; the eager ones exchange exact splits, captured ones
their static form. Killed and resumed runs and checkpoints between layouts: ``tests/dist/test_layouts.py``.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.contract.errors import CollectiveError
from qeffect_lm.contract.timeline import EMPTY
from qeffect_lm.parallel.expert import Dispatch
from qeffect_lm.parallel.mesh import Mesh
from tests.dist.frame import items_of, same_on_all, train_each, whole
from tests.helpers import run_distributed
from tests.tiny import Batch, Trained, batch, config, differing, train

EXPERTS = 8
MOE = {"num_experts": EXPERTS, "aux_loss_coef": 0.05, "z_loss_coef": 0.01}
SIZES: dict[str, Any] = {
    "model__family": "mixtral", "model__moe": MOE, "model__head_dim": 16, "model__num_layers": 2, "pipeline__microbatches": 2,
}  # fmt: skip
FLOAT64: dict[str, Any] = {"precision__fp8__recipe": "none", "precision__dtype": "float64"}
FP8: dict[str, Any] = {"precision__dtype": "bfloat16"}
REPLAY = {"graphs__backend": "host_replay"}
NOT_LATER = {"pipeline__w_delay": 0}
Told = tuple[Any, ...]


def data(step: int, rank: int, ranks: int) -> Batch:
    """A replica's two microbatches, all but the first with padding; the divisor is the valid tokens of all."""
    mine = batch(10 * step + rank, 2)
    for microbatch in range(2):
        mine.loss_mask[microbatch, :, 16 - 2 * (2 * rank + microbatch) :] = 0
    mine.tokens = sum(2 * (16 - 2 * number) for number in range(2 * ranks))
    return mine


def together(step: int, ranks: int) -> Batch:
    """All replicas' microbatches, one after the other, for one process."""
    parts = [data(step, rank, ranks) for rank in range(ranks)]
    joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "targets", "loss_mask"))
    return Batch(*joined, parts[0].tokens)


def _runs(rank: int, world: int, sizes: dict[str, int], variants: list[dict[str, Any]]) -> list[Told]:
    mesh = Mesh(sizes, rank)
    replica = mesh.coord("samples"), mesh.size("samples")
    return train_each(
        mesh, SIZES, variants, lambda _: lambda step: data(step, *replica), lambda _: batch(99, 2), _routed_and_state
    )


def _routed_and_state(run: Trained) -> Told:
    return run.assembly.engine.end.routed.clone(), items_of(run.assembly)


def run(sizes: dict[str, int], variants: list[dict[str, Any]]) -> list[Told]:
    """What each variant told, the same on all ranks, and its logical state."""
    results = run_distributed(_runs, math.prod(sizes.values()), sizes, variants, timeout=500)
    for number in range(len(variants)):
        assert all(torch.equal(rank[number][1], results[0][number][1]) for rank in results), number
    states = [whole([rank[n][2] for rank in results]) for n in range(len(variants))]
    return [(numbers, results[0][n][1], states[n]) for n, numbers in enumerate(same_on_all(results))]


def assert_near_one(told: Told, settings: dict[str, Any], replicas: int) -> None:
    """Float64: as one process with all replicas' microbatches, routers' sums included. Control: other data is not near."""
    settings = {**SIZES, **settings, "pipeline__microbatches": 2 * replicas, "optim__zero": 0}
    one = train(config(**settings), 3, batches=lambda step: together(step, replicas))
    (losses, norms, skipped, held_out), routed, state = told
    assert losses == pytest.approx(one.losses, rel=1e-12) and norms == pytest.approx(one.norms, rel=1e-12)
    assert held_out == pytest.approx(one.assembly.evaluator.run(batch(99, 2)), rel=1e-12) and not any(skipped)
    torch.testing.assert_close(routed, one.assembly.engine.end.routed, rtol=1e-12, atol=0)
    expected = one.tensors
    assert state.keys() == expected.keys()
    masters = [name for name in expected if name.startswith("master/")]
    worst = max(float((state[name] - expected[name]).abs().max()) for name in masters)
    assert worst < 1e-9 and sum(".experts." in name for name in masters) == 2 * 2 * EXPERTS
    assert len(set(losses)) == 3 and all(norm > 0 for norm in norms)
    assert abs(held_out - losses[-1]) > 1e-6, "other data: another loss"


def same(a: Told, b: Told) -> bool:
    return a[0] == b[0] and torch.equal(a[1], b[1]) and differing(a[2], b[2]) == []


def test_two_ranks() -> None:
    """Float64 as one process; FP8 captured, in static form, equals eager, with exact splits, bit for bit."""
    told = run({"ep": 2}, [FLOAT64, FP8, {**FP8, **REPLAY}])
    assert_near_one(told[0], FLOAT64, 2)
    assert same(told[1], told[2])
    one = train(config(**SIZES | FP8 | {"pipeline__microbatches": 4}), 3, batches=lambda step: together(step, 2))
    assert told[1][0][0] == pytest.approx(one.losses, abs=0.02)
    scales = [name for name in told[1][2] if name.startswith("scale/")]
    assert len(scales) == 2 * (2 + 2 * EXPERTS) * 3 and all(float(told[1][2][name]) != 0.0 for name in scales)


@pytest.mark.long
def test_every_way_of_two_ranks() -> None:
    """Whole steps as graphs, recompute, poison, window microbatch, W of several microbatches as one product, a scale for each
    tensor at hand: bits that must agree. As many experts a token as there are, and one."""
    moe = {"num_experts": 4, "aux_loss_coef": 0.05}
    micro = {**FP8, "precision__fp8__window": "microbatch"}
    current = {**FP8, "precision__fp8__recipe": "current"}
    variants = [
        FP8,
        {**FP8, **REPLAY, "graphs__scope": "step"},
        {**FP8, **REPLAY, "model__recompute": "full"},
        {**FP8, "model__recompute": "selective", "contract__poison": True},
        micro,
        {**micro, **REPLAY},
        current,
        {**current, **REPLAY},
        {**FP8, "pipeline__coalesce_w": 2, **REPLAY},
        {**FLOAT64, "model__moe": {**moe, "num_experts": 8, "top_k": 8}, "model__recompute": "full"},
        {**FLOAT64, "model__moe": {**moe, "num_experts": 8, "top_k": 1}},
        {**FLOAT64, "optim__name": "muon"},
        {**FP8, "pipeline__coalesce_w": 2},
        {**FP8, "pipeline__coalesce_w": 2, "model__recompute": "full", "contract__poison": True, **REPLAY},
    ]
    told = run({"ep": 2}, variants)
    for first, others in ((0, (1, 2, 3)), (4, (5,)), (6, (7,)), (8, (12, 13))):
        for number in others:
            assert same(told[number], told[first]), number
    assert told[4][0] != told[0][0] != told[6][0]
    assert told[8][0][0] == pytest.approx(told[0][0][0], abs=0.02) and not same(told[8], told[0])
    for number in (9, 10, 11):
        assert_near_one(told[number], variants[number], 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ({"tp": 2}, {"model__recompute": "full"}),
        ({"ep": 2, "tp": 2}, {"precision__fp8__window": "microbatch"}),
        ({"pp": 2, "ep": 2}, {"pipeline__schedule": "zb-v", "pipeline__stage_layers": [1, 0, 1, 0], **NOT_LATER}),
        ({"dp": 2, "ep": 2}, {"optim__zero": 1, "parallel__bucket_mib": 0.01}),
        ({"dp": 2, "tp": 2}, {"pipeline__schedule": "interleaved-1f1b", "pipeline__chunks": 2, **NOT_LATER}),
        ({"ep": 2, "cp": 2}, {}),
        ({"cp": 2, "tp": 2}, {}),
    ],
    ids=["tp", "ep tp", "pp ep", "dp ep", "dp tp", "ep cp", "cp tp"],
)
def test_with_other_axes(sizes: dict[str, int], more: dict[str, Any]) -> None:
    """Float64 as one process; FP8 captured equals eager; a chunk's gradients are reduced while other chunks still exchange."""
    told = run(sizes, [{**more, **FLOAT64}, {**FP8, **more}, {**FP8, **REPLAY, **more}])
    assert_near_one(told[0], FLOAT64, sizes.get("dp", 1) * sizes.get("ep", 1))
    assert same(told[1], told[2])


# ---- idle experts ----------------------------------------------------------------------------------------------------


def steer(assembly: Assembly, idle: tuple[int, ...]) -> None:
    """Routers that never choose ``idle``: of each of two opposite pairs one logit is positive, and the idle ones' are 0."""
    busy = [e for e in range(EXPERTS) if e not in idle]
    flat = assembly.flat
    for name in flat.names:
        if name.endswith("router.weight"):
            rows = torch.randn(2, flat.master(name).shape[1], generator=torch.Generator().manual_seed(len(name)))
            master = torch.zeros(EXPERTS, rows.shape[1])
            for pair, row in enumerate(rows):
                master[busy[2 * pair]], master[busy[2 * pair + 1]] = row, -row
            flat.master(name).copy_(master)
    flat.gather()


ASLEEP, AWAKE = (4, 5, 6, 7), (0, 1, 2, 3)  # all experts of rank 1, all of rank 0
STEPS = [ASLEEP, ASLEEP, AWAKE, ASLEEP]


def _sleepers(rank: int, world: int, sizes: dict[str, int], variants: list[dict[str, Any]]) -> list[Any]:
    """Rank 1's experts, or its peers', sleep, sleep, work, sleep."""
    mesh = Mesh(sizes, rank)
    mesh.create_groups()
    told = []
    for settings in variants:
        layout = {f"parallel__{axis}": size for axis, size in sizes.items()}
        assembly = assemble(config(**SIZES | layout | FP8 | settings), mesh)
        line, losses = assembly.timeline, []
        mine = [i for i, role in enumerate(line.roles) if not role.shared and not role.name.endswith("weight")]
        steer(assembly, ASLEEP)
        assembly.prepare(data(0, mesh.coord("samples"), mesh.size("samples")))
        held = {int(name.split(".")[4]) for name in assembly.flat.names if ".experts." in name}
        for step, idle in enumerate(STEPS):
            steer(assembly, idle)
            assembly.flat.grad_buffer.fill_(7.0)
            before = [tensor[mine].clone() for tensor in (line.scale, line.history)]
            result = assembly.engine.step(step, data(step, mesh.coord("samples"), mesh.size("samples")))
            losses.append(float(result.loss))
            still = all(torch.equal(a, b[mine]) for a, b in zip(before, (line.scale, line.history), strict=True))
            assert still is (held <= set(idle)), "nothing of an idle one moves"
            assert bool((line.open_amax[mine] == EMPTY).all())
            assert result.routing is not None and bool(result.routing[:, [2 + e for e in idle]].eq(0).all())
            for e in held.intersection(idle):
                for kind in ("gate_up", "down"):
                    assert not assembly.flat.grad(f"layers.0.moe.experts.{e}.{kind}.weight").view(torch.int32).any()
        told.append((losses, items_of(assembly)))
    return told


@pytest.mark.long
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2}], ids=str)
def test_ranks_without_any_row(sizes: dict[str, int]) -> None:
    """S2, over every axis: all experts of a rank are idle, and another rank gets every row of all. Scales and histories stay,
    slots are EMPTY, gradients zero; captured, in a graph that was captured while they slept, the bits of eager work."""
    joined = {"pipeline__coalesce_w": 2}
    results = run_distributed(
        _sleepers, math.prod(sizes.values()), sizes, [{}, REPLAY, joined, {**joined, **REPLAY}], timeout=500
    )
    for rank in results:
        for eager, captured, first in ((rank[0], rank[1], results[0][0]), (rank[2], rank[3], results[0][2])):
            assert eager[0] == captured[0] == first[0] and len(set(eager[0])) == len(STEPS)
    states = [whole([rank[n][1] for rank in results]) for n in range(4)]
    assert differing(*states[:2]) == [] and differing(*states[2:]) == [] and differing(*states[::2]) != []


# ---- what is wrong has a name ----------------------------------------------------------------------------------------


def _forgotten(rank: int, world: int, captured: bool) -> str:
    """Results that stay with their experts."""
    mesh = Mesh({"ep": 2}, rank)
    mesh.create_groups()
    Dispatch.collect = lambda self, rows, context: (rows[:1].expand(self.slots.shape[0], -1), self.places)  # type: ignore
    more = {**FLOAT64, **(REPLAY if captured else {}), "parallel__ep": 2}
    with pytest.raises(CollectiveError) as caught:
        train(config(**SIZES, **more), 1, mesh=mesh, batches=lambda step: data(step, 0, 1))
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("captured", [False, True])
def test_a_forgotten_exchange_has_a_name(captured: bool) -> None:
    for said in run_distributed(_forgotten, 2, captured, timeout=300):
        assert re.search(r"0F-?\d+ ended without the combine of 'layers.0.moe' among its peers", said), said
