"""Backend ``te``: decoder blocks run by Transformer Engine under the contract. The only importer of transformer_engine.

Importing this package imports none of it; :func:`load` does. :func:`connect` builds the modules once storages, scales and
caches exist. docs/transformer-engine.md tells what is supported.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.fp8.recipes import Recipe
from qeffect_lm.layers.te.block import TEBlock, TEColumnLinear, TELinear, TERowLinear
from qeffect_lm.layers.te.cache import TEWeightCache
from qeffect_lm.layers.te.library import Library, load
from qeffect_lm.layers.te.modules import Setting
from qeffect_lm.layers.te.recipe import BLOCK, BlockScaling, library_recipe

__all__ = [
    "BLOCK",
    "BlockScaling",
    "Library",
    "TEBlock",
    "TEColumnLinear",
    "TELinear",
    "TERowLinear",
    "TEWeightCache",
    "connect",
    "load",
]


def connect(
    chunks: Iterable[nn.Module],
    library: Library,
    recipe: Recipe | None,
    timeline: ScaleTimeline,
    cache: TEWeightCache,
    shape: tuple[int, int],
) -> dict[str, torch.Tensor]:
    """Build Transformer Engine's modules of all blocks in ``chunks`` and their cached weights.

    Args:
        shape: ``(batch, sequence)`` of a microbatch.

    Returns:
        Its hidden tensors by name, for the register: a capture may read them.
    """
    library.check_undisturbed()
    fp8 = None if recipe is None else library_recipe(library, recipe, timeline)
    setting = Setting(library, timeline, fp8, torch.zeros(1, device=library.device))
    modules = [block.connect(setting) for chunk in chunks for block in chunk.modules() if isinstance(block, TEBlock)]
    with_products = [part for block in modules for part in block.with_products]
    cache.connect(library, timeline, {n: q for part in with_products for n, q in part.weight_quantizers().items()})
    for part in with_products:
        part.bind_cached(cache.workspaces)
    return {
        "cublas_workspace": library.cublas_workspace(),
        "sequence_offsets": library.sequence_offsets(*shape),
        "scratch_amax": setting.scratch_amax,
    }
