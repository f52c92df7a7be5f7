"""Where tokens' rows go, as kernels: against the torch reference, bit for bit where all numbers are whole; the router's
probabilities and gradients against it in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.fp8.grouped import by_group
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.kernels import router as fused
from qeffect_lm.kernels import routing
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.moe import Routing
from qeffect_lm.layers.router import Router, RouterLosses, _backward, _fused_backward, chosen
from qeffect_lm.parallel import expert
from qeffect_lm.parallel.expert import Dispatch, ExpertParallel
from tests.tiny import differing, same_bits
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401
from tests.unit.layer_harness import random
from tests.unit.test_kernels_experts import run


@contextmanager
def launches(alone: int, blocks: int) -> Iterator[None]:
    """From which size on two launches sort, and over how many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "_ALONE", alone)
        patch.setattr(routing, "_BLOCKS", blocks)
        yield


def check_sort(numbers: torch.Tensor, count: int) -> None:
    """All four tensors of the reference, with their dtypes; sorted, and an inverse, in their own right."""
    numbers = numbers.to(DEVICE)
    groups, order, inverse = by_group(numbers, count)
    with reference():
        wanted, wanted_order, wanted_inverse = by_group(numbers, count)
    assert groups.count == count and groups.offsets.dtype is torch.int32
    assert same_bits(groups.offsets, wanted.offsets) and same_bits(groups.of_row, wanted.of_row)
    assert same_bits(order, wanted_order) and same_bits(inverse, wanted_inverse)
    assert torch.equal(numbers[order], groups.of_row) and torch.equal(order[inverse], torch.arange(len(order), device=DEVICE))


NUMBERS = {
    "every": lambda rows, count, made: torch.randint(count, (rows,), generator=made),
    "one": lambda rows, count, made: torch.full((rows,), int(torch.randint(count, (), generator=made))),
    "two": lambda rows, count, made: (torch.rand(rows, generator=made) < 0.1) * (count - 1),
    "rising": lambda rows, count, made: torch.arange(rows) * count // max(rows, 1),
    "falling": lambda rows, count, made: (torch.arange(rows) * count // max(rows, 1)).flip(0),
    "in turn": lambda rows, count, made: torch.arange(rows) % count,
}
"""Of rows: spread, all on one, idle experts between the first and the last, sorted, the other way around, with no two equal
neighbours."""


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_sort(data: st.DataObject) -> None:
    """Any size in one launch, and in two over a few blocks, some of them without rows."""
    count = data.draw(st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 64, 129, 255, 256])))
    rows = data.draw(st.one_of(st.integers(0, 70), st.integers(0, 1200)))
    kind, made = data.draw(st.sampled_from(sorted(NUMBERS))), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    numbers = NUMBERS[kind](rows, count, made).to(torch.int64)
    with launches(data.draw(st.sampled_from([routing._ALONE, 0])), data.draw(st.integers(1, 5))):
        check_sort(numbers, count)


@pytest.mark.parametrize(("rows", "count"), [(4096, 8), (8192, 8), (8193, 8), (5000, 16), (40000, 3), (3000, 256)])
@pytest.mark.parametrize("kind", ["every", "two"])
def test_sorts_of_microbatches(rows: int, count: int, kind: str) -> None:
    """Sizes as they come, on both sides of where a second launch begins."""
    check_sort(NUMBERS[kind](rows, count, torch.Generator().manual_seed(1)).to(torch.int64), count)


def test_what_a_capture_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the launches touch; of many rows also the counts of their blocks, of which there are never many."""
    told: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(routing, "launched", lambda name, *tensors: told.append(tensors))
    for rows, alone in ((4096, True), (40000, False)):
        numbers = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        made = routing.by_group(numbers, 8)
        given_, counts, *others = told.pop()
        assert given_ is numbers and all(a is b for a, b in zip(others, made, strict=True)) and not told
        assert counts is numbers if alone else 64 < counts.shape[0] <= routing._BLOCKS


def test_routing_of_tokens() -> None:
    """As the layer asks: by token and place, of tensors that are not contiguous too."""
    experts = torch.rand(50, 6, generator=torch.Generator().manual_seed(2)).argsort(dim=1).to(DEVICE)
    for numbers in (experts[:, :3].contiguous(), experts[:, :3], experts[:, :1]):
        got = Routing.of(numbers, 6)
        with reference():
            wanted = Routing.of(numbers, 6)
        assert got.rows.shape == numbers.shape
        assert all(same_bits(a, b) for a, b in zip(got.tensors(), wanted.tensors(), strict=True))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("comes", [True, False])
def test_rows_that_travel(static: bool, comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two ranks, of which the other sends what it is sent, or nothing: padding is sorted behind the last group."""
    monkeypatch.setattr(expert, "_all_to_all", lambda made, rows, *splits, group: made.copy_(rows) if comes else made.zero_())
    monkeypatch.setattr(expert, "host_reads", lambda tensor: not static)
    context, ranks = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64)), ExpertParallel(2)
    experts = torch.rand(50, 6, generator=torch.Generator().manual_seed(3)).argsort(dim=1)[:, :3].to(DEVICE)

    def dispatched() -> Dispatch:
        here = Routing.of(experts, 6)
        return ranks.dispatched(experts, here.groups.offsets, here.order, here.rows, context, "moe")

    got = dispatched()
    with reference():
        wanted = dispatched()
    assert all(same_bits(a, b) for a, b in zip(got.tensors(), wanted.tensors(), strict=True)) and got.splits == wanted.splits
    real = int(got.groups.offsets[-1])
    assert got.groups.count == 3 and real == (150 if comes else 0) and bool((got.groups.of_row[real:] == 3).all())
    assert got.groups.of_row.shape[0] == (300 if static else max(real, 1))


