"""Replicas that share the optimizer's state, as threads of this process: all bits are those of replicas that share nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models.decoder import Decoder
from pipeline.engine import Engine
from pipeline.program import COLLECTIVE, COMPUTE
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.layers.base import named_parameters
from tests.tiny import Batch, batch, config, same_bits, train
from tests.unit.in_process import Ranks

Outcome = tuple[list[Any], dict[str, torch.Tensor], Ranks]
SMALL: dict[str, Any] = {"model__num_layers": 1, "pipeline__microbatches": 2, "pipeline__w_delay": 0}


def data(step: int, rank: int, ranks: int, idle: bool = False) -> Batch:
    """A replica's part; the divisor is the tokens of all. ``idle``: the last replica has none that counts."""
    mine = batch(10 * step + rank, 2)
    mine.tokens *= ranks - idle
    if idle and rank == ranks - 1:
        mine.loss_mask.zero_()
    return mine


def logical(parts: list[Assembly]) -> dict[str, torch.Tensor]:
    """The logical tensors put together from what the replicas list."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for item in part.logical_tensors():
            tensor = item.tensor.view(torch.uint8) if item.tensor.dtype.itemsize == 1 else item.tensor
            whole = found.setdefault(item.name, torch.zeros(item.global_shape, dtype=tensor.dtype))
            whole[tuple(slice(a, a + n) for a, n in zip(item.start, tensor.shape, strict=True))] = tensor
    return found


def run(
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    steps: int = 2,
    spoil: Callable[[Assembly, int], None] | None = None,
    idle: bool = False,
    **settings: Any,
) -> Outcome:
    """Losses, norms and skips of every step on every replica; the final state; the replicas."""
    group = Ranks(config(**{**SMALL, **settings}, parallel__dp=ranks), monkeypatch)
    group.each(lambda part: part.prepare(data(0, part.mesh.coord("dp"), ranks, idle)))
    told: list[Any] = []
    for step in range(steps):

        def one(part: Assembly, step: int = step) -> Any:
            if spoil is not None:
                spoil(part, step)
            result = part.engine.step(step, data(step, part.mesh.coord("dp"), ranks, idle))
            return float(result.loss), float(result.grad_norm), bool(result.skipped)

        told.append(group.each(one))
        assert len(set(map(str, told[-1]))) == 1, "replicas disagree"
    return told, logical(group.parts), group


def assert_same(a: Outcome, b: Outcome) -> None:
    assert str(a[0]) == str(b[0]) and a[1].keys() == b[1].keys()
    assert [name for name in a[1] if not same_bits(a[1][name], b[1][name])] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"precision__dtype": "bfloat16"},
        {"precision__dtype": "bfloat16", "graphs__backend": "host_replay"},
        {"precision__dtype": "bfloat16", "precision__main_grads": "bfloat16"},
        {"graphs__backend": "host_replay", "graphs__scope": "step"},
        {"precision__dtype": "float64", "precision__fp8__recipe": "none"},
    ],
    ids=["bfloat16, fp8", "captured", "bfloat16 sums", "one graph", "float64"],
)
def test_two_replicas_share_without_changing_a_bit(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven buckets of one or two parameters; with two replicas an all-reduce has one order, so zero 0 and 1 must agree."""
    alone = run(2, monkeypatch, **settings, optim__zero=0)
    mib = 0.01 if "precision__main_grads" in settings else 0.02
    shared = run(2, monkeypatch, **settings, optim__zero=1, parallel__bucket_mib=mib)
    assert_same(alone, shared)
    assert all(norm > 0 and not skipped for step in shared[0] for _, norm, skipped in step)
    for part in shared[2].parts:
        assert part.flat.buckets is not None and len(part.flat.buckets.buckets) >= 3
        assert part.flat.moment1_buffer.numel() < 0.7 * part.flat.grad_buffer.numel()
    versions = [set(part.ledger.versions.versions.values()) for part in shared[2].parts]
    assert versions == [{2}, {2}]


def test_three_replicas_share_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are added in order of rank whether the state is shared or not."""
    settings: dict[str, Any] = {"precision__dtype": "bfloat16", "precision__fp8__recipe": "none"}
    alone, shared = (run(3, monkeypatch, **settings, optim__zero=zero, parallel__bucket_mib=0.02) for zero in (0, 1))
    assert_same(alone, shared)


def test_buckets_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three replicas, a bucket for each block or one for everything: the sum's order is that of the ranks."""
    settings: dict[str, Any] = {"precision__dtype": "bfloat16", "optim__zero": 1}
    runs = [run(3, monkeypatch, **settings, parallel__bucket_mib=mib) for mib in (1e-6, 64.0)]
    assert_same(*runs)
    counts = [len(parts[2].parts[0].flat.buckets.buckets) for parts in runs]
    assert counts[0] > 5 and counts[1] == 1


