"""The bucket plan: slices of the flat storage, cut at block edges, shared evenly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from qeffect_lm.optim.buckets import Span, boxes, plan_buckets


def spans_of(*sizes: int, frozen: int = 0, align: int = 8) -> tuple[list[Span], tuple[int, int]]:
    """Parameters one after the other, the last ``frozen`` of them frozen."""
    spans, at, trainable_end = [], 0, 0
    for number, size in enumerate(sizes):
        trainable = number < len(sizes) - frozen
        spans.append(Span(f"p{number}", at, size, trainable))
        at += -(-size // align) * align
        if trainable:
            trainable_end = at
    return spans, (trainable_end, at)


@pytest.mark.parametrize("seed", range(20))
def test_buckets_and_pieces_tile_the_storage_at_block_edges(seed: int) -> None:
    """Uneven buckets, parameters of all sizes, some frozen: each element once, no cut inside of a block, balanced shares."""
    rng = random.Random(seed)
    sizes = [rng.choice([1, 5, 16, 40, 64, 200]) for _ in range(rng.randint(1, 12))]
    frozen, ranks, limit = rng.randint(0, min(2, len(sizes) - 1)), rng.randint(1, 5), rng.choice([1, 40, 100, 10_000])
    spans, ends = spans_of(*sizes, frozen=frozen)
    plan = plan_buckets(spans, ends, ranks, limit, block=16)
    edges = {span.offset + start for span in spans for start in range(0, span.numel, 16)} | set(ends)
    at = 0
    for bucket in plan.buckets:
        assert bucket.start == at and set(bucket.cuts) <= edges and list(bucket.cuts) == sorted(bucket.cuts)
        assert bucket.trainable == (bucket.stop <= ends[0])
        inside = [span.name for span in spans if span.offset < bucket.stop and span.offset + span.numel > bucket.start]
        assert list(bucket.names) == inside
        blocks = sorted(edge for edge in edges if bucket.start <= edge < bucket.stop)
        assert bucket.stop - bucket.start <= limit or len(blocks) == 1
        at = bucket.stop
    assert at == ends[1]
    owned = sorted(piece for rank in range(ranks) for piece in plan.shard(rank))
    assert owned[0][0] == 0 and owned[-1][1] == ends[1]
    assert all(before[1] == after[0] for before, after in zip(owned, owned[1:], strict=False))
    assert sum(plan.owned(rank) for rank in range(ranks)) == ends[1]
    assert max(plan.owned(rank) for rank in range(ranks)) - min(plan.owned(rank) for rank in range(ranks)) <= 2 * 16 * ranks


def test_single_blocks_take_turns() -> None:
    """Buckets of one block each go to whoever owns least, not all to the first rank."""
    spans, ends = spans_of(16, 16, 16, 16, 16, 16)
    plan = plan_buckets(spans, ends, 3, 1, block=16)
    assert len(plan.buckets) == 6 and [plan.owned(rank) for rank in range(3)] == [32, 32, 32]


def test_cuts_are_the_nearest_edges() -> None:
    """A third of 64 elements is nearest to 16, two thirds to 48."""
    assert plan_buckets(*spans_of(64), 3, 100, block=16).buckets[0].cuts == (0, 16, 48, 64)


def test_one_block_lies_on_one_rank() -> None:
    """A stage that has a single block: one replica owns everything, the others nothing."""
    plan = plan_buckets(*spans_of(10), 4, 100, block=16)
    assert [len(plan.shard(rank)) for rank in range(4)].count(0) == 3
    assert plan_buckets([], (0, 0), 2, 10).buckets == ()


def test_the_table_shows_every_cut() -> None:
    spans, ends = spans_of(40, 5, 7, frozen=1)
    plan = plan_buckets(spans, ends, 2, 1000, block=16)
    lines = plan.table().splitlines()
    assert "dp 0 from" in lines[0] and "dp 1 from" in lines[0] and len(lines) == 1 + len(plan.buckets) + 1
    assert "p0 … p1" in lines[1] and f"{plan.buckets[0].cuts[1]:,}" in lines[1] and "p2 (frozen)" in lines[2]


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (3, 4, 5), (1, 9), (9, 1)])
def test_boxes_are_the_range_in_order(shape: tuple[int, ...]) -> None:
    """Every range of every shape: the boxes, flattened one after the other, are the range."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for start in range(numbers.numel()):
        for stop in range(start + 1, numbers.numel() + 1):
            found = boxes(shape, start, stop)
            assert len(found) <= max(1, 2 * len(shape) - 1)
            parts = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].reshape(-1) for box in found]
            assert torch.cat(parts).tolist() == list(range(start, stop))
    assert boxes(shape, 2, 2) == []


def test_wrong_numbers() -> None:
    with pytest.raises(ValueError, match="positive"):
        plan_buckets([], (0, 0), 0, 10)


@pytest.mark.parametrize("seed", range(5))
def test_a_bucket_holds_one_group(seed: int) -> None:
    """Parameters of two pipeline chunks never share a bucket, so that each chunk's can be reduced by itself; the rest holds."""
    rng = random.Random(seed)
    spans, ends = spans_of(*(rng.choice([5, 16, 40, 64]) for _ in range(9)), frozen=1)
    groups = [0, 0, 1, 1, 2, 0, 0, 1, 2]
    spans = [replace(span, group=group) for span, group in zip(spans, groups, strict=True)]
    plan = plan_buckets(spans, ends, 2, 80, block=16)
    assert plan.buckets[0].start == 0 and plan.buckets[-1].stop == ends[1]
    assert all(a.stop == b.start for a, b in zip(plan.buckets, plan.buckets[1:], strict=False))
    of = {span.name: span.group for span in spans}
    for bucket in plan.buckets:
        assert {of[name] for name in bucket.names} == {bucket.group}
