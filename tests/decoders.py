"""Decoders of given sizes without a configuration."""

from __future__ import annotations

from typing import Any

from models.decoder import Decoder
from models.parts import AttentionPart, EmbeddingPart, GatedMLPPart, HeadPart, RMSNormPart
from qeffect_lm.layers.rope import Rope


def llama_decoder(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_size: int,
    max_positions: int,
    dropout: float = 0.0,
    tied: bool = False,
    **rest: Any,
) -> Decoder:
    """Llama's parts; ``rest`` goes to :class:`Decoder`."""
    return Decoder(
        hidden_size=hidden_size,
        num_layers=num_layers,
        embedding=EmbeddingPart(vocab_size, dropout=dropout),
        attention=AttentionPart(num_heads, num_kv_heads, head_dim, max_positions, Rope(head_dim, 10000.0)),
        mlp=GatedMLPPart(ffn_size),
        norm=RMSNormPart(),
        head=HeadPart(vocab_size, tied),
        dropout=dropout,
        **rest,
    )
