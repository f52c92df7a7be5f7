"""Which device a process computes on."""

from __future__ import annotations

import torch

from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError


def device_of(config: Config, local_rank: int | None = None) -> torch.device:
    """The device of this process; without a local rank torch's current GPU.

    Raises:
        UsageError: cuda where torch sees no GPU, fewer GPUs than local ranks, or a graph backend of another device.
    """
    wanted, visible = config.run.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and not visible:
        raise UsageError(
            "run.device=cuda, but torch sees no GPU here: set run.device=cpu (or auto), or install a CUDA build of torch"
        )
    kind = wanted if wanted != "auto" else ("cuda" if visible else "cpu")
    backend = config.graphs.backend
    if backend == "cuda_graphs" and kind == "cpu":
        raise UsageError("graphs.backend=cuda_graphs needs a GPU: set graphs.backend=host_replay or eager on a CPU")
    if backend == "host_replay" and kind == "cuda":
        raise UsageError("graphs.backend=host_replay is for a CPU: set graphs.backend=cuda_graphs, or run.device=cpu")
    if kind == "cuda" and config.precision.dtype == "float64":
        raise UsageError("precision.dtype=float64 runs on a CPU only: set run.device=cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank is None:
        return torch.device("cuda", torch.cuda.current_device())
    if local_rank >= visible:
        raise UsageError(f"local rank {local_rank} has no GPU of its own: torch sees {visible}; start as many ranks per node")
    return torch.device("cuda", local_rank)


def planned_device(config: Config) -> str:
    """``cpu`` or ``cuda``: what a configuration will run on, which need not be here; with ``run.device`` auto what is here."""
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if config.graphs.backend == "cuda_graphs" or torch.cuda.is_available() else "cpu"
