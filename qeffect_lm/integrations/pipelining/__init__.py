"""The contract inside ``torch.distributed.pipelining``: stages and schedules of ours in its place, or ours around its own.

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "schedules": (
        "PipelineStage",
        "PipelineSchedule",
        "PipelineScheduleSingle",
        "ScheduleGPipe",
        "Schedule1F1B",
        "ScheduleZBH1",
        "ScheduleZBH2",
        "ScheduleInterleaved1F1B",
        "ScheduleZBVZeroBubble",
        "ScheduleDualPipeV",
        "BY_TORCH_NAME",
    ),
    "convert": ("Conversion", "SplitLinear", "split_linears"),
    "fp8": ("FP8State",),
    "around": ("Attached", "attach"),
}

__all__ = sorted(name for names in _WHERE.values() for name in names)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
