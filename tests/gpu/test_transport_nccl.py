"""The transport over NCCL on two GPUs: a plan on a V, both directions between the same two ranks, in the plan's own order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipeline.actions import RECEIVES, SENDS, Kind
from pipeline.p2p import Transport, gather_rows, queues_of
from pipeline.plan import build_plan
from qeffect_lm.parallel.mesh import Mesh
from tests.helpers import run_distributed

M, SIZE = 6, 1 << 22
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def _run(rank: int, world: int, schedule: str) -> tuple[dict[int, float], float]:
    """Chunk c adds c + 1 forward and 10 (c + 1) backward; returns what came back to chunk 0 for each microbatch."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    plan = build_plan(schedule, world, M)
    transport = Transport(mesh, queues_of(plan), M, 60.0, device)
    ranks, last = plan.placement.ranks, plan.placement.num_chunks - 1
    outputs = {(d, c, m): torch.zeros(SIZE, device=device) for d in "FB" for c in plan.placement.chunks(rank) for m in range(M)}
    inputs = {key: torch.zeros(SIZE, device=device) for key in outputs}
    pending = {}
    for action in plan.actions[rank]:
        if action.kind in (Kind.REDUCE, Kind.STEP, Kind.COMMIT, Kind.W):
            continue
        chunk, m = action.key
        d = "F" if action.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F) else "B"
        step = 1 if d == "F" else -1
        if action.kind in SENDS:
            pending["S", d, chunk, m] = transport.send(outputs[d, chunk, m], ranks[chunk + step], d, chunk, m)
        elif action.kind in RECEIVES:
            pending["R", d, chunk, m] = transport.receive(inputs[d, chunk, m], ranks[chunk - step], d, chunk - step, m)
        else:
            if ("R", d, chunk, m) in pending:
                pending.pop(("R", d, chunk, m)).wait()
            if chunk == 0 and d == "F":
                inputs[d, chunk, m].fill_(1000.0 * m)
            if chunk == last and d == "B":
                inputs[d, chunk, m].copy_(outputs["F", chunk, m])
            torch.add(inputs[d, chunk, m], (chunk + 1) * (1 if d == "F" else 10), out=outputs[d, chunk, m])
            target = chunk + step
            if 0 <= target <= last and ranks[target] == rank:
                inputs[d, target, m].copy_(outputs[d, chunk, m])
    for transfer in pending.values():
        transfer.wait()
    result = {m: float(outputs["B", 0, m].mean()) for m in range(M)} if ranks[0] == rank else {}
    rows = torch.zeros(world, 1, dtype=torch.float64)  # numbers of the host over the same group
    gather_rows(rows, torch.tensor([float(rank)], dtype=torch.float64), mesh, "pp")
    transport.close()
    return result, float(rows.sum())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved-1f1b", "dualpipev"])
def test_a_plan_s_messages_over_nccl(schedule):
    results = run_distributed(_run, 2, schedule, timeout=150, init=False)
    chunks = 2 if schedule == "1f1b" else 4
    added = 11 * sum(range(1, chunks + 1))
    assert results[0][0] == {m: 1000.0 * m + added for m in range(M)}
    assert [total for _, total in results] == [1.0, 1.0]
