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

from pipeline.calibrate import sample_underflow
from qeffect_lm import config_check
from qeffect_lm.app.watching import recipe_of, shares_of
from qeffect_lm.contract.errors import CollectiveError
from qeffect_lm.layers import te
from qeffect_lm.parallel import tensor
from qeffect_lm.parallel.linear import RowParallelLinear
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import PeerLostError
from qeffect_lm.parallel.tensor import Exchange, TensorParallel
from tests.dist.frame import same_on_all, train_each, whole
from tests.dist.test_zero import data, together
from tests.gathered_first import gather_first, scale_apart
from tests.helpers import run_distributed, start_distributed
from tests.runs import metrics_of, overrides, run_here, write_config
from tests.te_fake import fake_library
from tests.tiny import Batch, batch, config, differing, train
from tools.common import launch

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


# ---- tokens gathered in FP8 ------------------------------------------------------------------------------------------

Exchanged = dict[tuple[str, str, str], set[tuple[str, int]]]


def _gathers(rank: int, world: int, variants: list[dict[str, Any]], way: str, interpreted: bool) -> list[Any]:
    """:func:`_runs`, and what each work of each layer gathered: dtypes and numbers of elements, as the library got them."""
    with pytest.MonkeyPatch.context() as patch:
        if interpreted:
            from tests.unit.interpreted import run_kernels

            run_kernels(patch)
        if way != "FP8":
            {"tokens first": gather_first, "scales apart": scale_apart}[way](patch)
        seen: Exchanged = {}
        work: list[tuple[str, str, str]] = []
        tell, gather = TensorParallel._tell, tensor.all_gather

        def told(context: Any, who: str, kind: str) -> None:
            work.append((str(context.phase), "" if context.scope is None else context.scope.kind, who))
            tell(context, who, kind)

        def gathered(made: torch.Tensor, part: torch.Tensor, **group: Any) -> Any:
            seen.setdefault(work[-1], set()).add((str(made.dtype), made.numel()))
            assert part.dtype is made.dtype and part.numel() * world == made.numel()
            return gather(made, part, **group)

        patch.setattr(Exchange, "_tell", staticmethod(told))
        patch.setattr(tensor, "all_gather", gathered)
        return [*_runs(rank, world, {"tp": world}, variants), seen]


def both_ways(variants: list[dict[str, Any]], interpreted: bool = False) -> tuple[Exchanged, Exchanged]:
    """Bytes of losses, norms and every logical tensor, scales and histories of amax included, are the same whether ranks gather
    their tokens in FP8 or first of all; what was gathered, either way."""
    found = {}
    for way in ("FP8", "tokens first", "scales apart"):
        ran = variants[:1] if way == "scales apart" else variants
        ranks = run_distributed(_gathers, 2, ran, way, interpreted, timeout=600)
        assert ranks[0][-1] == ranks[1][-1], "ranks gather the same"
        runs = [rank[:-1] for rank in ranks]
        found[way] = same_on_all(runs), [whole([run[n][1] for run in runs]) for n in range(len(ran))], ranks[0][-1]
    (told, states, seen), (want, before, wide) = found["FP8"], found["tokens first"]
    for number, state in enumerate(states):
        assert told[number] == want[number] and differing(state, before[number]) == [], number
        scales = [name for name in state if name.startswith("scale/")]
        assert len(scales) > 10 and all(float(state[name]) not in (0.0, 1.0) for name in scales)
        assert len({float(state[name]) for name in scales}) > 0.8 * len(scales)
    assert found["scales apart"][0][0] != told[0], "control"
    return seen, wide


def test_gathered_in_fp8() -> None:
    """In training and evaluation a layer in FP8 gathers its input in F and its output gradient in I by the byte, a quarter of
    float32; everything else, and calibration, in the layers' dtype."""
    seen, wide = both_ways([{}])
    tokens, hidden = 32, 32
    layers = {(f"layers.{layer}.{part}", work) for layer in (0, 1) for part, work in LINEARS}
    trained = {(who, work): sizes for (phase, work, who), sizes in seen.items() if phase == "train"}
    assert {key for key, sizes in trained.items() if sizes == {("torch.uint8", tokens * hidden)}} == layers
    assert {key for key, sizes in trained.items() if sizes == {("torch.float32", tokens * hidden)}} == OTHERS
    assert trained.keys() == layers | OTHERS | {("loss", "F")}
    assert {(phase, who) for phase, _, who in seen if seen[phase, _, who] == {("torch.uint8", 1024)}} == {
        *(("train", who) for who, _ in layers), *(("eval", who) for who, work in layers if work == "F"),
    }  # fmt: skip
    calibrated = [sizes for (phase, _, who), sizes in seen.items() if phase == "calibrate" and who != "loss"]
    assert calibrated == [{("torch.float32", tokens * hidden)}] * len(layers | OTHERS)
    assert wide.keys() == seen.keys() and not any(dtype == "torch.uint8" for sizes in wide.values() for dtype, _ in sizes)

    def size(found: Exchanged) -> int:
        """Bytes of a microbatch in a layer."""
        of_layer = [found["train", work, f"layers.0.{part}"] for part, work in LINEARS]
        return sum(count * getattr(torch, dtype[6:]).itemsize for sizes in of_layer for dtype, count in sizes)

    assert (size(seen), size(wide)) == (4 * tokens * hidden, 4 * tokens * hidden * 4)


LINEARS = (("attention.qkv", "F"), ("mlp.gate_up", "F"), ("attention.out", "I"), ("mlp.down", "I"))
OTHERS = {("head", "F"), ("embedding", "I")}