# ---- the router ------------------------------------------------------------------------------------------------

UNIT = 2.0**-24  # of a float32's rounding
TINY = torch.finfo(torch.float32).smallest_normal
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-40, -1e-40, 88.0, -200.0, math.inf, -math.inf, math.nan]


def slack(logits: torch.Tensor) -> torch.Tensor:
    """Of each row, ``[tokens, 1]``, a bound of the relative error of what is made of its probabilities.

    An exponential errs by its exponent's rounding, twice (difference, product with log2 e), so by the largest distance of two
    logits, and by its approximation; each of two sums by an addition an expert; quotients and the rest by less than 80.
    """
    spread = logits.amax(dim=1, keepdim=True) - logits.amin(dim=1, keepdim=True)
    return (16 * spread.double() + 4 * logits.shape[1] + 80) * UNIT


def logits_of(tokens: int, experts: int, seed: int = 1) -> torch.Tensor:
    """Some rows spread so far that probabilities are zero, some all equal, some with ties."""
    made = random(tokens, experts, seed=seed, dtype=torch.float32, scale=3.0)
    made[::5] *= 40.0
    made[1::7] = made[1::7].round()
    made[2::11] = -0.25
    return made.to(DEVICE)


SHAPES = pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(70, 8, 2), (1, 8, 1), (64, 5, 3), (33, 6, 6), (9, 64, 4), (7, 200, 8), (130, 1, 1)]
)


@SHAPES
@pytest.mark.parametrize("normalise", [True, False])
def test_choice(tokens: int, experts: int, top_k: int, normalise: bool) -> None:
    logits = logits_of(tokens, experts)
    weights, numbers = chosen(logits, top_k, normalise=normalise)
    with reference():  # of a CPU, where both zeros are equal: torch sorts them apart on a GPU
        _, same = (made.to(DEVICE) for made in chosen(logits.cpu(), top_k, normalise=normalise))
        wanted, wide = (made.to(DEVICE) for made in chosen(logits.cpu().double(), top_k, normalise=normalise))
    assert same_bits(numbers, same) and same_bits(numbers, wide) and weights.dtype is torch.float32
    assert ((weights.double() - wanted).abs() <= slack(logits) * wanted + TINY).all() and wanted.max() > 0.1
    for part in (slice(tokens // 2, None), slice(tokens - 1, None)):  # a token's are the same wherever it lies
        again = chosen(logits[part], top_k, normalise=normalise)
        assert same_bits(again[0], weights[part]) and same_bits(again[1], numbers[part])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # infinity less infinity
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_choice(data: st.DataObject) -> None:
    """Equal logits, both zeros, infinities and NaN: the reference's numbers, and NaN where it has them."""
    experts = data.draw(st.integers(1, 20))
    top_k, tokens = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 9))
    values = data.draw(st.lists(st.sampled_from(SPECIAL), min_size=tokens * experts, max_size=tokens * experts))
    logits = torch.tensor(values).view(tokens, experts).to(DEVICE)
    weights, numbers = chosen(logits, top_k, normalise=True)
    with reference():  # of a CPU, where both zeros are equal: torch sorts them apart on a GPU
        wanted, same = (made.to(DEVICE) for made in chosen(logits.cpu(), top_k, normalise=True))
    assert same_bits(numbers, same) and torch.equal(weights.isnan(), wanted.isnan())
    good = ~wanted.isnan()
    bound = (2 * 16 * 300 + 8 * experts + 160) * UNIT  # slack of both: no two finite logits are farther apart
    assert ((weights - wanted).abs() <= bound * wanted + TINY)[good].all()


