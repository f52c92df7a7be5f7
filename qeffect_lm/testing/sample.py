"""The layer under test, and made-up data for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.dropout import host_key
from qeffect_lm.testing.harness import Harness, Microbatch, random
from qeffect_lm.testing.watch import LayerCheckError

Build = Callable[[torch.dtype], Layer]
COUNT = 3  # microbatches


class Sample:
    """The layer under test, and made-up data for it."""

    def __init__(self, build: Build, shape: tuple[int, ...], tokens: int | None, dtype: torch.dtype) -> None:
        self.build, self.shape, self.tokens, self.dtype = build, shape, tokens, dtype
        layer = build(torch.float64)
        if not isinstance(layer, Layer):
            raise LayerCheckError(f"{type(layer).__name__} is no qeffect_lm.layers.base.Layer")
        self.name = layer.name or type(layer).__name__

    def harness(self, dtype: torch.dtype, seed: int = 1) -> Harness:
        """A new instance, ready to run."""
        harness = self.fresh(dtype, seed)
        self.prepare(harness)
        return harness

    def fresh(self, dtype: torch.dtype, seed: int = 1) -> Harness:
        """A new instance with random parameters: matrices that keep the size of what they multiply, vectors near one."""
        harness = Harness(self.build(dtype), first=self.tokens is not None)
        with torch.no_grad():
            for number, parameter in enumerate(harness.parameters.values()):
                values = random(*parameter.shape, seed=1000 * seed + number)
                parameter.copy_(values * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.3 * values)
        return harness

    def prepare(self, harness: Harness) -> None:
        """Scales as calibration makes them at a fresh start, and caches; runs F and I where there are scales."""
        if harness.timeline.roles:
            for number in range(COUNT):  # calibration, as at a fresh start
                m = self.microbatch(harness, number, phase=Phase.CALIBRATE)
                harness.stage.forward(m.slot, None)
                harness.stage.input_grad(m.slot, None)
            harness.commit()
        harness.refresh()

    def input(self, seed: int, dtype: torch.dtype) -> torch.Tensor:
        if self.tokens is None:
            return random(*self.shape, seed=seed, dtype=dtype)
        return torch.randint(0, self.tokens, self.shape, generator=torch.Generator().manual_seed(seed))

    def microbatch(self, harness: Harness, number: int, seed: int = 50, phase: Phase = Phase.TRAIN) -> Microbatch:
        """Microbatch ``number`` with the data of (seed, number)."""
        dtype = harness.dtype
        x = self.input(seed + 2 * number, dtype)
        out = self.output(harness, x)
        return harness.microbatch(number, x, random(*out.shape, seed=seed + 2 * number + 1, dtype=out.dtype), phase=phase)

    def output(self, harness: Harness, x: torch.Tensor) -> torch.Tensor:
        """The layer's output in evaluation (in high precision where there are no scales yet)."""
        fresh = harness.timeline.roles and not harness.refreshed
        context = LayerContext(Phase.CALIBRATE if fresh else Phase.EVAL, key=torch.tensor(host_key("check")))
        before = harness.timeline.open_amax.clone()
        with torch.no_grad():
            out: torch.Tensor = harness.module(x, context)
        harness.timeline.open_amax.copy_(before)
        return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
