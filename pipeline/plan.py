"""A plan: what every rank does in one optimizer step, in which memory, with which graphs.

:func:`build_plan` generates a schedule, lowers and validates it. A :class:`Plan` has one canonical text; its
fingerprint is stored in checkpoints, and a run that resumes must have the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from pipeline.actions import Action, Kind, format_actions, parse_actions, place_of
from pipeline.coalesce import check_size, members_of, together
from pipeline.lower import lower
from pipeline.schedules import Placement, find_schedule
from pipeline.slots import Holding, SlotPlan, Slots, assign_slots
from pipeline.validate import WINDOWS, validate
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.contract.leases import Joint
from qeffect_lm.errors import UsageError, shown
from qeffect_lm.units import whole_number

__all__ = [
    "GraphKey",
    "Holding",
    "Plan",
    "SlotPlan",
    "Slots",
    "assign_slots",
    "build_plan",
    "make_plan",
    "peak_bytes",
]

FORMAT = 1


class GraphKey(NamedTuple):
    """What a graph is captured for. ``beta``: None for F; else 0 for a gradient's first writer, 1 after. ``joint``: of a W that
    multiplies the operands of several microbatches."""

    kind: Kind
    chunk: int
    i_slot: int
    w_slot: int
    beta: int | None
    joint: Joint | None = None


@dataclass(frozen=True)
class Plan:
    """One optimizer step of all ranks. Make it with :func:`build_plan` or :func:`make_plan`, which validate.

    Args:
        schedule: its name, for people.
        placement: which rank holds which chunk.
        microbatches: per optimizer step.
        window: ``"step"`` or ``"microbatch"``.
        actions: per rank, in order, lowered.
        allow_unordered: the plan declares that F, I and W of a chunk may leave microbatch order.
        holding: how long buffers are kept; the slots follow from it.
        coalesce_w: how many microbatches' W of one weight are one product (:mod:`pipeline.coalesce`).

    Raises: PlanError for a B that writes only one of its two kinds of gradients first.
    """

    schedule: str
    placement: Placement
    microbatches: int
    window: str
    actions: tuple[tuple[Action, ...], ...]
    allow_unordered: bool = False
    holding: Holding = Holding()
    coalesce_w: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(tuple(row) for row in self.actions))
        for row in self.actions:
            if any(action.kind is Kind.B for action in row):
                _betas(row)

    @cached_property
    def slots(self) -> tuple[SlotPlan, ...]:
        """The colouring of each rank's slots and buffers; made when it is first asked for, as drawing a plan needs none."""
        return tuple(assign_slots(row, self.holding, self.coalesce_w) for row in self.actions)

    @cached_property
    def _graphs(self) -> Mapping[Action, GraphKey]:
        graphs: dict[Action, GraphKey] = {}
        for row, slots in zip(self.actions, self.slots, strict=True):
            graphs.update(self._graphs_of(row, slots))
        return MappingProxyType(graphs)

    def _graphs_of(self, row: Sequence[Action], slots: SlotPlan) -> dict[Action, GraphKey]:
        i_index, w_index = slots.i_slots.index, slots.w_slots.index
        graphs = {}
        for action, beta in _betas(row).items():
            joint = self.joint(action)
            if joint is not None and not joint.members:
                joint = None
            graphs[action] = GraphKey(action.kind, action.key[0], i_index[action.key], w_index[action.key], beta, joint)
        return graphs

    def joint(self, action: Action) -> Joint | None:
        """What F, I or W does for the product of several microbatches; None where each W is a product of its own."""
        if self.coalesce_w == 1:
            return None
        members = 0
        if action.kind is Kind.W:
            members = members_of(action.key[1], self.coalesce_w, self.microbatches)
        return Joint(members, int(action.key[1] >= self.coalesce_w)) if members else Joint()

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    def graph_key(self, action: Action) -> GraphKey:
        """The graph that runs this F, I, W or B."""
        return self._graphs[action]

    def graph_keys(self, rank: int) -> list[GraphKey]:
        """The distinct graphs a rank captures, in the order of their first use."""
        return list(dict.fromkeys(self._graphs[action] for action in self.actions[rank] if action.is_compute))

    def peak_leases(self, rank: int) -> tuple[int, int]:
        """The most (I-slots, W-slots) that a rank holds at one moment, over all its chunks."""
        return self.slots[rank].i_slots.peak, self.slots[rank].w_slots.peak

    def validate(self) -> None:
        """Raises PlanError unless the plan keeps every rule of :mod:`pipeline.validate`."""
        validate(
            self.actions,
            self.placement,
            self.microbatches,
            lowered=True,
            allow_unordered=self.allow_unordered,
            window=self.window,
            coalesce_w=self.coalesce_w,
        )

    def text(self) -> str:
        """The canonical text: a plan's fields, one a line, and one line per rank."""
        holding = self.holding
        lines = [
            f"plan {FORMAT}",
            f"schedule {self.schedule}",
            f"placement {' '.join(map(str, self.placement.ranks))}",
            f"microbatches {self.microbatches}",
            f"window {self.window}",
            f"unordered {'yes' if self.allow_unordered else 'no'}",
            f"holding {_holding_text(holding)}",
            *([f"coalesce_w {self.coalesce_w}"] if self.coalesce_w > 1 else []),  # absent: as before it existed
            *(f"rank {rank}: {format_actions(row)}" for rank, row in enumerate(self.actions)),
        ]
        return "\n".join(lines) + "\n"

    def fingerprint(self) -> str:
        """SHA-256 of :meth:`text`, 64 hexadecimal digits."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def to_json(self) -> str:
        """The whole plan, for a checkpoint. Slots are not stored: they follow from the actions."""
        document = {
            "format": FORMAT,
            "schedule": self.schedule,
            "placement": list(self.placement.ranks),
            "microbatches": self.microbatches,
            "window": self.window,
            "allow_unordered": self.allow_unordered,
            "holding": {
                "border_in_i_slot": self.holding.border_in_i_slot,
                "input_until": str(self.holding.input_until),
                "i_slot_until": str(self.holding.i_slot_until),
                "sends_in_flight": self.holding.sends_in_flight,
                **({"spare_slots": True} if self.holding.spare_slots else {}),  # absent: as before it existed
            },
            **({"coalesce_w": self.coalesce_w} if self.coalesce_w > 1 else {}),
            "actions": [format_actions(row) for row in self.actions],
            "fingerprint": self.fingerprint(),
        }
        return json.dumps(document, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of :meth:`to_json`.

        Raises:
            PlanError: not a plan, a newer format, a text that its fingerprint does not fit, or a plan that
                breaks a rule.
        """
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise PlanError(f"a plan of format {shown(str(document['format']))}; this version reads format {FORMAT}")
            kept = document["holding"]
            holding = Holding(
                kept["border_in_i_slot"],
                Kind(kept["input_until"]),
                Kind(kept["i_slot_until"]),
                kept["sends_in_flight"],
                kept.get("spare_slots", False),
            )
            actions = tuple(tuple(parse_actions(row)) for row in document["actions"])
            placement = Placement(tuple(document["placement"]))
            microbatches, window = document["microbatches"], document["window"]
            unordered, stored = document["allow_unordered"], document["fingerprint"]
            joined = check_size(document.get("coalesce_w", 1), microbatches)
            _check_coalescing(joined, window, unordered, holding)
            about = {"allow_unordered": unordered, "window": window, "coalesce_w": joined}
            validate(actions, placement, microbatches, lowered=True, **about)
            plan = cls(document["schedule"], placement, microbatches, window, actions, unordered, holding, joined)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise PlanError(f"not a stored plan: {type(error).__name__}: {shown(str(error))}") from error
        if stored != plan.fingerprint():
            raise PlanError(
                f"the stored plan was changed: stored fingerprint {shown(str(stored))}, actual {plan.fingerprint()}"
            )
        return plan


