"""The weight cache: one cast per weight per step, both layouts, into fixed storages.

cache = Q(BF16(master), scale of the epoch). The storages never move, so captured graphs may read them; what they hold is
told by the contract's :class:`~qeffect_lm.contract.versions.WeightVersions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from qeffect_lm.fp8.quantise import E4M3, Quantised
from qeffect_lm.fp8.recipes import Recipe
from qeffect_lm.state import LogicalTensor, Role

LAYOUTS = ("rows", "columns")


class WeightCache:
    """Cached FP8 weights of one rank, by parameter name (``<layer>.weight``)."""

    def __init__(self, weights: Mapping[str, tuple[str, Recipe, Callable[[], torch.Tensor]]]) -> None:
        """``weights``: parameter name → (layer, recipe, function that gives the master ``[out, in]``)."""
        self._sources = dict(weights)
        self.cached: dict[str, Quantised] = {}
        for name, (_, _, master) in self._sources.items():
            out_features, in_features = master().shape
            device = master().device
            self.cached[name] = Quantised(
                torch.zeros(out_features, in_features, dtype=E4M3.dtype, device=device),
                torch.zeros(in_features, out_features, dtype=E4M3.dtype, device=device),
                torch.ones((), device=device),
            )

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    def layer_of(self, name: str) -> str:
        return self._sources[name][0]

    def refresh_(self) -> None:
        """Quantise every weight into its cache. Device work only: safe to capture, no contract calls."""
        for name, (layer, recipe, master) in self._sources.items():
            made = recipe.weight(layer, master().bfloat16())
            cached = self.cached[name]
            assert made.rows is not None and made.columns is not None
            assert cached.rows is not None and cached.columns is not None
            cached.rows.view(torch.uint8).copy_(made.rows.view(torch.uint8))
            cached.columns.view(torch.uint8).copy_(made.columns.view(torch.uint8))
            cached.scale_inv.copy_(made.scale_inv)

    def logical_tensors(self) -> list[LogicalTensor]:
        """``cached_weight/<param>`` (as laid out ``[out, in]``) and the inverse scale it was made with."""
        items = []
        for name, cached in self.cached.items():
            assert cached.rows is not None
            items.append(LogicalTensor.whole(f"cached_weight/{name}", cached.rows, Role.CACHED_WEIGHT))
            items.append(LogicalTensor.whole(f"cached_weight_scale_inv/{name}", cached.scale_inv, Role.CACHED_WEIGHT))
        return items
