"""The allocator's counts of a GPU, cheaply enough for every step.

torch's ``memory_allocated`` and its like flatten and sort all statistics for one number: some 0.3 ms of the host each.
"""

from __future__ import annotations

import torch


def allocated(device: torch.device) -> int:
    """Bytes given out now."""
    return _bytes(device, "allocated_bytes", "current")


def peak_allocated(device: torch.device) -> int:
    """Bytes given out at most since ``torch.cuda.reset_peak_memory_stats``."""
    return _bytes(device, "allocated_bytes", "peak")


def reserved(device: torch.device) -> int:
    """Bytes taken from the device, those of graphs' pools too."""
    return _bytes(device, "reserved_bytes", "current")


def _bytes(device: torch.device, what: str, when: str) -> int:
    counts = torch.cuda.memory_stats_as_nested_dict(device)
    return int(counts[what]["all"][when]) if counts else 0  # nothing before the device's first use
