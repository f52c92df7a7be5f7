"""Qwen3 (Yang et al. 2025): Llama's decoder with RMSNorm on every q and k head."""

from __future__ import annotations

import torch

from models.decoder import Decoder
from models.settings import decoder_of, settled
from qeffect_lm.config import Config
from qeffect_lm.fp8.recipes import Recipe


def qwen3(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """A Qwen3-style decoder with the configuration's sizes; layers from ``model.max_window_layers`` on may have a window."""
    choices = settled(config, "qwen3", attention_bias=("none", "all"), qk_norm=(True,), window=True)
    return decoder_of(config, recipe, dtype, **choices)
