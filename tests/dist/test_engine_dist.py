"""The engine over gloo: pipelines of 2 and 3 processes equal one process bit for bit; a dead peer is named."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from checkpoint import GroupCommunicator
from checkpoint.resume import check_replicas
from pipeline.actions import Action, Kind
from pipeline.p2p import Transport
from pipeline.plan import make_plan
from pipeline.rendezvous import Queue
from pipeline.schedules import Placement
from qeffect_lm.app.assemble import assemble
from qeffect_lm.app.run import join
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.errors import QEffectError
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import PeerLostError
from qeffect_lm.runtime.launch import LaunchEnv
from tests.helpers import run_distributed, start_distributed
from tests.tiny import assert_moved, batch, config, differing, merged, train

FP8: dict = {}
FLOAT64 = {"precision__fp8__recipe": "none", "precision__dtype": "float64"}


def _train(rank: int, world: int, settings: dict, sizes: dict, steps: int):
    mesh = Mesh(sizes, rank)
    mesh.create_groups()

    def data(step: int):
        whole = batch(step, settings.get("pipeline__microbatches", 4), 2 * mesh.size("dp"))
        if mesh.size("dp") == 1:
            return whole
        rows = slice(2 * mesh.coord("dp"), 2 * mesh.coord("dp") + 2)
        whole.inputs, whole.targets = whole.inputs[:, rows], whole.targets[:, rows]
        whole.loss_mask = whole.loss_mask[:, rows]
        return whole

    run = train(config(**settings, **{f"parallel__{axis}": n for axis, n in sizes.items()}), steps, mesh=mesh, batches=data)
    held_out = run.assembly.evaluator.run(data(99))
    return run.losses, run.norms, run.tensors, held_out, run.assembly.ledger.state()


CASES = [
    ("pp2, fp8, captured, dropout", {"graphs__backend": "host_replay", "model__dropout": 0.1}, 2),
    ("pp2, fp8, eager, gpipe", {"pipeline__schedule": "gpipe", "pipeline__w_delay": 0}, 2),
    ("pp3, fp8, captured, m=2", {"graphs__backend": "host_replay", "pipeline__microbatches": 2, "pipeline__w_delay": 0}, 3),
    ("pp3, float64, delayed W", {**FLOAT64, "pipeline__w_delay": 2}, 3),
]


EXPERTS = (
    "pp2, experts, captured, zb-v",
    {
        "model__family": "mixtral",
        "model__moe": {"num_experts": 4, "aux_loss_coef": 0.05, "z_loss_coef": 0.01},
        "graphs__backend": "host_replay",
        "pipeline": {"microbatches": 4, "schedule": "zb-v"},
    },
    2,
)
CASES.append(pytest.param(*EXPERTS, marks=pytest.mark.long))


@pytest.mark.parametrize(("name", "settings", "stages"), CASES, ids=[*(case[0] for case in CASES[:-1]), EXPERTS[0]])
def test_pipeline_equals_one_process(name, settings, stages):
    """Losses, norms, all logical state and the held-out loss; P7: every rank has the same loss."""
    single = {key: value for key, value in settings.items() if key != "graphs__backend"}
    m = settings.get("pipeline__microbatches", 4)
    one = train(config(**single), 4, batches=lambda step: batch(step)) if m == 4 else None
    results = run_distributed(_train, stages, settings, {"pp": stages}, 4, timeout=240)
    assert all(result[0] == results[0][0] and result[1] == results[0][1] for result in results)
    assert all(result[3] == results[0][3] for result in results)
    if one is None:
        reference = run_distributed(_train, 1, single, {"pp": 1}, 4, timeout=120)[0]
        losses, norms, tensors, held_out = reference[:4]
    else:
        assert_moved(one)
        losses, norms, tensors = one.losses, one.norms, one.tensors
        held_out = one.assembly.evaluator.run(batch(99))
    assert results[0][0] == losses and results[0][1] == norms
    assert differing(merged([result[2] for result in results]), tensors) == []
    assert results[0][3] == held_out


def test_data_parallel_times_pipeline():
    """DP 2 × PP 2: both replicas hold the same state; the loss is one process's on the whole batch, within float64's bound."""
    sizes = {"pp": 2, "dp": 2}
    results = run_distributed(_train, 4, FLOAT64, sizes, 3, timeout=240)
    assert all(result[0] == results[0][0] for result in results)
    for a, b in ((0, 1), (2, 3)):  # dp is faster than pp
        assert differing(results[a][2], results[b][2]) == []
    whole = train(config(**FLOAT64, data__microbatch_size=4), 3, batches=lambda step: batch(step, size=4))
    assert results[0][0] == pytest.approx(whole.losses, rel=1e-12)


def _four_stages_on_two_ranks(rank: int, world: int):
    """Chunks 0 and 2 on rank 0, 1 and 3 on rank 1: both neighbours of every chunk are the same rank."""
    mesh = Mesh({"pp": 2}, rank)
    mesh.create_groups()
    m = 4
    forward = [[Action(Kind.F, c, i) for c in chunks for i in range(m)] for chunks in ((0, 2), (1, 3))]
    backward = [[Action(kind, c, i) for c in chunks for i in range(m) for kind in "IW"] for chunks in ((2, 0), (3, 1))]
    plan = make_plan("looped", [f + b for f, b in zip(forward, backward, strict=True)], Placement((0, 1, 0, 1)), m)
    settings = config(parallel__pp=2, graphs__backend="host_replay", model__dropout=0.1)
    run = train(settings, 3, mesh=mesh, plan=plan)
    return run.losses, run.norms, run.tensors, run.assembly.evaluator.run(batch(99))


def test_two_ranks_four_stages():
    """P5: the two directions between the same two ranks never mix; all bits are those of one process."""
    results = run_distributed(_four_stages_on_two_ranks, 2, timeout=240)
    one = train(config(model__dropout=0.1), 3)
    assert results[0][0] == results[1][0] == one.losses and results[0][1] == one.norms
    assert differing(merged([result[2] for result in results]), one.tensors) == []
    assert results[0][3] == results[1][3] == one.assembly.evaluator.run(batch(99))


def _many_on_one_edge(rank: int, world: int):
    """Both ranks start all their sends before any receive, and wait in another order than they sent."""
    queues = [Queue(a, b, direction) for a, b in ((0, 1), (1, 0)) for direction in "FB"]
    transport = Transport(Mesh({"pp": 2}, rank), queues, 8, 60.0)
    other = 1 - rank
    sent = [
        transport.send(torch.full((1 << 18,), 100.0 * rank + 10 * i + (direction == "B")), other, direction, 0, i)
        for i in range(8)
        for direction in "FB"
    ]
    received = []
    for i in reversed(range(8)):
        for direction in "BF":
            buffer = torch.zeros(1 << 18)
            transport.receive(buffer, other, direction, 0, i).wait()
            received.append((i, direction, float(buffer[0]), bool((buffer == buffer[0]).all())))
    for pending in sent:
        pending.wait()
    return received


def test_several_tensors_on_one_edge():
    """P6: many tensors on one edge, both directions at once: no hang, and every one arrives as itself."""
    for rank, received in enumerate(run_distributed(_many_on_one_edge, 2, timeout=100)):
        assert len(received) == 16
        for i, direction, value, whole in received:
            assert value == 100.0 * (1 - rank) + 10 * i + (direction == "B") and whole


@pytest.mark.parametrize("dirty", [False, True])
def test_replicas_share_scales_in_window_microbatch(dirty):
    """DP 2, window microbatch: one roll for both replicas, NaN on one of them included; the step is skipped on both."""
    settings = {"precision__fp8__window": "microbatch", "precision__fp8__history": 2}
    results = run_distributed(_replicas, 2, settings, dirty, timeout=200)
    assert differing(results[0][0], results[1][0]) == []
    assert results[0][1] == results[1][1] == [False, dirty, False]


def _replicas(rank: int, world: int, settings: dict, dirty: bool):
    """One replica; with ``dirty``, replica 1 meets a NaN activation in step 1."""
    mesh = Mesh({"dp": 2}, rank)
    mesh.create_groups()

    def spoil(assembly, step: int) -> None:
        norm = assembly.flat.master("layers.1.mlp_norm.weight")
        if dirty and step == 0:
            assembly.kept = norm[0].clone()
            if rank == 1:
                norm[0] = float("nan")
        elif dirty and step == 1:
            norm[0] = assembly.kept

    run = train(
        config(**settings, parallel__dp=2), 3, mesh=mesh, batches=lambda step: batch(10 * step + rank), between=spoil
    )
    return run.tensors, run.skipped


def _save_apart(rank: int, world: int, apart: bool) -> str:
    """Replicas of one master; ``apart``: one element differs on rank 1."""
    mesh = Mesh({"dp": 2}, rank)
    mesh.create_groups()
    assembly = assemble(config(parallel__dp=2), mesh)
    if apart and rank == 1:
        assembly.flat.master("layers.2.mlp.down.weight")[3, 5] += 1e-3
    try:
        check_replicas(assembly.logical_tensors(), GroupCommunicator(), mesh)
    except ResumeError as error:
        return str(error)
    return "equal"


def test_replicas_that_drifted_apart_are_not_saved():
    """Only one replica's bytes are written, so before a save all must agree; every rank gets the same error."""
    assert run_distributed(_save_apart, 2, False, timeout=120) == ["equal", "equal"]
    errors = run_distributed(_save_apart, 2, True, timeout=120)
    assert errors[0] == errors[1] and "master/layers.2.mlp.down.weight" in errors[0] and "ranks 0 and 1" in errors[0]


