"""Sequences cut over ranks of gloo against one process.

In float64 the sums' order is all that differs: losses and norms agree to 1e-12 and masters (about 1) to 1e-9 after three steps.
What must be equal bit for bit is one layout in several ways: eager, captured action by action, captured as whole steps.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qeffect_lm.contract.errors import CollectiveError
from qeffect_lm.parallel.context import ContextParallel
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.peers import PeerLostError
from tests.dist.frame import same_on_all, train_each, whole
from tests.dist.test_resume import environment
from tests.dist.test_tensor_parallel import FLOAT64, GPT2, QWEN2, QWEN3, REPLAY, SIZES
from tests.dist.test_zero import data
from tests.helpers import run_distributed, start_distributed
from tests.runs import CONFIG, metrics_of
from tests.tiny import Batch, batch, config, differing, train
from tests.unit.test_run_data import DATA, corpus, options
from tools.common import launch

# Of a row of 16, cut into chunks of 4 or 2: documents that cross borders of chunks, that begin in a rank's second chunk, of one
# token; and padding, a document that does not count, which fills the last chunks.
LENGTHS = [[6, 3, 7], [1, 2, 6, 7], [16], [3, 10, 3]]
PADDING = (7, 7, 0, 0)
RESET: dict[str, Any] = {"data__documents": "reset"}


def short(step: int, replica: int = 0, replicas: int = 1) -> Batch:
    """Two microbatches of one row of four tokens: with two ranks every chunk is a single one."""
    made = batch(10 * step + replica, 2, 1, 4)
    made.loss_mask[0, :, 3:] = 0
    made.tokens = 7 * replicas
    return made


def packed(step: int, replica: int = 0, replicas: int = 1) -> Batch:
    """A replica's two microbatches of two rows; documents lie elsewhere in every other step."""
    made, starts, mask = batch(10 * step + replica, 2), torch.zeros(4, 16, dtype=torch.int32), torch.ones(4, 16)
    for row in range(4):
        at, which = 0, (row + step) % 4
        for length in LENGTHS[which]:
            starts[row, at : at + length] = at
            at += length
            mask[row, at - 1] = 0  # its target is the next document's first token
        mask[row, 16 - PADDING[which] :] = 0
    counted = int(mask.sum()) * replicas
    return replace(made, starts=starts.view(2, 2, 16), loss_mask=mask.view(2, 2, 16), tokens=counted)


def batches_of(settings: dict[str, Any], replica: int, replicas: int) -> Any:
    make = packed if "data__documents" in settings else short if "data__seq_len" in settings else data
    return lambda step: make(step, replica, replicas)


def joined(settings: dict[str, Any], replicas: int) -> Any:
    """All replicas' microbatches for one process, in the order of their places in the step: random keys go by it."""

    def made(step: int) -> Batch:
        parts = [batches_of(settings, replica, replicas)(step) for replica in range(replicas)]
        names = ["inputs", "targets", "loss_mask", *["starts"] * (parts[0].starts is not None)]
        found = {name: torch.stack([getattr(part, name) for part in parts], 1).flatten(0, 1) for name in names}
        return Batch(**found, tokens=parts[0].tokens)

    return made


def held_out(settings: dict[str, Any]) -> Batch:
    if "data__documents" in settings:
        return packed(99)
    return short(99) if "data__seq_len" in settings else batch(99, 2)


def _runs(rank: int, world: int, sizes: dict[str, int], variants: list[dict[str, Any]]) -> list[Any]:
    mesh = Mesh(sizes, rank)
    replica = mesh.coord("samples"), mesh.size("samples")
    return train_each(mesh, SIZES, variants, lambda settings: batches_of(settings, *replica), held_out)


def run(sizes: dict[str, int], variants: list[dict[str, Any]]) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """What each variant told, the same on all ranks, and its logical state."""
    results = run_distributed(_runs, math.prod(sizes.values()), sizes, variants, timeout=400)
    return same_on_all(results), [whole([rank[n][1] for rank in results]) for n in range(len(variants))]


