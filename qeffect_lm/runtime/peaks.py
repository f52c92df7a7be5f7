"""What a GPU can do at most, for the model FLOP utilisation (MFU): dense products, without sparsity, in FLOP/s.

From NVIDIA's data sheets of the products (where they give figures with sparsity only, half of them), for boards at their full
power limit. MFU is model FLOP/s over this (Chowdhery et al. 2022, appendix B): recomputation counts for nothing.
"""

from __future__ import annotations

import re

T = 1e12
PEAKS: tuple[tuple[str, float, float | None], ...] = (  # name as torch tells it; BF16; FP8 (None: the GPU has none)
    (r"A100", 312 * T, None),
    (r"H100 PCIe", 756 * T, 1513 * T),
    (r"H(100|200) NVL", 835 * T, 1671 * T),
    (r"H100|H200|H800|GH200", 989 * T, 1979 * T),
    (r"H20", 148 * T, 296 * T),
    (r"GB200", 2500 * T, 5000 * T),
    (r"B200", 2250 * T, 4500 * T),
    (r"L40S", 362 * T, 733 * T),
    (r"L4", 121 * T, 242 * T),
    (r"A10", 125 * T, None),
)


def peak_flops(device: str, fp8: bool) -> float | None:
    """The most FLOP/s of a device, told by its name, in FP8 or else in BF16; None where the table does not know."""
    for pattern, bf16, in_fp8 in PEAKS:
        if re.search(rf"\b({pattern})\b", device):
            return in_fp8 if fp8 else bf16
    return None
