"""Each warning fires beyond its threshold and not below, names what it is about, and comes at a limited rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qeffect_lm.config_sections import LoggingConfig
from qeffect_lm.runtime.alarms import LOOKS, SPIKE_WARM_UP, Alarms
from qeffect_lm.runtime.metrics import StepMetrics
from qeffect_lm.runtime.scale_watch import Windows


class Heard:
    """Alarms, and what they said."""

    def __init__(self, **settings: Any) -> None:
        self.said: list[tuple[str, int, str, dict[str, Any]]] = []
        self.alarms = Alarms(LoggingConfig(**settings), lambda *what: self.said.append(what))


def seen(saturated: list[int], windows: int = 10, jump: float = 1.0) -> Windows:
    n = len(saturated)
    names, ones = [f"layers.{i}.input" for i in range(n)], np.ones(n)
    excess = np.where(np.array(saturated) > 0, 1.5 + np.arange(n), 0.9)
    jumps = np.linspace(0.5, jump, n)
    return Windows(names, 448 * ones, np.full(n, windows), np.array(saturated), excess, jumps, ones, ones)


def test_saturation() -> None:
    """A tensor that nearly always saturates is named, after enough windows; one that often does is none, nor the others."""
    heard = Heard(warn_saturation=0.75)
    for step in (10, 20, 30):
        heard.alarms.scales(step, seen([0, 10, 5]))
    assert heard.said == []  # 30 windows are too few
    heard.alarms.scales(40, seen([0, 10, 5]))
    ((kind, step, text, values),) = heard.said
    assert (kind, step, values["role"], values["roles"], values["value"]) == ("saturation", 40, "layers.1.input", 1, 1.0)
    assert "1 of 3 FP8 tensors" in text and "layers.1.input by up to 2.5 times" in text
    calm = Heard(warn_saturation=0.75)
    for step in range(10, 500, 10):
        calm.alarms.scales(step, seen([0, 7, 5]))
    assert calm.said == []
    never = Heard(warn_saturation=None)
    for step in range(10, 100, 10):
        never.alarms.scales(step, seen([10, 10, 10]))
    assert never.said == []


def test_saturation_that_ended_is_forgotten() -> None:
    heard = Heard(warn_saturation=0.75, warn_every=1)
    for step in range(10, 110, 10):
        heard.alarms.scales(step, seen([10] if step <= 50 else [0]))
    assert [step for _, step, *_ in heard.said] == [40, 50, 60]  # 50 of about 60 windows, then less


def test_amax_jump() -> None:
    for jump, warned in ((15.9, False), (16.1, True)):
        heard = Heard()
        heard.alarms.scales(10, seen([0, 0], jump=jump))
        assert [(kind, values["role"]) for kind, _, _, values in heard.said] == [("amax_jump", "layers.1.input")] * warned
    assert Heard(warn_amax_jump=None).alarms.scales(10, seen([0], jump=1e9)) is None


def test_underflow() -> None:
    for share, warned in ((0.49, False), (0.51, True)):
        heard = Heard(warn_underflow=0.5)
        heard.alarms.underflow(20, {"layers.0.input": 0.1, "layers.1.grad_output": share})
        assert [(kind, values["role"], values["roles"]) for kind, _, _, values in heard.said] == [
            ("underflow", "layers.1.grad_output", 1)
        ] * warned
    quiet = Heard(warn_underflow=None)
    quiet.alarms.underflow(20, {"layers.0.input": 1.0})
    heard.alarms.underflow(900, {})
    assert quiet.said == [] and len(heard.said) == 1


def test_rate() -> None:
    """One of a kind in warn_every steps, the next says how many were held back; another kind is not held back by it."""
    heard = Heard(warn_every=100)
    for step in range(10, 251, 10):
        heard.alarms.scales(step, seen([0, 0], jump=20.0))
    heard.alarms.raise_("straggler", 251, "slow")
    assert [(kind, step, values["held_back"]) for kind, step, _, values in heard.said] == [
        ("amax_jump", 10, 0), ("amax_jump", 110, 9), ("amax_jump", 210, 9), ("straggler", 251, 0),
    ]  # fmt: skip
    assert heard.said[1][2].endswith("(9 more since step 10)") and "more since" not in heard.said[0][2]


@pytest.mark.parametrize(
    ("work", "stages", "rank", "usual"),
    [
        ([100, 100, 160, 100], [0, 0, 1, 1], 2, 100.0),  # of two replicas of stage 1
        ([100, 100, 300, 290], [0, 0, 1, 1], None, 0),  # a stage with more work is no straggler
        ([100, 149], [0, 0], None, 0),
        ([100, 151], [0, 0], 1, 100.0),
        ([100, 100, 160], [0, 1, 2], 2, 100.0),  # without replicas: of the other stages
        ([1, 4, 1], [0, 1, 2], None, 0),  # four times as long, but nothing of a step
        ([100], [0], None, 0),
    ],
)
def test_stragglers(work: list[float], stages: list[int], rank: int | None, usual: float) -> None:
    heard = Heard(warn_straggler=1.5)
    for look in range(LOOKS):
        assert heard.said == []
        heard.alarms.stragglers(10 * look, 200.0, work, stages)
    assert [(v["rank"], v["usual_ms"]) for _, _, _, v in heard.said] == ([] if rank is None else [(rank, usual)])
    if rank is not None:
        assert f"rank {rank} took {work[rank]:g} ms" in heard.said[0][2]
    silent = Heard(warn_straggler=None)
    for look in range(LOOKS):
        silent.alarms.stragglers(10 * look, 200.0, work, stages)
    assert silent.said == []


def test_a_single_slow_step_is_no_straggler() -> None:
    """Nor are two ranks in turn."""
    heard, even = Heard(), [100.0, 100.0, 100.0]
    for look, slow in enumerate((1, 1, None, 1, 1, 2, 1, 1)):
        work = [300.0 if rank == slow else ms for rank, ms in enumerate(even)]
        heard.alarms.stragglers(look, 300.0, work, [0, 0, 0])
    assert heard.said == []
    heard.alarms.stragglers(8, 300.0, [100.0, 300.0, 100.0], [0, 0, 0])
    assert [values["rank"] for *_, values in heard.said] == [1] and "the last 3 looks" in heard.said[0][2]


def test_spikes() -> None:
    """Of the loss or the norm; not in the warm-up, not for noise, not for a step that was skipped for it."""
    rng = np.random.default_rng(0)

    def steps(**last: Any) -> list[tuple[str, int, str, dict[str, Any]]]:
        heard = Heard()
        for step in range(1, SPIKE_WARM_UP + 20):
            noise = 1 + 0.02 * rng.standard_normal(2)
            heard.alarms.spike(StepMetrics(step, 3.0 * noise[0], 0.5 * noise[1], 1e-3, 0, None, None))
        assert heard.said == []
        usual = StepMetrics(SPIKE_WARM_UP + 20, 3.0, 0.5, 1e-3, 0, None, None)
        heard.alarms.spike(replace(usual, **last))
        return heard.said

    assert steps() == [] and steps(loss=3.1) == [] and steps(loss=30.0, skipped=True) == []
    assert steps(loss=None) == [] and steps(loss=float("nan"), skipped=False) == []
    ((kind, step, text, values),) = steps(loss=6.0)
    assert (kind, step, values["loss"]) == ("spike", SPIKE_WARM_UP + 20, 6.0) and "spike of the loss: loss 6" in text
    ((_, _, text, _),) = steps(grad_norm=5.0)
    assert text.startswith("spike of the gradient norm")
    early = Heard()
    for step, loss in enumerate((3.0, 3.0, 30.0), start=1):
        early.alarms.spike(StepMetrics(step, loss, 0.5, 1e-3, 0, None, None))
    assert early.said == []
