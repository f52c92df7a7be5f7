"""The weight cache: one cast per weight per step, both layouts, into fixed storages.

cache = Q(BF16(master), scale of the epoch). The storages never move, so captured graphs may read them; what they hold is
told by the contract's :class:`~qeffect_lm.contract.versions.WeightVersions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from qeffect_lm import kernels
from qeffect_lm.fp8.quantise import E4M3, Quantised
from qeffect_lm.fp8.recipes import DelayedScaling, Recipe
from qeffect_lm.state import LogicalTensor, Role

if TYPE_CHECKING:
    from qeffect_lm.kernels.weights import Weight, WeightRefresh
    from qeffect_lm.optim.flat import FlatBuffers

LAYOUTS = ("rows", "columns")


class WeightCache:
    """Cached FP8 weights of one rank, by parameter name (``<layer>.weight``)."""

    def __init__(self, weights: Mapping[str, tuple[str, Recipe, Callable[[], torch.Tensor]]]) -> None:
        """``weights``: parameter name → (layer, recipe, function that gives the master ``[out, in]``)."""
        self._sources = dict(weights)
        self.cached: dict[str, Quantised] = {}
        self._together: WeightRefresh | None = None
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
        """Quantise every weight into its cache. Device work only: safe to capture, no contract calls.

        On a GPU delayed weights are done together, in two launches, once :meth:`refresh_` ran outside a capture.
        """
        together = self._on_gpu()
        refresh = self._refresh_of([weight for _, weight in together])
        if refresh is not None:
            refresh.run()
        done = {name for name, _ in together}
        for name, (layer, recipe, master) in self._sources.items():
            if name in done:
                continue
            made = recipe.weight(layer, master().bfloat16())
            cached = self.cached[name]
            assert made.rows is not None and made.columns is not None
            assert cached.rows is not None and cached.columns is not None
            cached.rows.view(torch.uint8).copy_(made.rows.view(torch.uint8))
            cached.columns.view(torch.uint8).copy_(made.columns.view(torch.uint8))
            cached.scale_inv.copy_(made.scale_inv)

    def _on_gpu(self) -> list[tuple[str, Weight]]:
        """The weights that one kernel can refresh together: their scales are known before."""
        found = []
        for name, (layer, recipe, master) in self._sources.items():
            if not isinstance(recipe, DelayedScaling) or master().dtype is not torch.float32:
                continue
            if not kernels.usable(master()):
                continue
            from qeffect_lm.kernels.weights import Weight

            cached, role = self.cached[name], f"{layer}.weight"
            assert cached.rows is not None and cached.columns is not None
            scale, slot = recipe.timeline.scale_of(role), recipe.timeline.slot_of(role)
            found.append((name, Weight(master(), cached.rows, cached.columns, scale, slot, cached.scale_inv)))
        return found

    def _refresh_of(self, weights: list[Weight]) -> WeightRefresh | None:
        """What quantises ``weights`` together, made again where one of them moved; None for none."""
        if weights and (self._together is None or self._together.addresses != [weight.addresses() for weight in weights]):
            from qeffect_lm.kernels.weights import WeightRefresh

            self._together = WeightRefresh(weights)
        return self._together if weights else None

    def scratch(self) -> dict[str, torch.Tensor]:
        """What a captured refresh reads besides weights and scales: on a GPU the tables of the weights' addresses."""
        refresh = self._refresh_of([weight for _, weight in self._on_gpu()])
        return {} if refresh is None else {"refresh_table": refresh.table, "refresh_tiles": refresh.tile_owner}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``<param>/<layout>`` and storage of all that is cached."""
        for name, cached in self.cached.items():
            assert cached.rows is not None and cached.columns is not None
            yield f"{name}/rows", cached.rows
            yield f"{name}/columns", cached.columns
            yield f"{name}/scale_inv", cached.scale_inv

    def logical_tensors(self, flat: FlatBuffers | None = None) -> list[LogicalTensor]:
        """``cached_weight/<param>`` (as laid out ``[out, in]``) and the inverse scale it was made with. ``flat`` knows which
        pieces of the logical weights these are; None: they are whole."""
        items = []
        for name, cached in self.cached.items():
            assert cached.rows is not None
            label, where = f"cached_weight/{name}", {}
            if flat is None:
                items.append(LogicalTensor.whole(label, cached.rows, Role.CACHED_WEIGHT))
            else:
                items += flat.logical(label, cached.rows, Role.CACHED_WEIGHT, name)
                where = {"replicated": flat.entry(name).spec.replicated}
            inverse = f"cached_weight_scale_inv/{name}"
            items.append(LogicalTensor.whole(inverse, cached.scale_inv, Role.CACHED_WEIGHT, **where))
        return items
