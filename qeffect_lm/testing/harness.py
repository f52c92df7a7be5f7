"""Runs one layer through F, I and W under a real ledger, without engine, plan or optimizer.

    harness = Harness(SplitLinear("linear", 4, 3, dtype=torch.float64))
    harness.fill(seed=0)
    with harness.step():
        a = harness.microbatch(0, x, dy)
        harness.forward(a); harness.input_grad(a); harness.weight_grad(a)
    a.out, a.dx, harness.grads["linear.weight"]

The three pieces of work are :class:`pipeline.stage.Stage`'s own; what assembly does (main gradients, weight
cache, timeline) is done here for one module. Main gradients start at 7.0, so that what a first writer leaves
behind shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pipeline.stage import BorderShape, MicrobatchSlot, Stage
from qeffect_lm.contract.grads import GradSlot, GradSlots
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.contract.timeline import Direction, ScaleTimeline
from qeffect_lm.contract.versions import WeightVersions
from qeffect_lm.fp8.cache import LAYOUTS, WeightCache
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.base import direct_layers, named_parameters
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.dropout import host_key
from qeffect_lm.layers.linear import SplitLinear

SEEDED = 7.0


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> torch.Tensor:
    """Normal values of a seed, drawn in float64."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


@dataclass
class Microbatch:
    """One microbatch in its own slot."""

    number: int
    slot: MicrobatchSlot
    beta: int

    @property
    def slots(self) -> tuple[Slot, Slot]:
        return Slot("I", 0, self.number), Slot("W", 0, self.number)

    @property
    def out(self) -> torch.Tensor:
        return self.slot.out

    @property
    def dx(self) -> torch.Tensor:
        assert self.slot.dx is not None
        return self.slot.dx


class Harness:
    """One module as a stage.

    Args:
        module: called with ``(x, context)``.
        first: its input are token ids, without a gradient.
        last: its output is the 0-dim loss.
    """

    def __init__(self, module: nn.Module, *, first: bool = False, last: bool = False, history: int = 3) -> None:
        self.module = module
        self.parameters = dict(named_parameters(module))
        self.device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        wide = {n: torch.float64 if p.dtype is torch.float64 else torch.float32 for n, p in self.parameters.items()}
        trainable = {n: p for n, p in self.parameters.items() if p.requires_grad}
        self.grads = {n: torch.full_like(p, SEEDED, dtype=wide[n]) for n, p in trainable.items()}
        for layer in direct_layers(module):
            layer.main_grad = self.grads.get(layer.weight_name)
        linears = [m for m in module.modules() if isinstance(m, SplitLinear) and m.recipe is not None]
        roles = [role for m in linears if m.recipe is not None for role in m.recipe.roles(m.name)]
        self.timeline = ScaleTimeline(roles, history=history, device=self.device)
        for linear in linears:
            if isinstance(linear.recipe, DelayedScaling):
                linear.recipe.bind(self.timeline)
        self.cache = WeightCache({m.weight_name: (m.name, m.recipe, _weight_of(m)) for m in linears if m.recipe})
        for linear in linears:
            linear.cached = self.cache.cached[linear.weight_name]
        self.ledger = Ledger(
            self.timeline,
            WeightVersions(self.parameters),
            GradSlots(GradSlot(name, grad) for name, grad in self.grads.items()),
        )
        self.divisor = torch.ones((), device=self.device)
        self.dtype = next(iter(self.parameters.values())).dtype if self.parameters else torch.float64
        self.stage = Stage(
            module,
            0,
            first=first,
            last=last,
            i_slots=0,
            shape=BorderShape(1, 1, 1, self.dtype),
            divisor=self.divisor,
            main_grads=self.grads,
        )
        self._forwarded = 0
        self.refreshed = False  # whether weight caches were made

    def fill(self, seed: int, scale: float = 1.0) -> None:
        """Random parameters, and the caches made from them."""
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters.values()):
                parameter.copy_(random(*parameter.shape, seed=1000 * seed + number, scale=scale))
        self.refresh()

    def refresh(self) -> None:
        """Make all weight caches from the weights, with the current scales."""
        self.refreshed = True
        if self.cache.names:
            self.cache.refresh_()
            self.ledger.refreshed({name: self.cache.layer_of(name) for name in self.cache.names}, LAYOUTS)

    def microbatch(
        self,
        number: int,
        x: torch.Tensor,
        dy: torch.Tensor,
        *,
        targets: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        phase: Phase = Phase.TRAIN,
    ) -> Microbatch:
        """A slot that holds copies of ``x`` and of ``dy``, which has the output's shape and dtype."""
        first = self.stage.first
        context = LayerContext(
            phase,
            key=torch.tensor(host_key("harness", number), device=self.device),
            targets=targets,
            loss_mask=mask,
            divisor=self.divisor,
            anchor=torch.zeros((), requires_grad=True, device=self.device) if first else None,
        )
        slot = MicrobatchSlot(
            x.detach().clone(),
            torch.zeros_like(dy),
            dy.detach().clone(),
            None if first else torch.zeros_like(x),
            context,
        )
        context.border = (slot.x, slot.dy)
        return Microbatch(number, slot, 1)

    # ---- the step and its actions --------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int = 0) -> Iterator[None]:
        """One step of the ledger; no commit."""
        self._forwarded = 0
        self.ledger.begin_step(number)
        yield
        self.ledger.leases.end_step()
        self.ledger.abandon_step()  # layers alone commit no scales

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A step whose actions are captured, not accounted for."""
        self._forwarded = 0
        self.ledger.begin_step(-1)
        with self.ledger.recording():
            yield
        self.ledger.abandon_step()

    def forward(self, m: Microbatch) -> torch.Tensor:
        m.beta = 0 if self._forwarded == 0 else 1
        self._forwarded += 1
        with self.ledger.action("F", 0, m.number, slots=m.slots) as scope:
            self.stage.forward(m.slot, scope)
        return m.out

    def input_grad(self, m: Microbatch) -> None:
        with self.ledger.action("I", 0, m.number, beta=m.beta) as scope:
            self.stage.input_grad(m.slot, scope)

    def weight_grad(self, m: Microbatch) -> None:
        with self.ledger.action("W", 0, m.number, beta=m.beta) as scope:
            self.stage.weight_grad(m.slot, scope)

    def run(self, microbatches: Sequence[Microbatch], step: int = 0) -> None:
        """All F, then all I, then all W."""
        with self.step(step):
            for action in (self.forward, self.input_grad, self.weight_grad):
                for m in microbatches:
                    action(m)

    def commit(self) -> None:
        """Roll histories and scales as a step's end does, then refresh the caches."""
        self.ledger.timeline.begin_window()
        self.ledger.commit(self.timeline.epochs[Direction.FORWARD])
        with torch.no_grad():
            self.timeline.roll_(torch.zeros((), dtype=torch.bool, device=self.device))
        self.refresh()


def _weight_of(linear: SplitLinear):
    return lambda: linear.weight.detach()
