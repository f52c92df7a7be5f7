"""The contract around captured steps on a GPU: ``Guard`` over real CUDA graphs and streams, enforced, off, and without it.

The step is a stage of bfloat16 blocks, each two linears: F, I and W of every microbatch as CUDA graphs per slot, batches copied
in on a stream of their own, main gradients accumulated in float32, an SGD step and a refresh of the cached weights as graphs
too. What a mode costs is the difference of whole, synchronised steps; modes take turns from step to step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from qeffect_lm.contract import Guard, GuardedGraph, Slot, Summary

MODES = ("bare", "off", "enforce")


@dataclass(frozen=True)
class Size:
    """A stage: ``layers`` blocks of ``hidden``, ``tokens`` a microbatch."""

    layers: int
    hidden: int
    tokens: int
    microbatches: int = 8
    slots: int = 2


class Stage:
    """Captured graphs of a stage and their guard."""

    def __init__(self, size: Size) -> None:
        self.size = size
        shape = (size.tokens, size.hidden)

        def new(*dims: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(dims, device="cuda").mul_(0.02).to(dtype)

        self.masters = [new(size.hidden, size.hidden, dtype=torch.float32) for _ in range(size.layers)]
        self.cached = [master.bfloat16() for master in self.masters]
        self.grads = [torch.zeros_like(master) for master in self.masters]
        self.x = [new(*shape) for _ in range(size.slots)]
        self.dy = [new(*shape) for _ in range(size.slots)]
        # Per slot and layer what W needs: the layer's input and its output gradient.
        self.inputs = [[new(*shape) for _ in range(size.layers + 1)] for _ in range(size.slots)]
        self.douts = [[new(*shape) for _ in range(size.layers + 1)] for _ in range(size.slots)]
        self.data = new(*shape)
        names = tuple(f"layers.{k}.weight" for k in range(size.layers))
        self.names = names
        self.guard = Guard(
            {name: torch.cuda.Stream() for name in ("copy", "compute")},
            weights=names,
            grads=dict(zip(names, self.grads, strict=True)),
            device="cuda",
        )
        layers = tuple(name.removesuffix(".weight") for name in names)
        weights = tuple((name, "rows") for name in names)
        self.forward = [
            self._graph("F", partial(self._forward, s), Summary("F", layers=layers, weights=weights), s)
            for s in range(size.slots)
        ]
        self.input_grad = [
            self._graph("I", partial(self._input_grad, s), Summary("I", layers=layers, weights=weights), s)
            for s in range(size.slots)
        ]
        self.weight_grad = {
            (s, beta): self._graph(
                "W",
                partial(self._weight_grad, s, beta),
                Summary("W", layers=layers, grads=names, beta=beta),
                s,
            )
            for s, beta in itertools.product(range(size.slots), (0, 1))
        }
        self.update = self._graph("STEP", self._update, None, 0)

    # ---- device work -------------------------------------------------------------------------------------------

    def _forward(self, s: int) -> None:
        inputs = self.inputs[s]
        inputs[0].copy_(self.x[s])
        for k, weight in enumerate(self.cached):
            torch.mm(inputs[k], weight, out=inputs[k + 1])

    def _input_grad(self, s: int) -> None:
        douts = self.douts[s]
        douts[-1].copy_(self.dy[s])
        for k in reversed(range(self.size.layers)):
            torch.mm(douts[k + 1], self.cached[k].t(), out=douts[k])

    def _weight_grad(self, s: int, beta: int) -> None:
        for k, grad in enumerate(self.grads):
            product = torch.mm(self.inputs[s][k].t(), self.douts[s][k + 1])
            grad.add_(product) if beta else grad.copy_(product)

    def _update(self) -> None:
        torch._foreach_add_(self.masters, self.grads, alpha=-1e-4)
        for cached, master in zip(self.cached, self.masters, strict=True):
            cached.copy_(master)

    def _graph(self, kind: str, work: Callable[[], None], summary: Summary | None, s: int) -> GuardedGraph:
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        touched: dict[str, dict[str, list[torch.Tensor]]] = {
            "F": {"reads": [self.x[s], *self.cached], "writes": self.inputs[s]},
            "I": {"reads": [self.dy[s], *self.cached], "writes": self.douts[s]},
            "W": {"reads": [*self.inputs[s], *self.douts[s]], "writes": self.grads},
            "STEP": {"reads": self.grads, "writes": [*self.masters, *self.cached]},
        }
        return self.guard.graph(kind, graph, "compute", summary=summary, **touched[kind])

    # ---- one step ----------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        guard, slots = self.guard, self.size.slots
        with guard.step(number):
            for m in range(self.size.microbatches):
                s = m % slots
                with guard.work("copy", "batch", reads=[self.data], writes=[self.x[s], self.dy[s]]):
                    self.x[s].copy_(self.data, non_blocking=True)
                    self.dy[s].copy_(self.data, non_blocking=True)
                guard.edge("copy", "compute")
                self.forward[s].replay(m, slots=(Slot("I", 0, s), Slot("W", 0, s)))
                self.input_grad[s].replay(m)
                self.weight_grad[s, int(m > 0)].replay(m)
                guard.edge("compute", "copy")
            self.update.replay()
            guard.versions.bump()
            guard.ledger.commit(number)
            guard.ledger.refreshed({name: name.removesuffix(".weight") for name in self.names}, ["rows"])

    def bare(self) -> None:
        """The same launches and waits with nothing of ours around them."""
        copy, compute = self.guard.streams.real("copy"), self.guard.streams.real("compute")
        assert copy is not None and compute is not None
        for m in range(self.size.microbatches):
            s = m % self.size.slots
            with torch.cuda.stream(copy):
                self.x[s].copy_(self.data, non_blocking=True)
                self.dy[s].copy_(self.data, non_blocking=True)
            compute.wait_stream(copy)
            with torch.cuda.stream(compute):
                for graph in (self.forward[s], self.input_grad[s], self.weight_grad[s, int(m > 0)]):
                    graph.graph.replay()
            copy.wait_stream(compute)
        with torch.cuda.stream(compute):
            self.update.graph.replay()


def measure(size: Size, steps: int = 60) -> dict[str, object]:
    """Whole steps in ms per mode, host µs per replayed action per mode, and enforce's cost against off and bare."""
    stage = Stage(size)
    actions = 3 * size.microbatches
    wall: dict[str, list[float]] = {mode: [] for mode in MODES}
    host: dict[str, list[float]] = {mode: [] for mode in MODES}
    stage.guard.ledger.refreshed({name: name.removesuffix(".weight") for name in stage.names}, ["rows"])
    orders = list(itertools.permutations(MODES))
    number = 0
    for turn in range(steps + 2):
        for mode in orders[turn % len(orders)]:
            torch.cuda.synchronize()
            if mode != "bare":
                stage.guard.ledger.switch(mode, synchronised=True)
            began = time.perf_counter()
            if mode == "bare":
                stage.bare()
            else:
                stage.step(number)
                number += 1
            launched = time.perf_counter()
            torch.cuda.synchronize()
            if turn >= 2:
                wall[mode].append(1e3 * (time.perf_counter() - began))
                host[mode].append(1e6 * (launched - began) / actions)
    medians = {mode: statistics.median(values) for mode, values in wall.items()}
    per_action = {mode: statistics.median(values) for mode, values in host.items()}
    return {
        "layers": size.layers,
        "hidden": size.hidden,
        "tokens": size.tokens,
        "microbatches": size.microbatches,
        "median_step_ms": medians,
        "enforce_over_off": medians["enforce"] / medians["off"],
        "enforce_over_bare": medians["enforce"] / medians["bare"],
        "median_paired_enforce_over_off": statistics.median(
            a / b for a, b in zip(wall["enforce"], wall["off"], strict=True)
        ),
        "host_us_per_action": per_action,
        "added_host_us_per_action": per_action["enforce"] - per_action["off"],
    }


SIZES = tuple(Size(layers, hidden, tokens) for layers, hidden, tokens in ((4, 1024, 1024), (32, 1024, 1024), (32, 2048, 2048)))
