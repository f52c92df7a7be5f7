"""Models: what a model owes the framework (spec), the decoder and its parts, families."""

from __future__ import annotations

import torch

from models.decoder import Decoder
from models.families import check_model, find_family
from qeffect_lm.config import Config
from qeffect_lm.fp8.recipes import Recipe


def build_model(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """The model of a configuration.

    Raises:
        UsageError: a family that is unknown, cannot be imported or gives no model, or a key that it does not take.
    """
    name = config.model.family
    model: Decoder = find_family(name)(config, recipe, dtype)
    check_model(name, model)
    return model
