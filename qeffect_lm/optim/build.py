"""The optimizer of a configuration, chosen once: which library updates the elements (``optim.backend``)."""

from __future__ import annotations

from typing import Any

from qeffect_lm.optim import apex_adam, te_adam
from qeffect_lm.optim.adamw import AdamW
from qeffect_lm.optim.base import Optimizer
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.optim.torch_fused import TorchAdamW

BACKENDS = {"native": AdamW, "te": te_adam.make, "apex": apex_adam.make, "torch": TorchAdamW}


def make_optimizer(backend: str, flat: FlatBuffers, **settings: Any) -> Optimizer:
    """``settings``: the keyword arguments of :class:`Optimizer`. Raises UsageError where the backend is not to be had."""
    made: Optimizer = BACKENDS[backend](flat, **settings)  # type: ignore[operator]
    return made