def _holding_text(holding: Holding) -> str:
    border = "slot" if holding.border_in_i_slot else "buffers"
    spare = " spare" if holding.spare_slots else ""
    return f"{border} {holding.input_until} {holding.i_slot_until} {holding.sends_in_flight}{spare}"


def _betas(row: Sequence[Action]) -> dict[Action, int | None]:
    """Of each compute action of a rank: None for F; else 0 for a gradient's first writer, 1 after."""
    parts = {Kind.F: (), Kind.I: (Kind.I,), Kind.W: (Kind.W,), Kind.B: (Kind.I, Kind.W)}
    first: dict[tuple[Kind, int], int] = {}  # (I or W, chunk) → the microbatch that writes first
    betas: dict[Action, int | None] = {}
    for action in row:
        kinds = parts.get(action.kind)
        if kinds is None:
            continue
        chunk, microbatch = place_of(action)
        found = {int(first.setdefault((kind, chunk), microbatch) != microbatch) for kind in kinds}
        if len(found) > 1:
            raise PlanError("B is the first writer of only one of its two kinds of gradients", action=str(action))
        betas[action] = found.pop() if found else None
    return betas


def _check_coalescing(coalesce_w: int, window: str, allow_unordered: bool, holding: Holding) -> None:
    """What cannot be together with W of several microbatches as one product."""
    if coalesce_w == 1:
        return
    wrong = {
        "window 'microbatch', in which each microbatch has scales of its own": window != "step",
        "a plan that leaves microbatch order": allow_unordered,
        "spare slots": holding.spare_slots,
        "I-slots that are held until W": holding.i_slot_until is not Kind.I,
    }
    for what, found in wrong.items():
        if found:
            raise UsageError(f"coalesce_w={coalesce_w} does not go with {what}: leave it at 1")


