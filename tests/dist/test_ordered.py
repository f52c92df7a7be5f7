"""Sums over three gloo ranks and more: bits that do not depend on what else is reduced, on stages or a peer's vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from checkpoint import GroupCommunicator
from checkpoint.resume import check_replicas
from pipeline import ordered
from pipeline.ordered import OrderedSum
from qeffect_lm.parallel.mesh import Mesh
from tests.dist.frame import items_of, same_on_all, train_each, whole
from tests.dist.test_zero import data
from tests.helpers import run_distributed
from tests.tiny import Trained, batch, differing

FLOAT32: dict[str, Any] = {"precision__fp8__recipe": "none", "pipeline__microbatches": 2, "pipeline__w_delay": 0}
# With two ranks of tp their parts of the vocabulary are 1088 and 962 rows, and both hold the one KV head, which in one of nine
# layers lies in another third of what they reduce.
UNEVEN: dict[str, Any] = {**FLOAT32, "model__num_kv_heads": 1, "model__vocab_size": 2050, "model__num_layers": 9}


def _part(rank: int) -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank))


def _sums(rank: int, world: int) -> list[torch.Tensor]:
    mesh = Mesh({"dp": world}, rank)
    mesh.create_groups()
    told = []
    for before, behind, bucket in ((0, 0, 1 << 24), (500, 3, 1 << 24), (7, 2000, 100)):
        ordered.BUCKET = bucket
        values = torch.cat([torch.zeros(before), _part(rank), torch.ones(behind)])
        OrderedSum(mesh, "dp", values.numel(), values).sum_(values)
        assert bool((values[:before] == 0).all()) and bool((values[before + 1000 :] == world).all())
        told.append(values[before : before + 1000].clone())
    return told


def test_neighbours_change_no_bit() -> None:
    """Whatever lies beside a tensor, in whatever buckets: each element is ((g0 + g1) + g2)."""
    expected = (_part(0) + _part(1)) + _part(2)
    assert not torch.equal(expected, (_part(1) + _part(2)) + _part(0))
    for told in run_distributed(_sums, 3, timeout=100):
        assert all(torch.equal(values, expected) for values in told)


def _runs(rank: int, world: int, sizes: dict[str, int], variants: list[dict[str, Any]]) -> list[Any]:
    mesh = Mesh(sizes, rank)
    place = mesh.coord("samples"), mesh.size("samples")

    def told(run: Trained) -> tuple[Any, ...]:
        check_replicas(run.assembly.logical_tensors(), GroupCommunicator(), mesh)
        return (items_of(run.assembly),)

    return train_each(mesh, {}, variants, lambda _: lambda step: data(step, *place), lambda _: batch(99, 2), told)


def _trained(sizes: dict[str, int], world: int, variants: list[dict[str, Any]]) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    results = run_distributed(_runs, world, sizes, variants, timeout=400)
    states = [whole([rank[number][1] for rank in results]) for number in range(len(variants))]
    return list(zip(same_on_all(results), states, strict=True))


def test_stages_of_three_replicas() -> None:
    """One stage or two, chunks in a V, the optimizer's state shared or not, a tape of the step: the same bits."""
    tape = {**FLOAT32, "graphs__backend": "host_replay", "graphs__scope": "step"}
    first, *others = _trained({"dp": 3}, 3, [FLOAT32, {**FLOAT32, "optim__zero": 1}, tape])
    stages = _trained({"dp": 3, "pp": 2}, 6, [FLOAT32, {**FLOAT32, "pipeline__schedule": "zb-v"}])
    for told, state in (*others, *stages):
        assert told == first[0] and differing(state, first[1]) == []


def test_stages_of_four_tensor_parallel_ranks() -> None:
    """Norms, of whose gradients each of four ranks has a part."""
    settings = {**FLOAT32, "model__num_kv_heads": 4, "model__ffn_size": 64}
    replica = [{**settings, "parallel__sequence_parallel": sequence} for sequence in (True, False)]
    for one, other in zip(_trained({"tp": 4}, 4, replica), _trained({"tp": 4, "pp": 2}, 8, replica), strict=True):
        assert one[0] == other[0] and differing(one[1], other[1]) == []


def test_peers_with_other_pieces_hold_the_same_bytes() -> None:
    """A KV head that two ranks hold, norms that both hold: on three replicas of ranks whose pieces differ in length."""
    variants = [UNEVEN, {**UNEVEN, "parallel__sequence_parallel": False}]
    assert len(_trained({"dp": 3, "tp": 2}, 6, variants)) == 2
