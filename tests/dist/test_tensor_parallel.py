"""Tensor and sequence parallelism over gloo against one process.

In float64 the sums' order is all that differs: losses and norms agree to 1e-12 and masters (about 1) to 1e-9 after three steps.
Under FP8 a value next to the border of two FP8 numbers may fall to the other side, so losses are near, and what must be equal
bit for bit is one layout in several ways: eager, captured action by action, captured as whole steps.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest
import torch

from qeffect_lm import config_check
from qeffect_lm.contract.errors import CollectiveError
from qeffect_lm.layers import te
from qeffect_lm.parallel.linear import RowParallelLinear
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import PeerLostError
from qeffect_lm.parallel.tensor import TensorParallel
from tests.dist.frame import same_on_all, train_each, whole
from tests.dist.test_zero import data, together
from tests.helpers import run_distributed, start_distributed
from tests.te_fake import fake_library
from tests.tiny import Batch, batch, config, differing, train

SIZES: dict[str, Any] = {"model__head_dim": 16, "model__ffn_size": 64, "model__num_layers": 2, "pipeline__microbatches": 2}
FLOAT64: dict[str, Any] = {"precision__fp8__recipe": "none", "precision__dtype": "float64"}
# A vocabulary that does not divide, norms of single heads, biases, one KV head for two ranks, learned positions, tied weights.
QWEN3: dict[str, Any] = {**FLOAT64, "model__family": "qwen3", "model__num_kv_heads": 1, "model__vocab_size": 67}
QWEN2: dict[str, Any] = {**FLOAT64, "model__family": "qwen2", "model__num_kv_heads": 1, "model__dropout": 0.2}
GPT2: dict[str, Any] = {
    **FLOAT64, "model__family": "gpt2", "model__num_kv_heads": 4, "model__tie_word_embeddings": True, "model__dropout": 0.2,
}  # fmt: skip
REPLAY = {"graphs__backend": "host_replay"}


def _runs(rank: int, world: int, sizes: dict[str, int], variants: list[dict[str, Any]]) -> list[Any]:
    mesh = Mesh(sizes, rank)
    replica = mesh.coord("samples"), mesh.size("samples")
    return train_each(mesh, SIZES, variants, lambda _: lambda step: data(step, *replica), lambda _: batch(99, 2))


def run(sizes: dict[str, int], variants: list[dict[str, Any]]) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """What each variant told, the same on all ranks, and its logical state."""
    results = run_distributed(_runs, math.prod(sizes.values()), sizes, variants, timeout=400)
    return same_on_all(results), [whole([rank[n][1] for rank in results]) for n in range(len(variants))]


def assert_near_one(told: Any, state: dict[str, torch.Tensor], settings: dict[str, Any], replicas: int = 1) -> None:
    """Float64: as one process with all replicas' microbatches. Control: other data is not near."""
    settings = {**SIZES, **settings, "pipeline__microbatches": 2 * replicas, "optim__zero": 0}
    one = train(config(**settings), 3, batches=lambda step: together(step, replicas))
    losses, norms, skipped, held_out = told
    assert losses == pytest.approx(one.losses, rel=1e-12) and norms == pytest.approx(one.norms, rel=1e-12)
    assert held_out == pytest.approx(one.assembly.evaluator.run(batch(99, 2)), rel=1e-12) and not any(skipped)
    expected = one.tensors
    assert state.keys() == expected.keys() and len(state) > 30
    masters = [name for name in expected if name.startswith("master/")]
    worst = max(float((state[name] - expected[name]).abs().max()) for name in masters)
    assert worst < 1e-9
    assert len(set(losses)) == 3 and all(norm > 0 for norm in norms)
    assert abs(held_out - losses[-1]) > 1e-6, "other data: another loss"


def test_two_ranks() -> None:
    """G5; heads, KV heads fewer than ranks, a vocabulary that does not divide; captured equals eager bit for bit."""
    variants = [
        QWEN3,
        {**GPT2, "parallel__sequence_parallel": False},
        {"precision__dtype": "bfloat16"},
        {"precision__dtype": "bfloat16", **REPLAY},
    ]
    told, states = run({"tp": 2}, variants)
    for number in (0, 1):
        assert_near_one(told[number], states[number], variants[number])
    assert told[2] == told[3] and differing(states[2], states[3]) == []
    one = train(config(**SIZES, precision__dtype="bfloat16"), 3, batches=lambda step: together(step, 1))
    assert told[2][0] == pytest.approx(one.losses, abs=0.02) and told[2][0][0] == pytest.approx(one.losses[0], abs=1e-3)
    scales = [name for name in states[2] if name.startswith("scale/")]
    assert len(scales) == 24 and all(float(states[2][name]) not in (0.0, 1.0) for name in scales)


