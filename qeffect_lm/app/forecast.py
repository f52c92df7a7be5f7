"""What a configuration will be like: memory, time and money of its layout, and of other layouts beside it.

:func:`forecast` looks at one layout; :func:`sweep` at many, which it makes from one configuration for a number of GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from pipeline.actions import collector_paused
from pipeline.plan import Plan
from pipeline.simulate import Simulation, simulate
from qeffect_lm.app.assemble import make_plan
from qeffect_lm.app.ceilings import Clock
from qeffect_lm.app.counts import flop_per_token
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import Memory, RankMemory
from qeffect_lm.app.rehearsal import Rehearsed
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError

SWEPT = "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b"
MICROBATCH_SIZES = 1, 2, 4, 8
RECOMPUTES = "none", "selective", "full"
STAGES = 16  # most that a sweep looks at unless told
DAY = 86400.0


@dataclass(frozen=True)
class Forecast:
    """One layout.

    Attributes:
        memory: of every pipeline rank.
        times: (F, I, W) of every chunk in seconds; None without ceilings and without a profile.
        seconds: of a step: pipeline, then what follows it; None likewise.
    """

    config: Config
    plan: Plan
    memory: tuple[RankMemory, ...]
    times: tuple[tuple[float, float, float], ...] | None
    simulation: Simulation | None
    message: float
    end: float

    @property
    def gpus(self) -> int:
        return self.config.parallel.world

    @property
    def tokens(self) -> int:
        """Of a step."""
        return batch_of(self.config) * self.config.data.seq_len

    @property
    def peak(self) -> int:
        """Bytes of the fullest rank."""
        return max(rank.peak for rank in self.memory)

    @property
    def seconds(self) -> float | None:
        return None if self.simulation is None else self.simulation.makespan + self.end

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.seconds is None else self.tokens / self.seconds

    def budget(self, tokens: float, price: float | None) -> dict[str, float]:
        """Days, GPU-hours and (with a price of a GPU's hour) cost of training on so many tokens."""
        assert self.tokens_per_second is not None
        seconds = tokens / self.tokens_per_second
        hours = seconds * self.gpus / 3600
        cost = {} if price is None else {"cost": hours * price}
        return {"tokens": tokens, "days": seconds / DAY, "gpu_hours": hours, **cost}

    def flops(self, layout: Layout) -> float | None:
        """Model FLOP/s of a GPU."""
        rate = self.tokens_per_second
        return None if rate is None else rate * flop_per_token(self.config, layout.specs.values()) / self.gpus


def batch_of(config: Config) -> int:
    """Sequences of a step, over all replicas."""
    return config.pipeline.microbatches * config.data.microbatch_size * config.parallel.samples


def uneven(config: Config, chunks: int) -> str | None:
    """Which chunks have a layer more, where the number of layers does not divide."""
    layers = config.model.num_layers
    if config.pipeline.stage_layers is not None or layers % chunks == 0:
        return None
    counts = config.chunk_layers(chunks)
    more = [i for i, count in enumerate(counts) if count == max(counts)]
    rest = layers % chunks
    names = ", ".join(map(str, range(layers - rest, layers)))
    return (
        f"{layers} layers do not divide by {chunks} chunks: {rest} left over (as many as layers {names}); "
        f"chunks {', '.join(map(str, more))} hold {max(counts)}, the others {min(counts)}"
    )


def forecast(layout: Layout, plan: Plan, rehearsed: Rehearsed, device: str, clock: Clock | None) -> Forecast:
    """Look at one layout: all of its ranks."""
    memory = Memory(layout, plan, rehearsed, device)
    ranks = tuple(memory.of(rank) for rank in range(plan.num_ranks))
    if clock is None:
        return Forecast(layout.config, plan, ranks, None, None, 0.0, 0.0)
    return _timed(layout.config, plan, ranks, clock, plan)


def _timed(config: Config, plan: Plan, ranks: tuple[RankMemory, ...], clock: Clock, timed: Plan) -> Forecast:
    """``timed`` may have fewer microbatches than the plan: once the pipeline is full each more adds the work of one."""
    times = tuple(clock.chunk(plan, index) for index in range(plan.placement.num_chunks))
    message = clock.message()
    f, i, w = (list(column) for column in zip(*times, strict=True))
    simulation = simulate(timed, f, i, w, message)
    if timed is not plan:
        share = [sum(sum(times[chunk]) for chunk in plan.placement.chunks(rank)) for rank in range(plan.num_ranks)]
        makespan = simulation.makespan + (plan.microbatches - timed.microbatches) * max(share)
        work = plan.microbatches * max(share)
        simulation = replace(simulation, makespan=makespan, makespan_bubble=1 - work / makespan)
    end = max(clock.end(plan, rank) for rank in range(plan.num_ranks))
    return Forecast(config, plan, ranks, times, simulation, message, end)


def _fullest(memory: Memory) -> tuple[RankMemory, ...]:
    """Of the ranks that hold the same kinds of blocks the one with the most slots: some other cannot need more."""
    plan, kinds = memory.plan, memory.kinds
    most: dict[Any, tuple[int, int]] = {}
    for rank, slots in enumerate(plan.slots):
        blocks = memory.layout.rank(plan, rank)
        held = Counter("first" if b.first else "last" if b.layer is None else kinds[b.layer] for b in blocks)
        key = frozenset(held.items())
        count = sum(slots.i_slots.count.values()) + sum(slots.w_slots.count.values())
        most[key] = max(most.get(key, (-1, 0)), (count, -rank))
    return tuple(memory.of(-rank) for _, rank in most.values())


# ---- many layouts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A candidate: sizes, schedule and what is recomputed."""

    pp: int
    dp: int
    chunks: int | None
    microbatch_size: int
    microbatches: int
    schedule: str
    recompute: str

    def label(self) -> str:
        chunks = "" if self.chunks is None else f" x{self.chunks}"
        return (
            f"pp {self.pp}, dp {self.dp}, {self.schedule}{chunks}, {self.microbatches} microbatches of "
            f"{self.microbatch_size}, recompute {self.recompute}"
        )


@dataclass(frozen=True)
class Swept:
    """What a sweep found: layouts that fit, fastest first, and why the others were left out, by reason."""

    ranked: tuple[tuple[Choice, Forecast], ...]
    refused: Counter[str]

    @property
    def looked_at(self) -> int:
        return len(self.ranked) + sum(self.refused.values())


def choices(
    config: Config, gpus: int, schedules: Sequence[str] = SWEPT, stages: int = STAGES
) -> Iterator[tuple[Choice | None, str]]:
    """Every candidate of a sweep with the configuration's batch; None with a reason for what cannot be."""
    batch, layers = batch_of(config), config.model.num_layers
    kept = {axis: size for axis, size in config.parallel.sizes.items() if axis not in ("pp", "dp") and size > 1}
    share = prod(kept.values())
    if gpus % share:
        raise UsageError(f"--gpus {gpus} does not divide by parallel.{' x '.join(f'{a} {n}' for a, n in kept.items())}")
    for pp in (size for size in range(1, gpus // share + 1) if gpus // share % size == 0):
        dp = gpus // share // pp
        replicas = dp * config.parallel.ep
        if pp > layers:
            yield None, "more stages than decoder layers"
            continue
        if pp > stages:
            yield None, f"more than {stages} stages (--stages)"
            continue
        if batch % replicas:
            yield None, "the batch does not divide by the replicas"
            continue
        for size, schedule, recompute in product(MICROBATCH_SIZES, schedules, RECOMPUTES):
            if schedule != schedules[0] and pp == 1:
                continue  # one stage has no bubble: all schedules are one
            if recompute != "none" and config.model.backend == "te":
                yield None, "Transformer Engine does not recompute"
                continue
            if batch // replicas % size:
                yield None, "the batch does not divide by the microbatch size"
                continue
            several = {"interleaved-1f1b": (2, 3), "zb-v": (2,), "dualpipev": (2,)}.get(schedule, (1,))
            for chunks in several:
                if pp * chunks > layers:
                    yield None, "more chunks than decoder layers"
                else:
                    named = chunks if schedule == "interleaved-1f1b" else None
                    yield Choice(pp, dp, named, size, batch // replicas // size, schedule, recompute), ""


def configured(config: Config, choice: Choice) -> Config:
    """The configuration with a choice's layout; nothing else changes."""
    changed = config.to_dict()
    changed["parallel"] |= {"pp": choice.pp, "dp": choice.dp}
    changed["data"] |= {"microbatch_size": choice.microbatch_size}
    changed["model"] |= {"recompute": choice.recompute}
    if choice.recompute == "none":
        changed["model"] |= {"recompute_layers": None}
    changed["pipeline"] |= {"schedule": choice.schedule, "microbatches": choice.microbatches, "chunks": choice.chunks}
    changed["pipeline"] |= {"w_delay": 0, "stage_layers": None, "memory_limit": None}
    return Config.from_dict(changed)


@collector_paused()
def sweep(
    layout: Layout,
    gpus: int,
    limit: float,
    device: str,
    rehearsals: Callable[[Config], Rehearsed],
    clock: Callable[[Layout, Rehearsed], Clock],
    schedules: Sequence[str] = SWEPT,
    stages: int = STAGES,
) -> Swept:
    """Look at every layout of ``gpus`` GPUs that keeps the batch, and rank by tokens/s those whose ranks keep ``limit`` bytes.

    Raises:
        UsageError: nothing to look at.
    """
    plans: dict[Any, Plan] = {}

    def planned(settings: Config, microbatches: int) -> Plan:
        pipeline = settings.pipeline
        key = pipeline.schedule, settings.parallel.pp, pipeline.chunks, microbatches
        if key not in plans:
            fewer = settings.to_dict()
            fewer["pipeline"] |= {"microbatches": microbatches}
            plans[key] = make_plan(Config.from_dict(fewer))
        return plans[key]

    found: list[tuple[Choice, Forecast]] = []
    fitting: set[Any] = set()
    refused: Counter[str] = Counter()
    for choice, reason in choices(layout.config, gpus, schedules, stages):
        if choice is None:
            refused[reason] += 1
            continue
        same = replace(choice, recompute="")
        if same in fitting:
            refused["recompute that is not needed"] += 1
            continue
        settings = configured(layout.config, choice)
        of, rehearsed = layout.of(settings), rehearsals(settings)
        enough = 2 * choice.pp + 2 * settings.pipeline.coalesce_w
        plan = planned(settings, min(enough, choice.microbatches))
        ranks = _fullest(Memory(of, plan, rehearsed, device))
        if max(rank.peak for rank in ranks) > limit:
            refused[_too_large(ranks, limit)] += 1
            continue
        fitting.add(same)
        whole = plan if plan.microbatches == choice.microbatches else replace(plan, microbatches=choice.microbatches)
        found.append((choice, _timed(settings, whole, ranks, clock(of, rehearsed), plan)))
    if not found and not refused:
        raise UsageError(f"--gpus {gpus}: there is no layout to look at")
    found.sort(key=lambda one: (-(one[1].tokens_per_second or 0.0), one[1].peak))
    return Swept(tuple(found), refused)


def _too_large(ranks: Sequence[RankMemory], limit: float) -> str:
    """What of a layout does not fit: the state alone, or with its microbatches."""
    state = "parameters", "masters", "moments", "main gradients", "FP8 weight caches"
    alone = max(sum(rank.categories[name] for name in state) for rank in ranks)
    return "weights, gradients and optimizer alone are too large" if alone > limit else "too large with their activations"
