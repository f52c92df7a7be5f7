"""How much memory a plan needs: slots and buffers, coloured so that their number is the plan's peak.

A resource is held over a span of positions in its rank's list of actions, both ends included. Two
microbatches of a chunk may share a place when their spans do not overlap. Spans on a line form an interval
graph, and giving each, in order of its start, any free one of the places there are uses exactly as many places
as are ever held at once; no colouring uses fewer. It is the lowest free index, but where I-slots and W-slots
would then meet in more pairs than necessary: each pair is a graph, so there :mod:`pipeline.slot_pairs` chooses.

=============  ======================================  =====================================================
resource       held                                    exists for
=============  ======================================  =====================================================
``i_slots``    F (or its first arrival) → I            every microbatch: what only the input gradient reads
``w_slots``    F → W (of its group: see below)         every microbatch: what the weight gradient reads
``inputs``     RECV_F posted → last reader (F)         every microbatch (chunk 0: only while F runs)
``outputs``    F → SEND_F complete                     chunks whose output is sent
``grad_ins``   RECV_B posted → I                       all chunks but the last
``dxs``        I → SEND_B complete                     chunks whose input gradient is sent
=============  ======================================  =====================================================

An engine may keep the buffers at a stage's border inside the I-slot (``Holding.border_in_i_slot``, the
default). Then the slot is reserved as soon as anything may arrive in it: when a receive is posted, or when a
neighbour on the same rank writes it.

Where W of n microbatches is one product (:mod:`pipeline.coalesce`), their operands lie side by side: a group takes n adjacent
W-slots, numbered group · n + position, from F of its first member until W of its last. A group smaller than n takes n as well.

Where neighbouring chunks share a rank, nothing is sent: the producer writes the consumer's input buffer (or
its output gradient) directly, so that buffer is held from the producer on and the producer needs none of its
own.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from pipeline.actions import Action, Kind
from pipeline.coalesce import groups
from pipeline.slot_pairs import few_pairs
from qeffect_lm.errors import UsageError
from qeffect_lm.units import whole_number

Key = tuple[int, int]  # (chunk, microbatch)


class Span(NamedTuple):
    """First and last position, in the rank's list of actions, at which a resource is held."""

    start: int
    end: int


@dataclass(frozen=True)
class Holding:
    """For how long an engine keeps things; the defaults release each at the earliest moment that is safe.

    Args:
        border_in_i_slot: received inputs and gradients land in the I-slot; False: in buffers of their own,
            which an engine then has to copy or to tell its graphs apart by.
        input_until: the last reader of a stage's input buffer: ``F``, or ``I`` or ``W`` if it reads it again.
        i_slot_until: ``I``; or ``W`` for a backend that cannot free the two kinds of saved tensors apart.
        sends_in_flight: how many sends of one chunk and direction may be incomplete while their producer runs
            again. With 1 a buffer's send is waited for before the buffer is written again; with 2 there are
            two buffers in turn.
        spare_slots: a chunk may get more slots of one kind than are ever held, at most as many as of the other
            kind, where that saves pairs of slots, and so graphs and their pools.
    """

    border_in_i_slot: bool = True
    input_until: Kind = Kind.F
    i_slot_until: Kind = Kind.I
    sends_in_flight: int = 1
    spare_slots: bool = False

    def __post_init__(self) -> None:
        if self.input_until not in (Kind.F, Kind.I, Kind.W):
            raise UsageError(f"input_until={self.input_until}: an input is read by F, I or W")
        if self.i_slot_until not in (Kind.I, Kind.W):
            raise UsageError(f"i_slot_until={self.i_slot_until}: an I-slot is held until I or W")
        object.__setattr__(self, "sends_in_flight", whole_number("sends_in_flight", self.sends_in_flight))
        if self.sends_in_flight < 1:
            raise UsageError(f"sends_in_flight={self.sends_in_flight}: at least one")


@dataclass(frozen=True)
class Slots:
    """One resource of one rank: ``index[chunk, microbatch]``, below ``count[chunk]``, held over ``span``."""

    index: Mapping[Key, int]
    span: Mapping[Key, Span]
    count: Mapping[int, int]

    @property
    def peak(self) -> int:
        """The most held at one moment over all chunks of the rank (at most the sum of ``count``)."""
        claims = [(span.start, 1) for span in self.span.values()]
        releases = [(span.end + 1, -1) for span in self.span.values()]
        held = most = 0
        for _, change in sorted(claims + releases):  # at one position releases (−1) come first
            held += change
            most = max(most, held)
        return most


@dataclass(frozen=True)
class SlotPlan:
    """Every resource of one rank; see the module's table."""

    i_slots: Slots
    w_slots: Slots
    inputs: Slots
    outputs: Slots
    grad_ins: Slots
    dxs: Slots


def colour(spans: Mapping[Key, Span]) -> Slots:
    """Give each span, chunk by chunk in order of its start, the lowest index that is free."""
    index: dict[Key, int] = {}
    count: dict[int, int] = {}
    busy: dict[int, list[tuple[int, int]]] = {}  # chunk → heap of (end, index)
    free: dict[int, list[int]] = {}  # chunk → heap of released indices
    for key, span in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        chunk = key[0]
        held, released = busy.setdefault(chunk, []), free.setdefault(chunk, [])
        while held and held[0][0] < span.start:
            heapq.heappush(released, heapq.heappop(held)[1])
        if released:
            place = heapq.heappop(released)
        else:
            place = count.get(chunk, 0)
            count[chunk] = place + 1
        heapq.heappush(held, (span.end, place))
        index[key] = place
    return Slots(MappingProxyType(index), MappingProxyType(dict(spans)), MappingProxyType(dict(sorted(count.items()))))


