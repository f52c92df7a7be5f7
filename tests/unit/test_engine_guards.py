"""Guards that a user's mistake meets: a role nobody reports, replaced tensors, infinities in window microbatch."""

from __future__ import annotations

import pytest
import torch

from qeffect_lm.app.assemble import assemble
from qeffect_lm.contract.errors import CaptureError, ScaleOrderError
from qeffect_lm.fp8 import recipes
from qeffect_lm.fp8.quantise import quantise
from tests.tiny import batch, config, train


@pytest.mark.parametrize("backend", ["eager", "host_replay"])
@pytest.mark.parametrize("kind", ["input", "grad_output"])
def test_a_role_that_nobody_reports(backend, kind, monkeypatch):
    """A layer that quantises without reporting its amax would freeze that scale for ever: named in its first action."""
    original = recipes.DelayedScaling.operand

    def silent(self, layer, which, x, scope, *, columns=True, **more):
        if layer == "layers.1.mlp.down" and which == kind:
            return quantise(x, self.timeline.scale_of(f"{layer}.{which}"), recipes.FORMATS[which], columns=columns)
        return original(self, layer, which, x, scope, columns=columns, **more)

    monkeypatch.setattr(recipes.DelayedScaling, "operand", silent)
    with pytest.raises(ScaleOrderError, match=f"layers.1.mlp.down.{kind}"):
        train(config(graphs__backend=backend), 1)


@pytest.mark.parametrize("what", ["parameter", "scale"])
def test_replaced_tensors_are_noticed_at_replay(what):
    """A graph reads the storage it captured: replacing a tensor instead of writing it is an error before the next step."""
    assembly = assemble(config(graphs__backend="host_replay"))
    assembly.prepare(batch(0))
    assembly.engine.step(0, batch(0))
    if what == "parameter":
        layer = next(m for m in assembly.engine.stages[0].chunk.modules() if getattr(m, "name", "") == "layers.2.attention.out")
        layer.weight.data = layer.weight.data.clone() * 3
        name = "layers.2.attention.out.weight"
    else:
        assembly.timeline.scale = assembly.timeline.scale.clone() * 2
        name = "timeline/scale"
    with pytest.raises(CaptureError, match=name):
        assembly.engine.step(1, batch(1))


@pytest.mark.parametrize("window", ["step", "microbatch"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("backend", ["eager", "host_replay"])
def test_an_infinity_skips_the_step_in_every_window(window, recipe, backend):
    """S8: a weight that makes activations infinite in step 1 only. Casts saturate, so the amax is what tells."""
    settings = config(graphs__backend=backend, precision__fp8__window=window, precision__fp8__recipe=recipe)
    assembly = assemble(settings)
    assembly.prepare(batch(0))
    norm = assembly.flat.master("layers.1.mlp_norm.weight")
    skipped, finite = [], []
    for step in range(3):
        kept = norm[0].clone()
        if step == 1:
            norm[0] = float("inf")
        before = assembly.flat.master("layers.3.mlp.down.weight").clone()
        skipped.append(bool(assembly.engine.step(step, batch(step)).skipped))
        if step == 1:
            assert torch.equal(assembly.flat.master("layers.3.mlp.down.weight"), before)
            norm[0] = kept
        finite.append(bool(torch.isfinite(assembly.timeline.history).all() and torch.isfinite(assembly.timeline.scale).all()))
    assert skipped == [False, True, False] and all(finite)
