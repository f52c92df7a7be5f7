"""Spikes of loss and gradient norm: the formula, what is skipped, that it never stops for good; then in the engine."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from qeffect_lm.errors import UsageError
from qeffect_lm.graphs import HiddenStateRegister, HostReplay
from qeffect_lm.optim.spikes import FLOOR, LOSS, NORM, NOT_FINITE, WINDOW, SpikeGate, reason_text
from tests.tiny import same_bits

YES, NO = torch.tensor(True), torch.tensor(False)


def wide(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def noise(step: int) -> tuple[float, float]:
    """A falling loss and a norm, each with about 3 % of noise."""
    generator = torch.Generator().manual_seed(step)
    a, b = (0.03 * torch.randn(2, generator=generator)).tolist()
    return 4.0 * math.exp(a), 0.7 * math.exp(b)


def gate_after(steps: int, sigma: float = 6.0, warmup: int = 10) -> SpikeGate:
    gate = SpikeGate(sigma, warmup)
    for step in range(steps):
        loss, norm = noise(step)
        assert gate.check_(wide(loss), wide(norm), YES) and int(gate.reason) == 0
    return gate


def test_statistics_are_mean_and_variance_of_the_logarithms() -> None:
    """Exactly averages of all values within the window (to float64 rounding), exponential ones after."""
    gate = gate_after(40)
    logs = [[math.log(value) for value in noise(step)] for step in range(40)]
    for series in range(2):
        values = [row[series] for row in logs]
        assert gate.mean[series].item() == pytest.approx(statistics.fmean(values), rel=1e-12)
        assert gate.variance[series].item() == pytest.approx(statistics.pvariance(values), rel=1e-10)
    assert int(gate.count) == 40
    gate.count.fill_(10_000)
    mean, variance = gate.mean.clone(), gate.variance.clone()
    gate.check_(wide(4.0), wide(0.7), YES)
    away = torch.tensor([4.0, 0.7], dtype=torch.float64).log() - mean
    torch.testing.assert_close(gate.mean, mean + away / WINDOW)
    torch.testing.assert_close(gate.variance, (1 - 1 / WINDOW) * (variance + away**2 / WINDOW))


@pytest.mark.parametrize(("loss", "norm", "reason"), [(6.0, 0.7, LOSS), (4.0, 1.2, NORM), (6.0, 1.2, LOSS | NORM)])
def test_a_spike_in_either_series_is_refused_with_its_reason(loss: float, norm: float, reason: int) -> None:
    gate = gate_after(40)
    assert not gate.check_(wide(loss), wide(norm), YES) and int(gate.reason) == reason
    assert gate.check_(wide(4.0), wide(0.7), YES) and int(gate.reason) == 0, "one outlier does not close the gate"
    assert gate.check_(wide(1.0), wide(0.1), YES), "what falls is no spike"


def test_a_huge_outlier_does_not_widen_the_limit() -> None:
    """It is entered at the limit: right after it, a spike of half as much again is refused all the same."""
    gate = gate_after(40)
    assert not gate.check_(wide(4e6), wide(0.7e6), YES)
    assert not gate.check_(wide(6.0), wide(0.7), YES) and not gate.check_(wide(4.0), wide(1.2), YES)


def test_nothing_is_refused_before_the_warm_up_ends() -> None:
    for steps, passes in ((9, True), (10, False)):
        gate = gate_after(steps)
        assert bool(gate.check_(wide(400.0), wide(70.0), YES)) is passes


def test_the_limit_is_k_standard_deviations() -> None:
    gate = gate_after(40, sigma=4.0)
    limit = 4.0 * max(FLOOR, gate.variance[1].sqrt().item())
    for factor, passes in ((0.99, True), (1.01, False)):
        gate = gate_after(40, sigma=4.0)
        norm = math.exp(gate.mean[1].item() + factor * limit)
        assert bool(gate.check_(wide(4.0), wide(norm), YES)) is passes
    still = SpikeGate(3.0, 2)
    for _ in range(20):
        still.check_(wide(4.0), wide(0.7), YES)
    assert still.check_(wide(4.1), wide(0.7), YES) and not still.check_(wide(4.3), wide(0.7), YES), "the least deviation"


def test_a_lasting_change_is_accepted_after_some_steps() -> None:
    """Refused steps enter at the limit, so the limit grows: training never stops for good, not even from a constant run."""
    constant = SpikeGate(6.0, 10)
    for _ in range(200):
        constant.check_(wide(4.0), wide(0.7), YES)
    for gate in (gate_after(200), constant):
        refused = 0
        while not gate.check_(wide(8.0), wide(1.4), YES):
            refused += 1
            assert refused < 60
        assert refused >= 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_leaves_every_byte(bad: float) -> None:
    gate = gate_after(40)
    before = [t.tensor.clone() for t in gate.logical_tensors()]
    assert not gate.check_(wide(bad), wide(bad), NO) and int(gate.reason) == 0
    assert all(same_bits(a, b.tensor) for a, b in zip(before, gate.logical_tensors(), strict=True))


def test_zero_is_no_accident() -> None:
    """Neither while it only watches nor after."""
    for steps in (1, 40):
        gate = gate_after(steps)
        assert gate.check_(wide(0.0), wide(0.0), YES)
        assert torch.isfinite(gate.mean).all() and torch.isfinite(gate.variance).all()


def test_captured_equals_eager_and_a_restored_gate_goes_on() -> None:
    """Replays, and a gate loaded at half time, against one eager gate: every verdict and every byte, over two spikes and a
    step that is not finite."""
    eager, taped, resumed = (SpikeGate(5.0, 4) for _ in range(3))
    loss, norm, finite, ok = wide(1.0), wide(1.0), torch.tensor(False), torch.tensor(False)
    register = HiddenStateRegister({"loss": loss, "norm": norm, "finite": finite, "ok": ok})
    register.add_object("gate", taped)
    graph = HostReplay().capture("gate", lambda: (ok.copy_(taped.check_(loss, norm, finite)), None)[1], register=register)
    verdicts = []
    for step in range(24):
        values = {11: (9.0, 0.7), 12: (math.nan, math.nan), 17: (4.0, 3.0)}.get(step, noise(step))
        if step == 12:
            for item, saved in zip(resumed.logical_tensors(), eager.logical_tensors(), strict=True):
                item.tensor.copy_(saved.tensor)
        loss.copy_(wide(values[0]))
        norm.copy_(wide(values[1]))
        finite.fill_(math.isfinite(values[0]))
        verdicts.append(bool(eager.check_(loss, norm, finite)))
        graph.replay()
        assert bool(ok) is verdicts[-1] and torch.equal(eager.reason, taped.reason)
        others = [taped]
        if step >= 12:
            assert bool(resumed.check_(loss, norm, finite)) is verdicts[-1]
            others.append(resumed)
        for other in others:
            pairs = zip(eager.logical_tensors(), other.logical_tensors(), strict=True)
            assert all(same_bits(a.tensor, b.tensor) for a, b in pairs), step
    assert [step for step, ok in enumerate(verdicts) if not ok] == [11, 12, 17]


def test_words_and_settings() -> None:
    assert reason_text(NOT_FINITE) == "not finite" and reason_text(0) == ""
    assert reason_text(LOSS | NORM) == "spike of the loss and spike of the gradient norm"
    with pytest.raises(UsageError, match="skip_sigma is 0"):
        SpikeGate(0, 10)
    with pytest.raises(UsageError, match="skip_warmup is 1"):
        SpikeGate(6.0, 1)