def _reduce_nan(rank: int, world: int) -> list[float]:
    """Slots of one replica: a NaN on rank 0, on rank 1, on both; an infinity; EMPTY; numbers."""
    mesh = Mesh({"dp": 2}, rank)
    mesh.create_groups()
    assembly = assemble(config(parallel__dp=2), mesh)
    nan, inf = float("nan"), float("inf")
    mine = [[nan, 1.0, nan, inf, -1.0, 2.0], [3.0, nan, nan, 4.0, -1.0, 5.0]][rank]
    assembly.timeline.open_amax[:6] = torch.tensor(mine)
    assembly.engine.end.reduce_amax_()
    return assembly.timeline.open_amax[:6].tolist()


def _calibrated(rank: int, world: int):
    """Scales after calibration on this replica's own data."""
    mesh = Mesh({"dp": 2}, rank)
    mesh.create_groups()
    assembly = assemble(config(parallel__dp=2), mesh)
    assembly.prepare(batch(rank))
    return assembly.timeline.scale.tolist()


def test_replicas_calibrate_together():
    """Each replica sees other data; the first scales are those of the larger amax, on both."""
    both = run_distributed(_calibrated, 2, timeout=120)
    alone = []
    for rank in range(2):
        assembly = assemble(config())
        assembly.prepare(batch(rank))
        alone.append(assembly.timeline.scale.tolist())
    assert both[0] == both[1] and alone[0] != alone[1]
    assert both[0] == [min(pair) for pair in zip(*alone, strict=True)]


