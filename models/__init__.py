"""Models: what a model owes the framework (spec), the decoder, families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from models.decoder import Decoder
from models.llama import llama
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import Recipe

FAMILIES: Mapping[str, Callable[..., Decoder]] = MappingProxyType({"llama": llama})


def build_model(config: Config, recipe: Recipe | None, dtype: torch.dtype) -> Decoder:
    """The model of a configuration.

    Raises:
        UsageError: an unknown family.
    """
    family = FAMILIES.get(config.model.family)
    if family is None:
        raise UsageError(f"model.family is {config.model.family!r}; the families are {', '.join(FAMILIES)}")
    return family(config, recipe, dtype)