def assert_near_one(told: Any, state: dict[str, torch.Tensor], settings: dict[str, Any], replicas: int = 1) -> None:
    """Float64: as one process with all replicas' microbatches, evaluation too. Control: other data is not near."""
    alone = {**SIZES, **settings, "pipeline__microbatches": 2 * replicas, "optim__zero": 0, "graphs__backend": "eager"}
    one = train(config(**alone), 3, batches=joined(settings, replicas))
    losses, norms, skipped, evaluated = told
    assert losses == pytest.approx(one.losses, rel=1e-12) and norms == pytest.approx(one.norms, rel=1e-12)
    assert evaluated == pytest.approx(one.assembly.evaluator.run(held_out(settings)), rel=1e-12) and not any(skipped)
    expected = one.tensors
    assert state.keys() == expected.keys() and len(state) > 30
    masters = [name for name in expected if name.startswith("master/")]
    worst = max(float((state[name] - expected[name]).abs().max()) for name in masters)
    assert worst < 1e-9
    assert len(set(losses)) == 3 and all(norm > 0 for norm in norms)
    assert abs(evaluated - losses[-1]) > 1e-6, "other data: another loss"


MIXTRAL: dict[str, Any] = {
    **FLOAT64, "model__family": "mixtral", "model__moe__num_experts": 4, "model__moe__aux_loss_coef": 0.01,
    "model__moe__z_loss_coef": 0.001,
}  # fmt: skip
WINDOW: dict[str, Any] = {**FLOAT64, "model__family": "mistral", "model__sliding_window": 5}


def test_two_ranks() -> None:
    """Norms of single heads, dropout and learned positions, documents under a window; under FP8 captured equals eager bit for
    bit, and one process within what a rounding to the next FP8 number does."""
    narrow: dict[str, Any] = {"precision__dtype": "bfloat16"}
    variants = [QWEN3, {**GPT2, **RESET}, {**WINDOW, **RESET}, narrow, {**narrow, **REPLAY}]
    told, states = run({"cp": 2}, variants)
    for number in range(3):
        assert_near_one(told[number], states[number], variants[number])
    assert told[3] == told[4] and differing(states[3], states[4]) == []
    one = train(config(**SIZES, **narrow), 3, batches=joined({}, 1))
    assert told[3][0] == pytest.approx(one.losses, abs=0.02) and told[3][0][0] == pytest.approx(one.losses[0], abs=1e-3)
    scales = [name for name in states[3] if name.startswith("scale/")]
    assert len(scales) == 24 and all(float(states[3][name]) not in (0.0, 1.0) for name in scales)


SHORT: dict[str, Any] = {**QWEN2, "data__seq_len": 4, "data__microbatch_size": 1}


@pytest.mark.long
def test_every_way_of_two_ranks() -> None:
    """Dropout, documents, windows, recompute, rows of one token a chunk, Muon, experts: each as one process in float64. Under
    FP8 eager execution, whole steps captured, recompute and a contract that is off have the same bits."""
    narrow: dict[str, Any] = {"precision__dtype": "bfloat16", "model__dropout": 0.1}
    variants = [
        QWEN2,
        {**QWEN2, **RESET, "model__recompute": "full"},
        {**QWEN3, **RESET, "model__recompute": "selective"},
        GPT2,
        WINDOW,
        SHORT,
        {**QWEN2, "optim__name": "muon"},
        {**MIXTRAL, **RESET},
        narrow,
        {**narrow, **REPLAY, "graphs__scope": "step"},
        {**narrow, **REPLAY, "model__recompute": "full"},
        {**narrow, "model__recompute": "selective", "contract__mode": "off"},
        {**narrow, **RESET},
        {**narrow, **RESET, **REPLAY},
        {**narrow, "precision__fp8__window": "microbatch"},
        {**narrow, "precision__fp8__window": "microbatch", **REPLAY},
        {**narrow, "pipeline__coalesce_w": 2, **REPLAY},
        {**narrow, "precision__fp8__recipe": "current"},
    ]
    told, states = run({"cp": 2}, variants)
    for number in range(8):
        assert_near_one(told[number], states[number], variants[number])
    for first, others in ((8, (9, 10, 11)), (12, (13,)), (14, (15,))):
        for number in others:
            assert told[number] == told[first] and differing(states[number], states[first]) == [], number
    assert told[12] != told[8]
    for number in (14, 16, 17):
        assert told[number][0] == pytest.approx(told[8][0], abs=0.03), number


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes", [{"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp": 2, "cp": 2}, {"ep": 2, "cp": 2}, {"cp": 4}], ids=str
)
def test_four_processes(sizes: dict[str, int]) -> None:
    """With tensor parallelism (tokens cut twice, and not), a pipeline with two chunks a rank, replicas that share the
    optimizer's state or not, and four ranks, of which some have padding alone in a chunk."""
    replicas = sizes.get("dp", 1) * sizes.get("ep", 1)
    more: dict[str, Any] = {}
    if "dp" in sizes:
        more = {"optim__zero": 1}
    elif "pp" in sizes:
        more = {"pipeline__schedule": "interleaved-1f1b", "pipeline__w_delay": 0, "model__num_layers": 4}
    elif "tp" in sizes:
        more = {"parallel__sequence_parallel": False}
    variants = [{**GPT2, **RESET}, QWEN3, {**QWEN3, **more}, {**WINDOW, **RESET}]
    if "ep" in sizes:
        variants = [{**MIXTRAL, **RESET}, {**MIXTRAL, "model__dropout": 0.2}, {**MIXTRAL, **REPLAY}, MIXTRAL]
    if sizes != {"cp": 4}:  # 8 tokens a rank are none for FP8
        like = {"model__family": "mixtral", "model__moe__num_experts": 4} if "ep" in sizes else {}
        variants += [like, {**like, **REPLAY, "graphs__scope": "step"}]
    told, states = run(sizes, variants)
    for number in range(4):
        assert_near_one(told[number], states[number], variants[number], replicas)
    if sizes != {"cp": 4}:
        assert told[4] == told[5] and differing(states[4], states[5]) == []