def router_of(experts: int, top_k: int, normalise: bool, statistics: torch.Tensor | None) -> Router:
    losses = RouterLosses(balance=0.7, z=0.3, layers=2)
    router = Router("router", 8, experts, top_k, normalise=normalise, losses=losses)
    router.statistics = statistics
    return router


def step(mask: torch.Tensor | None, divisor: torch.Tensor | None, beta: int = 0) -> LayerContext:
    scope: Any = SimpleNamespace(beta=beta, collective=lambda name: None)
    return LayerContext(Phase.TRAIN, torch.zeros((), dtype=torch.int64), scope, loss_mask=mask, divisor=divisor)


def gradient_bound(logits: torch.Tensor, numbers: torch.Tensor, d_weights: torch.Tensor, normalise: bool) -> torch.Tensor:
    """What errors of the gradient are relative to: its terms' magnitudes; coefficients as in :func:`router_of`, parts of 1."""
    p = torch.softmax(logits.double(), dim=1)
    best, size = p.gather(1, numbers), torch.logsumexp(logits.double(), dim=1, keepdim=True)
    total = best.sum(dim=1, keepdim=True) if normalise else torch.ones_like(best[:, :1])
    of_best = d_weights.double().abs()
    if normalise:
        of_best = (of_best + (of_best * best).sum(dim=1, keepdim=True) / total) / total
    grads = torch.zeros_like(p).scatter(1, numbers, of_best) + 0.35 * logits.shape[1]
    return p * (grads + (grads * p).sum(dim=1, keepdim=True)) + 0.3 * (size.abs() + logits.abs().amax(1, True) + 1) * p


@SHAPES
@pytest.mark.parametrize(("normalise", "masked", "beta"), [(True, True, 0), (False, False, 1), (True, None, 0)])
def test_way_back(tokens: int, experts: int, top_k: int, normalise: bool, masked: bool | None, beta: int) -> None:
    """With both losses, over valid tokens and in runs of a few tiles; without, where nobody trains (``masked`` None)."""
    logits, d_weights = logits_of(tokens, experts), random(tokens, top_k, seed=2, dtype=torch.float32).to(DEVICE)
    numbers = chosen(logits, top_k, normalise=normalise)[1]
    mask = (torch.arange(tokens) % 3 != 1).float().view(1, -1).to(DEVICE) if masked else None
    divisor = None if masked is None else torch.tensor(2.5 * tokens, device=DEVICE)
    before = torch.full((2 + experts,), 0.5 if beta else math.nan, dtype=torch.float64, device=DEVICE)
    statistics = [before.clone() for _ in range(3)]
    made = []
    for number, (work, wide) in enumerate(((_fused_backward, False), (_backward, False), (_backward, True))):
        router = router_of(experts, top_k, normalise, statistics[number])
        tensors = [tensor.double() if wide else tensor for tensor in (logits, d_weights)]
        made.append(work(router, step(mask, divisor, beta), tensors[0], numbers, tensors[1]))
    error, bound = (made[0].double() - made[2]).abs(), gradient_bound(logits, numbers, d_weights, normalise)
    assert made[0].dtype is torch.float32 and (error <= 4 * slack(logits) * bound + TINY).all()
    assert top_k == 1 or made[2].abs().max() > 1e-3, "one weight alone, divided by itself, has no gradient"
    if masked is None:
        assert all(same_bits(found, before) for found in statistics)
        return
    assert same_bits(statistics[0][2:], statistics[1][2:]), "counts are whole numbers"
    counted = statistics[2] - before if beta else statistics[2]
    sizes = (torch.logsumexp(logits.double(), 1).abs() + logits.double().abs().amax(1) + 1).square() / 2.5 / tokens
    bounds = (slack(logits).max() + tokens * UNIT) * torch.stack([counted[0], 4 * sizes.sum()])
    assert ((statistics[0] - statistics[2])[:2].abs() <= bounds).all() and (counted[:2] > 0).all()