def test_the_order_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gradients whose sum depends on the order: it is ((g0 + g1) + g2)."""
    group = Ranks(config(**SMALL, parallel__dp=3, optim__zero=1, parallel__bucket_mib=0.02), monkeypatch)
    values = (2.0**25, 2.5, -(2.0**25))

    def reduce(part: Assembly) -> None:
        part.flat.grad_buffer.fill_(values[part.mesh.coord("dp")])
        part.engine.end.reduce_gradients_(0)

    group.each(reduce)
    left = [torch.tensor(value) for value in values]
    expected = float((left[0] + left[1]) + left[2])
    others = float(left[0] + (left[1] + left[2])), float((left[2] + left[0]) + left[1])
    assert len({expected, *others}) == 3
    for part in group.parts:
        owned = [part.flat.grad_buffer[span] for span in part.flat.owned(slice(0, part.flat.no_decay_range.stop))]
        assert owned and all(bool((piece == expected).all()) for piece in owned)


def test_what_is_frozen_empty_or_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen parameter keeps its bytes; a replica without a valid token adds zeros; NaN on one skips the step on all."""
    frozen = "layers.0.mlp.down.weight"
    chunk_of = Decoder.chunk

    def freezing(*args: Any, **more: Any) -> Any:
        made = chunk_of(*args, **more)
        for name, parameter in named_parameters(made):
            parameter.requires_grad_(name != frozen)
        return made

    def spoil(part: Assembly, step: int) -> None:
        first, norm = part.mesh.coord("dp") == 0, part.flat.param("layers.0.mlp_norm.weight")
        if step == 1 and first:
            part.kept = norm[0].clone()  # type: ignore[attr-defined]
            norm[0] = float("nan")
        elif step == 2 and first:
            norm[0] = part.kept  # type: ignore[attr-defined]

    monkeypatch.setattr(Decoder, "chunk", freezing)
    settings: dict[str, Any] = {"precision__fp8__recipe": "none", "precision__dtype": "bfloat16", "steps": 3, "idle": True}
    runs = [run(2, monkeypatch, **settings, spoil=spoil, optim__zero=zero, parallel__bucket_mib=0.01) for zero in (0, 1)]
    assert_same(*runs)
    assert [told[0][2] for told in runs[1][0]] == [False, True, False]
    plan = runs[1][2].parts[0].flat.buckets
    assert plan is not None and [bucket.names for bucket in plan.buckets if not bucket.trainable] == [(frozen,)]
    assert f"moment1/{frozen}" not in runs[1][1] and f"master/{frozen}" in runs[1][1]


@pytest.mark.parametrize("zero", [0, 1])
def test_tied_embeddings_of_two_replicas(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """G5 without stages (with: tests/dist/test_tied.py): two replicas of two microbatches are one process with four, in float64
    up to the order of the sums."""
    settings: dict[str, Any] = {"precision__dtype": "float64", "precision__fp8__recipe": "none"}
    settings |= {"model__tie_word_embeddings": True, "parallel__bucket_mib": 0.02}
    told, state, _ = run(2, monkeypatch, **settings, optim__zero=zero)

    def together(step: int) -> Batch:
        parts = [data(step, rank, 2) for rank in range(2)]
        joined = (torch.cat([getattr(part, name) for part in parts]) for name in ("inputs", "targets", "loss_mask"))
        return Batch(*joined, parts[0].tokens)

    one = train(config(**{**SMALL, **settings, "pipeline__microbatches": 4}), 2, batches=together)
    assert [norms for _, norms, _ in (step[0] for step in told)] == pytest.approx(one.norms, rel=1e-12)
    moment = "moment1/embedding.weight"
    torch.testing.assert_close(state[moment], one.tensors[moment], rtol=1e-10, atol=1e-15)


def test_a_graph_that_ends_before_reduce_joins_the_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is outside of the step's graph: its last edge brings the reductions' stream back, which a capture on a GPU
    demands and what follows the graph relies on."""
    body = {"graphs__backend": "host_replay", "graphs__scope": "step", "graphs__optimizer": "outside"}
    ranks = Ranks(config(**SMALL, parallel__dp=2, **body), monkeypatch)
    edges: dict[int, list[tuple[str, str]]] = {0: [], 1: []}
    edge = Engine._edge

    def noted(self: Engine, source: str, target: str) -> None:
        edges[self.mesh.rank].append((source, target))
        edge(self, source, target)

    monkeypatch.setattr(Engine, "_edge", noted)
    ranks.prepare(batch(0, 2))
    assert all(told[-2:] == [(COMPUTE, COLLECTIVE), (COLLECTIVE, COMPUTE)] for told in edges.values())
