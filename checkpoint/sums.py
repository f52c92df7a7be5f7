"""Sums that tell logical tensors apart by their bits, whatever ranks and slices hold them.

The sum of a tensor is linear in its elements, seen as integers x of their size:

    sum = Σ x[i, j, …] · a₀(i) · a₁(j) · …   modulo 2⁶⁴

where aₖ(i) are fixed odd pseudo-random numbers of 64 bits. So the sums of the pieces of a tensor, wherever they lie, add up to
the sum of the whole, and no rank needs another one's bytes. Two such sums with other numbers make 128 bits. A change of one
element always shows; others go unseen with a probability below 2⁻⁶⁰ unless somebody makes them up on purpose (what is to
withstand that is compared by SHA-256). It runs where the tensor is, in pieces that need little memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from checkpoint.assembly import owns
from checkpoint.layout import natural_key
from checkpoint.reader import Checkpoint
from checkpoint.shards import as_integers, dtype_name
from qeffect_lm.state import LogicalTensor, Role

LANES = 2
MASK = 2**64 - 1
SMALL = 4096  # elements up to which a tensor is summed by numpy: there a launch costs more than the sum
ON_HOST, ON_DEVICE = 1 << 16, 1 << 22  # elements summed at once: what fits a cache, and what keeps a GPU busy


@dataclass(frozen=True)
class TensorSum:
    """The sums of a logical tensor, or of some pieces of it. ``elements`` counts what was summed."""

    dtype: str
    shape: tuple[int, ...]
    lanes: tuple[int, ...]
    elements: int

    def __add__(self, other: TensorSum) -> TensorSum:
        """Of two sets of pieces that share no element. Raises ValueError where they are of different tensors."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            raise ValueError(f"pieces of {self.dtype} {self.shape} and of {other.dtype} {other.shape} are of two tensors")
        lanes = tuple((a + b) & MASK for a, b in zip(self.lanes, other.lanes, strict=True))
        return TensorSum(self.dtype, self.shape, lanes, self.elements + other.elements)

    @property
    def text(self) -> str:
        """``float32 [64, 32] 00a1…``: equal for equal bits in equal places. 32 hexadecimal digits."""
        return f"{self.dtype} {list(self.shape)} {''.join(f'{lane:016x}' for lane in self.lanes)}"


