"""TorchTitan's trainer on CPUs, over gloo: to try a configuration without a GPU. Not for speed.

    torchrun --nproc-per-node 2 -m qeffect_lm.integrations.torchtitan.cpu --module … --config … [TorchTitan's options]

TorchTitan asks torch for an accelerator when it is imported, and takes CUDA where there is none. Here it is told of the CPU
before; what it asks of a device that a CPU has not (memory statistics, a device's properties) is answered with nothing.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from qeffect_lm.integrations.torchtitan.pipeline import required
from qeffect_lm.integrations.torchtitan.train import launch


class _Module:
    """``torch.cpu`` with the rest of what a device's module has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None: ...

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), name="CPU")

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self, device: Any = None) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...


def on_cpu() -> None:
    """Make TorchTitan run on the CPU; before anything of it but its utilities is imported."""
    utils = required("torchtitan.tools.utils")
    utils.get_local_device = lambda: torch.device("cpu")
    for name, module in list(sys.modules.items()):  # in 0.2 its package imports some that have copied it from there
        if name.partition(".")[0] == "torchtitan" and hasattr(module, "device_type"):
            module.device_type, module.device_module = "cpu", _Module()  # type: ignore[attr-defined]


def main(argv: list[str] | None = None) -> None:
    """As ``python -m torchtitan.train``."""
    on_cpu()
    if argv is not None:
        sys.argv[1:] = argv
    launch()


if __name__ == "__main__":
    main()
