"""Whether a step's loss or gradient norm is a spike: further than k standard deviations above its running mean.

Watched are ``log(loss)`` and ``log(gradient norm)``, whose noise has about one width over a whole run. Per series a running
mean ``m`` and variance ``v`` with the weight ``w = max(1 / (n + 1), 1 / WINDOW)`` of the ``n + 1``-th value ``x``, so plain
averages at first and exponential ones later (West 1979, doi:10.1145/359146.359153):

    d = x - m;   m = m + w d;   v = (1 - w) (v + w d^2)

After ``warmup`` values a step is a spike when ``d > k max(sqrt(v), FLOOR)`` in either series. It then enters the averages as
if it had been at that limit (below, likewise): a single outlier cannot widen the limit much, and a level that stays changed
is accepted after some steps, so training never stops for good. A step that is not finite does not count.

Device tensors only, no host read, no branch on a value: it can be captured. Ranks that see equal numbers decide alike.
"""

from __future__ import annotations

import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.state import LogicalTensor, Role

WINDOW = 128
"""Steps over which the running averages look back."""

FLOOR = 0.01
"""Least standard deviation: a change of one per cent is no spike, however quiet the run was."""

TINY = 1e-30
"""A loss or norm of 0 has this logarithm."""

NOT_FINITE, LOSS, NORM = 1, 2, 4
"""Reasons to skip a step; their sum says all that apply, 0 none."""


def reason_text(reason: int) -> str:
    """Why a step was skipped, in words."""
    words = {NOT_FINITE: "not finite", LOSS: "spike of the loss", NORM: "spike of the gradient norm"}
    return " and ".join(text for bit, text in words.items() if reason & bit)


class SpikeGate:
    """Running statistics of two series, and the verdict on a step.

    Owned device tensors, saved: ``count`` (0-dim int64, steps in the averages), ``mean`` and ``variance`` (``[2]`` float64: log
    loss, log norm). Rewritten by each :meth:`check_`: ``reason`` (0-dim int64, sum of LOSS and NORM).

    Raises UsageError for settings outside their range.
    """

    def __init__(self, sigma: float, warmup: int, device: torch.device | str = "cpu") -> None:
        if not sigma > 0:
            raise UsageError(f"optim.skip_sigma is {sigma}; it must be greater than 0, or null (no such skips)")
        if warmup < 2:
            raise UsageError(f"optim.skip_warmup is {warmup}; it must be 2 or more, since one value has no deviation")
        self._sigma, self._warmup = sigma, warmup

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.mean, self.variance = zeros(2), zeros(2)
        self.reason = torch.zeros((), dtype=torch.int64, device=device)
        self._bits = torch.tensor([LOSS, NORM], device=device)

    def check_(self, loss: torch.Tensor, norm: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Judge a step and enter it into the averages; returns the 0-dim bool of whether it may be applied.

        ``loss`` and ``norm`` are 0-dim float64, ``finite`` 0-dim bool: False leaves every statistic as it is and is answered
        with False.
        """
        seen = torch.stack((loss, norm)).clamp(min=TINY).log()
        away = seen - self.mean
        limit = self.variance.sqrt().clamp(min=FLOOR) * self._sigma
        judged = self.count >= self._warmup
        spike = (away > limit) & judged & finite
        entered = torch.where(judged, torch.minimum(torch.maximum(away, -limit), limit), away)
        weight = (1.0 / (self.count + 1).double()).clamp(min=1.0 / WINDOW)
        mean = self.mean + weight * entered
        variance = (1.0 - weight) * (self.variance + weight * entered * entered)
        self.mean.copy_(torch.where(finite, mean, self.mean))
        self.variance.copy_(torch.where(finite, variance, self.variance))
        self.count.add_(finite)
        self.reason.copy_((spike * self._bits).sum())
        return finite & ~spike.any()

    def logical_tensors(self) -> list[LogicalTensor]:
        """The saved statistics, equal on every rank."""
        parts = (("count", self.count), ("mean", self.mean), ("variance", self.variance))
        replicated = ("pp", "dp", "ep", "cp", "tp")
        return [LogicalTensor.whole(f"spikes/{name}", t, Role.STATISTIC, replicated=replicated) for name, t in parts]
