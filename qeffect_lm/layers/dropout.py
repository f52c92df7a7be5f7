"""Keyed randomness: the mask is a function of (seed, step, microbatch's place in the step over all replicas, layer, role,
element), never of the order of execution, so dropout is equal across schedules, stages, replicas, capture and restart.

The generator is counter-based (Salmon et al. 2011): element number and key go through SplitMix64's finaliser (Steele, Lea and
Flood 2014). The key is a device tensor, so a captured graph draws a new mask at each replay.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext

if TYPE_CHECKING:
    from qeffect_lm.parallel.context import ContextParallel

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
    return keyed_bits(counter, key, role).view(shape)


def keyed_bits(counter: torch.Tensor, key: torch.Tensor, role: int) -> torch.Tensor:
    """24 random bits, int64, of each element number in ``counter`` (int64)."""
    return _shift(mix(counter * _signed(_GOLDEN) + mix(key ^ role)), 40)


class KeyedDropout(Layer):
    """Inverted dropout with probability ``p``; identity outside TRAIN and CALIBRATE, and for ``p`` 0.

    ``before``: so many ranks, each with as many elements, hold what comes before ``x`` of a tensor that is cut. A rank then has
    its part of the whole tensor's mask, another one than its peers; where they all hold the tensor, they have the same mask.
    ``cp``: sequences are cut over its ranks, and what ``before`` counts is a part of this one's tokens.
    """

    def __init__(self, name: str, p: float, before: int = 0, cp: ContextParallel | None = None) -> None:
        super().__init__(name)
        self.before, self.cp = before, cp
        if not 0 <= p < 1:
            raise ValueError(f"{name}: a dropout probability lies in [0, 1), not {p}")
        self.p, self.role = p, host_key("dropout", name)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if self.p == 0 or context.phase.value == "eval":
            return x
        keep = self._bits(x, context) >= int(self.p * (1 << 24))
        return x * keep.to(x.dtype) * (1.0 / (1.0 - self.p))

    def _bits(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if self.cp is None:
            return keyed_uniform_bits(x.shape, context.key, self.role, self.before * x.numel())
        features, count = x.shape[-1], x.numel() // x.shape[-1]
        tokens = self.cp.tokens(*context.grid_of(x), x.device)[self.before * count : (self.before + 1) * count]
        counter = tokens[:, None] * features + torch.arange(features, device=x.device)
        return keyed_bits(counter, context.key, self.role).view(x.shape)
