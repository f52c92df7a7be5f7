"""The parts that come with the framework: attention, MLPs, norms, embedding, head and loss.

Each is a frozen record of its sizes. ``without_te`` of a part says what of it Transformer Engine's blocks do not run, as the
key of the configuration that asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from models.spec import ParameterSpec, Place
from qeffect_lm.layers.attention import Attention
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.dropout import KeyedDropout
from qeffect_lm.layers.embedding import Embedding, LearnedPositions
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.loss import CrossEntropyLoss
from qeffect_lm.layers.mlp import GatedMLP, PlainMLP
from qeffect_lm.layers.norm import LayerNorm, RMSNorm
from qeffect_lm.layers.rope import Rope
from qeffect_lm.parallel.context import ContextParallel
from qeffect_lm.parallel.cuts import Even, GroupedHeads, Vocabulary
from qeffect_lm.parallel.linear import ColumnParallelLinear
from qeffect_lm.parallel.vocabulary import ParallelCrossEntropy, ParallelEmbedding


@dataclass(frozen=True)
class RMSNormPart:
    """RMSNorm over the residual stream."""

    parallel = True

    eps: float = 1e-5

    @property
    def without_te(self) -> str | None:
        return None

    def parameters(self, place: Place) -> list[ParameterSpec]:
        return [place.vector("weight", place.hidden_size, summed=place.kinds.norms)]

    def build(self, place: Place) -> Layer:
        return RMSNorm(place.name, place.hidden_size, self.eps, place.dtype)


@dataclass(frozen=True)
class LayerNormPart:
    """LayerNorm over the residual stream, with a bias."""

    parallel = True

    eps: float = 1e-5

    @property
    def without_te(self) -> str | None:
        return "a family with LayerNorm"

    def parameters(self, place: Place) -> list[ParameterSpec]:
        size = place.hidden_size
        return [place.vector("weight", size), place.vector("bias", size, init_std=0.0)]

    def build(self, place: Place) -> Layer:
        return LayerNorm(place.name, place.hidden_size, self.eps, place.dtype)


@dataclass(frozen=True)
class AttentionPart:
    """Causal attention with grouped queries.

    Attributes:
        max_positions: the longest sequence, tokens; every training sequence is so long.
        rope: rotation of q and k; None: none.
        bias: of which products: ``none``, ``qkv`` or ``all``.
        qk_norm: RMSNorm of every q and k head, with ``norm_eps``.
        window: tokens that a token sees, itself included; None: all before it.
        full_layers: the first so many decoder layers have no window.
    """

    parallel = sequences = True

    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rope: Rope | None = None
    bias: str = "none"
    qk_norm: bool = False
    norm_eps: float = 1e-5
    window: int | None = None
    full_layers: int = 0

    @property
    def without_te(self) -> str | None:
        if self.bias != "none":
            return f"model.attention_bias {self.bias}"
        if self.qk_norm:
            return "model.qk_norm true"
        if self.window is not None and self.window < self.max_positions:
            return f"model.sliding_window {self.window}"
        return None

    @property
    def _sizes(self) -> tuple[int, int]:
        """Features of all query heads, and of the fused projection."""
        heads = self.heads * self.head_dim
        return heads, heads + 2 * self.kv_heads * self.head_dim

    def parameters(self, place: Place) -> list[ParameterSpec]:
        heads, qkv = self._sizes
        d, query = self.head_dim, self.heads // self.kv_heads * self.head_dim
        rows = tuple((self.kv_heads, *rows) for rows in ((0, query), (query, query + d), (query + d, query + 2 * d)))
        specs = place.matrix("qkv", place.hidden_size, qkv, bias=self.bias != "none", rows=rows, cut=self._cut)
        specs += place.matrix("out", heads, place.hidden_size, bias=self.bias == "all", residual=True)
        if self.qk_norm:
            specs += [place.vector(f"{which}_norm.weight", d, summed="always") for which in ("q", "k")]
        return specs

    @property
    def _cut(self) -> GroupedHeads:
        return GroupedHeads(self.heads, self.kv_heads, self.head_dim)

    def build(self, place: Place) -> Layer:
        heads, qkv = self._sizes
        own_heads, own_kv_heads = (self.heads, self.kv_heads) if place.tp is None else self._cut.local(place.tp.size)
        norms = [RMSNorm(f"{place.name}.{which}", self.head_dim, self.norm_eps, place.dtype) for which in ("q_norm", "k_norm")]
        return Attention(
            place.name,
            place.column("qkv", place.hidden_size, qkv, bias=self.bias != "none", cut=self._cut),
            place.row("out", heads, place.hidden_size, bias=self.bias == "all"),
            heads=own_heads,
            kv_heads=own_kv_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            rope=self.rope,
            window=None if place.layer is not None and place.layer < self.full_layers else self.window,
            q_norm=norms[0] if self.qk_norm else None,
            k_norm=norms[1] if self.qk_norm else None,
            selective=place.selective,
            cp=place.cp,
            dtype=place.dtype,
        )


@dataclass(frozen=True)
class GatedMLPPart:
    """``down(activation(gate) * up)``: with ``silu`` SwiGLU."""

    parallel = True

    ffn_size: int
    activation: str = "silu"
    bias: bool = False

    @property
    def without_te(self) -> str | None:
        if self.activation != "silu":
            return f"model.activation {self.activation}"
        return "model.mlp_bias true" if self.bias else None

    def parameters(self, place: Place) -> list[ParameterSpec]:
        f = self.ffn_size
        rows, cut = ((1, 0, f), (1, f, 2 * f)), Even(2 * f, blocks=2)
        specs = place.matrix("gate_up", place.hidden_size, 2 * f, bias=self.bias, rows=rows, cut=cut)
        return specs + place.matrix("down", f, place.hidden_size, bias=self.bias, residual=True)

    def build(self, place: Place) -> Layer:
        cut = Even(2 * self.ffn_size, blocks=2)  # a rank's gate and up are of the same features
        gate_up = place.column("gate_up", place.hidden_size, 2 * self.ffn_size, bias=self.bias, cut=cut)
        down = place.row("down", self.ffn_size, place.hidden_size, bias=self.bias)
        return GatedMLP(place.name, gate_up, down, self.activation, selective=place.selective)


@dataclass(frozen=True)
class PlainMLPPart:
    """``down(activation(up))``."""

    parallel = True

    ffn_size: int
    activation: str = "gelu_new"
    bias: bool = True

    @property
    def without_te(self) -> str | None:
        return "a family whose MLP has no gate"

    def parameters(self, place: Place) -> list[ParameterSpec]:
        specs = place.matrix("up", place.hidden_size, self.ffn_size, bias=self.bias)
        return specs + place.matrix("down", self.ffn_size, place.hidden_size, bias=self.bias, residual=True)

    def build(self, place: Place) -> Layer:
        up = place.column("up", place.hidden_size, self.ffn_size, bias=self.bias)
        down = place.row("down", self.ffn_size, place.hidden_size, bias=self.bias)
        return PlainMLP(place.name, up, down, self.activation, selective=place.selective)


class EmbeddingBlock(Layer):
    """Token ids → activations: the embedding, learned positions where there are any, dropout."""

    def __init__(
        self,
        name: str,
        embedding: Layer,
        positions: LearnedPositions | None,
        dropout: float,
        before: int = 0,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__(name)
        self.embedding, self.positions = embedding, positions
        self.dropout = KeyedDropout(f"{name}.dropout", dropout, before, cp)

    def forward(self, tokens: torch.Tensor, context: LayerContext) -> torch.Tensor:
        x = self.embedding(tokens, context)
        if self.positions is not None:
            x = self.positions(x, context)
        return self.dropout(x, context)


@dataclass(frozen=True)
class EmbeddingPart:
    """The first block: token ids → activations. ``positions``: rows of learned positions; 0: none."""

    parallel = sequences = True

    vocab_size: int
    positions: int = 0
    dropout: float = 0.0

    def parameters(self, place: Place) -> list[ParameterSpec]:
        def table(name: str, rows: int, axis: str | None) -> ParameterSpec:
            cut, summed = (None, "tokens") if axis is None else (Vocabulary(rows), None)
            shape = rows, place.hidden_size
            return ParameterSpec(name, shape, place.init_std, True, (axis, None), embedding=True, cut=cut, summed=summed)

        specs = [table("embedding.weight", self.vocab_size, "tp")]
        return specs + ([table("positions.weight", self.positions, None)] if self.positions else [])

    def build(self, place: Place) -> Layer:
        sizes = self.vocab_size, place.hidden_size
        embedding: Layer = Embedding("embedding", *sizes, place.dtype)
        if place.tp is not None:
            embedding = ParallelEmbedding("embedding", *sizes, tp=place.tp, dtype=place.dtype)
        positions = None
        if self.positions:
            sizes = self.positions, place.hidden_size
            positions = LearnedPositions("positions", *sizes, place.dtype, place.before, place.cp)
        return EmbeddingBlock(place.name, embedding, positions, self.dropout, place.before, place.cp)


@dataclass(frozen=True)
class HeadPart:
    """Activations → logits ``[..., vocab]``; ``tied``: its weight is the embedding's."""

    parallel = True

    vocab_size: int
    tied: bool = False

    def parameters(self, place: Place) -> list[ParameterSpec]:
        if self.tied:
            return []
        shape = self.vocab_size, place.hidden_size
        return [ParameterSpec(f"{place.name}.weight", shape, place.init_std, True, ("tp", None), cut=Vocabulary(shape[0]))]

    def build(self, place: Place) -> Layer:
        sizes = place.hidden_size, self.vocab_size
        if place.tp is not None:
            cut = Vocabulary(self.vocab_size)
            return ColumnParallelLinear(place.name, *sizes, tp=place.tp, cut=cut, dtype=place.dtype)
        return SplitLinear(place.name, *sizes, dtype=place.dtype)


@dataclass(frozen=True)
class CrossEntropyPart:
    """Logits → the loss."""

    parallel = True

    def parameters(self, place: Place) -> list[ParameterSpec]:
        return []

    def build(self, place: Place) -> Layer:
        if place.tp is not None:
            return ParallelCrossEntropy(place.name, place.vocab_size, tp=place.tp)
        return CrossEntropyLoss(place.name)
