"""Mixtral (Jiang et al. 2024): Mistral's decoder with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from models.decoder import Decoder
from models.moe import MoEPart
from models.settings import decoder_of, settled
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import Recipe


def mixtral(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """A Mixtral-style decoder with the configuration's sizes; ``model.ffn_size`` is the width of one expert, ``model.moe`` says
    how many there are, how many a token takes, and how much the router's losses count."""
    moe = config.model.moe
    if moe.num_experts is None:
        raise UsageError("model.moe.num_experts is null: family mixtral needs it, 8 for instance")
    decoder = decoder_of(config, recipe, dtype, **settled(config, "mixtral", window=True, experts=True))
    part = MoEPart(
        config.model.ffn_size, moe.num_experts, moe.top_k, moe.norm_top_k, moe.aux_loss_coef, moe.z_loss_coef
    )
    return replace(decoder, mlp=part)
