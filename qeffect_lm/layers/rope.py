"""Rotary position embedding (Su et al. 2021), half-rotation layout, with the scalings that released models use.

A scaling changes the frequencies, and some a factor on cos and sin: ``linear`` (Chen et al. 2023) divides all frequencies,
``dynamic`` raises the base with the sequence's length, ``yarn`` (Peng et al. 2023) divides slow ones and blends in between,
``longrope`` (Ding et al. 2024) has a divisor for each, ``llama3`` is Llama 3.1's. Names of types and parameters are those of
Hugging Face's ``rope_parameters``.

The frequencies of ``dynamic`` and ``longrope`` depend on how long the sequence is. Training uses those of ``data.seq_len`` for
every position; another length (generation) those of the tokens seen so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeScaling:
    """A scaling and its parameters; what its type does not name is None.

    Attributes:
        type: ``linear``, ``dynamic``, ``yarn``, ``longrope`` or ``llama3``.
        factor: by how much the context grows; longrope may leave it to the ratio of the two lengths.
        original_max_position_embeddings: the context before it grew, tokens.
    """

    type: str
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Rope:
    """The rotation of one head.

    Attributes:
        theta: base of the frequencies.
        max_position_embeddings: the context that the model declares, tokens; ``dynamic`` grows from it, ``longrope`` without a
            factor to it.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    max_position_embeddings: int | None = None

    def regime(self, length: int) -> int:
        """Sequences of two lengths have the same frequencies when this is the same number."""
        kind = None if self.scaling is None else self.scaling.type
        if kind == "dynamic":
            assert self.max_position_embeddings is not None
            return max(length, self.max_position_embeddings)
        if kind == "longrope":
            assert self.scaling is not None and self.scaling.original_max_position_embeddings is not None
            return int(length > self.scaling.original_max_position_embeddings)
        return 0

    def frequencies(self, length: int) -> tuple[torch.Tensor, float]:
        """float64 ``[head_dim // 2]`` radians a position for a sequence of ``length`` tokens, and the factor on cos and sin."""
        plain = self.theta ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        scaling = self.scaling
        if scaling is None:
            return plain, 1.0
        if scaling.type == "linear":
            assert scaling.factor is not None
            return plain / scaling.factor, 1.0
        made = {"dynamic": _dynamic, "yarn": _yarn, "longrope": _longrope, "llama3": _llama3}[scaling.type]
        return made(self, scaling, plain, length)

    def tables(self, positions: range, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of ``positions`` for a sequence of ``length`` tokens, each ``[positions, head_dim // 2]``; computed in
        float64, rounded once."""
        frequencies, factor = self.frequencies(length)
        angles = torch.arange(positions.start, positions.stop, dtype=torch.float64)[:, None] * frequencies
        return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rope_tables(
    positions: int, head_dim: int, theta: float, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin without a scaling, each ``[positions, head_dim // 2]``; computed in float64."""
    return Rope(head_dim, theta).tables(range(positions), positions, dtype)


def identity_tables(positions: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin that turn nothing, exactly: kernels that rotate then serve a model without rotation."""
    shape = positions, head_dim // 2
    return torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


def positions_of(starts: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    """Positions ``[batch, sequence]`` that count from each token's document's start (``starts``, places in the row).

    ``places`` int64 ``[sequence]``: those of the tokens in their row; None: 0, 1, …
    """
    if places is None:
        places = torch.arange(starts.shape[1], device=starts.device)
    return places.to(starts.dtype) - starts


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[batch, heads, sequence, head_dim]`` by tables ``[sequence, head_dim // 2]`` (or of more dimensions)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# ---- scalings --------------------------------------------------------------------------------------------------


def _dynamic(rope: Rope, scaling: RopeScaling, plain: torch.Tensor, length: int) -> tuple[torch.Tensor, float]:
    """The base grows once the sequence is longer than the declared context ("NTK-aware")."""
    factor, declared, d = scaling.factor, rope.max_position_embeddings, rope.head_dim
    assert factor is not None and declared is not None
    grown = factor * max(length, declared) / declared - (factor - 1)
    base = rope.theta * grown ** (d / (d - 2))
    return base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d), 1.0


def _yarn(rope: Rope, scaling: RopeScaling, plain: torch.Tensor, length: int) -> tuple[torch.Tensor, float]:
    """Frequencies that turn often within the original context stay, slow ones are divided, a ramp in between."""
    factor, original, d = scaling.factor, scaling.original_max_position_embeddings, rope.head_dim
    assert factor is not None and original is not None

    def dimension(turns: float) -> float:
        """Which pair turns so often over the original context."""
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast or 32), dimension(scaling.beta_slow or 1)
    if scaling.truncate is None or scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = ((torch.arange(d // 2, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, _yarn_attention(scaling, factor)


def _yarn_attention(scaling: RopeScaling, factor: float) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.mscale) / temperature(scaling.mscale_all_dim)
    return temperature(1.0)


def _longrope(rope: Rope, scaling: RopeScaling, plain: torch.Tensor, length: int) -> tuple[torch.Tensor, float]:
    """A divisor for each frequency: one list within the original context, another beyond it."""
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    assert original is not None
    divisors = scaling.long_factor if length > original else scaling.short_factor
    attention = scaling.attention_factor
    if attention is None:
        if factor is None:
            assert rope.max_position_embeddings is not None
            factor = rope.max_position_embeddings / original
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return plain / torch.tensor(divisors, dtype=torch.float64), attention


def _llama3(rope: Rope, scaling: RopeScaling, plain: torch.Tensor, length: int) -> tuple[torch.Tensor, float]:
    """Long waves are divided, short ones stay, a blend in between."""
    factor, original = scaling.factor, scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert factor is not None and original is not None and low is not None and high is not None
    waves = original * plain / (2 * math.pi)  # wavelengths in the original context
    blend = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain, 1.0
