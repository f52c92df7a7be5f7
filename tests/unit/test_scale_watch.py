"""What two looks at FP8 histories tell of the windows between them, against an account kept window by window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.calibrate import sample_underflow
from qeffect_lm.app.watching import recipe_of, shares_of
from qeffect_lm.contract.timeline import Direction, ScaleRole, ScaleTimeline
from qeffect_lm.fp8.quantise import E4M3, E5M2, quantise, underflow
from qeffect_lm.runtime.scale_watch import ScaleWatch, Windows
from tests.tiny import batch, differing
from tests.unit.engine_support import FP8_LINEARS, make, step, tensors

ROLES = [ScaleRole("a.input", Direction.FORWARD, 448.0), ScaleRole("b.input", Direction.FORWARD, 448.0),
         ScaleRole("a.grad_output", Direction.BACKWARD, 57344.0)]  # fmt: skip


class Account:
    """A timeline that is rolled with made-up amax, and what was quantised with which scale, noted at each window."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.timeline = ScaleTimeline(ROLES, **settings)
        self.generator = np.random.default_rng(seed)
        self.draw = lambda: float(np.exp(self.generator.normal(0, 2)))
        self.noted: list[list[tuple[float, float, float]]] = [[] for _ in ROLES]  # amax, scale, largest before

    def roll(self, directions: tuple[Direction, ...], skip: bool = False, idle: tuple[str, ...] = ()) -> None:
        timeline = self.timeline
        for index, role in enumerate(timeline.roles):
            if role.direction not in directions:
                continue
            amax = np.float32(self.draw())
            if role.name not in idle:
                timeline.open_amax[index] = float(amax)
            if not skip and role.name not in idle:
                self.noted[index].append((float(amax), float(timeline.scale[index]), float(timeline.history[index].max())))
        timeline.roll_(torch.tensor(skip), directions)
        for direction in directions:
            timeline.epochs[direction] += 1

    def expected(self, since: list[int]) -> list[tuple[int, int, float, float]]:
        """Per role since so many windows: windows, saturated, worst excess, worst jump."""
        told = []
        for role, noted, start in zip(self.timeline.roles, self.noted, since, strict=True):
            filled = [amax * scale / role.fp8_max for amax, scale, _ in noted[start:]]
            jumps = [amax / before for amax, _, before in noted[start:] if before > 0]
            told.append((len(filled), sum(one > 1 + 1e-6 for one in filled), max(filled, default=0.0), max(jumps, default=0.0)))
        return told


def assert_same(windows: Windows, expected: list[tuple[int, int, float, float]]) -> None:
    assert windows.seen.tolist() == [one[0] for one in expected]
    assert windows.saturated.tolist() == [one[1] for one in expected]
    np.testing.assert_allclose(windows.excess, [one[2] for one in expected], rtol=1e-6)
    np.testing.assert_allclose(windows.jump, [one[3] for one in expected], rtol=1e-6)


@pytest.mark.parametrize("amax", ["max", "most_recent"])
@pytest.mark.parametrize("window", ["step", "microbatch"])
@pytest.mark.parametrize("margin", [0, 1])
def test_every_window_is_told(window: str, amax: str, margin: int) -> None:
    """Skipped steps and idle tensors included, from the first window on; the newest amax with the scale that it had."""
    account = Account(3, window=window, history=6, amax=amax, margin=margin)
    watch, saturated = ScaleWatch(account.timeline), 0
    for _ in range(20):
        since = [len(noted) for noted in account.noted]
        skips = 0
        for _ in range(int(account.generator.integers(0, 7))):
            skip = bool(account.generator.random() < 0.2) and window == "step"
            if window == "step":
                account.roll(tuple(Direction), skip)
                skips += skip
            else:
                idle = ("b.input",) if account.generator.random() < 0.3 else ()
                for direction in Direction:
                    account.roll((direction,), idle=idle)
        windows = watch.windows(skips)
        assert_same(windows, account.expected(since))
        saturated += int(windows.saturated.sum())
        for index, noted in enumerate(account.noted):
            if len(noted) > since[index]:
                assert (windows.amax[index], windows.scale[index]) == noted[-1][:2]
    assert saturated > 5


def test_equal_amaxes_and_skipped_steps() -> None:
    """Values that come again and again do not hide how often a history rolled, where the skipped steps are told."""
    account = Account(4, history=8)
    account.draw = lambda: float(2 ** account.generator.integers(0, 2))
    watch = ScaleWatch(account.timeline)
    for _ in range(30):
        since, skips = [len(noted) for noted in account.noted], 0
        for _ in range(5):
            skip = bool(account.generator.random() < 0.4)
            account.roll(tuple(Direction), skip)
            skips += skip
        assert_same(watch.windows(skips), account.expected(since))


def test_more_windows_than_a_history_holds_are_not_guessed() -> None:
    account = Account(5, history=3)
    watch = ScaleWatch(account.timeline)
    assert watch.reaches(3, 1) and not watch.reaches(2, 2)
    for _ in range(4):
        account.roll(tuple(Direction))
    assert watch.windows().seen.tolist() == [0, 0, 0]
    watch.restart()
    since = [len(noted) for noted in account.noted]
    account.roll(tuple(Direction))
    assert_same(watch.windows(), account.expected(since))


