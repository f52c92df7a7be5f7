"""Llama 2 and 3 (Touvron et al. 2023, Dubey et al. 2024): RMSNorm, RoPE, grouped queries, SwiGLU, no biases."""

from __future__ import annotations

import torch

from models.decoder import Decoder
from models.settings import decoder_of, settled
from qeffect_lm.config import Config
from qeffect_lm.fp8.recipes import Recipe


def llama(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """A Llama-style decoder with the configuration's sizes. Biases are Hugging Face's ``attention_bias`` and ``mlp_bias``."""
    choices = settled(config, "llama", attention_bias=("none", "all"), mlp_bias=(False, True))
    return decoder_of(config, recipe, dtype, **choices)
