"""Schedules as torch.distributed.pipelining writes them: a CSV of a row per rank, in and out.

Ours are its words but for five: ``B`` and ``(2F1;1B0)OVERLAP_F_B`` are taken apart, as here a full backward is I and then W,
and what overlaps is the hardware's business; ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD`` are dropped, as they follow from the
rest.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from pipeline.actions import COMPUTE, Action, Kind, parse_action
from pipeline.plan import Plan, make_plan
from pipeline.schedules import Placement
from pipeline.slots import Holding
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError, shown

HOLDING = Holding(i_slot_until=Kind.W)  # a linear's input may be the stage's: its buffer is W's until W
_DROPPED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def write(plan: Plan, *, communication: bool) -> str:
    """The plan's compute actions, or all that torch has words for."""
    out = io.StringIO()
    rows = [
        [str(action) for action in row if action.is_compute or (communication and action.kind.startswith(("SEND", "RECV")))]
        for row in plan.actions
    ]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def read(text: str, ranks: int, stages: int, microbatches: int, name: str) -> Plan:
    """A plan of the compute actions of ``text``; its messages are ours, whatever the file says of them.

    Raises:
        PlanError: no plan: a backward twice, a microbatch without one, a stage on two ranks, stages that wait for each other.
        UsageError: a cell that is no action; names row and cell.
    """
    rows: list[list[Action]] = []
    for number, row in enumerate(csv.reader(io.StringIO(text))):
        actions: list[Action] = []
        for place, cell in enumerate(row):
            try:
                actions += _actions(cell.strip())
            except UsageError as error:
                raise UsageError(f"{name}: row {number}, cell {place}: {error}") from None
        rows.append(actions)
    rows = [row for row in rows if row] if len(rows) > ranks else rows
    if len(rows) != ranks:
        raise PlanError(f"{name} has {len(rows)} rows, and there are {ranks} pipeline ranks")
    return make_plan(name, rows, _placement(rows, stages, name), microbatches, holding=HOLDING)


def _actions(cell: str) -> Iterator[Action]:
    overlap = _OVERLAP.fullmatch(cell)
    if overlap is not None:
        for word in overlap[1].split(";"):
            yield from _actions(word.strip())
    elif cell and not _DROPPED.fullmatch(cell):
        action = parse_action(cell)
        if action.kind is Kind.B:
            yield Action(Kind.I, *action.key)
            yield Action(Kind.W, *action.key)
        elif action.kind in COMPUTE:
            yield action
        elif action.chunk is None or action.kind is Kind.COMMIT:
            raise UsageError(f"{shown(cell)} is no action of torch's schedules")


def _placement(rows: Sequence[Sequence[Action]], stages: int, name: str) -> Placement:
    """Which rank has which stage: the one that runs its forward."""
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            stage = action.key[0]
            if ranks.setdefault(stage, rank) != rank:
                raise PlanError(f"{name}: stage {stage} is on rank {ranks[stage]} and on rank {rank}")
    if sorted(ranks) != list(range(stages)):
        missing = sorted(set(range(stages)) ^ set(ranks))
        raise PlanError(f"{name}: there are {stages} stages, it says something else of stage {missing[0]}")
    return Placement(tuple(ranks[stage] for stage in range(stages)))
