"""What was captured of a rank's plan, and how it is given up; what its microbatches retain until W."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pipeline.plan import GraphKey
from pipeline.stage import Stage
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


def released_by(stage: Stage, w_slot: int, members: int, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of the tensors that a microbatch retains, those that nobody reads after its W; for debugging.

    Where W of several microbatches is one product, their operands lie in storages of the stage: the W that multiplies
    ``members`` of them releases all of these, another W none.
    """
    if stage.joined is None:
        return list(tensors)
    shared = list(stage.joined.written(w_slot, members)) if members else []
    return [*(tensor for tensor in tensors if not stage.joined.holds(tensor)), *shared]


def poison_(tensor: torch.Tensor) -> None:
    """Fill with NaN, so that a use after release shows in the numbers; integers, which have none, with zeros: splits then say
    that there are no rows."""
    if tensor.dtype.is_floating_point:
        if tensor.dtype.itemsize == 1:
            tensor.detach().view(torch.uint8).fill_(0x7F)  # NaN in E4M3 and in E5M2
        else:
            tensor.detach().fill_(float("nan"))
    else:
        tensor.detach().zero_()
