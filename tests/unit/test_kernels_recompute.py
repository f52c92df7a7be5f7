"""Recompute with the kernels, attention and MLP as one node each: the same bits on or off, scales that roll included."""

from __future__ import annotations

import pytest
import torch

from models.spec import Chunk
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling
from qeffect_lm.layers.linear import SplitLinear
from tests.decoders import llama_decoder
from tests.unit.interpreted import DEVICE, kernels_run  # noqa: F401
from tests.unit.layer_harness import Harness
from tests.unit.test_kernels_fused import HIDDEN, TOKENS, batches, calibrate, harness_for


def harness(mode: str, recipe) -> Harness:
    decoder = llama_decoder(
        vocab_size=8, hidden_size=HIDDEN, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=48,
        max_positions=TOKENS, dtype=torch.bfloat16, recipe=recipe, recompute=mode,
    )  # fmt: skip
    return harness_for(Chunk([decoder.block(0)]).to(DEVICE))


def run(mode: str, recipe, roll: bool = False) -> list[torch.Tensor]:
    """A microbatch; between F and I every scale of an input is halved if ``roll``, as window ``microbatch`` may do."""
    made, data = harness(mode, recipe), batches(count=1)
    if isinstance(recipe, DelayedScaling):
        calibrate(made, data)
        made.timeline.window = "microbatch" if roll else "step"
    else:
        made.refresh()
    linears = [m for m in made.module.modules() if isinstance(m, SplitLinear)]
    microbatches = [made.microbatch(n, x, dy) for n, (x, dy) in enumerate(data)]
    with made.step():
        for m in microbatches:
            made.forward(m)
        payloads = made.ledger.leases.payloads(0, 0)
        waiting = {name.split(".")[-1] for name, payload in payloads.items() if payload.x is None}
        for linear in linears:
            if roll:
                made.timeline.scale_of(f"{linear.name}.input").mul_(0.5)
        for m in microbatches:
            made.input_grad(m)
        for m in microbatches:
            made.weight_grad(m)
    everything = {"qkv", "out", "gate_up", "down"}
    left_to_i = {"down"} if isinstance(recipe, DelayedScaling) else set()
    assert waiting == (left_to_i if mode == "none" else everything)
    ends = [tensor for m in microbatches for tensor in (m.out, m.dx)]
    return [*ends, made.timeline.open_amax.clone(), *made.grads.values()]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("recipe", [DelayedScaling, CurrentScaling])
def test_on_or_off_the_same_bits(recipe, mode):
    for got, want in zip(run(mode, recipe()), run("none", recipe()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_scales_that_rolled_in_between(mode):
    """I quantises again with the scale that F used: of the microbatch's own window, not of the next."""
    for got, want in zip(run(mode, DelayedScaling(), roll=True), run("none", DelayedScaling(), roll=True), strict=True):
        assert torch.equal(got, want)
