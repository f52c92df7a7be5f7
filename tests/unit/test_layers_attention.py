"""RoPE, attention with grouped queries and a cache, keyed dropout: against plain formulations, exact rows,
keyed masks."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.decoder import DecoderBlock
from qeffect_lm.layers.attention import Attention
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.dropout import KeyedDropout, host_key, keyed_uniform_bits
from qeffect_lm.layers.kv_cache import KVCache
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.mlp import GatedMLP
from qeffect_lm.layers.norm import RMSNorm
from qeffect_lm.layers.rope import Rope, apply_rope, rope_tables
from tests.unit.layer_harness import Harness, check, close, pairs, plain_attention, random


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope(theta):
    """The pair (i, i + d/2) at position p is one complex number times exp(i p theta**(-2i/d))."""
    cos, sin = rope_tables(9, 8, theta, torch.float64)
    assert cos.shape == sin.shape == (9, 4)
    x = random(2, 3, 9, 8, seed=20)
    z = torch.complex(x[..., :4], x[..., 4:])
    frequency = theta ** (-torch.arange(4, dtype=torch.float64) * 2 / 8)
    turned = z * torch.exp(1j * torch.arange(9, dtype=torch.float64)[:, None] * frequency)
    got = apply_rope(x, cos, sin)
    close(got, torch.cat([turned.real, turned.imag], dim=-1))
    assert torch.equal(got[:, :, 0], x[:, :, 0]), "position 0 is not turned"
    q, k = random(8, seed=21).expand(1, 1, 9, 8), random(8, seed=22).expand(1, 1, 9, 8)
    scores = (apply_rope(q, cos, sin) @ apply_rope(k, cos, sin).transpose(-1, -2))[0, 0]
    for offset in range(9):  # only the distance counts
        diagonal = scores.diagonal(offset)
        close(diagonal, diagonal[:1].expand_as(diagonal))
    exact = rope_tables(4096, 8, theta, torch.float64)[1]
    close(rope_tables(4096, 8, theta, torch.float32)[1], exact, factor=0.006)


def attention(heads: int, kv_heads: int, head_dim: int, hidden: int, **kwargs) -> Attention:
    dtype = kwargs.setdefault("dtype", torch.float64)
    qkv = SplitLinear("attention.qkv", hidden, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    out = SplitLinear("attention.out", heads * head_dim, hidden, dtype=dtype)
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": 16,
        "rope": Rope(head_dim, 100.0),
    }
    return Attention("attention", qkv, out, **sizes, **kwargs)


ROWS = {
    # H2, H3: 4 query heads, 2 KV heads: q0 q1 k0 v0 q2 q3 k1 v1.
    (4, 2): ([0, 1, 4, 5], [2, 2, 6, 6], [3, 3, 7, 7]),
    # multi-head: q0 k0 v0 q1 k1 v1; multi-query: q0 q1 q2 k0 v0.
    (2, 2): ([0, 3], [1, 4], [2, 5]),
    (3, 1): ([0, 1, 2], [3, 3, 3], [4, 4, 4]),
}


@pytest.mark.parametrize("head_dim", [4, 6])  # H4: 6 is not hidden / heads
@pytest.mark.parametrize("heads", ROWS, ids=str)
def test_attention(heads, head_dim):
    harness = Harness(attention(*heads, head_dim, 8))
    harness.fill(23)

    def reference(p, x):
        weights = p["attention.qkv.weight"], p["attention.out.weight"]
        return plain_attention(x, *weights, ROWS[heads], head_dim, theta=100.0)

    check(harness, reference, pairs(2, (2, 5, 8), (2, 5, 8), torch.float64), factor=5)


def test_grouped_rows_exactly():
    """H2, H3 without arithmetic: the rows of v1 (row 7) reach query heads 2 and 3 and no other; those of q0
    (row 0) change head 0 alone."""
    layer = attention(4, 2, 2, 8)
    harness = Harness(layer)
    harness.fill(24)
    with torch.no_grad():
        layer.out.weight.copy_(torch.eye(8, dtype=torch.float64))
    x = random(1, 5, 8, seed=25)
    context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64))

    def touched(row: int) -> list[int]:
        with torch.no_grad():
            before = layer(x, context)
            layer.qkv.weight[2 * row : 2 * row + 2].add_(1.0)
            after = layer(x, context)
            layer.qkv.weight[2 * row : 2 * row + 2].sub_(1.0)
        return [
            head
            for head in range(4)
            if not torch.equal(before[..., 2 * head : 2 * head + 2], after[..., 2 * head : 2 * head + 2])
        ]

    assert [touched(row) for row in range(8)] == [[0], [1], [0, 1], [0, 1], [2], [3], [2, 3], [2, 3]]


def test_attention_is_causal_and_bounded():
    layer = attention(4, 2, 4, 8)
    harness = Harness(layer)
    harness.fill(26)
    context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64))
    x = random(1, 16, 8, seed=27)
    changed = x.clone()
    changed[:, 9:] += 1.0
    with torch.no_grad():
        a, b = layer(x, context), layer(changed, context)
        assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9:], b[:, 9:])
        with pytest.raises(ValueError, match="attention: position 17 is past the table of 16"):
            layer(torch.zeros(1, 17, 8, dtype=torch.float64), context)


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 1, 4, 1], [12], [1, 11], [7, 5]], ids=str)
def test_generation_with_cache_equals_full_forward(pieces):
    """Two decoder blocks, token by token or several at a time: the same activations as in one go."""
    blocks = nn.ModuleList()
    for i in range(2):
        at, width = f"layers.{i}", 8
        layer = attention(4, 2, 4, width)
        layer.name = f"{at}.attention"
        layer.qkv.name, layer.out.name = f"{at}.attention.qkv", f"{at}.attention.out"
        mlp = GatedMLP(
            f"{at}.mlp",
            SplitLinear(f"{at}.mlp.gate_up", width, 24, dtype=torch.float64),
            SplitLinear(f"{at}.mlp.down", 12, width, dtype=torch.float64),
        )
        norms = [RMSNorm(f"{at}.{n}", width, dtype=torch.float64) for n in ("attention_norm", "mlp_norm")]
        blocks.append(DecoderBlock(at, norms[0], layer, norms[1], mlp, 0.0))
    Harness(blocks).fill(28)
    x = random(2, 12, 8, seed=29)

    @torch.no_grad()
    def forward(part: torch.Tensor, cache: KVCache | None) -> torch.Tensor:
        context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64), cache=cache)
        if cache is not None:
            cache.begin(part.shape[1])
        for block in blocks:
            part = block(part, context)
        return part

    cache, done = KVCache.empty(2, 14), []
    cache.limit = 12
    for part in x.split(pieces, dim=1):
        done.append(forward(part, cache))
        cache.lengths.add_(part.shape[1])
    close(torch.cat(done, dim=1), forward(x, None), factor=5)
    assert sorted(cache.entries) == ["layers.0.attention", "layers.1.attention"]
    keys, values = cache.entries["layers.1.attention"]
    assert keys.shape == values.shape == (2, 14, 2, 4) and not bool(keys[:, 12:].any())


def test_rows_of_a_cache_have_lengths_of_their_own():
    """Sequences of 3 and 7 tokens begin with a pass of their own, then go on together: as each alone, and a row that is used
    again knows nothing of the sequence before."""
    layer = attention(4, 2, 4, 8)
    Harness(layer).fill(31)
    x = random(3, 12, 8, seed=32)
    key = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def plain(part: torch.Tensor) -> torch.Tensor:
        return layer(part, LayerContext(Phase.EVAL, key=key))

    @torch.no_grad()
    def on(cache: KVCache, part: torch.Tensor) -> torch.Tensor:
        cache.begin(part.shape[1])
        y = layer(part, LayerContext(Phase.EVAL, key=key, cache=cache))
        cache.lengths.add_(part.shape[1])
        return y

    alone = [plain(x[i : i + 1]) for i in range(3)]

    cache = KVCache.empty(2, 12)
    for row, (sequence, begin) in enumerate(((0, 3), (1, 7))):
        part = x[sequence : sequence + 1, :begin]
        assert torch.equal(on(cache.fresh_row(row), part), plain(part)), "a first pass is one without a cache"
    for step in range(4):
        y = on(cache, torch.stack([x[0, 3 + step], x[1, 7 + step]])[:, None])
        close(y, torch.stack([alone[0][0, 3 + step], alone[1][0, 7 + step]])[:, None], factor=5)
    on(cache.fresh_row(0), x[2:, :2])
    y = on(cache, torch.stack([x[2, 2], x[1, 11]])[:, None])
    close(y, torch.stack([alone[2][0, 2], alone[1][0, 11]])[:, None], factor=5)
    assert cache.lengths.tolist() == [3, 12]


# ---- keyed dropout -----------------------------------------------------------------------------------------


def key(*parts: int) -> torch.Tensor:
    return torch.tensor(host_key(*parts))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_mean_and_scale(p):
    """Kept with probability 1 - p within five standard deviations, and scaled so that the mean stays."""
    count = 40000
    out = KeyedDropout("layer", p)(torch.ones(count), LayerContext(Phase.TRAIN, key=key(1, 2)))
    kept = out != 0
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / count)
    assert torch.equal(out[kept], torch.full((int(kept.sum()),), 1.0) * (1.0 / (1.0 - p)))
    flips = (kept[1:] != kept[:-1]).double().mean().item()  # neighbours are independent
    assert abs(flips - 2 * p * (1 - p)) < 5 * math.sqrt(0.25 / count)


def test_dropout_mask_is_a_function_of_key_role_and_element():
    """The same key gives the same mask whatever ran before or how the tensor is shaped; another seed, step,
    microbatch, rank or layer gives another."""
    x = torch.ones(8, 64)
    layer = KeyedDropout("layers.0.mlp_dropout", 0.5)

    def mask(*parts: int, layer: KeyedDropout = layer, x: torch.Tensor = x) -> torch.Tensor:
        return layer(x, LayerContext(Phase.TRAIN, key=key(*parts))) != 0

    first = mask(1234, 5, 2, 0)
    torch.rand(100)
    mask(1234, 5, 3, 0)
    assert torch.equal(mask(1234, 5, 2, 0), first)
    assert torch.equal(mask(1234, 5, 2, 0, x=x.view(4, 128)).view(8, 64), first)
    assert torch.equal(mask(1234, 5, 2, 0, x=x.double()), first)
    others = [mask(1235, 5, 2, 0), mask(1234, 6, 2, 0), mask(1234, 5, 3, 0), mask(1234, 5, 2, 1)]
    others.append(mask(1234, 5, 2, 0, layer=KeyedDropout("layers.1.mlp_dropout", 0.5)))
    everything = [first, *others]
    for i, a in enumerate(everything):
        for b in everything[:i]:
            agreement = (a == b).double().mean().item()
            assert abs(agreement - 0.5) < 5 * math.sqrt(0.25 / x.numel()), "independent of each other"


def test_dropout_leaves_generators_alone():
    before = torch.get_rng_state()
    KeyedDropout("layer", 0.5)(torch.ones(10), LayerContext(Phase.TRAIN, key=key(1)))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_backward_uses_the_same_mask():
    harness = Harness(KeyedDropout("layer", 0.25))
    batches = pairs(2, (3, 40), (3, 40), torch.float64)
    microbatches = [harness.microbatch(i, *pair) for i, pair in enumerate(batches)]
    harness.run(microbatches)
    masks = []
    for m, (x, dy) in zip(microbatches, batches, strict=True):
        kept = (m.out != 0).double()
        close(m.out, x * kept / 0.75)
        close(m.dx, dy * kept / 0.75)
        masks.append(kept)
    assert not torch.equal(*masks)


def test_dropout_phases_and_range():
    x = torch.ones(4, 50)
    for phase, changes in ((Phase.TRAIN, True), (Phase.CALIBRATE, True), (Phase.EVAL, False)):
        assert torch.equal(KeyedDropout("layer", 0.5)(x, LayerContext(phase, key=key(1))), x) != changes
    assert KeyedDropout("layer", 0.0)(x, LayerContext(Phase.TRAIN, key=key(1))) is x
    for p in (-0.1, 1.0, 2.0):
        with pytest.raises(ValueError, match=r"layer: a dropout probability lies in \[0, 1\)"):
            KeyedDropout("layer", p)


def splitmix64(counter: int, start: int) -> int:
    """Steele, Lea and Flood's generator in Python integers: output number ``counter`` from state
    ``start``."""
    mask = (1 << 64) - 1
    z = (start + counter * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**40), role=st.integers(-(2**63), 2**63 - 1))
def test_random_bits_are_splitmix64(seed, role):
    """Against the published generator with unbounded integers: the wrapping int64 arithmetic is right."""
    k = host_key(seed)
    got = keyed_uniform_bits(torch.Size([2, 5]), torch.tensor(k), role)
    start = splitmix64(0, (k ^ role) & ((1 << 64) - 1))
    assert got.flatten().tolist() == [splitmix64(i, start) >> 40 for i in range(10)]


def test_splitmix64_reference():
    """The published first outputs of seed 1234567."""
    outputs = [splitmix64(i, 1234567) for i in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_host_key():
    """Separated parts, both signs, fixed for ever (checkpoints of another machine rely on it)."""
    assert host_key(1, 23) != host_key(12, 3) and host_key("a", "b") != host_key("ab")
    keys = [host_key(i) for i in range(1000)]
    assert len(set(keys)) == 1000 and min(keys) < 0 < max(keys) and max(map(abs, keys)) < 2**63
    first = hashlib.sha256(b"\0".join([b"1234", b"init", b"2", b"0"])).digest()[:8]
    assert host_key(1234, "init", 2, 0) == int.from_bytes(first, "little", signed=True)
