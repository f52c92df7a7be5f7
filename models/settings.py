"""What families share in reading the configuration: which keys they leave open, and the decoder that Llama and its kin are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from models.decoder import Decoder
from models.parts import AttentionPart, EmbeddingPart, GatedMLPPart, HeadPart, RMSNormPart
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import Recipe
from qeffect_lm.layers.rope import Rope, RopeScaling


def settled(
    config: Config,
    family: str,
    *,
    attention_bias: Sequence[str] = ("none",),
    mlp_bias: Sequence[bool] = (False,),
    qk_norm: Sequence[bool] = (False,),
    activation: Sequence[str] = ("silu",),
    window: bool = False,
    experts: bool = False,
) -> dict[str, Any]:
    """The keys that null leaves to the family, settled: its first choice, or what the configuration says if the family has it.

    Args:
        window: whether the family knows ``model.sliding_window``.
        experts: whether it has any (``model.moe``).

    Raises:
        UsageError: the configuration asks for something that the family does not have, by key.
    """
    model = config.model
    found = {}
    choices = {"attention_bias": attention_bias, "mlp_bias": mlp_bias, "qk_norm": qk_norm, "activation": activation}
    for key, allowed in choices.items():
        given = getattr(model, key)
        if given is not None and given not in allowed:
            known = " or ".join(_text(value) for value in allowed)
            raise UsageError(f"model.{key} {_text(given)}: family {family} has {known}; leave it null, or take another family")
        found[key] = allowed[0] if given is None else given
    if model.sliding_window is not None and not window:
        raise UsageError(
            f"model.sliding_window {model.sliding_window}: family {family} has no window; leave it null, or take another family"
        )
    if model.moe.num_experts is not None and not experts:
        raise UsageError(
            f"model.moe.num_experts {model.moe.num_experts}: family {family} has no experts; leave it null, or take mixtral"
        )
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def rope_of(config: Config) -> Rope:
    """The rotation that the configuration describes."""
    model = config.model
    given = {key: value for key, value in model.rope_scaling.model_dump().items() if key != "type"}
    scaling = None if model.rope_scaling.type == "none" else RopeScaling(model.rope_scaling.type, **given)
    return Rope(model.head_dim, model.rope_theta, scaling, model.max_position_embeddings)


def check_rope_unused(config: Config, family: str) -> None:
    """Raises UsageError where the configuration sets keys of a rotation that the family does not have."""
    default = type(config.model).model_fields["rope_theta"].default
    for key, given, unset in (
        ("rope_theta", config.model.rope_theta, default),
        ("rope_scaling.type", config.model.rope_scaling.type, "none"),
    ):
        if given != unset:
            raise UsageError(f"model.{key} {given}: family {family} has no rotary positions: leave it {unset}")


def decoder_of(
    config: Config,
    recipe: Recipe | None,
    dtype: torch.dtype,
    *,
    attention_bias: str = "none",
    mlp_bias: bool = False,
    qk_norm: bool = False,
    activation: str = "silu",
) -> Decoder:
    """Llama's decoder with the configuration's sizes, and what its kin changed in it."""
    model, fp8 = config.model, config.precision.fp8
    return Decoder(
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        embedding=EmbeddingPart(model.vocab_size, dropout=model.dropout),
        attention=AttentionPart(
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            max_positions=config.data.seq_len,
            rope=rope_of(config),
            bias=attention_bias,
            qk_norm=qk_norm,
            norm_eps=model.norm_eps,
            window=model.sliding_window,
            full_layers=model.max_window_layers,
        ),
        mlp=GatedMLPPart(model.ffn_size, activation, mlp_bias),
        norm=RMSNormPart(model.norm_eps),
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
