"""Qwen2 and 2.5 (Yang et al. 2024): Llama's decoder with biases on q, k and v."""

from __future__ import annotations

import torch

from models.decoder import Decoder
from models.settings import decoder_of, settled
from qeffect_lm.config import Config
from qeffect_lm.fp8.recipes import Recipe


def qwen2(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """A Qwen2-style decoder with the configuration's sizes; layers from ``model.max_window_layers`` on may have a window."""
    return decoder_of(config, recipe, dtype, **settled(config, "qwen2", attention_bias=("qkv",), window=True))
