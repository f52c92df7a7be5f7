"""Models: what a model owes the framework (spec), the decoder and its parts, families."""

from __future__ import annotations

from dataclasses import replace

import torch

from models.decoder import Decoder
from models.families import check_model, find_family
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import Recipe
from qeffect_lm.parallel.context import ContextParallel
from qeffect_lm.parallel.tensor import TensorParallel


def build_model(
    config: Config,
    recipe: Recipe | None,
    dtype: torch.dtype,
    tp: TensorParallel | None = None,
    cp: ContextParallel | None = None,
) -> Decoder:
    """The model of a configuration; with ``tp`` its layers are a rank's pieces, while its parameters' specs stay whole; with
    ``cp`` they know that a rank has parts of sequences.

    Raises:
        UsageError: a family that is unknown, cannot be imported or gives no model, or a key that it does not take; or a model
            that cannot be cut over ranks.
    """
    name = config.model.family
    model: Decoder = find_family(name)(config, recipe, dtype)
    check_model(name, model)
    for peers in (tp, cp):
        if peers is not None and not isinstance(model, Decoder):
            what = f"parallel.{peers.axis}"
            raise UsageError(f"{what} {peers.size}: model.family {name!r} is no Decoder, which alone is cut: set {what}=1")
    return model if tp is cp is None else replace(model, tp=tp, cp=cp)