class Summer:
    """Sums tensors; keeps the weights of the places that it has met."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int, int], np.ndarray] = {}
        self._weights: dict[tuple[int, int, int, int, torch.device], torch.Tensor] = {}

    def own(self, items: Iterable[LogicalTensor], coords: Mapping[str, int]) -> dict[str, TensorSum]:
        """By name the sums of what this rank would write of ``items``, as :func:`checkpoint.save_checkpoint` chooses it."""
        mine = [item for item in items if owns(item, coords)]
        lanes = [self._lanes(item.tensor, item.start) for item in mine]
        large = [lane for pair in lanes for lane in pair if isinstance(lane, torch.Tensor)]
        read = iter(torch.stack(large).tolist() if large else ())  # one wait for the GPU, of which a rank has one
        found: dict[str, TensorSum] = {}
        for item, pair in zip(mine, lanes, strict=True):
            values = tuple((next(read) if isinstance(lane, torch.Tensor) else lane) & MASK for lane in pair)
            one = TensorSum(dtype_name(item.tensor.dtype), tuple(item.global_shape), values, item.tensor.numel())
            found[item.name] = found[item.name] + one if item.name in found else one
        return found

    def of(self, tensor: torch.Tensor, shape: Sequence[int], start: Sequence[int]) -> TensorSum:
        """Of one piece of a tensor of ``shape``."""
        lanes = tuple(int(lane) & MASK for lane in self._lanes(tensor, start))
        return TensorSum(dtype_name(tensor.dtype), tuple(shape), lanes, tensor.numel())

    @torch.no_grad()
    def _lanes(self, tensor: torch.Tensor, start: Sequence[int]) -> Sequence[torch.Tensor | int]:
        """Numbers, or of large tensors on a GPU 0-dim int64 tensors there."""
        bits = as_integers(tensor)
        if bits.dim() == 0:
            bits, start = bits[None], (0,)
        places = [(d, first, size) for d, (first, size) in enumerate(zip(start, bits.shape, strict=True))]
        if bits.numel() > SMALL:
            found = _contract(bits, [[self._on(bits.device, lane, *place) for place in places] for lane in range(LANES)])
            return found if bits.is_cuda else [int(lane) for lane in found]
        numbers = bits.cpu().numpy().astype(np.int64).view(np.uint64)
        sums = []
        for lane in range(LANES):
            total = numbers
            for place in reversed(places):
                total = (total * self._of_places(lane, *place)).sum(-1, dtype=np.uint64)
            sums.append(int(total))
        return sums

    def _of_places(self, lane: int, dimension: int, start: int, size: int) -> np.ndarray:
        """The weights of indices ``start … start + size`` along a dimension."""
        key = lane, dimension, start, size
        if key not in self._numbers:
            self._numbers[key] = _odd_numbers((lane << 60) + (dimension << 52) + start, size)
        return self._numbers[key]

    def _on(self, device: torch.device, lane: int, dimension: int, start: int, size: int) -> torch.Tensor:
        key = lane, dimension, start, size, device
        if key not in self._weights:
            numbers = self._of_places(lane, dimension, start, size)
            self._weights[key] = torch.from_numpy(numbers.view(np.int64)).to(device)
        return self._weights[key]


def _contract(bits: torch.Tensor, weights: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Per lane Σ bits · weights over all dimensions, a bounded number of elements at a time."""
    most = ON_HOST if bits.device.type == "cpu" else ON_DEVICE
    inner = bits[0].numel()
    totals = [torch.zeros((), dtype=torch.int64, device=bits.device) for _ in weights]
    rows = max(1, most // inner)
    for row in range(0, bits.shape[0], rows):
        if inner > most:  # one row, itself too long
            parts = [part[None] for part in _contract(bits[row], [lane[1:] for lane in weights])]
        else:
            block = bits[row : row + rows].to(torch.int64)
            parts = [_rows(block, lane) for lane in weights]
        for total, part, lane in zip(totals, parts, weights, strict=True):
            total += (part * lane[0][row : row + rows]).sum()
    return totals


def _rows(block: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Σ over all dimensions but the first, the last one first."""
    for weight in reversed(weights[1:]):
        block = (block * weight).sum(-1)
    return block


def _odd_numbers(first: int, count: int) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood 2014) of ``first … first + count``, made odd."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(first)) * np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x | np.uint64(1)


def merge(parts: Iterable[Mapping[str, TensorSum]]) -> dict[str, TensorSum]:
    """The sums of all ranks together, in natural order of the names.

    Raises:
        ValueError: ranks disagree on a tensor's shape or dtype.
    """
    found: dict[str, TensorSum] = {}
    for part in parts:
        for name, one in part.items():
            found[name] = found[name] + one if name in found else one
    return {name: found[name] for name in sorted(found, key=natural_key)}


def of_checkpoint(checkpoint: Checkpoint, share: int = 0, of: int = 1) -> dict[str, TensorSum]:
    """The sums of the tensors on disk but for generators, which belong to ranks; of ``of`` readers number ``share`` reads its
    part of the slices, each slice against its SHA-256."""
    summer, found, number = Summer(), dict[str, TensorSum](), 0
    for name, entry in checkpoint.manifest.tensors.items():
        if entry.role is Role.RNG:
            continue
        for part in entry.slices:
            number += 1
            if number % of != share:
                continue
            one = summer.of(checkpoint.read(name, part.start, part.shape), entry.shape, part.start)
            found[name] = found[name] + one if name in found else one
    return found


def state_digest(sums: Mapping[str, TensorSum]) -> str:
    """SHA-256 over names and sums: one number for a whole logical state, the same in every layout."""
    lines = [f"{name} {sums[name].text}\n" for name in sorted(sums, key=natural_key)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
