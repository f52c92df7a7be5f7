"""The weight cache of backend ``te``: Transformer Engine's casts into storages that are ours.

Per-tensor recipes keep the storages of :class:`~qeffect_lm.fp8.cache.WeightCache` (rows ``[out, in]``, columns ``[in, out]``,
inverse scale); its ``Float8Tensor`` is a view of them. So both backends save, compare and read the same cached weights. Block
scaling has two layouts with a table of scales each, and a name for each of the four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from qeffect_lm.contract.timeline import EMPTY, ScaleTimeline
from qeffect_lm.fp8.cache import WeightCache
from qeffect_lm.fp8.quantise import E4M3, Quantised
from qeffect_lm.fp8.recipes import DelayedScaling, Recipe
from qeffect_lm.layers.te.library import Library
from qeffect_lm.layers.te.recipe import BlockScaling
from qeffect_lm.layers.te.region import opaque
from qeffect_lm.layers.te.weight_grad import buffers_of
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.state import LogicalTensor, Role


class TEWeightCache(WeightCache):
    """Cached weights by parameter name; ``weights`` as in :class:`WeightCache`, the functions giving the bfloat16 parameter."""

    def __init__(self, weights: Mapping[str, tuple[str, Recipe, Callable[[], torch.Tensor]]]) -> None:
        super().__init__({name: item for name, item in weights.items() if not isinstance(item[1], BlockScaling)})
        self._sources = dict(weights)
        self.workspaces: dict[str, Any] = {}  # Transformer Engine's cached weights
        self._library: Library | None = None
        self._timeline: ScaleTimeline | None = None

    def connect(self, library: Library, timeline: ScaleTimeline, quantizers: Mapping[str, Any]) -> None:
        """Build the cached weights; ``quantizers``: parameter name → its module's weight quantizer."""
        self._library, self._timeline = library, timeline
        for name, shared in quantizers.items():
            quantizer = shared.copy()
            quantizer.internal = False
            quantizer.set_usage(rowwise=True, columnwise=True)
            weight = self._sources[name][2]().detach()
            cached = self.cached.get(name)
            if cached is None:
                self.workspaces[name] = quantizer.quantize(weight)
                for buffer in buffers_of(self.workspaces[name]):
                    buffer.zero_()  # padding of the scale tables included: it is saved and compared
            else:
                self.workspaces[name] = _float8_tensor(library, quantizer, weight, cached)

    @torch.no_grad()
    def refresh_(self) -> None:
        """Cast every weight. Device work only."""
        assert self._library is not None and self._timeline is not None, "connect() comes before the first refresh"
        for name, workspace in self.workspaces.items():
            layer, recipe, source = self._sources[name]
            touched = [source(), *buffers_of(workspace)]
            if isinstance(recipe, DelayedScaling):
                self._timeline.slot_of(f"{layer}.weight").fill_(EMPTY)  # as in the native cache: the last refresh counts
                touched += [self._timeline.scale, self._timeline.open_amax]
            with opaque(self._library, f"te.{layer} cast", touched):
                workspace.quantize_(source().detach())

    def scratch(self) -> dict[str, torch.Tensor]:
        return {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().tensors()
        for name, layout, buffer in self._blocks():
            yield f"{name}/{layout}", buffer

    def logical_tensors(self, flat: FlatBuffers | None = None) -> list[LogicalTensor]:
        """Those of the per-tensor caches; of block scaling ``cached_weight/<param>/<layout>``, FP8 data as such."""
        items = super().logical_tensors(flat)
        for name, layout, buffer in self._blocks():
            typed = buffer.view(E4M3.dtype) if buffer.dtype is torch.uint8 else buffer
            items.append(LogicalTensor.whole(f"cached_weight/{name}/{layout}", typed, Role.CACHED_WEIGHT))
        return items

    def _blocks(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for name, workspace in self.workspaces.items():
            if name not in self.cached:
                for attribute, _ in type(workspace)._INNER_TENSORS:
                    yield name, attribute.strip("_"), getattr(workspace, attribute)


def _float8_tensor(library: Library, quantizer: Any, weight: torch.Tensor, cached: Quantised) -> Any:
    """Transformer Engine's per-tensor FP8 tensor over the storages of ``cached``."""
    assert cached.rows is not None and cached.columns is not None
    return library.te.Float8Tensor(
        shape=tuple(weight.shape),
        dtype=weight.dtype,
        data=cached.rows.view(torch.uint8),
        fp8_scale_inv=cached.scale_inv.view(1),
        fp8_dtype=quantizer.dtype,
        data_transpose=cached.columns.view(torch.uint8),
        quantizer=quantizer,
        requires_grad=False,
        device=weight.device,
    )
