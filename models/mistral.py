"""Mistral (Jiang et al. 2023): Llama's decoder with a sliding window."""

from __future__ import annotations

import torch

from models.decoder import Decoder
from models.settings import decoder_of, settled
from qeffect_lm.config import Config
from qeffect_lm.fp8.recipes import Recipe


def mistral(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """A Mistral-style decoder with the configuration's sizes; ``model.sliding_window`` null: no window, as from 0.2 on."""
    return decoder_of(config, recipe, dtype, **settled(config, "mistral", window=True))
