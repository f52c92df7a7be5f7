"""How the next token is chosen from logits: on the device, reproducible, and for each sequence by itself.

A draw adds keyed Gumbel noise to the logarithms of the probabilities and takes the largest (Gumbel 1954; Maddison, Tarlow and
Minka 2014). The noise is a function of (seed, prompt, number of the new token, token id) alone, so a sequence draws the same
tokens whatever is generated beside it. Top-k as Fan et al. 2018, nucleus (top-p) as Holtzman et al. 2020, repetition penalty as
Keskar et al. 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.layers.dropout import host_key, mix

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64's increment, as int64
_BITS = 52  # with the half that is added below, what a float64 holds exactly


@dataclass(frozen=True)
class Sampling:
    """``temperature`` 0 takes the most probable token; ``top_k`` 0, ``top_p`` 1 and ``repetition_penalty`` 1 change nothing.

    In this order: the penalty divides the positive logits of tokens that the sequence holds already and multiplies the negative
    ones; the temperature divides; top-k keeps the k largest (and those equal to the k-th); top-p keeps the most probable of
    these until their mass reaches p.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"--top-k is {self.top_k}; it must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p}; it must lie in (0, 1]")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UsageError(f"--repetition-penalty is {self.repetition_penalty}; it must be above 0 (1 changes nothing)")

    def key(self, prompt: Sequence[int], copy: int = 0) -> int:
        """What a prompt's draws are keyed on; ``copy`` numbers equal prompts, so that each draws its own."""
        return host_key("sample", self.seed, copy, *prompt)


def choose(
    logits: torch.Tensor, sampling: Sampling, keys: torch.Tensor, count: torch.Tensor, held: torch.Tensor | None = None
) -> torch.Tensor:
    """Next tokens, int64 ``[rows]``, of ``logits`` ``[rows, vocab]``; each row by itself, nothing is read on the host.

    Args:
        keys: int64 ``[rows]``, those of :meth:`Sampling.key`.
        count: int64 ``[rows]``, how many new tokens each row has already.
        held: bool ``[rows, vocab]``, the tokens that each sequence holds; needed with a repetition penalty.
    """
    scores = logits if logits.dtype is torch.float64 else logits.float()
    if sampling.repetition_penalty != 1:
        assert held is not None
        penalty = sampling.repetition_penalty
        scores = torch.where(held, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    if sampling.temperature == 0:
        return scores.argmax(-1)
    scores = scores.double() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[..., -1:], float("-inf"))
    noise = _gumbel(keys, count, scores.shape[-1])
    if sampling.top_p == 1:
        return (scores + noise).argmax(-1)
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    probabilities = scores.softmax(-1)
    before = torch.nn.functional.pad(_running_sum(probabilities)[..., :-1], (1, 0))  # 0 for the first, which stays
    scores = scores.masked_fill(before >= sampling.top_p, float("-inf"))
    place = (scores + noise.gather(-1, order)).argmax(-1, keepdim=True)
    return order.gather(-1, place).squeeze(-1)


def _gumbel(keys: torch.Tensor, count: torch.Tensor, size: int) -> torch.Tensor:
    """Gumbel noise, float64 ``[rows, size]``."""
    rows = mix(keys + count * _GOLDEN)[:, None]
    numbers = torch.arange(1, size + 1, dtype=torch.int64, device=keys.device) * _GOLDEN
    bits = (mix(numbers + rows) >> (64 - _BITS)) & ((1 << _BITS) - 1)
    uniform = (bits.double() + 0.5) * 2.0**-_BITS  # never 0 or 1
    return -torch.log(-torch.log(uniform))


def _running_sum(x: torch.Tensor) -> torch.Tensor:
    """Inclusive sums along the last dimension, by doubling: torch's own has no fixed order on a GPU."""
    step = 1
    while step < x.shape[-1]:
        x = x + torch.nn.functional.pad(x[..., :-step], (step, 0))
        step *= 2
    return x
