"""FP8 recipes of backend ``te``: ours for roles and calibration, Transformer Engine's for its modules.

``delayed`` and ``current`` are :mod:`qeffect_lm.fp8.recipes`; ``block`` (Transformer Engine's Float8BlockScaling: tiles of
1 x 128 activations and 128 x 128 weights, each with a scale of its own) has no state and no counterpart in backend ``native``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qeffect_lm.contract.timeline import ScaleRole, ScaleTimeline
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling, Recipe
from qeffect_lm.layers.te.library import Library

BLOCK = 128  # rows and columns of a tile


class BlockScaling(CurrentScaling):
    """No roles, nothing to observe; where layers run as plain maths (calibration, generation) it quantises nothing."""

    name = "block"

    def weight(self, layer: str, weight: torch.Tensor) -> Any:
        raise NotImplementedError(f"{layer}: Transformer Engine itself casts weights under block scaling")

    def roles(self, layer: str) -> Sequence[ScaleRole]:
        return ()


def library_recipe(library: Library, recipe: Recipe, timeline: ScaleTimeline) -> Any:
    """Transformer Engine's recipe for ``recipe``. One object per run: an equal one keeps its modules' quantizers in place.

    Of delayed scaling it reads the formats only: scales, histories and their roll are the timeline's. ``reduce_amax`` is off,
    since its own reduction runs over the default group, which pipeline stages do not enter together.
    """
    recipes = library.recipes
    if isinstance(recipe, DelayedScaling):
        return recipes.DelayedScaling(
            margin=timeline.margin,
            fp8_format=recipes.Format.HYBRID,
            amax_history_len=timeline.history.shape[1],
            amax_compute_algo=timeline.amax,
            reduce_amax=False,
        )
    if isinstance(recipe, BlockScaling):
        return recipes.Float8BlockScaling()
    return recipes.Float8CurrentScaling(fp8_format=recipes.Format.HYBRID)
