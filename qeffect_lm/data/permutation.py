"""A seeded permutation of ``range(n)`` that is computed per index and never stored.

A Feistel network over the smallest even number of bits that holds n, with cycle walking: an image that falls
outside ``range(n)`` is sent through again until it falls inside (Black and Rogaway, *Ciphers with Arbitrary
Finite Domains*, 2002). The round function is the finaliser of SplitMix64 (Steele, Lea, Flood, 2014). Only
64-bit integer arithmetic is used, so the order is the same with every version of every library. It is for
shuffling, not for secrets.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ALGORITHM = "feistel-splitmix64-1"
"""Name of the algorithm and its revision; saved with a cursor, because another algorithm is another order."""

_ROUNDS = 8
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Permutation:
    """The permutation of ``range(size)`` for ``(seed, stream)``; any integers, taken modulo 2^64.

    ``stream`` separates permutations of one seed (the loader uses the epoch).
    """

    def __init__(self, size: int, seed: int, stream: int = 0) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs a size of at least 1, not {size}")
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._half_mask = np.uint64((1 << half_bits) - 1)
        state = _mix_integer(_mix_integer(seed & _MASK) + (stream & _MASK))
        self._keys = [np.uint64(_mix_integer(state + (r + 1) * _GOLDEN)) for r in range(_ROUNDS)]

    def __call__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The images of ``indices`` (any shape, each in ``range(size)``), int64 of the same shape."""
        if indices.size and not (0 <= int(indices.min()) and int(indices.max()) < self.size):
            raise ValueError(f"index outside range({self.size})")
        values = self._network(indices.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64).reshape(indices.shape)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._shift, values & self._half_mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._half_mask)
        return (left << self._shift) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_integer(x: int) -> int:
    """:func:`_mix` of ``x + golden`` for a Python integer, one step of SplitMix64."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
