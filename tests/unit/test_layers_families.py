"""The layers that families beside Llama need, against float64 autograd of plain formulations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as functional

from models.parts import AttentionPart, EmbeddingPart, GatedMLPPart, PlainMLPPart
from models.spec import Place
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.kv_cache import KVCache
from qeffect_lm.layers.norm import LayerNorm
from qeffect_lm.layers.rope import Rope, RopeScaling, apply_rope
from tests.unit.layer_harness import SEEDED, Harness, check, close, pairs, random

WIDTH, SEQUENCE = 8, 6
PLACE = Place("part", WIDTH, 1, torch.float64, 0.02)
KEY = torch.zeros((), dtype=torch.int64)


def linear(p, name, x):
    return x @ p[f"part.{name}.weight"].t() + p.get(f"part.{name}.bias", 0.0)


def test_layer_norm():
    harness = Harness(LayerNorm("norm", WIDTH, 0.1, torch.float64))
    harness.fill(1)

    def reference(p, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 0.1) * p["norm.weight"] + p["norm.bias"]

    check(harness, reference, pairs(2, (3, WIDTH), (3, WIDTH), torch.float64))


ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("part", [GatedMLPPart, PlainMLPPart])
def test_mlp(part, activation):
    harness = Harness(part(12, activation, bias=True).build(PLACE))
    harness.fill(2)

    def reference(p, x):
        if part is PlainMLPPart:
            return linear(p, "down", ACTIVATIONS[activation](linear(p, "up", x)))
        gate, up = linear(p, "gate_up", x).chunk(2, dim=-1)
        return linear(p, "down", ACTIVATIONS[activation](gate) * up)

    check(harness, reference, pairs(2, (3, WIDTH), (3, WIDTH), torch.float64), factor=5)


ROPE = Rope(4, 100.0, RopeScaling("linear", factor=2.0))
VARIANTS = {
    "biases of q, k and v": {"rope": ROPE, "bias": "qkv"},
    "q/k norm": {"rope": ROPE, "qk_norm": True, "norm_eps": 0.1, "bias": "all"},
    "window": {"rope": ROPE, "window": 3},
    "window as long as the sequence": {"rope": ROPE, "window": SEQUENCE},
    "no rotation": {"rope": None},
}


def plain(p, x, *, rope=None, bias="none", qk_norm=False, norm_eps=1e-5, window=None):
    """Two KV heads of two query heads each, one after the other."""
    fused = linear(p, "qkv", x)

    def head(row: int, norm: str | None) -> torch.Tensor:
        y = fused[..., 4 * row : 4 * row + 4]
        if norm and qk_norm:
            y = y / torch.sqrt(y.square().mean(-1, keepdim=True) + norm_eps) * p[f"part.{norm}.weight"]
        return y if rope is None or norm is None else apply_rope(y, *rope.tables(range(SEQUENCE), SEQUENCE, torch.float64))

    distance = torch.arange(SEQUENCE)[:, None] - torch.arange(SEQUENCE)
    hidden = (distance < 0) | (distance >= (window or SEQUENCE))
    heads = []
    for q, k, v in ((0, 2, 3), (1, 2, 3), (4, 6, 7), (5, 6, 7)):
        scores = head(q, "q_norm") @ head(k, "k_norm").transpose(1, 2) / 2.0
        heads.append(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ head(v, None))
    return linear(p, "out", torch.cat(heads, dim=-1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention(variant):
    keys = VARIANTS[variant]
    harness = Harness(AttentionPart(4, 2, 4, SEQUENCE, **keys).build(PLACE))
    harness.fill(3)
    shape = (2, SEQUENCE, WIDTH)
    check(harness, lambda p, x: plain(p, x, **keys), pairs(2, shape, shape, torch.float64), factor=10)


@pytest.mark.parametrize("pieces", [[1] * 6, [2, 3, 1], [4, 2]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_with_cache_equals_full_forward(variant, pieces):
    layer = AttentionPart(4, 2, 4, SEQUENCE, **VARIANTS[variant]).build(PLACE)
    Harness(layer).fill(4)
    x = random(2, SEQUENCE, WIDTH, seed=5)
    cache, done = KVCache.empty(2, SEQUENCE), []
    with torch.no_grad():
        for piece in x.split(pieces, dim=1):
            cache.begin(piece.shape[1])
            done.append(layer(piece, LayerContext(Phase.EVAL, key=KEY, cache=cache)))
            cache.lengths.add_(piece.shape[1])
        close(torch.cat(done, dim=1), layer(x, LayerContext(Phase.EVAL, key=KEY)), factor=5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_follow_the_length(kind):
    """Training has those of the whole sequence; a shorter one (generation) those of what it has seen."""
    scaling = {
        "dynamic": RopeScaling("dynamic", factor=4.0),
        "longrope": RopeScaling(
            "longrope", short_factor=(1.0, 2.0), long_factor=(3.0, 7.0), original_max_position_embeddings=3, factor=2.0
        ),
    }[kind]
    rope = Rope(4, 100.0, scaling, max_position_embeddings=3)
    layer = AttentionPart(4, 2, 4, SEQUENCE, rope).build(PLACE)
    for start, count in ((0, SEQUENCE), (0, 3), (0, 2), (2, 1), (3, 2)):
        want = rope.tables(range(start, start + count), start + count, torch.float64)
        assert all(torch.equal(a, b) for a, b in zip(layer.tables(start, count), want, strict=True))
    assert not torch.equal(layer.tables(0, 3)[0], layer.tables(0, SEQUENCE)[0][:3])


def test_learned_positions():
    """G1: two microbatches shorter than the table: the sum over both, and zeros where no sequence reaches."""
    block = EmbeddingPart(5, positions=7).build(PLACE)
    harness = Harness(block, first=True)
    harness.fill(6)
    tokens = [torch.tensor([[0, 1, 4], [2, 2, 3]]), torch.tensor([[4, 4, 0], [1, 0, 2]])]
    dys = [random(2, 3, WIDTH, seed=seed) for seed in (7, 8)]
    microbatches = [harness.microbatch(n, t, dy) for n, (t, dy) in enumerate(zip(tokens, dys, strict=True))]
    harness.run(microbatches)
    table, positions = harness.parameters["embedding.weight"], harness.parameters["positions.weight"]
    for m, t in zip(microbatches, tokens, strict=True):
        close(m.out, (functional.one_hot(t, 5).double() @ table + positions[:3]).detach())
    want = torch.zeros(7, WIDTH, dtype=torch.float64)
    want[:3] = sum(dys).sum(dim=0)
    close(harness.grads["positions.weight"], want)
    assert not bool((harness.grads["positions.weight"] == SEEDED).any())
    with pytest.raises(ValueError, match="positions: position 8 is past the table of 7"), torch.no_grad():
        block(torch.zeros(1, 8, dtype=torch.int64), LayerContext(Phase.EVAL, key=KEY))
