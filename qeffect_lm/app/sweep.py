"""Layouts of one configuration for a number of GPUs, ranked by tokens per second.

Every layout tp x pp x dp x ep x cp that divides what it has to divide is a candidate, with each schedule, microbatch size and
ZeRO stage. A lower bound of a candidate's time is cheap: its work and exchanges spread evenly over the stages, without a
bubble. In that order candidates are timed, and those whose memory suffices are ranked; once there are as many as were asked
for, what cannot be faster is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from pipeline.actions import collector_paused
from pipeline.plan import Plan
from qeffect_lm.app.assemble import make_plan
from qeffect_lm.app.clock import Clock
from qeffect_lm.app.forecast import Forecast, batch_of, fullest, timed
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import Memory
from qeffect_lm.app.rehearsal import Rehearsed
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError

SCHEDULES = "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b"
MICROBATCH_SIZES = 1, 2, 4, 8
RECOMPUTES = "none", "selective", "full"
STAGES, CONTEXT, TOP = 16, 16, 12  # most stages, most ranks of cp, layouts that are ranked for certain, unless told
STATE = "parameters", "masters", "moments", "main gradients", "FP8 weight caches"
ALONE = "weights, gradients and optimizer alone are too large"
Refused = Counter[str]


@dataclass(frozen=True)
class Choice:
    """A candidate: sizes, schedule, what is recomputed, how the optimizer's state is shared."""

    pp: int
    dp: int
    ep: int
    cp: int
    tp: int
    chunks: int | None
    microbatch_size: int
    microbatches: int
    schedule: str
    zero: int
    recompute: str = "none"


@dataclass(frozen=True)
class Limits:
    """What a sweep looks at.

    Attributes:
        gpus: of every layout, all of them.
        memory: bytes that a rank may hold.
        batch: sequences of a step.
        stages, context: most of each.
        node: GPUs that NVLink joins: tensor parallelism stays inside.
        top: layouts that are ranked for certain.
    """

    gpus: int
    memory: float
    batch: int
    schedules: Sequence[str] = SCHEDULES
    stages: int = STAGES
    context: int = CONTEXT
    node: int = 8
    top: int = TOP


@dataclass(frozen=True)
class Swept:
    """What a sweep found: layouts that fit, fastest first, and why the others were left out, by reason."""

    ranked: tuple[tuple[Choice, Forecast], ...]
    refused: Refused

    @property
    def looked_at(self) -> int:
        return len(self.ranked) + sum(self.refused.values())


# ---- candidates --------------------------------------------------------------------------------------------------------