@pytest.mark.long
def test_every_way_of_two_ranks() -> None:
    """Sequence parallelism or not, dropout (masks are parts of one process's), recompute, W of several microbatches as one
    product, whole steps captured: each as one process, and bits that must agree."""
    narrow: dict[str, Any] = {"precision__dtype": "bfloat16", "model__dropout": 0.1}
    variants = [
        QWEN2,
        {**QWEN2, "parallel__sequence_parallel": False},
        GPT2,
        {**QWEN3, "parallel__sequence_parallel": False, "model__recompute": "selective"},
        narrow,
        {**narrow, **REPLAY, "graphs__scope": "step"},
        {**narrow, **REPLAY, "model__recompute": "full"},
        {**narrow, "model__recompute": "selective", "contract__mode": "off"},
        {**narrow, "parallel__sequence_parallel": False},
        {**narrow, "parallel__sequence_parallel": False, **REPLAY, "model__recompute": "selective"},
        {**narrow, "pipeline__coalesce_w": 2, **REPLAY},
        {**narrow, "precision__fp8__window": "microbatch"},
        {**narrow, "precision__fp8__window": "microbatch", **REPLAY},
    ]
    told, states = run({"tp": 2}, variants)
    for number in range(4):
        assert_near_one(told[number], states[number], variants[number])
    for first, others in ((4, (5, 6, 7)), (8, (9,)), (11, (12,))):
        for number in others:
            assert told[number] == told[first] and differing(states[number], states[first]) == [], number
    assert told[8] != told[4] and told[8][0] == pytest.approx(told[4][0], abs=0.02)
    assert told[10][0] == pytest.approx(told[4][0], abs=0.02)


@pytest.mark.long
@pytest.mark.parametrize("axis", ["pp", "dp"])
def test_four_processes(axis: str) -> None:
    """TP 2 × PP 2, tied over two stages; TP 2 × DP 2, the optimizer's state shared or not: the same bits."""
    first = {**GPT2} if axis == "pp" else QWEN3
    other = {"optim__zero": 1} if axis == "dp" else {"pipeline__schedule": "zb-h1", "pipeline__w_delay": 0}
    variants = [first, {**QWEN3, **other}, {**REPLAY, "graphs__scope": "step"}, {}]
    told, states = run({"tp": 2, axis: 2}, variants)
    for number in (0, 1):
        assert_near_one(told[number], states[number], variants[number], 2 if axis == "dp" else 1)
    assert told[2] == told[3] and differing(states[2], states[3]) == []
    assert axis == "pp" or (told[0] == told[1] and differing(states[0], states[1]) == [])


# ---- what is wrong has a name ----------------------------------------------------------------------------------------


def two(step: int) -> Batch:
    return batch(step, 2)


def _forgotten(rank: int, world: int, captured: bool) -> str:
    """A linear that does not add up its parts."""
    mesh = Mesh({"tp": 2}, rank)
    mesh.create_groups()
    RowParallelLinear.product = RowParallelLinear.__mro__[2].product  # type: ignore[method-assign]
    more = REPLAY if captured else {}
    layout = {"parallel__tp": 2, "parallel__sequence_parallel": False}
    with pytest.raises(CollectiveError) as caught:
        train(config(**SIZES, **layout, **more, precision__fp8__recipe="none"), 1, mesh=mesh, batches=two)
    return str(caught.value)


def _out_of_step(rank: int, world: int) -> str:
    """One peer calls its sums by another name, as a rank with another version of a layer would."""
    mesh = Mesh({"tp": 2}, rank)
    mesh.create_groups()
    tell = TensorParallel._tell
    if rank:
        TensorParallel._tell = staticmethod(  # type: ignore[method-assign]
            lambda context, who, kind: tell(context, who.replace("layers.0", "layers.x"), kind)
        )
    layout = {"parallel__tp": 2, "contract__mode": "enforce"}
    settings = config(**SIZES, **layout, precision__fp8__recipe="none")
    if rank:  # it would declare its own names
        from qeffect_lm.contract.collectives import Collectives

        Collectives.declare = lambda self, kind, chunk, names: None  # type: ignore[method-assign]
    with pytest.raises(CollectiveError) as caught:
        train(settings, 2, mesh=mesh, batches=two)
    return str(caught.value)


