"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, biases everywhere, an MLP without a gate."""

from __future__ import annotations

import torch

from models.decoder import Decoder
from models.parts import AttentionPart, EmbeddingPart, HeadPart, LayerNormPart, PlainMLPPart
from models.settings import check_rope_unused, settled
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import Recipe


def gpt2(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """A GPT-2-style decoder with the configuration's sizes. ``model.max_position_embeddings`` (null: ``data.seq_len``) is the
    number of learned positions, ``model.norm_eps`` LayerNorm's epsilon.

    Raises:
        UsageError: keys that GPT-2 has no use for.
    """
    model, fp8 = config.model, config.precision.fp8
    choices = settled(
        config, "gpt2", attention_bias=("all",), mlp_bias=(True,), activation=("gelu_new", "gelu", "relu", "silu")
    )
    check_rope_unused(config, "gpt2")
    if model.num_kv_heads != model.num_heads:
        raise UsageError(
            f"model.num_kv_heads {model.num_kv_heads}: family gpt2 has a key and a value for each of model.num_heads "
            f"{model.num_heads}: set it to that"
        )
    return Decoder(
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        embedding=EmbeddingPart(
            model.vocab_size, positions=model.max_position_embeddings or config.data.seq_len, dropout=model.dropout
        ),
        attention=AttentionPart(
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            max_positions=config.data.seq_len,
            bias=choices["attention_bias"],
        ),
        mlp=PlainMLPPart(model.ffn_size, choices["activation"], choices["mlp_bias"]),
        norm=LayerNormPart(model.norm_eps),
        head=HeadPart(model.vocab_size, model.tie_word_embeddings),
        dropout=model.dropout,
        init_std=model.init_std,
        dtype=dtype,
        recipe=recipe,
        high_precision_first=fp8.high_precision_first,
        high_precision_last=fp8.high_precision_last,
        backend=model.backend,
        recompute=model.recompute,
        recompute_layers=model.recompute_layers,
    )
