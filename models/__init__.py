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
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.tensor import TensorParallel


def build_model(
    config: Config,
    recipe: Recipe | None,
    dtype: torch.dtype,
    tp: TensorParallel | None = None,
    cp: ContextParallel | None = None,
    ep: ExpertParallel | None = None,
) -> Decoder:
    """The model of a configuration; with ``tp`` its layers are a rank's pieces, while its parameters' specs stay whole; with
    ``cp`` they know that a rank has parts of sequences, and with ``ep`` they hold a rank's experts.

    Raises:
        UsageError: a family that is unknown, cannot be imported or gives no model, or a key that it does not take; or a model
            that cannot be cut over ranks, or has no experts to spread.
    """
    name = config.model.family
    model: Decoder = find_family(name)(config, recipe, dtype)
    check_model(name, model)
    if config.parallel.ep > 1 and all(spec.expert is None for spec in model.parameters([0])):
        size = config.parallel.ep
        raise UsageError(f"parallel.ep {size}: model.family {name!r} has no experts: set parallel.ep=1, or raise parallel.dp")
    for peers in (tp, cp, ep):
        if peers is not None and not isinstance(model, Decoder):
            what = f"parallel.{peers.axis}"
            raise UsageError(f"{what} {peers.size}: model.family {name!r} is no Decoder, which alone is cut: set {what}=1")
    return model if tp is cp is ep is None else replace(model, tp=tp, cp=cp, ep=ep)