@pytest.mark.long
def test_a_forgotten_sum_has_a_name() -> None:
    """Eager at the action's end, captured at its capture; peers that exchange different things are found before step two."""
    for captured in (False, True):
        for said in run_distributed(_forgotten, 2, captured, timeout=120):
            assert re.search(r"0F-?\d+ ended without the sum of 'layers.0.attention.out' among its peers", said), said
    for said in run_distributed(_out_of_step, 2, timeout=120):
        assert "peers exchange different things" in said and "start all ranks with the same" in said


def _left_alone(rank: int, world: int, captured: bool) -> str:
    """Rank 1 leaves after two steps."""
    mesh = Mesh({"tp": 2}, rank)
    mesh.create_groups()
    more = {**(REPLAY if captured else {}), "parallel__tp": 2, "precision__fp8__recipe": "none"}

    def batches(step: int) -> Batch:
        if rank == 1 and step == 2:
            os._exit(0)
        return two(step)

    with pytest.raises(PeerLostError) as caught:
        train(config(**SIZES, **more), 4, mesh=mesh, batches=batches)
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("captured", [False, True])
def test_a_lost_peer_is_named(captured: bool) -> None:
    said = start_distributed(_left_alone, 2, captured, timeout=120).wait(check=False)[0].value
    what = "allreduce in the replay of 0F" if captured else "a sum of embedding over tp"
    assert said is not None and f"rank 1 was lost during {what}" in said, said


def _te_runs(rank: int, world: int, variants: list[dict[str, Any]]) -> list[Any]:
    """Transformer Engine's stand-in, in float64 as well, which the real one has not."""
    te.load = lambda device, recipe: fake_library()  # type: ignore[assignment]
    config_check._check_backend = lambda _: iter(())  # type: ignore[assignment]
    base = {**SIZES, "model__backend": "te", "run__device": "auto"}
    return train_each(
        Mesh({"tp": world}, rank), base, variants, lambda _: lambda step: data(step, 0, 1), lambda _: batch(99, 2)
    )


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "all tokens"])
def test_blocks_of_transformer_engine(sequence: bool) -> None:
    """Its modules hold pieces, exchanges stand around them: float64 as one process, FP8 near it, scales of whole tensors."""
    common = {"parallel__sequence_parallel": sequence, "model__dropout": 0.2}
    fp8 = {"precision__dtype": "bfloat16", "precision__fp8": {"recipe": "delayed", "history": 3}}
    variants = [{**common, **FLOAT64}, {**common, **fp8}]
    one = [results for (results,) in [run_distributed(_te_runs, 1, [variant]) for variant in variants]]
    two = run_distributed(_te_runs, 2, variants, timeout=400)
    assert [told for told, _ in two[0]] == [told for told, _ in two[1]]
    (alone, before), ((losses, norms, skipped, held_out), _) = one[0][0], two[0][0]
    # The stand-in's weight gradients are made in float32: of what follows the first step less agrees.
    assert losses[0] == pytest.approx(alone[0][0], rel=1e-12) and losses == pytest.approx(alone[0], rel=1e-8)
    assert norms == pytest.approx(alone[1], rel=1e-6) and held_out == pytest.approx(alone[3], rel=1e-8) and not any(skipped)
    state, expected = whole([rank[0][1] for rank in two]), whole([before])
    masters = [name for name in expected if name.startswith("master/")]
    assert state.keys() == expected.keys() and any("norm" in name for name in masters)
    assert max(float((state[name] - expected[name]).abs().max()) for name in masters) < 1e-4
    (alone, before), ((losses, *_), _) = one[1][0], two[0][1]
    assert losses == pytest.approx(alone[0], abs=0.05) and len(set(losses)) == 3
    state, expected = whole([rank[1][1] for rank in two]), whole([before])
    scales = [name for name in expected if name.startswith("scale/")]
    assert state.keys() == expected.keys() and any(not torch.equal(expected[name], torch.ones(())) for name in scales)
    near = [float(state[name] / expected[name]) for name in scales]
    assert all(0.5 < ratio < 2 for ratio in near) and sum(0.9 < ratio < 1.1 for ratio in near) > 0.8 * len(near)