def _paired(i_slots: Slots, w_slots: Slots, spare: bool) -> tuple[Slots, Slots]:
    """The same spans in slots that meet in as few pairs as can be found; in as many slots, unless ``spare``."""
    i_index, w_index = dict(i_slots.index), dict(w_slots.index)
    keys: dict[int, list[Key]] = {}
    for key in i_index:
        keys.setdefault(key[0], []).append(key)
    for chunk, mine in keys.items():
        first = [i_index[key] for key in mine], [w_index[key] for key in mine]
        counts = i_slots.count[chunk], w_slots.count[chunk]
        spans = [i_slots.span[key] for key in mine], [w_slots.span[key] for key in mine]
        chosen = few_pairs(*spans, first, counts, spare=spare)
        i_index.update(zip(mine, chosen[0], strict=True))
        w_index.update(zip(mine, chosen[1], strict=True))
    return _recoloured(i_slots, i_index), _recoloured(w_slots, w_index)


def _recoloured(slots: Slots, index: dict[Key, int]) -> Slots:
    count = dict.fromkeys(slots.count, 0)
    for (chunk, _), place in index.items():
        count[chunk] = max(count[chunk], place + 1)
    return Slots(MappingProxyType(index), slots.span, MappingProxyType(count))


def _grouped(spans: Mapping[Key, Span], coalesce_w: int) -> Slots:
    """W-slots where ``coalesce_w`` microbatches share a product."""
    members = groups(list(spans), coalesce_w)
    whole = {key: Span(spans[mine[0]].start, spans[mine[-1]].end) for key, mine in members.items()}
    of_groups = colour(whole)
    index, span = {}, {}
    for key, mine in members.items():
        for position, member in enumerate(mine):
            index[member], span[member] = of_groups.index[key] * coalesce_w + position, whole[key]
    count = {chunk: number * coalesce_w for chunk, number in of_groups.count.items()}
    return Slots(MappingProxyType(index), MappingProxyType(span), MappingProxyType(count))


def assign_slots(actions: Sequence[Action], holding: Holding | None = None, coalesce_w: int = 1) -> SlotPlan:
    """Colour the resources of one rank.

    Args:
        actions: the rank's lowered and valid actions, in order.
        holding: how long things are kept; None: the defaults of :class:`Holding`.
        coalesce_w: how many microbatches' W are one product.

    Returns: indices and counts per chunk, the counts being the peaks of the given order (or above, with ``spare_slots``).
    """
    holding = holding or Holding()
    at = _positions(actions)
    ends = _send_ends(actions, holding.sends_in_flight)
    spans: dict[str, dict[Key, Span]] = {name: {} for name in SlotPlan.__dataclass_fields__}
    for kind, chunk, microbatch in at:
        if kind is not Kind.F:
            continue
        key = chunk, microbatch
        forward, input_grad = at[Kind.F, chunk, microbatch], at[Kind.I, chunk, microbatch]
        arrival = at.get((Kind.RECV_F, *key), at.get((Kind.F, chunk - 1, microbatch), forward))
        gradient = at.get((Kind.RECV_B, *key), at.get((Kind.I, chunk + 1, microbatch)))
        reserved = min(arrival, forward if gradient is None else gradient)
        reserved = min(reserved, forward) if holding.border_in_i_slot else forward
        spans["i_slots"][key] = Span(reserved, at[holding.i_slot_until, chunk, microbatch])
        spans["w_slots"][key] = Span(forward, at[Kind.W, chunk, microbatch])
        spans["inputs"][key] = Span(arrival, at[holding.input_until, chunk, microbatch])
        if gradient is not None:
            spans["grad_ins"][key] = Span(gradient, input_grad)
        if (Kind.SEND_F, *key) in ends:
            spans["outputs"][key] = Span(forward, ends[Kind.SEND_F, chunk, microbatch])
        if (Kind.SEND_B, *key) in ends:
            spans["dxs"][key] = Span(input_grad, ends[Kind.SEND_B, chunk, microbatch])
    coloured = {name: colour(resource) for name, resource in spans.items()}
    if coalesce_w > 1:
        # Whole groups leave no choice of W-slots; I-slots chosen to meet known ones gave no plan fewer pairs.
        i_slots, w_slots = coloured["i_slots"], _grouped(spans["w_slots"], coalesce_w)
    else:
        i_slots, w_slots = _paired(coloured["i_slots"], coloured["w_slots"], holding.spare_slots)
    return SlotPlan(**{**coloured, "i_slots": i_slots, "w_slots": w_slots})


def _positions(actions: Sequence[Action]) -> dict[tuple[Kind, int, int], int]:
    """Where each action is; a B counts as I and as W."""
    at: dict[tuple[Kind, int, int], int] = {}
    for position, action in enumerate(actions):
        if action.chunk is not None:
            for kind in (Kind.I, Kind.W) if action.kind is Kind.B else (action.kind,):
                at[kind, *action.key] = position
    return at


def _send_ends(actions: Sequence[Action], in_flight: int) -> dict[tuple[Kind, int, int], int]:
    """Until when each sent buffer is held: the position of the send that finds this one complete."""
    sends: dict[tuple[Kind, int], list[tuple[int, int]]] = {}  # (kind, chunk) → (microbatch, position)s
    for position, action in enumerate(actions):
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            chunk, microbatch = action.key
            sends.setdefault((action.kind, chunk), []).append((microbatch, position))
    ends = {}
    for (kind, chunk), sent in sends.items():
        for place, (microbatch, _) in enumerate(sent):
            last = place + in_flight - 1
            ends[kind, chunk, microbatch] = sent[last][1] if last < len(sent) else len(actions) - 1
    return ends
