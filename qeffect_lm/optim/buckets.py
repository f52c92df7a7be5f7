"""Buckets and shards of the flat storage: what is reduced at once, and which replica owns what (ZeRO stage 1).

The flat buffers are cut into *buckets*, contiguous ranges, and each bucket into one *piece* per data-parallel rank, in order of
rank. A rank's pieces together are its *shard*: it alone holds their masters and moments and updates them (Rajbhandari et al.
2020, "ZeRO", arXiv:1910.02054, stage 1). All cuts lie at block edges: where a parameter begins, or a multiple of 65,536
elements into it. A block of the gradient norm (:mod:`qeffect_lm.optim.norm`) is therefore always whole on one rank, and the
padding behind a parameter belongs to its last block.

Everything here is arithmetic on offsets, the same on all ranks; nothing is exchanged to agree on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

BLOCK = 65_536
"""Elements per block of the norm, and the grain of buckets and shards. A change changes the norm, and so all results."""


@dataclass(frozen=True)
class Span:
    """One parameter in the flat storage: ``offset`` and ``numel`` in elements; ``group``: what completes its gradient (a
    pipeline chunk). A bucket holds parameters of one group."""

    name: str
    offset: int
    numel: int
    trainable: bool
    group: int = 0


@dataclass(frozen=True)
class Bucket:
    """One bucket. ``cuts`` has an element offset more than there are ranks: rank r owns ``[cuts[r], cuts[r + 1])``, perhaps
    nothing. ``names`` are the parameters that lie in it, whole or in part; a frozen bucket is not ``trainable`` and is never
    reduced."""

    cuts: tuple[int, ...]
    names: tuple[str, ...]
    trainable: bool
    group: int = 0

    @property
    def start(self) -> int:
        return self.cuts[0]

    @property
    def stop(self) -> int:
        return self.cuts[-1]

    @property
    def sizes(self) -> list[int]:
        """Elements of each rank's piece."""
        return [stop - start for start, stop in pairwise(self.cuts)]

    def piece(self, rank: int) -> tuple[int, int]:
        """First and last-plus-one element of a rank's piece."""
        return self.cuts[rank], self.cuts[rank + 1]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one pipeline stage's storage in order of offset, for ``ranks`` replicas."""

    buckets: tuple[Bucket, ...]
    ranks: int

    def shard(self, rank: int) -> list[tuple[int, int]]:
        """The ranges that a rank owns, ascending; neighbours are joined."""
        ranges: list[tuple[int, int]] = []
        for bucket in self.buckets:
            start, stop = bucket.piece(rank)
            if start == stop:
                continue
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        return ranges

    def owned(self, rank: int, *, trainable: bool = False) -> int:
        """Elements of a rank's shard, padding included; ``trainable``: without frozen parameters."""
        return sum(bucket.sizes[rank] for bucket in self.buckets if bucket.trainable or not trainable)

    def table(self, itemsize: int = 4) -> str:
        """The offsets as text: per bucket its range, bytes of main gradient, each rank's first element, its parameters."""
        numbers = [["bucket", "first", "end", "bytes", *(f"dp {rank} from" for rank in range(self.ranks))]]
        texts = ["parameters"]
        for index, bucket in enumerate(self.buckets):
            size = bucket.stop - bucket.start
            row = [bucket.start, bucket.stop, size * itemsize if bucket.trainable else 0, *bucket.cuts[:-1]]
            numbers.append([str(index), *(f"{number:,}" for number in row)])
            first, last = bucket.names[0], bucket.names[-1]
            texts.append((first if first == last else f"{first} … {last}") + ("" if bucket.trainable else " (frozen)"))
        widths = [max(map(len, column)) for column in zip(*numbers, strict=True)]
        lines = [
            "  ".join([*(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)), text])
            for row, text in zip(numbers, texts, strict=True)
        ]
        shares = ", ".join(f"dp {rank} {self.owned(rank):,}" for rank in range(self.ranks))
        return "\n".join([*lines, f"elements of masters per replica: {shares}"])


