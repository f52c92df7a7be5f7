"""What was captured of a rank's plan, and how it is given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pipeline.plan import GraphKey
from qeffect_lm.contract.errors import CaptureError
from qeffect_lm.contract.ledger import Summary
from qeffect_lm.graphs.backend import Graph

if TYPE_CHECKING:
    from pipeline.step_graph import StepGraph


@dataclass
class Captured:
    """The graphs of a rank: one per :class:`GraphKey`, and the step's end by name; or ``step``, one graph of them all, beside
    the end's where the optimizer stays outside of it."""

    actions: dict[GraphKey, tuple[Graph, Summary]] = field(default_factory=dict)
    end: dict[str, Graph] = field(default_factory=dict)
    retained: dict[tuple[int, int, int], list[torch.Tensor]] = field(default_factory=dict)  # by (chunk, I-slot, W-slot)
    check_addresses: Callable[[], None] = lambda: None  # raises CaptureError where a graph would read an old storage
    step: StepGraph | None = None
    checked: bool = True  # the ledger's checks were on when ``step`` was captured: a replay takes its verdict for granted

    def graphs(self) -> list[Graph]:
        whole = [] if self.step is None else [self.step.graph]
        return [*whole, *(graph for graph, _ in self.actions.values()), *self.end.values()]

    def check(self) -> None:
        """Before a step that the ledger checks.

        Raises:
            CaptureError: a storage was replaced since; or the step was captured in mode ``off``, and nobody checked it.
        """
        if not self.checked:
            raise CaptureError("the step's graph was captured in mode off, so nobody checked what it holds: capture it again")
        self.check_addresses()

    def bytes(self) -> int:
        return sum(graph.pool_bytes for graph in self.graphs())

    def release(self) -> None:
        """Destroy the graphs: before the communicators that they hold, and before others are captured in their place."""
        graphs = self.graphs()
        for graph in graphs:
            graph.reset()
        if any(graph.pool_bytes for graph in graphs) and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # only then do the pools' segments go back; each capture would else add its own