@pytest.mark.long
def test_gathered_in_fp8_every_way() -> None:
    """Recompute (tokens are gathered again in I, in FP8 too), W of several microbatches as one product, tapes, a roll after
    every microbatch, layers that are not in FP8, biases, experts: the bits of gathering first."""
    narrow: dict[str, Any] = {"precision__dtype": "bfloat16", "model__dropout": 0.1}
    variants = [
        {**narrow, "model__recompute": "full"},
        {**narrow, "model__recompute": "selective"},
        {**narrow, "pipeline__coalesce_w": 2, **REPLAY},
        {**narrow, "pipeline__coalesce_w": 2, "model__recompute": "selective"},
        {**narrow, "precision__fp8__window": "microbatch", **REPLAY, "graphs__scope": "step"},
        {**narrow, "precision__fp8__high_precision_first": 1, "contract__mode": "off"},
        {**narrow, "model__family": "gpt2", "model__num_kv_heads": 4},
        {"model__family": "mixtral", "model__moe": {"num_experts": 4}, "model__recompute": "full"},
    ]
    seen, wide = both_ways(variants)
    again = {who for phase, work, who in seen if phase == "train" and work == "I" and who.endswith(("qkv", "gate_up"))}
    assert again == {f"layers.{layer}.{part}" for layer in (0, 1) for part in ("attention.qkv", "mlp.gate_up")}
    assert wide.keys() == seen.keys() and all(("torch.uint8", 1024) in seen["train", "I", who] for who in again)
    assert ("torch.bfloat16", 1024) in seen["train", "F", "layers.0.attention.qkv"], "the layer that is not in FP8"
    assert ("torch.bfloat16", 1024) not in seen["train", "F", "layers.1.attention.qkv"]


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; tests/gpu does it on a GPU")
def test_gathered_in_fp8_by_the_kernels() -> None:
    """A GPU's way, its kernels interpreted: the norm in the kernel that quantises, attention and MLP a node each, columns by a
    kernel of their own, in F, in I (``selective``) and into their place among other microbatches'."""
    pytest.importorskip("triton", reason="needs Triton (extra test)")
    base: dict[str, Any] = {"precision__dtype": "bfloat16", "model__num_layers": 1}
    seen, wide = both_ways([{**base, "model__recompute": "selective"}, {**base, "pipeline__coalesce_w": 2}], interpreted=True)
    again = {who for phase, work, who in seen if phase == "train" and work == "I" and who.endswith(("qkv", "gate_up"))}
    assert again == {"layers.0.attention.qkv", "layers.0.mlp.gate_up"} and wide.keys() == seen.keys()
    assert {seen["train", work, f"layers.0.{part}"] == {("torch.uint8", 1024)} for part, work in LINEARS} == {True}


def _lost(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Of a step's first microbatch, with scales that are too small."""
    mesh = Mesh({"tp": world}, rank)
    if world > 1:
        mesh.create_groups()
    run = train(config(**SIZES, parallel__tp=world, precision__dtype="float64"), 1, mesh=mesh, batches=lambda _: data(0, 0, 1))
    for role in run.assembly.timeline.index:
        run.assembly.timeline.scale_of(role).mul_(2.0**-26 if role.endswith("grad_output") else 2.0**-12)
    return sample_underflow(run.assembly.engine, data(1, 0, 1), recipe_of(run.assembly))


def test_underflow_is_counted_of_all_pieces() -> None:
    """Two ranks' counts together are one process's: pieces of weights, of gradients of what is cut by rows, of inputs of what
    is cut by columns; what both ranks have whole counts twice, which is the same share."""
    ranks = run_distributed(_lost, 2, timeout=200)
    one = _lost(0, 1)
    assert one.keys() == ranks[0].keys() == ranks[1].keys() and len(one) == 24
    for role, (lost, nonzero) in one.items():
        times = 2 if role.endswith(("qkv.input", "gate_up.input", "out.grad_output", "down.grad_output")) else 1
        assert [sum(rank[role][i] for rank in ranks) for i in (0, 1)] == [times * lost, times * nonzero], role
    assert shares_of(ranks) == shares_of([one]) and all(0 < share < 1 for share in shares_of(ranks).values())


def test_a_run_tells_underflow_of_all_pieces(tmp_path) -> None:
    """Launched, with scales that are too small: the metrics are one process's."""
    write_config(tmp_path)
    keys = ("precision.dtype=float64", "precision.fp8.margin=12", "model.dropout=0", "model.head_dim=16", "model.ffn_size=64")
    keys += ("logging.underflow_every=2", "train.steps=2", "graphs.backend=eager", "optim.lr=1e-12")  # nothing moves apart
    assert run_here(tmp_path, "one", *keys)[0] == 0
    run = launch(tmp_path / "tiny.yaml", overrides(tmp_path, "two", *keys, "parallel.tp=2"), 2, dict(os.environ))
    code, said = run.wait()
    assert code == 0, said
    one, two = ({m.step: m.extra for m in metrics_of(tmp_path, name)}[2] for name in ("one", "two"))
    told = {name: share for name, share in one.items() if name.startswith("underflow_")}
    assert len(told) == 3 and all(told[name] == two[name] > 0.01 for name in ("underflow_input", "underflow_weight"))
    # A gradient that is zero in one order of sums may be 1e-20 in another, and is counted then.
    assert two["underflow_grad_output"] == pytest.approx(told["underflow_grad_output"], abs=1e-4)
    assert told["underflow_grad_output"] > 1e-3


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
