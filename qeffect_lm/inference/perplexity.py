"""Perplexity of a sequence of tokens: the mean negative log-likelihood of each token given those before it.

A sequence longer than the context is read in windows. With a stride below the context they overlap, and every window after the
first counts only tokens that none before it counted: each token is counted once, given at least ``context - stride + 1`` tokens
(or all there are). With the stride equal to the context the windows are those of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.inference.model import InferenceModel

LOGITS_AT_ONCE = 2**25  # in float64 256 MiB


@dataclass(frozen=True)
class Window:
    """One pass: tokens ``[start, end - 1)`` are read, ``[start + 1, end)`` predicted, ``[first, end)`` counted."""

    start: int
    first: int
    end: int


@dataclass(frozen=True)
class Score:
    """Negative log-likelihood in ``nats`` of ``tokens`` tokens, over ``windows`` passes."""

    nats: float
    tokens: int
    windows: int

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the nats per token; infinite beyond float64."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    def bits_per_byte(self, count: int) -> float:
        """With ``count`` the bytes of the counted tokens' text."""
        return self.nats / math.log(2) / count


def windows_of(tokens: int, context: int, stride: int) -> list[Window]:
    """The windows over a sequence of ``tokens`` tokens.

    Raises:
        UsageError: a stride outside ``[1, context]``, or fewer than two tokens.
    """
    if not 1 <= stride <= context:
        raise UsageError(f"--stride is {stride}; it must lie between 1 and the context of {context}")
    if tokens < 2:
        raise UsageError(f"there are {tokens} tokens: a token is predicted from those before it, so two are needed")
    made, counted = [], 1
    for start in range(0, tokens, stride):
        end = min(start + context + 1, tokens)
        made.append(Window(start, counted, end))
        counted = end
        if end == tokens:
            break
    return made


def score(
    model: InferenceModel,
    tokens: npt.NDArray[np.integer],
    *,
    stride: int | None = None,
    batch: int = 1,
    progress: Callable[[int], object] = lambda windows: None,
) -> Score:
    """The score of ``tokens``, a sequence of ids, in windows of the model's context.

    Args:
        stride: tokens from one window to the next; None: the context.
        batch: windows in one pass; one where the model asks for it (``alone``).
        progress: is told how many windows were done since it was last called.

    Likelihoods are made in float64 of the model's logits. Raises UsageError as :func:`windows_of`, and for a token that the
    model does not know.
    """
    if batch < 1:
        raise UsageError(f"--batch-size is {batch}; it must be at least 1")
    check_known(tokens, model.vocab_size)
    context = model.context_length
    windows = windows_of(len(tokens), context, context if stride is None else stride)
    sums: list[float] = []
    for together in _batches(windows, 1 if model.alone else batch):
        sums += _nats(model, tokens, together)
        progress(len(together))
    return Score(math.fsum(sums), windows[-1].end - windows[0].first, len(windows))


def check_known(tokens: npt.NDArray[np.integer], vocab: int) -> None:
    """Raises UsageError for a token that a model of ``vocab`` ids does not know."""
    if len(tokens) and not (0 <= int(tokens.min()) and int(tokens.max()) < vocab):
        wrong = int(tokens.max()) if int(tokens.max()) >= vocab else int(tokens.min())
        raise UsageError(f"the data has token id {wrong}, the model knows 0 to {vocab - 1}: the data is another tokenizer's")


def _batches(windows: Sequence[Window], size: int) -> Iterator[list[Window]]:
    """Windows of one length, at most ``size``, in order."""
    for _, alike in groupby(windows, lambda window: window.end - window.start):
        several = list(alike)
        for begin in range(0, len(several), size):
            yield several[begin : begin + size]


@torch.no_grad()
def _nats(model: InferenceModel, tokens: npt.NDArray[np.integer], windows: Sequence[Window]) -> list[float]:
    """Negative log-likelihood of what each window counts."""
    read = np.stack([np.asarray(tokens[window.start : window.end], dtype=np.int64) for window in windows])
    ids = torch.from_numpy(read).to(model.device)
    hidden = model.hidden(ids[:, :-1])
    sums = []
    for row, window in enumerate(windows):
        first = window.first - window.start
        sums.append(_negative_log_likelihood(model, hidden[row, first - 1 :], ids[row, first:]))
    result: list[float] = torch.stack(sums).tolist()
    return result


def _negative_log_likelihood(model: InferenceModel, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """0-dim float64, of ``targets`` ``[tokens]`` given ``hidden`` ``[tokens, hidden]``."""
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    size = max(1, LOGITS_AT_ONCE // model.vocab_size)
    for part, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        logits = model.head(part[None])[0].double()
        total += (torch.logsumexp(logits, -1) - logits.gather(-1, wanted[:, None])[:, 0]).sum()
    return total
