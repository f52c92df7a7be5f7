"""Keyed randomness: the mask is a function of (seed, step, microbatch's place in the step over all replicas, layer, role,
element), never of the order of execution, so dropout is equal across schedules, stages, replicas, capture and restart.

The generator is counter-based (Salmon et al. 2011): element number and key go through SplitMix64's finaliser (Steele, Lea and
Flood 2014). The key is a device tensor, so a captured graph draws a new mask at each replay.
"""

from __future__ import annotations

import hashlib

import torch

from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext

_MASK64 = (1 << 64) - 1
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def host_key(*parts: int | str) -> int:
    """A 64-bit signed key of any integers and names (SHA-256 of their text)."""
    text = "\0".join(str(part) for part in parts)
    return _signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (torch's is arithmetic)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 (wrapping)."""
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    return z ^ _shift(z, 31)


def keyed_uniform_bits(shape: torch.Size, key: torch.Tensor, role: int, first: int = 0) -> torch.Tensor:
    """24 random bits per element, int64, of ``key`` (0-dim int64) and the constant ``role``; elements count from ``first``."""
    counter = torch.arange(first, first + shape.numel(), dtype=torch.int64, device=key.device)
    return _shift(mix(counter * _signed(_GOLDEN) + mix(key ^ role)), 40).view(shape)


class KeyedDropout(Layer):
    """Inverted dropout with probability ``p``; identity outside TRAIN and CALIBRATE, and for ``p`` 0.

    ``before``: so many ranks, each with as many elements, hold what comes before ``x`` of a tensor that is cut. A rank then has
    its part of the whole tensor's mask, another one than its peers; where they all hold the tensor, they have the same mask.
    """

    def __init__(self, name: str, p: float, before: int = 0) -> None:
        super().__init__(name)
        self.before = before
        if not 0 <= p < 1:
            raise ValueError(f"{name}: a dropout probability lies in [0, 1), not {p}")
        self.p, self.role = p, host_key("dropout", name)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if self.p == 0 or context.phase.value == "eval":
            return x
        keep = keyed_uniform_bits(x.shape, context.key, self.role, self.before * x.numel()) >= int(self.p * (1 << 24))
        return x * keep.to(x.dtype) * (1.0 / (1.0 - self.p))