def choices(config: Config, limits: Limits) -> Iterator[tuple[Choice | None, str]]:
    """Every candidate, without recompute; None with a reason for what cannot be."""
    for sizes in _axes(limits.gpus, config):
        pp, dp, ep, cp, tp = sizes
        reason = impossible(config, limits, *sizes)
        if reason is not None:
            yield None, reason
            continue
        samples = dp * ep
        for size, schedule, zero in product(MICROBATCH_SIZES, limits.schedules, (0, 1)):
            if (schedule != limits.schedules[0] and pp == 1) or (zero and dp * cp == 1):
                continue  # one stage has no bubble: all schedules are one; one replica has nobody to share with
            if limits.batch // samples % size:
                yield None, "the batch does not divide by the microbatch size"
                continue
            several = {"interleaved-1f1b": (2, 3), "zb-v": (2,), "dualpipev": (2,)}.get(schedule, (1,))
            for chunks in several:
                if pp * chunks > config.model.num_layers:
                    yield None, "more chunks than decoder layers"
                else:
                    named = chunks if schedule == "interleaved-1f1b" else None
                    yield Choice(pp, dp, ep, cp, tp, named, size, limits.batch // samples // size, schedule, zero), ""


def _axes(gpus: int, config: Config) -> Iterator[tuple[int, int, int, int, int]]:
    """(pp, dp, ep, cp, tp) whose product is the number of GPUs; ep where there are experts."""

    def divisors(number: int) -> list[int]:
        return [size for size in range(1, number + 1) if number % size == 0]

    for tp in divisors(gpus):
        for cp in divisors(gpus // tp):
            for ep in divisors(gpus // tp // cp) if config.model.moe.num_experts is not None else [1]:
                for pp in divisors(gpus // tp // cp // ep):
                    yield pp, gpus // tp // cp // ep // pp, ep, cp, tp


def impossible(config: Config, limits: Limits, pp: int, dp: int, ep: int, cp: int, tp: int) -> str | None:
    """Why no run has this layout, or why the sweep does not look at it."""
    model, experts, fp8 = config.model, config.model.moe.num_experts, config.precision.fp8.recipe != "none"
    sequence, kv = config.data.seq_len, config.model.num_kv_heads
    divisor = 16 if fp8 else 1
    if tp > limits.node:
        return f"tp over more than a node's {limits.node} GPUs: not looked at"
    if cp > limits.context:
        return f"more than {limits.context} ranks of cp: not looked at (--context)"
    if pp > limits.stages:
        return f"more than {limits.stages} stages: not looked at (--stages)"
    if pp > model.num_layers:
        return "more stages than decoder layers"
    if model.num_heads % tp or (kv % tp and tp % kv):
        return "heads do not divide by tp"
    if experts is None and (model.ffn_size % tp or model.ffn_size // tp % divisor):
        return "the MLP's width does not divide by tp"
    if experts is not None and experts % (ep * tp):
        return "experts do not divide by ep x tp"
    if sequence % (2 * cp) and cp > 1:
        return "the sequence does not divide by 2 cp"
    if sequence // cp % (tp * divisor):
        return "the sequence's part does not divide by tp"
    if limits.batch % (dp * ep):
        return "the batch does not divide by the replicas"
    return None


def configured(config: Config, choice: Choice) -> Config:
    """The configuration with a choice's layout; nothing else changes."""
    changed = config.to_dict()
    changed["parallel"] |= {axis: getattr(choice, axis) for axis in ("pp", "dp", "ep", "cp", "tp")}
    changed["data"] |= {"microbatch_size": choice.microbatch_size}
    changed["model"] |= {"recompute": choice.recompute}
    if choice.recompute == "none":
        changed["model"] |= {"recompute_layers": None}
    changed["optim"] |= {"zero": choice.zero}
    changed["pipeline"] |= {"schedule": choice.schedule, "microbatches": choice.microbatches, "chunks": choice.chunks}
    changed["pipeline"] |= {"w_delay": 0, "stage_layers": None, "memory_limit": None}
    return Config.from_dict(changed)


# ---- looking at them ---------------------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """One sweep.

    Args:
        config: whose layouts.
        rehearsals: what a configuration's parts hold, at microbatches of one sequence.
        clock: of a layout; without a rehearsal it gives a lower bound.
    """

    config: Config
    limits: Limits
    device: str
    rehearsals: Callable[[Config], Rehearsed]
    clock: Callable[[Layout, Rehearsed | None], Clock]
    refused: Refused = field(default_factory=Counter)
    _plans: dict[Any, Plan] = field(default_factory=dict)
    _whole: dict[Any, float] = field(default_factory=dict)
    _layouts: dict[Any, Layout] = field(default_factory=dict)
    _rehearsed: dict[Any, Rehearsed] = field(default_factory=dict)
    _moved: float | None = None

    @collector_paused()
    def run(self) -> Swept:
        """Raises UsageError: nothing to look at."""
        bounds: list[tuple[float, int, Choice]] = []
        for choice, reason in choices(self.config, self.limits):
            if choice is None:
                self.refused[reason] += 1
            elif self._least(choice) > self.limits.memory:
                self.refused[ALONE] += 1
            else:
                bounds.append((self._bound(choice), len(bounds), choice))
        if not bounds and not self.refused:
            raise UsageError(f"--gpus {self.limits.gpus}: there is no layout to look at")
        bounds.sort()
        found: list[tuple[Choice, Forecast]] = []
        for bound, _, choice in bounds:
            slowest = float("inf")
            if len(found) >= self.limits.top:
                found.sort(key=_rank)
                slowest = found[self.limits.top - 1][1].seconds or slowest
            if bound >= slowest:
                self.refused[f"slower than the first {self.limits.top} by work and exchanges alone: not looked at"] += 1
                continue
            seen = self._look(choice, slowest)
            if seen is not None:
                found.append(seen)
        return Swept(tuple(sorted(found, key=_rank)), self.refused)

    def _bound(self, choice: Choice) -> float:
        key = choice.dp, choice.ep, choice.cp, choice.tp, choice.microbatch_size
        if key not in self._whole:
            config = configured(self.config, replace(choice, schedule="1f1b", chunks=None, microbatches=1))
            work = self.clock(self._layout(config), None).whole()
            self._whole[key] = work + choice.microbatch_size * self._crossing() / (choice.cp * choice.tp)
        return choice.microbatches * self._whole[key] / choice.pp

    def _least(self, choice: Choice) -> float:
        """Bytes of weights, gradients and optimizer that the fullest rank holds at least: the stages' mean."""
        layout = self._layout(configured(self.config, replace(choice, schedule="1f1b", chunks=None, microbatches=1)))
        every = sum(param.numel for block in layout.blocks for param in block.params if param.tied_to is None)
        cached = sum(block.cached for block in layout.blocks)
        state = (layout.master_size + 2 * layout.moment_size) / (choice.dp * choice.cp if choice.zero else 1)
        return (every * (layout.grad_size + layout.dtype.itemsize + state) + 2 * cached) / choice.pp

    def _crossing(self) -> float:
        """Seconds of what one sequence moves over the memory bus on a rank alone; cut over ranks no less in all."""
        if self._moved is None:
            alone = configured(self.config, Choice(1, 1, 1, 1, 1, None, 1, 1, "1f1b", 0))
            layout = self._layout(alone)
            self._moved = self.clock(layout, self._rehearsal(alone)).whole() - self.clock(layout, None).whole()
        return self._moved

    def _look(self, choice: Choice, slowest: float) -> tuple[Choice, Forecast] | None:
        """The layout with as little recompute as fits, if it is faster than ``slowest`` seconds."""
        for recompute in RECOMPUTES if self.config.model.backend == "native" else RECOMPUTES[:1]:
            with_it = replace(choice, recompute=recompute)
            config = configured(self.config, with_it)
            layout, rehearsed = self._layout(config), self._rehearsal(config)
            plan = self._plan(config, min(2 * choice.pp + 2 * config.pipeline.coalesce_w, choice.microbatches))
            whole = plan if plan.microbatches == choice.microbatches else replace(plan, microbatches=choice.microbatches)
            seen = timed(config, whole, (), self.clock(layout, rehearsed), plan)
            if (seen.seconds or 0.0) >= slowest:
                self.refused[f"slower than the first {self.limits.top}: memory not looked at"] += 1
                return None
            ranks = fullest(Memory(layout, plan, rehearsed, self.device))
            if max(rank.peak for rank in ranks) <= self.limits.memory:
                return with_it, replace(seen, memory=ranks)
            if max(sum(rank.categories[name] for name in STATE) for rank in ranks) > self.limits.memory:
                self.refused[ALONE] += 1
                return None
        self.refused["too large with their activations"] += 1
        return None

    def _layout(self, config: Config) -> Layout:
        """Structures differ by what is cut, and by nothing else."""
        parallel = config.parallel
        key = parallel.ep, parallel.tp
        if key not in self._layouts:
            self._layouts[key] = Layout(config)
        return self._layouts[key].of(config)

    def _rehearsal(self, config: Config) -> Rehearsed:
        """What a microbatch holds is proportional to its sequences, so that one of them is rehearsed."""
        parallel = config.parallel
        key = parallel.ep, parallel.cp, parallel.tp, config.model.recompute
        if key not in self._rehearsed:
            one = config.to_dict()
            one["data"] |= {"microbatch_size": 1}
            self._rehearsed[key] = self.rehearsals(Config.from_dict(one))
        return self._rehearsed[key].times(config.data.microbatch_size)

    def _plan(self, config: Config, microbatches: int) -> Plan:
        pipeline = config.pipeline
        key = pipeline.schedule, config.parallel.pp, pipeline.chunks, microbatches
        if key not in self._plans:
            fewer = config.to_dict()
            fewer["pipeline"] |= {"microbatches": microbatches}
            self._plans[key] = make_plan(Config.from_dict(fewer))
        return self._plans[key]


def _rank(one: tuple[Choice, Forecast]) -> tuple[float, int]:
    return -(one[1].tokens_per_second or 0.0), one[1].peak


def batch_sequences(config: Config, tokens: float | None) -> int:
    """Sequences of a step: of so many tokens, or (None) the configuration's own.

    Raises:
        UsageError: the tokens are no whole number of sequences.
    """
    if tokens is None:
        return batch_of(config)
    sequence = config.data.seq_len
    if tokens < sequence or tokens % sequence:
        raise UsageError(f"--batch-tokens {tokens:,.0f} is no multiple of data.seq_len {sequence:,}: change one of them")
    return int(tokens) // sequence
