"""Learning-rate schedules (case C5): conventions, and device equals closed form at every step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.lr import KINDS, Schedule


def _device_rates(schedule: Schedule, steps: int, start: int = 0) -> list[float]:
    """Rates as a training process sees them: a device counter that starts at ``start`` and counts up in
    place."""
    device = schedule.on_device("cpu")
    step = torch.tensor(start)
    rate = torch.zeros((), dtype=torch.float64)
    rates = []
    for _ in range(start, steps):
        rates.append(device.write_(step, rate).item())
        step.add_(1)
    return rates


def _reference(kind: str, step: int, lr: float, total: int, warmup: int, ratio: float, decay: int) -> float:
    """The documented formula, written down a second time, in exact enough arithmetic."""
    floor = lr * ratio
    if step >= total:
        return floor
    if step < warmup:
        return lr * (step + 1) / warmup
    begin = warmup if kind != "wsd" else max(warmup, total - decay)
    x = max(0.0, (step - begin) / (total - begin))
    if kind == "cosine":
        return floor + (lr - floor) * (1 + math.cos(math.pi * x)) / 2
    return lr + (floor - lr) * x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "warmup"), [(40, 0), (40, 1), (40, 10), (10, 10), (5, 10), (1, 0)])
def test_device_equals_closed_form(kind: str, total: int, warmup: int) -> None:
    """C5: at every step around warm-up and end, and from every resume point, exactly the closed form."""
    schedule = Schedule(3e-3, total, kind, warmup, 0.1)
    expected = [schedule.closed_form(step) for step in range(total + 5)]
    assert _device_rates(schedule, total + 5) == expected
    for resume in range(0, total + 4, 3):
        assert _device_rates(schedule, total + 5, resume) == expected[resume:]


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    total=st.integers(1, 400),
    warmup=st.integers(0, 50),
    ratio=st.floats(0, 1),
    lr=st.floats(1e-6, 1.0),
    data=st.data(),
)
def test_closed_form_follows_the_documented_formula(
    kind: str, total: int, warmup: int, ratio: float, lr: float, data: st.DataObject
) -> None:
    """Within 4 units in the last place of the peak of an independent statement of the formula, everywhere."""
    decay = data.draw(st.integers(1, max(1, total - warmup)))
    schedule = Schedule(lr, total, kind, warmup, ratio, decay if kind == "wsd" else None)
    for step in range(total + 3):
        expected = _reference(kind, step, lr, total, warmup, ratio, decay)
        assert abs(schedule.closed_form(step) - expected) <= 4 * math.ulp(lr), step


@pytest.mark.parametrize("kind", KINDS)
def test_conventions(kind: str) -> None:
    """First step lr / warmup, peak exactly lr, never rising after it, floor exactly lr * ratio from the end
    on."""
    schedule = Schedule(1e-3, 100, kind, 10, 0.1)
    rates = [schedule.closed_form(step) for step in range(110)]
    assert rates[0] == pytest.approx(1e-4, rel=1e-15)
    assert rates[9] == rates[10] == max(rates) == 1e-3
    assert all(later <= earlier for earlier, later in zip(rates[10:], rates[11:], strict=False))
    assert rates[99] > rates[100] == 1e-3 * 0.1 and set(rates[100:]) == {rates[100]}
    assert Schedule(1e-3, 100, kind, 0, 0.1).closed_form(0) == 1e-3


def test_wsd_is_stable_then_decays() -> None:
    """WSD holds the peak until T - D; D defaults to a fifth of the steps."""
    schedule = Schedule(1.0, 100, "wsd", 10, 0.0, wsd_decay_steps=30)
    assert all(schedule.closed_form(step) == 1.0 for step in range(10, 71))
    assert schedule.closed_form(85) == pytest.approx(0.5)
    assert Schedule(1.0, 100, "wsd", 10).decay_start == 80
    assert Schedule(1.0, 12, "wsd", 11).decay_start == 11


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"kind": "exponential"}, "optim.schedule"),
        ({"total_steps": 0}, "train.steps"),
        ({"warmup_steps": -1}, "optim.warmup_steps"),
        ({"lr": float("nan")}, "optim.lr"),
        ({"min_lr_ratio": 1.5}, "optim.min_lr_ratio"),
        ({"kind": "wsd", "wsd_decay_steps": 95}, "optim.wsd_decay_steps"),
    ],
)
def test_errors_name_the_key(change: dict[str, object], key: str) -> None:
    """Impossible settings are usage errors that name the configuration key."""
    settings_: dict[str, object] = {"lr": 1e-3, "total_steps": 100, "warmup_steps": 10, **change}
    with pytest.raises(UsageError, match=key):
        Schedule(**settings_)  # type: ignore[arg-type]
