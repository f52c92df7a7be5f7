"""``check_layer``: passes what is right, and finds every kind of wrong layer, naming action and tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from models.parts import (
    AttentionPart,
    EmbeddingPart,
    GatedMLPPart,
    HeadPart,
    LayerNormPart,
    PlainMLPPart,
    RMSNormPart,
)
from models.spec import ParameterSpec
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.dropout import KeyedDropout
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.rope import Rope
from qeffect_lm.testing import LayerCheckError, check_layer, check_part

SHAPE = (2, 8, 16)


@pytest.mark.parametrize(
    ("part", "keys"),
    [
        (RMSNormPart(), {}),
        (LayerNormPart(), {}),
        (AttentionPart(2, 1, 16, 8, Rope(16, 100.0), bias="all", qk_norm=True, window=3), {}),
        (GatedMLPPart(32), {}),
        (PlainMLPPart(32, "gelu"), {"fp8": False}),
        (EmbeddingPart(11, positions=9, dropout=0.5), {"tokens": 11, "name": "embedding_block"}),
        (HeadPart(32), {"fp8": False, "name": "head"}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_our_parts_pass(part, keys):
    report = check_part(part, 16, **keys)
    assert [line.split(":")[0] for line in report.lines] == [
        "parameters", "state", "gradients", "order", "replay", "checkpoint",
    ]  # fmt: skip


def test_a_reference_checks_f_too():
    def reference(p, x):
        return x @ p["linear.weight"].t() + p["linear.bias"]

    def build(dtype):
        recipe = DelayedScaling() if dtype is not torch.float64 else None
        return SplitLinear("linear", 16, 32, bias=True, recipe=recipe, dtype=dtype)

    assert "equal float64 autograd of the reference" in str(check_layer(build, SHAPE, reference))
    with pytest.raises(LayerCheckError, match="linear: F: the output of microbatch 0 is .* from the reference"):
        check_layer(build, SHAPE, lambda p, x: reference(p, x) * 1.001)
    with pytest.raises(LayerCheckError, match=r"has the shape \[2, 8, 32\], the reference's \[2, 8, 16\]"):
        check_layer(build, SHAPE, lambda p, x: reference(p, x)[..., :16])


def test_dropout_passes_without_parameters():
    check_layer(lambda dtype: KeyedDropout("dropout", 0.5), SHAPE)


# ---- layers that are wrong -----------------------------------------------------------------------------------------


class Scale(Layer):
    """``x * weight``, and whatever ``wrong`` does to it."""

    def __init__(self, wrong: Callable[[Scale, torch.Tensor], torch.Tensor], **attributes: Any) -> None:
        super().__init__("scale")
        self.weight = nn.Parameter(torch.ones(16))
        self.wrong = wrong
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, context) -> torch.Tensor:
        return self.wrong(self, x * self.weight)


def built(wrong: Callable, **attributes: Callable[[], Any]) -> Callable[[torch.dtype], Layer]:
    return lambda dtype: Scale(wrong, **{name: make() for name, make in attributes.items()}).to(dtype)


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.999


def _write(layer, x):
    layer.running.copy_(x.detach().mean())
    return x


def _keep(layer, x):
    layer.last = x.detach()
    return x


def _count(layer, x):
    layer.calls += 1
    return x


def _touch_weight(layer, x):
    with torch.no_grad():
        layer.weight.mul_(1.0001)
    return x


def _buffer(layer, x):
    layer.seen.add_(1)
    return x


def _remember(layer, x):
    """What a microbatch gets depends on the one before; no attribute of the layer shows it."""
    memory = layer.wrong.__globals__["_MEMORY"]
    y = x + memory.get("last", 0.0)
    memory["last"] = x.detach().sum() * 1e-3
    return y


_MEMORY: dict[str, torch.Tensor] = {}
_TABLE = torch.ones(16)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (built(lambda layer, x: _WrongBackward.apply(x)), "scale: I: dx of microbatch 0 is"),
        (built(_write, running=lambda: torch.zeros(())), r"scale: F writes the attribute 'running' \(float32, \[\]\)"),
        (built(_write, running=lambda: nn.Buffer(torch.zeros(()))), "scale: F writes the buffer 'running'"),
        (built(_keep), r"scale: F keeps a tensor in the attribute 'last' \(float32, \[2, 8, 16\]\)"),
        (built(_keep, last=lambda: None), "keeps a tensor in the attribute 'last'"),
        (built(_count, calls=lambda: 0), "scale: F changes the attribute 'calls' from 0 to 2"),
        (built(_touch_weight), "scale: F writes the parameter 'scale.weight'"),
        (built(lambda layer, x: x + torch.rand(16, dtype=x.dtype)), "scale: (I|the output of microbatch 0)"),
        (built(lambda layer, x: x * float(x.detach().flatten()[0])), "scale: (I|it cannot be captured)"),
        (built(lambda layer, x: x + _TABLE.to(x.dtype)), "it cannot be captured: .* the hidden-state register does not know"),
        (built(lambda layer, x: x + layer.table.to(x.dtype), table=lambda: torch.ones(16)), "finds the attribute 'table'"),
        (built(lambda layer, x: x if x.sum() > 0 else x * 2), "it cannot be captured: .* reads a tensor's value on the host"),
        (built(_remember), "scale: the output of microbatch . differs when microbatches run|scale: I"),
        (built(lambda layer, x: x + layer.noise, noise=lambda: nn.Buffer(torch.rand(16))), "buffer 'noise' differs between"),
        (lambda dtype: nn.Linear(16, 16), "Linear is no qeffect_lm.layers.base.Layer"),
    ],
)
def test_what_is_found(build, words):
    with pytest.raises(LayerCheckError, match=words):
        check_layer(build, SHAPE)


def test_a_wrong_w_is_found(monkeypatch):
    """The weight's gradient alone is wrong: W forgets a microbatch's operands are its own."""
    original = SplitLinear._accumulate

    def wrong(self, operands, beta):
        original(self, operands, 0)

    monkeypatch.setattr(SplitLinear, "_accumulate", wrong)
    with pytest.raises(LayerCheckError, match="linear: I or W: the gradient of linear.weight is"):
        check_layer(lambda dtype: SplitLinear("linear", 16, 16, dtype=dtype), SHAPE)


class _Part:
    """A part whose specs are what a test says."""

    def __init__(self, specs: list[ParameterSpec]) -> None:
        self.specs = specs

    def parameters(self, place):
        return self.specs

    def build(self, place):
        layer = Scale(lambda layer, x: x)
        layer.name = place.name
        return layer.to(place.dtype)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], r"and its layer's disagree about layers\.0\.part\.weight \(16,\)"),
        ([ParameterSpec("layers.0.part.weight", (8,), None, False, (None,))], "disagree about"),
        ([ParameterSpec("layers.0.part.weight", (16,), None, False, ())], "0 mesh axes for 1 dimensions"),
    ],
)
def test_specs_that_are_not_the_layers(specs, words):
    with pytest.raises(LayerCheckError, match=words):
        check_part(_Part(specs), 16, fp8=False)
    check_part(_Part([ParameterSpec("layers.0.part.weight", (16,), None, False, (None,))]), 16, fp8=False)