def test_sums_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tiles a program, the last in part or beyond the end, one run without tokens' rest; the same bits twice."""
    logits, divisor = logits_of(700, 8), torch.tensor(1400.0, device=DEVICE, dtype=torch.float64)
    numbers = chosen(logits, 2, normalise=True)[1]
    mask = (torch.arange(700) % 4 != 0).float().to(DEVICE)
    p, size = torch.softmax(logits.double(), 1), torch.logsumexp(logits.double(), 1)
    hits = (numbers[..., None] == torch.arange(8, device=DEVICE)).any(1).double() * mask.double()[:, None]
    part = mask.double() / 1400
    mean, z = (p * part[:, None]).sum(0), (size.square() * part).sum()
    for runs in (1, 3, 5, 128):
        monkeypatch.setattr(fused, "_RUNS", runs)
        got = fused.sums(logits, numbers, mask, divisor)
        assert got[0] == mask.sum() and torch.equal(got[1:9].double(), hits.sum(0))
        bound = (slack(logits).max() + 700 * UNIT) * torch.cat([mean, z[None] * 4])
        assert ((got[9:].double() - torch.cat([mean, z[None]])).abs() <= bound).all()
        assert same_bits(got, fused.sums(logits, numbers, mask, divisor))


def test_tokens_on_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The balance loss takes all ranks' counts; the statistics are this rank's part."""
    others = torch.tensor([31.0, 9.0, 8.0, 7.0, 6.0, 32.0], device=DEVICE)
    monkeypatch.setattr(expert, "_all_reduce", lambda values, group: values.add_(others.to(values.dtype)))
    logits, d_weights = logits_of(20, 5), torch.zeros(20, 2, device=DEVICE)
    numbers, divisor = chosen(logits, 2, normalise=True)[1], torch.tensor(51.0, device=DEVICE)
    found, statistics = [], [torch.zeros(7, dtype=torch.float64, device=DEVICE) for _ in range(3)]
    for number, parallel in enumerate((ExpertParallel(1, cut=2), ExpertParallel(1, cut=2), None)):
        router = router_of(5, 2, True, statistics[number])
        router.parallel = parallel
        tensors = [logits, d_weights] if number != 1 else [logits.double(), d_weights.double()]
        work = _backward if number == 1 else _fused_backward
        found.append(work(router, step(None, divisor), tensors[0], numbers, tensors[1]))
    error, bound = (found[0].double() - found[1]).abs(), gradient_bound(logits, numbers, d_weights, True)
    assert (error <= 4 * slack(logits) * bound + TINY).all() and (found[0] - found[2]).abs().max() > 1e-4
    assert same_bits(statistics[0][2:], statistics[2][2:]) and statistics[0][0] != statistics[2][0]
    assert ((statistics[0] - statistics[1])[0].abs() <= (slack(logits).max() + 20 * UNIT) * statistics[1][0]).all()


def test_padding_alone_has_no_losses() -> None:
    logits, d_weights = logits_of(20, 8), torch.zeros(20, 2, device=DEVICE)
    numbers, statistics = chosen(logits, 2, normalise=True)[1], torch.full((10,), math.nan, dtype=torch.float64, device=DEVICE)
    context = step(torch.zeros(4, 5, device=DEVICE), torch.tensor(100.0, device=DEVICE))
    made = _fused_backward(router_of(8, 2, True, statistics), context, logits, numbers, d_weights)
    assert not made.any() and not statistics.any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_token_that_is_no_number_stays_alone() -> None:
    """Its gradient is NaN, the other tokens' are theirs, where no loss connects them."""
    logits, d_weights = logits_of(20, 8), random(20, 2, seed=2, dtype=torch.float32).to(DEVICE)
    router = router_of(8, 2, True, None)
    want = _fused_backward(router, step(None, None), logits, chosen(logits, 2, normalise=True)[1], d_weights)
    logits[7, 3] = math.nan
    weights, numbers = chosen(logits, 2, normalise=True)
    got = _fused_backward(router, step(None, None), logits, numbers, d_weights)
    others = torch.arange(20, device=DEVICE) != 7
    assert numbers[7, 0] == 3 and weights[7].isnan().all() and not weights[others].isnan().any()
    assert got[7].isnan().all() and same_bits(got[others], want[others])


# ---- the layer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [DelayedScaling, None])
def test_layer(recipe: type[DelayedScaling] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all of these kernels; sorted by torch its rows give the same bits."""
    names: list[str] = []
    for module in (routing, fused):
        monkeypatch.setattr(module, "launched", lambda name, *arguments: names.append(name))
    want = run(recipe and recipe())
    passes = 4  # calibration, evaluation, two microbatches of a step
    assert names.count("by_group") == names.count("router") == passes
    assert names.count("router_sums") == names.count("router_backward") == passes - 1, "nothing goes back in evaluation"

    def by_torch(numbers: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        with reference():
            groups, order, inverse = by_group(numbers, count)
        return groups.offsets, groups.of_row, order, inverse

    monkeypatch.setattr(routing, "by_group", by_torch)
    assert differing(run(recipe and recipe()), want) == [] and names.count("by_group") == passes
