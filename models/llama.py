"""Llama (Touvron et al. 2023): the decoder as it is, without biases."""

from __future__ import annotations

import torch

from models.decoder import Decoder
from qeffect_lm.config import Config
from qeffect_lm.fp8.recipes import Recipe


def llama(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """A Llama-style decoder with the configuration's sizes."""
    model, fp8 = config.model, config.precision.fp8
    return Decoder(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_size=model.ffn_size,
        max_positions=config.data.seq_len,
        rope_theta=model.rope_theta,
        norm_eps=model.norm_eps,
        dropout=model.dropout,
        init_std=model.init_std,
        dtype=dtype,
        recipe=recipe,
        high_precision_first=fp8.high_precision_first,
        high_precision_last=fp8.high_precision_last,
        backend=model.backend,
        tied=model.tie_word_embeddings,
    )