def make_plan(
    name: str,
    compute: Sequence[Sequence[Action]],
    placement: Placement,
    microbatches: int,
    *,
    window: str = "step",
    allow_unordered: bool = False,
    holding: Holding | None = None,
    coalesce_w: int = 1,
) -> Plan:
    """Lower and validate any compute plan. Raises PlanError (see :mod:`pipeline.validate`) or UsageError.

    ``coalesce_w``: with more than 1, W of so many microbatches are moved together and become one product.
    """
    microbatches = whole_number("the number of microbatches", microbatches)
    holding = holding or Holding()
    validate(compute, placement, microbatches, lowered=False, allow_unordered=allow_unordered)
    coalesce_w = check_size(coalesce_w, microbatches)
    if coalesce_w > 1:
        _check_coalescing(coalesce_w, window, allow_unordered, holding)
        compute = together(compute, coalesce_w, microbatches)
    rows = lower(compute, placement, window=window, i_slot_until=holding.i_slot_until, checked=True)
    actions = tuple(tuple(row) for row in rows)
    plan = Plan(name, placement, microbatches, window, actions, allow_unordered, holding, coalesce_w)
    plan.validate()
    return plan


def build_plan(
    schedule: str,
    pp: int,
    microbatches: int,
    w_delay: int | None = 0,
    window: str = "step",
    chunks: int | None = None,
    *,
    holding: Holding | None = None,
    coalesce_w: int = 1,
) -> Plan:
    """The plan of a named schedule.

    Args:
        schedule: a name in :data:`pipeline.schedules.SCHEDULES`.
        pp: pipeline ranks, at least 1.
        microbatches: per optimizer step, at least 1; may be below ``pp`` and need not be divisible by it.
        w_delay: microbatches by which W trails I; None: the stage index. The zero-bubble schedules and DualPipeV
            set it themselves and take only 0 or None.
        window: ``"step"`` or ``"microbatch"``, when scales are committed.
        chunks: chunks per rank; None: the schedule's own (1; 2 for the V shapes and, where any number may be
            asked for, the interleaved one).
        holding: how long buffers are kept; None: the defaults.
        coalesce_w: how many microbatches' W of one weight are one product, 1 … ``microbatches``.

    Raises:
        UsageError: an unknown schedule or window, or numbers out of range.
    """
    chosen = find_schedule(schedule)
    if window not in WINDOWS:
        raise UsageError(f"unknown window {window!r}; use one of {', '.join(WINDOWS)}")
    compute = chosen(pp, microbatches, w_delay, chunks)
    placement = chosen.placement(pp, chunks)
    return make_plan(schedule, compute, placement, microbatches, window=window, holding=holding, coalesce_w=coalesce_w)


def peak_bytes(
    plan: Plan,
    rank: int,
    bytes_I: int | Mapping[int, int],  # noqa: N803 - the design's names
    bytes_W: int | Mapping[int, int],  # noqa: N803
    *,
    bytes_input: int | Mapping[int, int] = 0,
    bytes_output: int | Mapping[int, int] = 0,
    bytes_grad_in: int | Mapping[int, int] = 0,
    bytes_dx: int | Mapping[int, int] = 0,
) -> int:
    """Bytes of all slots and buffers of a rank: for each chunk and resource its count times its bytes.

    Slots are allocated once and kept, so this is what the rank holds during the whole step. Each size is one
    number of bytes per slot or buffer, or a mapping chunk → bytes.
    """
    slots = plan.slots[rank]
    sizes = (
        (slots.i_slots, bytes_I),
        (slots.w_slots, bytes_W),
        (slots.inputs, bytes_input),
        (slots.outputs, bytes_output),
        (slots.grad_ins, bytes_grad_in),
        (slots.dxs, bytes_dx),
    )
    return sum(
        count * (size[chunk] if isinstance(size, Mapping) else whole_number("a size in bytes", size))
        for resource, size in sizes
        for chunk, count in resource.count.items()
    )
