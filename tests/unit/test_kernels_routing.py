"""Where tokens' rows go, as kernels: against the torch reference, bit for bit where all numbers are whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.fp8.grouped import by_group
from qeffect_lm.kernels import routing
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.moe import Routing
from qeffect_lm.parallel import expert
from qeffect_lm.parallel.expert import Dispatch, ExpertParallel
from tests.tiny import same_bits
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401


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
