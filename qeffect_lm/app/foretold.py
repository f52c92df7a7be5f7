"""``pipeline.schedule: auto`` before there is a machine: the plan that the predicted times make.

Training measures its own layers and messages and may choose another one; so the plan that this makes is labelled as predicted.
"""

from __future__ import annotations

from pipeline.actions import Action, Kind
from pipeline.plan import Plan, make_plan
from pipeline.schedules import Placement
from qeffect_lm.app.auto_plan import Foretold, decide, explain, needs_profile
from qeffect_lm.app.clock import Clock
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import Memory
from qeffect_lm.app.profile import Part
from qeffect_lm.app.rehearsal import Rehearsed
from qeffect_lm.errors import UsageError


def foretold_plan(layout: Layout, rehearsed: Rehearsed, device: str, clock: Clock | None) -> tuple[Plan, list[str]]:
    """The plan of ``auto``, and what it was made from, in sentences.

    Raises:
        UsageError: neither the configuration nor a clock has times; a memory limit that no plan keeps.
    """
    config = layout.config
    if not needs_profile(config):
        found = decide(config, [])
        return found.plan, explain(config, found)
    if clock is None:
        raise UsageError(
            "pipeline.schedule auto needs times: name a device with ceilings (--device h200), measure (--measure FILE), or "
            "give pipeline.costs"
        )

    def parts(placement: Placement) -> list[Part]:
        one = _one_microbatch(placement)
        memory = Memory(layout, one, rehearsed, device)
        sizes = [memory.chunk(index) for index in range(placement.num_chunks)]
        return [
            Part(*clock.chunk(one, index), float(size.f.left), float(min(size.i.left, size.f.left)))
            for index, size in enumerate(sizes)
        ]

    found = decide(config, [], Foretold(parts, clock.message()))
    told = explain(config, found, "predicted")
    return found.plan, [*told, "auto: made from predicted times; training measures its own, and may choose another plan"]


def _one_microbatch(placement: Placement) -> Plan:
    """The placement as a plan: forward through all chunks, then backward."""
    rows = []
    for rank in range(placement.num_ranks):
        chunks = placement.chunks(rank)
        backward = [Action(kind, chunk, 0) for chunk in reversed(chunks) for kind in (Kind.I, Kind.W)]
        rows.append([*(Action(Kind.F, chunk, 0) for chunk in chunks), *backward])
    return make_plan("gpipe", rows, placement, 1)
