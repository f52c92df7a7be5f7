"""AdamW by Transformer Engine's ``FusedAdam`` (``transformer_engine.pytorch.optimizers``), found when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.optim.fused_adam import REMEDY, FusedAdamW


def make(flat: FlatBuffers, **settings: Any) -> FusedAdamW:
    """Raises UsageError without a GPU, or where Transformer Engine cannot be imported or has no such class."""
    if flat.device.type != "cuda":
        raise UsageError(f"optim.backend=te needs a GPU, and this run uses the {flat.device.type}: {REMEDY}")
    try:
        fused = import_module("transformer_engine.pytorch.optimizers").FusedAdam
    except (ImportError, OSError, AttributeError) as error:
        raise UsageError(
            f"optim.backend=te needs Transformer Engine's FusedAdam, which cannot be imported ({error}): install "
            f"Transformer Engine (docs/transformer-engine.md), or {REMEDY}"
        ) from error
    narrow = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    return FusedAdamW(flat, fused=fused, name="Transformer Engine", narrow=narrow, **settings)