def plan_buckets(spans: Sequence[Span], ends: tuple[int, int], ranks: int, limit: int, block: int = BLOCK) -> BucketPlan:
    """Cut a flat storage into buckets and shards.

    Args:
        spans: all parameters in order of offset, the frozen ones last.
        ends: where the trainable part ends, and the frozen one.
        ranks: replicas that share.
        limit: most elements of a bucket; a block that is longer is a bucket of its own.
        block: elements between two edges inside of a parameter.

    Raises:
        ValueError: a number that is not positive.
    """
    if min(ranks, limit, block) < 1:
        raise ValueError(f"ranks {ranks}, limit {limit} and block {block} must be positive")
    loads = [0] * ranks
    buckets: list[Bucket] = []
    for trainable, end in ((True, ends[0]), (False, ends[1])):
        mine = [span for span in spans if span.trainable == trainable]
        for group, stop in _groups(mine, end):
            blocks = [edge for span in group for edge in _edges(span, block)]
            for run, run_stop in _runs(blocks, stop, limit):
                edges = [*(edge for edge, _ in run), run_stop]
                cuts = _cut(edges, loads)
                loads = [load + after - before for load, before, after in zip(loads, cuts, cuts[1:], strict=False)]
                buckets.append(Bucket(tuple(cuts), tuple(dict.fromkeys(name for _, name in run)), trainable, group[0].group))
    return BucketPlan(tuple(buckets), ranks)


def _groups(spans: Sequence[Span], end: int) -> Iterator[tuple[list[Span], int]]:
    """Neighbours of one group, and where they stop."""
    runs = [list(run) for _, run in groupby(spans, key=lambda span: span.group)]
    stops = [*(run[0].offset for run in runs[1:]), end]
    yield from zip(runs, stops, strict=False)  # no spans: one stop too many


def _edges(span: Span, block: int) -> Iterator[tuple[int, str]]:
    """Where the parameter's blocks begin."""
    for start in range(0, span.numel, block):
        yield span.offset + start, span.name


def _runs(blocks: Sequence[tuple[int, str]], end: int, limit: int) -> Iterator[tuple[list[tuple[int, str]], int]]:
    """Blocks of one bucket each, and where it stops: as many as fit, in order."""
    run: list[tuple[int, str]] = []
    stops = [*(edge for edge, _ in blocks[1:]), end]
    for block, stop in zip(blocks, stops, strict=False):  # no blocks: one stop too many
        if run and stop - run[0][0] > limit:
            yield run, block[0]
            run = []
        run.append(block)
    if run:
        yield run, end


def _cut(edges: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Each rank's first element, and the end: the edges nearest to what evens out all that the ranks own so far."""
    size = edges[-1] - edges[0]
    even = -(-(sum(loads) + size) // len(loads))
    wanted = [max(0, even - load) for load in loads]
    cuts, share = [edges[0]], 0
    for want in wanted[:-1]:
        share += want
        target = edges[0] + size * share // sum(wanted)
        place = bisect_left(edges, target)
        if place and target - edges[place - 1] < edges[place] - target:
            place -= 1
        cuts.append(max(cuts[-1], edges[place]))
    return [*cuts, edges[-1]]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements ``[start, stop)`` of a row-major tensor as blocks of it: (first index, extent) of each, in order.

    At most ``2 * dimensions - 1`` of them: the end of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,)) if shape else ((), ())]
    inner = 1
    for size in shape[1:]:
        inner *= size
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def part_of(row: int, first: int, last: int) -> None:
        found.extend(((row, *at), (1, *extent)) for at, extent in boxes(shape[1:], first, last))

    row, at = divmod(start, inner)
    if at:
        part_of(row, at, min(inner, at + stop - start))
        row += 1
    rows = max(0, stop // inner - row)
    if rows:
        found.append(((row, *(0 for _ in shape[1:])), (rows, *shape[1:])))
        row += rows
    if row * inner < stop:
        part_of(row, 0, stop - row * inner)
    return found