def test_a_nan_survives_the_reduction_on_every_replica():
    """A library's MAX may lose a NaN, and then replicas would go on with different scales."""
    results = run_distributed(_reduce_nan, 2, timeout=120)
    inf = float("inf")
    assert results[0] == results[1] == [inf, inf, inf, inf, -1.0, 5.0]


def _die_mid_step(rank: int, world: int):
    mesh = Mesh({"pp": 2}, rank)
    mesh.create_groups()

    def between(assembly, step: int) -> None:
        if rank == 1 and step == 1:
            stage = next(iter(assembly.engine.stages.values()))
            stage.weight_grad = lambda slot, scope: os.kill(os.getpid(), signal.SIGKILL)

    try:
        train(config(parallel__pp=2, launch__timeout_seconds=20.0), 5, mesh=mesh, between=between)
    except QEffectError as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(1) from None


def test_dead_peer_is_named():
    """P8: one rank is killed in the middle of a step; the other exits non-zero in time and names it."""
    run = start_distributed(_die_mid_step, 2, timeout=90)
    survivor, dead = run.wait(check=False)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode == 1
    assert "rank 1" in survivor.output and "lost" in survivor.output


def _hang(rank: int, world: int, axis: str) -> tuple[str, float]:
    """Rank 1 is there and does nothing, past the time-out."""
    experts = {"model__family": "mixtral", "model__moe__num_experts": 4} if axis == "ep" else {}
    settings = config(**{f"parallel__{axis}": 2}, **experts, precision__fp8__recipe="none", launch__timeout_seconds=4.0)
    mesh, _ = join(settings, LaunchEnv.from_mapping(os.environ))
    assembly = assemble(settings, mesh)
    assembly.prepare(batch(0))
    dist.barrier()
    if rank == 1:
        time.sleep(12)
        return "", 0.0
    began = time.monotonic()
    try:
        assembly.engine.step(0, batch(0))
    except PeerLostError as error:
        return str(error), time.monotonic() - began
    return "nobody was missed", 0.0


@pytest.mark.parametrize("axis", ["tp", "cp", "ep", "dp"])
def test_a_peer_that_hangs_is_given_up(axis: str):
    """P8: a machine that is off or a process that stands still closes no connection: ``launch.timeout_seconds`` counts."""
    said, seconds = start_distributed(_hang, 2, axis, timeout=90).wait(check=False)[0].value
    assert "rank 1 was lost during" in said and seconds < 9, (said, seconds)
