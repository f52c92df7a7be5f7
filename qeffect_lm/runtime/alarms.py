"""Warnings about a run: when a figure is beyond its threshold, at a limited rate, to the terminal and to ``events.jsonl``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from qeffect_lm.config_sections import LoggingConfig
from qeffect_lm.optim.spikes import LOSS, NORM, SpikeGate, reason_text
from qeffect_lm.runtime.metrics import StepMetrics
from qeffect_lm.runtime.scale_watch import Windows

MEMORY, LEAST = 32.0, 32
"""Windows over which a role's share of saturated ones is averaged, and of which there must be as many before it counts."""
STALL = 0.05  # of a step: what a straggler costs at least
LOOKS = 3  # in a row that find the same rank slow: a single slow step is no straggler
SPIKE_WARM_UP = 20  # logged steps before a loss can be a spike


class Alarms:
    """Judges what rank 0 knows of a run.

    Args:
        emit: called with ``(kind, step, text, values)`` of each warning that is due.
    """

    def __init__(self, settings: LoggingConfig, emit: Callable[[str, int, str, dict[str, Any]], object]) -> None:
        self._settings, self._emit = settings, emit
        self._said: dict[str, int] = {}
        self._slow: tuple[int | None, int] = None, 0  # the rank that was slow, and how many looks in a row
        self._held: dict[str, int] = {}
        self._share: dict[str, np.ndarray] = {}  # running share of saturated windows, and the windows that are in it
        self._spikes = None if settings.warn_spike is None else SpikeGate(settings.warn_spike, SPIKE_WARM_UP)

    def raise_(self, kind: str, step: int, text: str, **values: Any) -> None:
        """Warn, unless one of this kind came less than ``logging.warn_every`` steps ago; the next tells how many did not."""
        if kind in self._said and step - self._said[kind] < self._settings.warn_every:
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        held = self._held.pop(kind, 0)
        more = f" ({held} more since step {self._said[kind]})" if held else ""
        self._said[kind] = step
        self._emit(kind, step, text + more, {**values, "held_back": held})

    def scales(self, step: int, windows: Windows) -> None:
        """Saturation and jumps, from what histories tell; the same roles in the same order every time."""
        settings = self._settings
        if settings.warn_saturation is not None:
            share = self._running(windows)
            bad = np.flatnonzero(share > settings.warn_saturation)
            if len(bad):
                worst = int(bad[np.argmax(windows.excess[bad])])
                self.raise_(
                    "saturation",
                    step,
                    f"{len(bad)} of {len(share)} FP8 tensors saturate in more than {settings.warn_saturation:.0%} of their "
                    f"windows, {windows.names[worst]} by up to {windows.excess[worst]:.3g} times the format's largest value: "
                    "its amax keeps growing; raise precision.fp8.margin, or look for what grows",
                    role=windows.names[worst],
                    roles=len(bad),
                    value=float(share[worst]),
                    excess=float(windows.excess[worst]),
                )
        if settings.warn_amax_jump is not None and len(windows.jump):
            worst = int(windows.jump.argmax())
            if windows.jump[worst] > settings.warn_amax_jump:
                self.raise_(
                    "amax_jump",
                    step,
                    f"the amax of {windows.names[worst]} jumped to {windows.jump[worst]:.3g} times the largest of its history",
                    role=windows.names[worst],
                    value=float(windows.jump[worst]),
                )

    def _running(self, windows: Windows) -> np.ndarray:
        """Each role's share of saturated windows over about :data:`MEMORY` of them; 0 until :data:`LEAST` were seen."""
        if not self._share:
            self._share = {"share": np.zeros(len(windows.names)), "seen": np.zeros(len(windows.names))}
        seen = windows.seen.astype(np.float64)
        total = np.minimum(self._share["seen"], MEMORY) + seen
        with np.errstate(invalid="ignore"):
            mixed = (self._share["share"] * np.minimum(self._share["seen"], MEMORY) + windows.saturated) / total
        self._share["share"] = np.where(total > 0, mixed, 0.0)
        self._share["seen"] += seen
        return np.where(self._share["seen"] >= LEAST, self._share["share"], 0.0)

    def underflow(self, step: int, shares: dict[str, float]) -> None:
        """Role → share of its non-zero values that became zero in FP8."""
        limit = self._settings.warn_underflow
        if limit is None or not shares:
            return
        role, worst = max(shares.items(), key=lambda item: item[1])
        bad = sum(share > limit for share in shares.values())
        if bad:
            self.raise_(
                "underflow",
                step,
                f"more than {limit:.0%} of the non-zero values of {bad} of {len(shares)} FP8 tensors become zero, "
                f"{worst:.0%} of {role}: their range is too wide for one scale; keep these layers out of FP8",
                role=role,
                roles=bad,
                value=worst,
            )

    def stragglers(self, step: int, step_ms: float, work_ms: list[float], stages: list[int]) -> None:
        """``work_ms``: each rank's own time in a step (its work and its wait for data); ``stages``: its pipeline stage.

        A rank is compared with the other replicas of its stage, where there are any, else with the other stages; one that is
        the slowest in several looks in a row is a straggler.
        """
        limit = self._settings.warn_straggler
        if limit is None or len(work_ms) < 2:
            return
        replicated = len(set(stages)) < len(stages)

        def usual(rank: int) -> float:
            others = [ms for r, ms in enumerate(work_ms) if r != rank and (stages[r] == stages[rank] or not replicated)]
            return float(np.median(others))

        slow = [r for r, ms in enumerate(work_ms) if ms > limit * usual(r) and ms - usual(r) > STALL * step_ms]
        rank = max(slow, key=work_ms.__getitem__, default=None)
        before, looks = self._slow
        self._slow = rank, (looks + 1 if rank is not None and rank == before else 1)
        if rank is None or self._slow[1] < LOOKS:
            return
        than = f"the other replicas of stage {stages[rank]}" if replicated else "the other stages"
        self.raise_(
            "straggler",
            step,
            f"rank {rank} took {work_ms[rank]:.3g} ms for its own part of the step, {than} {usual(rank):.3g} ms, and was the "
            f"slowest in the last {self._slow[1]} looks: all ranks wait for it",
            rank=rank,
            value=work_ms[rank] / usual(rank) if usual(rank) > 0 else None,
            ms=work_ms[rank],
            usual_ms=usual(rank),
        )

    def spike(self, metrics: StepMetrics) -> None:
        """A loss or gradient norm far above its running mean, as ``optim.skip_sigma`` judges it, over the logged steps."""
        if self._spikes is None or metrics.skipped or metrics.loss is None or metrics.grad_norm is None:
            return
        loss, norm = (torch.tensor(value, dtype=torch.float64) for value in (metrics.loss, metrics.grad_norm))
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        self._spikes.check_(loss, norm, finite)
        reason = int(self._spikes.reason)
        if finite and reason & (LOSS | NORM):
            self.raise_(
                "spike",
                metrics.step,
                f"{reason_text(reason)}: loss {metrics.loss:.4g}, gradient norm {metrics.grad_norm:.4g}, more than "
                f"{self._settings.warn_spike:g} standard deviations above their running mean",
                loss=metrics.loss,
                grad_norm=metrics.grad_norm,
            )