def test_merged_joined_sorted() -> None:
    """Windows of one time after another are those of both; of two stages each role keeps its own."""
    account, once = Account(8, history=8), Account(8, history=8)
    watch, other = ScaleWatch(account.timeline), ScaleWatch(once.timeline)
    merged: Windows | None = None
    for _ in range(2):
        for one in (account, once):
            for _ in range(3):
                one.roll(tuple(Direction))
        seen = watch.windows()
        merged = seen if merged is None else merged.merge(seen)
    whole = other.windows()
    assert merged is not None
    for a, b in zip(merged._arrays(), whole._arrays(), strict=True):
        np.testing.assert_array_equal(a, b)
    renamed = Windows(["0", "z", "b"], *whole._arrays())
    joined = whole.join(renamed).sorted()
    assert joined.names == sorted([*whole.names, "0", "z", "b"])
    for name, amax in zip(joined.names, joined.amax, strict=True):
        source = whole if name in whole.names else renamed
        assert amax == source.amax[source.names.index(name)]
    filled = whole.amax.astype(float) * whole.scale / whole.fp8_max
    np.testing.assert_allclose(whole.room, -np.log2(filled))


def test_nothing_seen_is_nothing_told() -> None:
    """Before the first window: no amax, no room, no jump; and a run without FP8 tensors."""
    windows = ScaleWatch(ScaleTimeline(ROLES)).windows()
    assert windows.seen.sum() == windows.saturated.sum() == 0 and windows.jump.max() == 0 and np.isnan(windows.room).all()
    assert ScaleWatch(ScaleTimeline([])).windows().names == []


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_underflow_is_what_the_cast_does(fmt: Any) -> None:
    """Of values around the smallest number, ties and zeros among them: the share that the quantisation itself makes zero."""
    generator = torch.Generator().manual_seed(0)
    smallest = torch.finfo(fmt.dtype).tiny * torch.finfo(fmt.dtype).eps
    edges = torch.tensor([0.0, 0.5, 0.5000001, 0.4999999, 1.0, -0.5, -0.6]).repeat(10)
    for scale in (1.0, 64.0):
        values = torch.cat([edges, torch.randn(90, generator=generator)]) * smallest / scale
        x = values[:160].view(16, 10).float()
        made = quantise(x, torch.tensor(scale), fmt).rows
        assert made is not None
        lost, nonzero = int(((made.float() == 0) & (x != 0)).sum()), int((x != 0).sum())
        assert 0.2 < lost / nonzero < 0.8 and underflow(x, torch.tensor(scale), fmt).tolist() == [lost, nonzero]
    assert underflow(torch.zeros(16, 16), torch.tensor(1.0), fmt).tolist() == [0, 0]


def test_shares_of_all_ranks_counts() -> None:
    """Pieces of one role count as what they are of the whole; what is zero everywhere loses nothing."""
    ranks: list[dict[str, tuple[int, int]]] = [{"a": (1, 10), "b": (0, 0)}, {"a": (5, 20)}, {}]
    assert shares_of(ranks) == {"a": 0.2, "b": 0.0} and shares_of([]) == {}


@pytest.mark.parametrize("backend", ["eager", "host_replay"])
def test_a_sample_changes_nothing(backend: str) -> None:
    """Between two steps: all state and the next step are those of a run without; scales that are too small lose values."""
    plain, sampled = make(backend), make(backend)
    step(plain, 0), step(sampled, 0)
    shares = shares_of([sample_underflow(sampled.engine, batch(1), recipe_of(sampled))])
    assert len(shares) == 3 * FP8_LINEARS and set(shares) == set(sampled.timeline.index)
    assert all(0 <= share < 0.1 for share in shares.values()) and max(shares.values()) > 0
    assert differing(tensors(plain), tensors(sampled)) == []
    assert step(plain, 1) == step(sampled, 1) and differing(tensors(plain), tensors(sampled)) == []
    role = "layers.0.mlp.down.input"
    sampled.timeline.scale_of(role).mul_(2.0**-14)
    again = shares_of([sample_underflow(sampled.engine, batch(1), recipe_of(sampled))])
    assert again[role] > 0.2 and all(again[name] < 0.1 for name in again if name != role)


def test_a_sample_of_experts_changes_nothing() -> None:
    """Their weights are sampled; what their inputs and gradients merge into the open windows is taken back."""
    moe = {"model__family": "mixtral", "model__moe": {"num_experts": 4}, "pipeline__microbatches": 2}
    assembly = make(**moe)
    step(assembly, 0)
    before = tensors(assembly)
    shares = sample_underflow(assembly.engine, batch(1, 2), recipe_of(assembly))
    assert differing(before, tensors(assembly)) == []
    assert {name for name in assembly.timeline.index if name not in shares} == {
        name for name in assembly.timeline.index if "expert" in name and not name.endswith(".weight")
    }
