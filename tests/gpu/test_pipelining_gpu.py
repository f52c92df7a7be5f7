"""The drop-ins for torch.distributed.pipelining over NCCL on two GPUs: one process's losses, and each other's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import pipelining_support as support
from tests.helpers import run_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("ScheduleZBVZeroBubble", {"stages": 4, "dtype": torch.float64}),
    ("ScheduleZBVZeroBubble", {"stages": 4}),
    ("ScheduleInterleaved1F1B", {"stages": 4}),
    ("ScheduleZBVZeroBubble", {"stages": 4, "dtype": torch.bfloat16, "fp8": {"history": 3}}),
    ("ScheduleDualPipeV", {"stages": 4, "dtype": torch.bfloat16, "fp8": {"history": 3}}),
    ("ScheduleZBVZeroBubble", {"stages": 4, "dtype": torch.bfloat16, "fp8": {"history": 3}, "again": "other"}),
]


def _runs(rank: int, world: int, bound: bool) -> list[Any]:
    """``bound``: the default group is bound to a device, and NCCL splits new groups from it."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("cpu:gloo,cuda:nccl", **({"device_id": device} if bound else {}))
    told = [support.pipeline(rank, world, name, device=f"cuda:{rank}", **options) for name, options in VARIANTS]
    torch.cuda.synchronize()
    return told


@pytest.mark.parametrize("bound", [True, False])
def test_over_nccl(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    ranks = run_distributed(_runs, 2, bound, timeout=170, init=False)
    losses = [one["losses"] + two["losses"] for one, two in zip(*ranks, strict=True)]
    grads = [one["grads"] | two["grads"] for one, two in zip(*ranks, strict=True)]
    want, wanted = support.by_hand(support.model(4, torch.float64), 8, 4, 2)
    assert losses[0] == pytest.approx(want, rel=1e-10)
    for name, grad in wanted.items():
        torch.testing.assert_close(grads[0][name], grad, rtol=1e-9, atol=1e-11)
    for one, other in ((1, 2), (3, 4), (3, 5)):
        assert losses[one] == losses[other]
        assert [name for name in grads[one] if not torch.equal(grads[one][name], grads[other][name])] == []
    assert ranks[0][3]["state"] == ranks[0][4]["state"] == ranks[0][5]["state"] and ranks[0][3]["state"]
    assert losses[3] == pytest.approx(losses[1], rel=0.1)
