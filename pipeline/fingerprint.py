"""The graph-plan document of a rank: everything that a re-capture after a restart must reproduce, as lines of text.

    plan 1                                       the plan's actions, of all ranks
    rank 0: 0F0 0F1 …
    slots I 0.0=0 0.1=1 …                        slot colours: chunk.microbatch=slot
    graph 0I i=1 w=0 beta=0                      then, for each graph
    effects scales=backward layers=…             what it does to contract state
    node kernel quantise grid=(64, 1, 1) …       what it launches, in order

Addresses never enter, so that equal work gives equal lines in every process. The fingerprint is the SHA-256 of the document
(:mod:`qeffect_lm.graphs.document`); a checkpoint keeps both, so that a resume whose graphs differ can say where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.plan import GraphKey, Plan
from pipeline.slots import Slots
from qeffect_lm.contract.ledger import Summary

if TYPE_CHECKING:
    from pipeline.captured import Captured


def document(plan: Plan, rank: int, captured: Captured) -> list[str]:
    """The lines for pipeline rank ``rank``."""
    slots = plan.slots[rank]
    lines = plan.text().splitlines()
    for name, resource in (("I", slots.i_slots), ("W", slots.w_slots)):
        lines.append(f"slots {name} {_colours(resource)}")
    if captured.step is not None:
        lines.append("graph step")
        for key, summary in sorted(captured.step.summaries.items(), key=lambda item: str(item[0])):
            lines.append(f"effects {graph_name(key)} {effects_text(summary)}")
        lines += captured.step.graph.lines
    for key, (graph, summary) in sorted(captured.actions.items(), key=lambda item: str(item[0])):
        lines += [f"graph {graph_name(key)}", f"effects {effects_text(summary)}", *graph.lines]
    for name, graph in sorted(captured.end.items()):
        lines += [f"graph {name}", *graph.lines]
    return lines


def graph_name(key: GraphKey) -> str:
    """``0W i=1 w=0 beta=1``: kind, chunk and the place it was captured for."""
    beta = "" if key.beta is None else f" beta={key.beta}"
    joint = "" if key.joint is None else f" members={key.joint.members} joint={key.joint.beta}"
    return f"{key.chunk}{key.kind} i={key.i_slot} w={key.w_slot}{beta}{joint}"


def effects_text(summary: Summary) -> str:
    """A summary in one line; what has no order is sorted."""
    weights = [f"{name}:{layout}" for name, layout in summary.weights]
    parts: Mapping[str, Sequence[str]] = {
        "scales": sorted(map(str, summary.scales)),
        "roles": summary.roles,
        "empty": summary.empty,
        "weights": weights,
        "layers": summary.layers,
        "grads": summary.grads,
        "idle": summary.idle,
        "joined": summary.joined,
        "collectives": summary.collectives,
    }
    words = [f"{name}={','.join(values)}" for name, values in parts.items() if values]
    if summary.joint is not None and summary.joint.members:
        words.append(f"members={summary.joint.members} joint={summary.joint.beta}")
    if summary.beta is not None:
        words.append(f"beta={summary.beta}")
    return " ".join(words) or "none"


def _colours(resource: Slots) -> str:
    return " ".join(f"{chunk}.{m}={slot}" for (chunk, m), slot in sorted(resource.index.items()))
