"""Decoder blocks with what the one-node kernels do not have: they fall back part by part, with the same effects and as good
numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.decoder import Decoder
from models.parts import AttentionPart, LayerNormPart, PlainMLPPart
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.rope import Rope
from tests.decoders import llama_decoder
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401
from tests.unit.layer_harness import Harness
from tests.unit.test_kernels_fused import HIDDEN, TOKENS, batches, calibrate, error, harness_for, run

ATTENTION = AttentionPart(4, 2, 16, TOKENS, Rope(16, 10000.0))


def decoder(variant: str, dtype: torch.dtype, recipe: DelayedScaling | None) -> Decoder:
    base = llama_decoder(
        vocab_size=8, hidden_size=HIDDEN, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=48,
        max_positions=TOKENS, dtype=dtype, recipe=recipe,
    )  # fmt: skip
    plain = {"norm": LayerNormPart(), "mlp": PlainMLPPart(48), "attention": replace(ATTENTION, rope=None, bias="all")}
    changes = {
        "biases": {"attention": replace(ATTENTION, bias="qkv")},
        "q/k norm": {"attention": replace(ATTENTION, qk_norm=True)},
        "window": {"attention": replace(ATTENTION, window=3)},
        "gpt2": plain,
        "gelu": {"mlp": replace(base.mlp, activation="gelu", bias=True)},
    }
    return replace(base, **changes[variant])


def harness(variant: str, dtype: torch.dtype = torch.bfloat16, recipe: DelayedScaling | None = None) -> Harness:
    made = harness_for(decoder(variant, dtype, recipe).block(0).to(DEVICE))
    with torch.no_grad():
        for parameter in made.parameters.values():
            parameter.copy_(parameter.bfloat16())
    return made


@pytest.mark.parametrize("variant", ["biases", "q/k norm", "window", "gpt2", "gelu"])
def test_block_as_the_reference(variant, monkeypatch):
    """Same scope calls in the same order; outputs, dX and every gradient as near to float64 as the reference's (half as far
    again at most)."""
    from qeffect_lm.layers import fused

    nodes = {"attention": fused.FusedAttention, "mlp": fused.FusedMLP}
    for name in {"gpt2": ("attention", "mlp"), "gelu": ("mlp",)}.get(variant, ("attention",)):
        monkeypatch.delattr(nodes[name], "forward")  # the part that has something else must not go there
    data = batches(count=1)
    ours, theirs = harness(variant, recipe=DelayedScaling()), harness(variant, recipe=DelayedScaling())
    calibrate(ours, data)
    got, got_calls = run(ours, data, monkeypatch)
    with reference():
        calibrate(theirs, data)
        want, want_calls = run(theirs, data, monkeypatch)
        exact = harness(variant, torch.float64)
        wide = exact.microbatch(0, data[0][0].double(), data[0][1].double())
        exact.run([wide])
    assert got_calls == want_calls and len(got_calls) > 30
    assert 0 < error(got[0].out, wide.out) <= 1.5 * error(want[0].out, wide.out)
    assert 0 < error(got[0].dx, wide.dx) <= 1.5 * error(want[0].dx, wide.dx)
    for name, grad in exact.grads.items():
        assert 0 < error(ours.grads[name], grad) <= 1.5 * error(theirs.grads[name], grad) + 1e-3 < 0.5, name
