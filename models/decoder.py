"""A decoder-only transformer (Llama style): RMSNorm before attention and MLP, RoPE, grouped queries, SwiGLU; the head has a
weight of its own or the embedding's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from models.spec import Chunk, ParameterSpec, layer_range
from qeffect_lm.fp8.recipes import Recipe
from qeffect_lm.layers.attention import Attention
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.dropout import KeyedDropout
from qeffect_lm.layers.embedding import Embedding
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.loss import CrossEntropyLoss
from qeffect_lm.layers.mlp import SwiGLU
from qeffect_lm.layers.norm import RMSNorm
from qeffect_lm.layers.te import TEBlock, TELinear


class DecoderBlock(Layer):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``, with residual dropout."""

    def __init__(
        self, name: str, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: SwiGLU, dropout: float
    ) -> None:
        super().__init__(name)
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_dropout = KeyedDropout(f"{name}.attention_dropout", dropout)
        self.mlp_dropout = KeyedDropout(f"{name}.mlp_dropout", dropout)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if self.attention_dropout.p == 0:
            x = self.attention(x, context, self.attention_norm, residual=True)
        else:
            x = x + self.attention_dropout(self.attention(x, context, self.attention_norm), context)
        if self.mlp_dropout.p == 0:
            return self.mlp(x, context, self.mlp_norm, residual=True)
        return x + self.mlp_dropout(self.mlp(x, context, self.mlp_norm), context)


class EmbeddingBlock(Layer):
    """Token ids → activations, with dropout."""

    def __init__(self, name: str, embedding: Embedding, dropout: float) -> None:
        super().__init__(name)
        self.embedding, self.dropout = embedding, KeyedDropout(f"{name}.dropout", dropout)

    def forward(self, tokens: torch.Tensor, context: LayerContext) -> torch.Tensor:
        return self.dropout(self.embedding(tokens, context), context)


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder, and how to build any part of it.

    Attributes:
        recipe: FP8 recipe of the decoder layers' linears (embedding and head stay in ``dtype``); None: no FP8.
        high_precision_first, high_precision_last: that many decoder layers at either end stay out of FP8.
        backend: who runs the decoder layers, ``native`` or ``te`` (Transformer Engine).
        tied: the head's weight is the embedding's.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    init_std: float = 0.02
    dtype: torch.dtype = torch.float32
    recipe: Recipe | None = field(default=None, compare=False)
    high_precision_first: int = 0
    high_precision_last: int = 0
    backend: str = "native"
    tied: bool = False

    # ---- parameters --------------------------------------------------------------------------------------------

    def parameters(self, layers: Sequence[int] | None = None) -> list[ParameterSpec]:
        """All parameters in global order (embedding, layers, final norm, head), or those of ``layers`` only."""
        h, qkv = self.hidden_size, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        std, out_std = self.init_std, self.init_std / math.sqrt(2 * self.num_layers)
        d, query = self.head_dim, self.num_heads // self.num_kv_heads * self.head_dim
        heads = tuple((self.num_kv_heads, *rows) for rows in ((0, query), (query, query + d), (query + d, query + 2 * d)))
        gate_up = ((1, 0, self.ffn_size), (1, self.ffn_size, 2 * self.ffn_size))
        whole = ((1, 0, h),)
        specs = []
        if layers is None:
            specs.append(ParameterSpec("embedding.weight", (self.vocab_size, h), std, True, ("tp", None), embedding=True))
        for i in range(self.num_layers) if layers is None else layers:
            at = f"layers.{i}"
            specs += [
                ParameterSpec(f"{at}.attention_norm.weight", (h,), None, False, (None,)),
                ParameterSpec(f"{at}.attention.qkv.weight", (qkv, h), std, True, ("tp", None), matrices=heads),
                ParameterSpec(
                    f"{at}.attention.out.weight", (h, self.num_heads * d), out_std, True, (None, "tp"), matrices=whole
                ),
                ParameterSpec(f"{at}.mlp_norm.weight", (h,), None, False, (None,)),
                ParameterSpec(f"{at}.mlp.gate_up.weight", (2 * self.ffn_size, h), std, True, ("tp", None), matrices=gate_up),
                ParameterSpec(f"{at}.mlp.down.weight", (h, self.ffn_size), out_std, True, (None, "tp"), matrices=whole),
            ]
        if layers is None:
            specs.append(ParameterSpec("final_norm.weight", (h,), None, False, (None,)))
            if not self.tied:
                specs.append(ParameterSpec("head.weight", (self.vocab_size, h), std, True, ("tp", None)))
        return specs

    @property
    def ties(self) -> dict[str, str]:
        """Weight of a layer → the parameter that it is, another layer's. It is no parameter of its own."""
        return {"head.weight": "embedding.weight"} if self.tied else {}

    # ---- modules -----------------------------------------------------------------------------------------------

    def chunk(self, index: int, stage_layers: Sequence[int]) -> Chunk:
        """One chunk per entry of ``stage_layers`` (its decoder layers): the first also holds the embedding, the last the
        final norm, head and loss."""
        blocks: list[Layer] = []
        if index == 0:
            embedding = Embedding("embedding", self.vocab_size, self.hidden_size, self.dtype)
            blocks.append(EmbeddingBlock("embedding_block", embedding, self.dropout))
        blocks += [self.block(i) for i in layer_range(index, stage_layers)]
        loss = None
        if index == len(stage_layers) - 1:
            blocks.append(RMSNorm("final_norm", self.hidden_size, self.norm_eps, self.dtype))
            blocks.append(SplitLinear("head", self.hidden_size, self.vocab_size, dtype=self.dtype))
            loss = CrossEntropyLoss("loss")
        return Chunk(blocks, loss=loss, first=index == 0)

    def meta_chunk(self, index: int, stage_layers: Sequence[int]) -> Chunk:
        """The chunk's structure without storage, to ask what another rank holds."""
        with torch.device("meta"):
            return self.chunk(index, stage_layers)

    def block(self, i: int) -> DecoderBlock | TEBlock:
        """Decoder layer ``i``."""
        block = self._block(i, SplitLinear if self.backend == "native" else TELinear)
        return block if self.backend == "native" else TEBlock(block)

    def _block(self, i: int, kind: type[SplitLinear]) -> DecoderBlock:
        at = f"layers.{i}"
        in_fp8 = self.high_precision_first <= i < self.num_layers - self.high_precision_last
        recipe = self.recipe if in_fp8 else None

        def linear(name: str, inputs: int, outputs: int) -> SplitLinear:
            return kind(f"{at}.{name}", inputs, outputs, recipe=recipe, dtype=self.dtype)

        h, heads = self.hidden_size, self.num_heads * self.head_dim
        attention = Attention(
            f"{at}.attention",
            linear("attention.qkv", h, heads + 2 * self.num_kv_heads * self.head_dim),
            linear("attention.out", heads, h),
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            rope_theta=self.rope_theta,
            dtype=self.dtype,
        )
        mlp = SwiGLU(f"{at}.mlp", linear("mlp.gate_up", h, 2 * self.ffn_size), linear("mlp.down", self.ffn_size, h))
        norms = [RMSNorm(f"{at}.{which}", h, self.norm_eps, self.dtype) for which in ("attention_norm", "mlp_norm")]
        return DecoderBlock(at, norms[0], attention, norms[1], mlp, self.dropout)
