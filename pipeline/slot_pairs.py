"""Which I-slot meets which W-slot: colourings in which few distinct pairs occur.

A graph is captured, and with CUDA graphs a memory pool allocated, for every pair (I-slot, W-slot) that some microbatch of a
chunk lies in. How many slots of each kind are needed follows from the spans (:mod:`pipeline.slots`); any free slot keeps those
numbers, and this module chooses among the free ones so that pairs recur.

It cannot always: where each F finds exactly one free slot of either kind, as in the steady state of 1F1B with a late W,
nothing is left to choose, and two cycles of different length meet in as many pairs as their least common multiple. With
*spare* slots there is a choice. If F, I and W keep microbatch order (they do, unless a plan says ``allow_unordered``),
max(i, w) pairs suffice for i I-slots and w W-slots: the kind with more slots goes round in microbatch order, and the other
one goes round with the least number of slots, from its own on, that divides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

WIDTH = 4  # colourings kept from one microbatch to the next
FRESH = 3  # slots of each kind, those in fewest pairs, that a new pair is tried with
WORK = 100_000  # microbatches times slots up to which more than one colouring is kept


class _Span(Protocol):
    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


class _Path(NamedTuple):
    """The pairs chosen so far, last first."""

    before: _Path | None
    i: int
    w: int


@dataclass(frozen=True)
class _State:
    """A colouring up to some microbatch: when each slot is free again, and which pairs have met.

    ``met[i]`` has a bit for each W-slot. ``crowd`` grows with the number of pairs that one slot is in: of two colourings
    with as many pairs the one whose pairs are spread finds more of them free.
    """

    pairs: int
    crowd: int
    i_ends: tuple[int, ...]
    w_ends: tuple[int, ...]
    met: tuple[int, ...]
    path: _Path | None

    def candidates(self, i_start: int, w_start: int) -> tuple[list[tuple[int, int]], bool]:
        """The pairs that the next microbatch may take, and whether they are new: known ones if any is free."""
        i_free = [slot for slot, end in enumerate(self.i_ends) if end < i_start]
        w_free = [slot for slot, end in enumerate(self.w_ends) if end < w_start]
        mask = sum(1 << slot for slot in w_free)
        known = []
        for i in i_free:
            both = self.met[i] & mask
            while both:
                lowest = both & -both
                known.append((i, lowest.bit_length() - 1))
                both ^= lowest
        if known:
            return known, False
        i_free = sorted(i_free, key=lambda i: self.met[i].bit_count())[:FRESH]
        w_free = sorted(w_free, key=self._met_by)[:FRESH]
        return [(i, w) for i in i_free for w in w_free], True

    def _met_by(self, w: int) -> int:
        return sum(bits >> w & 1 for bits in self.met)

    def take(self, i: int, w: int, i_end: int, w_end: int, new: bool) -> _State:
        pairs, crowd, met = self.pairs, self.crowd, self.met
        if new:
            pairs, crowd = pairs + 1, crowd + met[i].bit_count() + self._met_by(w)
            met = (*met[:i], met[i] | 1 << w, *met[i + 1 :])
        i_ends = (*self.i_ends[:i], i_end, *self.i_ends[i + 1 :])
        w_ends = (*self.w_ends[:w], w_end, *self.w_ends[w + 1 :])
        return _State(pairs, crowd, i_ends, w_ends, met, _Path(self.path, i, w))


Indices = tuple[list[int], list[int]]  # the I-slot and the W-slot of each microbatch


def few_pairs(
    i_spans: Sequence[_Span], w_spans: Sequence[_Span], first: Indices, counts: tuple[int, int], *, spare: bool
) -> Indices:
    """A colouring with few pairs of one chunk's I-slots and W-slots.

    Args:
        i_spans, w_spans: when each microbatch holds its slots.
        first: a colouring; returned unless another one has fewer pairs.
        counts: the numbers of I-slots and W-slots that it uses, the least that suffice.
        spare: the result may use more slots of one kind, at most as many as of the other, or as many of both as it takes.

    Returns: the slots of each microbatch. Without ``spare`` they are numbered below ``counts``, and all are used.
    """
    least = max(counts)
    if _number(first) <= least:
        return first
    found = [first]
    order = sorted(range(len(i_spans)), key=lambda place: (i_spans[place].start, w_spans[place].start))
    starts = [w_spans[place].start for place in order]
    if starts == sorted(starts):  # both kinds are claimed in one order
        found.append(_searched(i_spans, w_spans, order, counts))
    if spare and _number(min(found, key=_number)) > least:
        found += _rounds(i_spans, w_spans, order, counts)
    return min(found, key=_number)  # the first of those with fewest


def _number(indices: Indices) -> int:
    return len(set(zip(*indices, strict=True)))


def _searched(i_spans: Sequence[_Span], w_spans: Sequence[_Span], order: Sequence[int], counts: tuple[int, int]) -> Indices:
    """Microbatch by microbatch, with the best few colourings kept; known pairs are preferred."""
    width = WIDTH if len(order) * sum(counts) <= WORK else 1
    states = [_State(0, 0, (-1,) * counts[0], (-1,) * counts[1], (0,) * counts[0], None)]
    for place in order:
        i_span, w_span = i_spans[place], w_spans[place]
        made: dict[tuple[tuple[int, ...], ...], _State] = {}
        for state in states:
            candidates, new = state.candidates(i_span.start, w_span.start)
            for i, w in candidates:
                after = state.take(i, w, i_span.end, w_span.end, new)
                made.setdefault((after.i_ends, after.w_ends, after.met), after)
        states = sorted(made.values(), key=lambda state: (state.pairs, state.crowd))[:width]
    indices = [0] * len(order), [0] * len(order)
    path = states[0].path
    for place in reversed(order):
        assert path is not None
        indices[0][place], indices[1][place], path = path.i, path.w, path.before
    return indices


def _rounds(i_spans: Sequence[_Span], w_spans: Sequence[_Span], order: Sequence[int], counts: tuple[int, int]) -> list[Indices]:
    """Both kinds in turn, the one with fewer slots in a number that divides the other's: the first one that fits, if any."""
    few, many = sorted(counts)
    for number in range(few, many + 1):
        if many % number:
            continue
        sizes = (number, many) if counts[0] <= counts[1] else (many, number)
        if all(_fits(spans, order, size) for spans, size in zip((i_spans, w_spans), sizes, strict=True)):
            turns = sorted(range(len(order)), key=order.__getitem__)  # place → its turn
            return [([turn % sizes[0] for turn in turns], [turn % sizes[1] for turn in turns])]
    return []


def _fits(spans: Sequence[_Span], order: Sequence[int], size: int) -> bool:
    """Whether slots taken in turn are free when their turn comes."""
    return all(spans[before].end < spans[after].start for before, after in zip(order, order[size:], strict=False))
