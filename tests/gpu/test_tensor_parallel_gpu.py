"""Tensor parallelism over NCCL on two GPUs: captured equals eager bit for bit, and near one GPU. And, eager, of two ranks that
share one GPU.

python -m pytest -q tests/gpu/test_tensor_parallel_gpu.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect_lm.parallel import tensor
from qeffect_lm.parallel.mesh import Mesh
from tests.gathered_first import gather_first, scale_apart
from tests.gpu.one_gpu import GENTLY, assert_near, shared_gpu
from tests.gpu.test_engine_gpu import data
from tests.gpu.test_step_graph_gpu import settings, two_gpus
from tests.helpers import run_distributed
from tests.tiny import differing, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STEPS = 8
GRAPHS = ("eager", "action", "step", "body")


def _runs(rank: int, world: int, variants: list[dict[str, Any]]) -> list[Any]:
    """Every way to execute each variant; bytes of FP8 are told as such."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = Mesh({"tp": world}, rank)
    mesh.create_groups()
    told = []
    for more in variants:
        for graphs in GRAPHS:
            run = train(settings(graphs, **GENTLY, parallel__tp=world, **more), STEPS, mesh=mesh, batches=data)
            told.append((run.losses, run.norms, {name: tensor.cpu() for name, tensor in run.tensors.items()}))
            run.assembly.release()
    return told


def _shared(rank: int, world: int, variants: list[dict[str, Any]]) -> list[Any]:
    mesh = shared_gpu(rank, tp=world)
    told = []
    for more in variants:
        run = train(settings("eager", **GENTLY, parallel__tp=world, **more), STEPS, mesh=mesh, batches=data)
        told.append((run.losses, run.norms))
        run.assembly.release()
    return told


def test_two_ranks_on_one_gpu() -> None:
    """The kernels of cut layers: both ranks agree bit for bit in losses and norms, which are near one rank's."""
    chosen = (True, "none", 0.0), (True, "selective", 0.1), (False, "none", 0.1), (False, "full", 0.0)
    _near_one_rank(
        [
            {"parallel__sequence_parallel": sequence, "model__recompute": recompute, "model__dropout": p}
            for sequence, recompute, p in chosen
        ]
    )


WAYS: dict[str, Any] = {"FP8": None, "tokens first": gather_first, "scales apart": scale_apart}


def _gathers(rank: int, world: int, variants: list[dict[str, Any]], steps: int) -> dict[str, list[Any]]:
    """By way, of each variant losses, norms, every logical tensor, and which dtypes were gathered."""
    mesh, gather = shared_gpu(rank, tp=world), tensor.all_gather
    told: dict[str, list[Any]] = {way: [] for way in WAYS}
    for way, change in WAYS.items():
        with pytest.MonkeyPatch.context() as patch:
            if change is not None:
                change(patch)
            for more in variants if way != "scales apart" else variants[:1]:
                seen: set[str] = set()

                def gathered(made: torch.Tensor, *rest: Any, seen: set[str] = seen, **group: Any) -> Any:
                    seen.add(str(made.dtype))
                    return gather(made, *rest, **group)

                patch.setattr(tensor, "all_gather", gathered)
                run = train(settings("eager", **GENTLY, parallel__tp=world, **more), steps, mesh=mesh, batches=data)
                told[way].append((run.losses, run.norms, {name: t.cpu() for name, t in run.tensors.items()}, seen))
                run.assembly.release()
    return told


def test_gathered_in_fp8_on_one_gpu() -> None:
    """The fused kernels: bytes of losses, norms and all tensors, scales and histories included, are those of gathering tokens
    first, with columns made in F or in I, into a storage of their own or among other microbatches'."""
    steps, variants = 4, [
        {},
        {"model__recompute": "full"},
        {"model__dropout": 0.1, "model__recompute": "selective"},
        {"pipeline__coalesce_w": 2},
        {"precision__fp8": {"recipe": "delayed", "history": 4, "window": "microbatch"}},
    ]
    for found in run_distributed(_gathers, 2, variants, steps, timeout=300, init=False):
        for number, (got, want) in enumerate(zip(found["FP8"], found["tokens first"], strict=True)):
            assert got[:2] == want[:2] and differing(got[2], want[2]) == [], (number, variants[number])
            assert "torch.uint8" in got[3] and "torch.uint8" not in want[3] and len(set(got[0])) == steps
        assert found["scales apart"][0][0] != found["FP8"][0][0], "control"


def test_two_ranks_of_transformer_engine_on_one_gpu() -> None:
    """The same of its modules, which hold pieces."""
    pytest.importorskip("transformer_engine")
    _near_one_rank([{"parallel__sequence_parallel": sequence, "model__backend": "te"} for sequence in (True, False)])


def _near_one_rank(variants: list[dict[str, Any]]) -> None:
    first, second = run_distributed(_shared, 2, variants, timeout=300, init=False)
    assert first == second
    for (losses, _), more in zip(first, variants, strict=True):
        alone = {key: value for key, value in more.items() if key in ("model__backend", "model__dropout")}
        one = train(settings("eager", **GENTLY, **alone), STEPS, batches=data)
        assert_near(losses, one.losses)


@two_gpus
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "all tokens"])
def test_two_gpus(sequence: bool, recompute: str) -> None:
    """All ways to execute agree bit for bit on each rank, both ranks in losses and norms; the losses are near one GPU's, whose
    sums have another order; without dropout attention and MLP are a node each, with it not."""
    variants = [
        {"parallel__sequence_parallel": sequence, "model__recompute": recompute, "model__dropout": p} for p in (0.0, 0.1)
    ]
    ranks = run_distributed(_runs, 2, variants, timeout=600, init=False)
    for number, more in enumerate(variants):
        first = number * len(GRAPHS)
        for place in range(first, first + len(GRAPHS)):
            assert ranks[0][place][:2] == ranks[1][place][:2] == ranks[0][first][:2], GRAPHS[place - first]
            for rank in ranks:
                assert differing(rank[place][2], rank[first][2]) == [], GRAPHS[place - first]
        one = train(settings("eager", **GENTLY, model__dropout=more["model__dropout"]), STEPS, batches=data)
        assert_near(ranks[0][first][0], one.losses)