@pytest.mark.long
def test_losses_by_source(tmp_path: Path) -> None:
    """``train.py`` on blended, packed documents, float32: the losses of one process, of each corpus too, and of held-out data;
    with documents that see each other they are others."""
    for seed, name in enumerate(("a", "b", "c")):
        corpus(tmp_path / name, seed)
    (tmp_path / "tiny.yaml").write_text(CONFIG.replace("data: {seq_len: 16, microbatch_size: 2}", DATA))
    steps = ["train.steps=3", "train.eval_every=3", "train.eval_microbatches=2"]
    more = [*steps, "precision.fp8.recipe=none", "checkpoint.every=0"]
    for name, ranks, layout in (("one", 1, []), ("two", 2, ["parallel.cp=2"]), ("seen", 1, ["data.documents=joined"])):
        code, said = launch(tmp_path / "tiny.yaml", options(tmp_path, name, *more, *layout), ranks, environment()).wait()
        assert code == 0, said

    def told(name: str) -> list[float]:
        rows = [{"loss": m.loss, "held out": m.eval_loss, **m.extra} for m in metrics_of(tmp_path, name)]
        told = [row.get(key) for row in rows for key in ("loss", "loss/a", "loss/b", "held out")]
        return [float(value) for value in told if isinstance(value, float)]

    assert told("two") == pytest.approx(told("one"), rel=1e-6) and len(told("one")) == 3 * 3 + 2  # evaluated twice
    assert told("seen") != pytest.approx(told("one"), rel=1e-5)


# ---- what is wrong has a name ----------------------------------------------------------------------------------------


def _forgotten(rank: int, world: int, captured: bool) -> str:
    """An attention that keeps its part of dk and dv without adding the others'."""
    mesh = Mesh({"cp": 2}, rank)
    mesh.create_groups()

    def alone(cp: ContextParallel, x: torch.Tensor, context: Any, who: str) -> torch.Tensor:
        return x.chunk(cp.size)[cp.rank].clone()

    ContextParallel.scatter_sum = alone  # type: ignore[method-assign]
    with pytest.raises(CollectiveError) as caught:
        train(config(**SIZES, **FLOAT64, **(REPLAY if captured else {}), parallel__cp=2), 1, mesh=mesh, batches=data_of)
    return str(caught.value)


def data_of(step: int) -> Batch:
    return data(step, 0, 1)


def _left_alone(rank: int, world: int) -> str:
    """Rank 1 leaves after two steps."""
    mesh = Mesh({"cp": 2}, rank)
    mesh.create_groups()

    def batches(step: int) -> Batch:
        if rank == 1 and step == 2:
            os._exit(0)
        return data_of(step)

    with pytest.raises(PeerLostError) as caught:
        train(config(**SIZES, **FLOAT64, parallel__cp=2), 4, mesh=mesh, batches=batches)
    return str(caught.value)


@pytest.mark.long
def test_what_goes_wrong_between_ranks_has_a_name() -> None:
    """A sum that is left out, eager at the action's end and captured at its capture; a peer that dies."""
    for captured in (False, True):
        for said in run_distributed(_forgotten, 2, captured, timeout=120):
            assert re.search(r"0I-?\d+ ended without the scatter of 'layers.\d.attention'", said), said
    said = start_distributed(_left_alone, 2, timeout=120).wait(check=False)[0].value
    assert said is not None and "rank 1 was lost during a gather of layers.0.attention over cp" in said, said
