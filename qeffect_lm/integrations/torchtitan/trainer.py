"""TorchTitan's trainer, with the state of our FP8 linears in its checkpoints: scales, histories, cached weights."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from qeffect_lm.integrations.torchtitan.pipeline import required


def _set_timeout(timeout: timedelta, group: Any = None) -> None:
    _set_pg_timeout(timeout, group)


if not hasattr(dist, "set_timeout"):  # torchtitan 0.3.0 wants torch 2.14's name of it; 2.13 has it under a private one
    dist.set_timeout = _set_timeout  # type: ignore[attr-defined]

BY_CONFIG = hasattr(required("torchtitan.config"), "Configurable")  # a Config makes its trainer (0.3), or is given to it (0.2)
Titan = required("torchtitan.trainer" if BY_CONFIG else "torchtitan.train").Trainer


class Trainer(Titan):  # type: ignore[misc,valid-type]
    """As TorchTitan's; a checkpoint has an entry ``qeffect`` of typed tensors beside model and optimizer.

    On resume the first cast of the weights must give the bytes that were saved, or the run stops
    (:class:`~qeffect_lm.contract.errors.StaleWeightError`).
    """

    if BY_CONFIG:

        @dataclass(kw_only=True, slots=True)
        class Config(Titan.Config):  # type: ignore[misc,name-defined]
            pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        state = getattr(getattr(self, "pp_schedule", None), "fp8", None)
        states = getattr(self.checkpointer, "states", None)  # None where checkpoints are off
        if state is not None and states is not None:
            states["qeffect"] = state
