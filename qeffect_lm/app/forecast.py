"""What a configuration will be like: memory, time and money of its layout.

Between work and exchanges a step's time goes so: F, I and W with the exchanges inside of them, and messages between stages, by
the schedule's simulation; gradients of a chunk, reduced on a stream of their own from the chunk's last W on, as far as they
outlast the pipeline; the optimizer; with ZeRO the new parameters' way to all replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.actions import Kind
from pipeline.plan import Plan
from pipeline.simulate import Simulation, simulate
from pipeline.tied import TIED
from qeffect_lm.app.clock import GRADIENTS, PARAMETERS, PP, Clock, Cost, Times
from qeffect_lm.app.counts import flop_per_token
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.memory import Memory, RankMemory
from qeffect_lm.app.rehearsal import Rehearsed
from qeffect_lm.config import Config

DAY = 86400.0


@dataclass(frozen=True)
class Forecast:
    """One layout.

    Attributes:
        memory: of every pipeline rank.
        times: (F, I, W) of every chunk in seconds; None without ceilings and without a profile.
        message: seconds of a message between stages.
        end: seconds after the pipeline.
        exposed: kind of exchange → seconds of the step in which the busiest rank (or, of a step's end, the last) does nothing
            else.
        hidden: seconds of reductions that nobody waits for.
        seconds: of a step: pipeline, then what follows it; None likewise.
    """

    config: Config
    plan: Plan
    memory: tuple[RankMemory, ...]
    times: tuple[tuple[float, float, float], ...] | None
    simulation: Simulation | None
    message: float = 0.0
    end: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0

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
        return Forecast(layout.config, plan, ranks, None, None)
    return timed(layout.config, plan, ranks, clock, plan)


def timed(config: Config, plan: Plan, ranks: tuple[RankMemory, ...], clock: Clock, shorter: Plan) -> Forecast:
    """``shorter`` may have fewer microbatches than the plan: once the pipeline is full each more adds the work of one."""
    costs = [clock.cost(plan, index) for index in range(plan.placement.num_chunks)]
    times, message = tuple(cost.times for cost in costs), clock.message()
    simulation = _simulated(plan, shorter, times, message)
    hurried = _simulated(plan, shorter, times, 0.0) if message and plan.num_ranks > 1 else simulation
    reduced, total = _reduced(shorter, simulation, clock)
    reduced += simulation.makespan - max(ends[-1] for ends in simulation.end)  # what the shorter plan left out
    update = max(clock.update(plan, rank) for rank in range(plan.num_ranks))
    sent = max(clock.parameters(plan, rank) for rank in range(plan.num_ranks))
    late = max(0.0, reduced - simulation.makespan)
    busiest = max(range(plan.num_ranks), key=lambda rank: simulation.busy[rank])
    inside = sum((costs[chunk] for chunk in plan.placement.chunks(busiest)), Cost()).exchanges
    exposed = {kind: plan.microbatches * seconds for kind, seconds in inside.items()}
    exposed |= {PP: simulation.makespan - hurried.makespan, GRADIENTS: late, PARAMETERS: sent}
    exposed = {kind: seconds for kind, seconds in exposed.items() if seconds > 0}
    return Forecast(config, plan, ranks, times, simulation, message, late + update + sent, exposed, max(0.0, total - late))


def _simulated(plan: Plan, shorter: Plan, times: tuple[Times, ...], message: float) -> Simulation:
    f, i, w = (list(column) for column in zip(*times, strict=True))
    simulation = simulate(shorter, f, i, w, message)
    if shorter is plan:
        return simulation
    most = max(sum(sum(times[chunk]) for chunk in plan.placement.chunks(rank)) for rank in range(plan.num_ranks))
    makespan = simulation.makespan + (plan.microbatches - shorter.microbatches) * most
    return replace(simulation, makespan=makespan, makespan_bubble=1 - plan.microbatches * most / makespan)


def _reduced(plan: Plan, simulation: Simulation, clock: Clock) -> tuple[float, float]:
    """When the last rank has reduced its gradients, and how long the one that takes longest reduces: a chunk's from its last W
    on, one after the other, of tied weights at the end."""
    latest = longest = 0.0
    for rank, (actions, ends) in enumerate(zip(plan.actions, simulation.end, strict=True)):
        last = {action.key[0]: end for action, end in zip(actions, ends, strict=True) if action.kind is Kind.W}
        now = total = 0.0
        groups = clock.layout.held(plan, rank).groups
        for chunk, ready in [*sorted(last.items(), key=lambda one: one[1]), (TIED, simulation.makespan)]:
            if chunk in groups:
                takes = clock.reduction(*groups[chunk])
                now, total = max(now, ready) + takes, total + takes
        latest, longest = max(latest, now), max(longest, total)
    return latest, longest


def fullest(memory: Memory) -> tuple[RankMemory, ...]:
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
