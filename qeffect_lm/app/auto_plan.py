"""The plan of a run: named, made by ``auto``, or saved; and that all ranks have the same one.

``auto`` is computed on rank 0 from every rank's profile (or ``pipeline.costs``), broadcast, and saved whole in the checkpoint.
So no timing decides anything but which plan is chosen, once; with window ``step`` not even a bit of the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from checkpoint.comm import Communicator
from pipeline.auto import SHAPES, Auto, placement_of, solve
from pipeline.auto_problem import Problem
from pipeline.batch import StepInput
from pipeline.plan import Plan
from pipeline.schedules import Placement
from pipeline.simulate import simulate
from qeffect_lm.app.assemble import make_plan
from qeffect_lm.app.profile import Part, Profile, in_fp8, message_seconds, profile
from qeffect_lm.config import Config
from qeffect_lm.config_check import memory_limit
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.units import format_bytes

UNIT = Part(0.0, 0.0, 0.0, 0.0, 0.0)
TOLERANCE = 0.015
"""Plans that a profile cannot tell apart: two profiles of one machine differ by more. And memory costs time too: on two H200
plans that were predicted 1.3 % faster with several times the memory ran 4 % slower (docs/schedules.md). Whatever is taken is
predicted to be at least as good as every named schedule within the limit."""


def choose_plan(
    config: Config, mesh: Mesh, comm: Communicator, batch: Callable[[], StepInput], say: Callable[[str], None]
) -> Plan:
    """The configuration's plan; collective over all ranks for ``auto``, which measures on ``batch()`` where it must.

    Raises:
        UsageError: on every rank, a memory limit that no plan keeps.
    """
    if config.pipeline.schedule != "auto":
        return make_plan(config)
    mine: tuple[int, Profile] | None = None
    if needs_profile(config):
        measured, t_comm = profile(config, batch()), message_seconds(config, mesh)
        mine = mesh.coord("pp"), Profile(measured.embedding, measured.layers, measured.head, t_comm)
    gathered = comm.gather(mine)
    answer: tuple[str, list[str]] | QEffectError | None = None
    if gathered is not None:
        try:
            found = decide(config, [one for one in gathered if one is not None])
            answer = found.plan.to_json(), explain(config, found)
        except QEffectError as error:  # told to all ranks, then raised on all
            answer = error
    answer = comm.broadcast(answer)
    if isinstance(answer, QEffectError):
        raise answer
    assert answer is not None
    if comm.rank == 0:
        for line in answer[1]:
            say(line)
    return Plan.from_json(answer[0])


def agree_on_plan(config: Config, plan: Plan, comm: Communicator) -> None:
    """Before step one: all ranks have the same plan, slots and layers per chunk; collective.

    Raises:
        PlanError: on every rank, with the ranks and their hashes.
    """
    layers = config.chunk_layers(plan.placement.num_chunks)
    text = hashlib.sha256(plan.text().encode())
    for slots in plan.slots:
        for resource in (slots.i_slots, slots.w_slots):
            text.update(repr((sorted(resource.index.items()), sorted(resource.count.items()))).encode())
    text.update(repr(layers).encode())
    gathered = comm.gather(text.hexdigest())
    fault: str | None = None
    if gathered is not None and len(set(gathered)) > 1:
        holders: dict[str, list[int]] = {}
        for rank, value in enumerate(gathered):
            holders.setdefault(value, []).append(rank)
        parts = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {value}" for value, ranks in holders.items()]
        fault = (
            f"the ranks have different plans (hash of actions, slots and layers per chunk): {'; '.join(parts)}. Start all "
            "ranks with the same configuration, checkpoint and version of this program"
        )
    fault = comm.broadcast(fault)
    if fault is not None:
        raise PlanError(fault)


# ---- auto ----------------------------------------------------------------------------------------------------------


def needs_profile(config: Config) -> bool:
    """Whether something that ``auto`` needs is neither in the configuration nor has a safe value."""
    costs, limit = config.pipeline.costs, config.pipeline.memory_limit
    in_bytes = limit is not None and (memory_limit(limit) or (0.0, False))[1]
    return costs.t_f is None or (in_bytes and costs.m_b is None)


@dataclass(frozen=True)
class _Chunks:
    """Per chunk of a placement: times and sizes."""

    placement: Placement
    parts: list[Part]

    def of_ranks(self) -> list[Part]:
        """The same, summed up per rank."""
        ranks: list[list[Part]] = [[] for _ in range(self.placement.num_ranks)]
        for chunk, part in enumerate(self.parts):
            ranks[self.placement.ranks[chunk]].append(part)
        return [reduce(_plus, parts) for parts in ranks]


@dataclass(frozen=True)
class Foretold:
    """Instead of profiles: each chunk of a placement and a message, as :mod:`qeffect_lm.app.foretold` predicts them."""

    parts: Callable[[Placement], Sequence[Part]]
    t_comm: float


def decide(config: Config, profiles: Sequence[tuple[int, Profile]], foretold: Foretold | None = None) -> Auto:
    """Run ``auto`` on (pipeline rank, its profile)s; of several replicas the slowest counts. Depends on its arguments alone.

    Args:
        foretold: instead of profiles.

    Raises:
        UsageError: a memory limit that no plan keeps.
    """
    pipeline, pp, m = config.pipeline, config.parallel.pp, config.pipeline.microbatches
    costs = pipeline.costs
    t_comm = max((one.t_comm for _, one in profiles), default=0.0) if costs.t_f is None else costs.t_comm or 0.0
    if foretold is not None and costs.t_comm is None:
        t_comm = foretold.t_comm
    problems: dict[str, Problem] = {}
    fullest: dict[str, float] = {}
    for shape in _shapes(config):
        chunks = _chunks(config, placement_of(shape, pp), profiles, foretold)
        fullest[shape] = max(part.m_b for part in chunks.of_ranks())
        held = _limit(config, fullest[shape], m * sum(part.m_b for part in chunks.parts))
        problems[shape] = Problem(
            chunks.placement,
            m,
            t_f=tuple(part.t_f for part in chunks.parts),
            t_i=tuple(part.t_i for part in chunks.parts),
            t_w=tuple(part.t_w for part in chunks.parts),
            t_comm=t_comm,
            m_b=tuple(part.m_b for part in chunks.parts),
            m_w=tuple(min(part.m_w, part.m_b) for part in chunks.parts),
            limit=(held,) * pp,
            objective="makespan",
        )
    least = min(fullest.values())
    if all(problem.limit[0] < fullest[shape] for shape, problem in problems.items()):
        raise UsageError(
            f"pipeline.memory_limit {pipeline.memory_limit} is below one microbatch, which holds {format_bytes(least)} on the "
            "fullest rank: raise it, or lower data.microbatch_size or data.seq_len"
        )
    return solve(problems, window=config.precision.fp8.window, tolerance=TOLERANCE)


def explain(config: Config, found: Auto, source: str = "measured") -> list[str]:
    """What was measured (or predicted) or given, what was chosen, and how good it is."""
    problem, plan = found.problem, found.plan
    parts = [Part(*numbers) for numbers in zip(problem.t_f, problem.t_i, problem.t_w, problem.m_b, problem.m_w, strict=True)]
    ranks = _Chunks(plan.placement, parts).of_ranks()
    measured = config.pipeline.costs.t_f is None
    scale, unit = (1000.0, " ms") if measured else (1.0, "")
    times = " | ".join(f"{scale * r.t_f:.4g} {scale * r.t_i:.4g} {scale * r.t_w:.4g}" for r in ranks)
    message = f"{scale * problem.t_comm:.4g}{unit}"
    lines = [f"auto: T_F T_I T_W per rank, {source if measured else 'given'}: {times}{unit}; message {message}"]
    if needs_profile(config) or config.pipeline.costs.m_b is not None:
        sizes = " | ".join(f"{format_bytes(r.m_b)}, {format_bytes(r.m_w)}" for r in ranks)
        limit = config.pipeline.memory_limit
        lines.append(f"auto: M_B, M_W per rank: {sizes}; limit {'none' if limit is None else limit}")
    shape = next(name for name in SHAPES if placement_of(name, plan.num_ranks) == plan.placement)
    result = simulate(plan, problem.t_f, problem.t_i, problem.t_w, problem.t_comm)
    lines.append(
        f"auto: chose {found.origin} ({shape}): predicted bubble {result.makespan_bubble:.4f} of the step, "
        f"{result.bubble:.4f} by stage span; at most {100 * found.gap:.2f} % above the lower bound"
    )
    if found.named:
        others = ", ".join(f"{name} {100 * (cost / found.cost - 1):+.2f} %" for name, cost in sorted(found.named.items()))
        lines.append(f"auto: named schedules within the limit take, beside it: {others}")
    return lines


def _shapes(config: Config) -> list[str]:
    """The placements that chunks, stage_layers and the number of layers leave."""
    pipeline, pp = config.pipeline, config.parallel.pp
    possible = []
    for shape in SHAPES if pp > 1 else SHAPES[:1]:
        number = placement_of(shape, pp).num_chunks
        fits = number <= config.model.num_layers if pipeline.stage_layers is None else number == len(pipeline.stage_layers)
        if fits and pipeline.chunks in (None, number // pp):
            possible.append(shape)
    if not possible:
        raise UsageError(
            f"pipeline.schedule=auto has no placement with pipeline.chunks {pipeline.chunks} and pipeline.stage_layers "
            f"{pipeline.stage_layers} on parallel.pp {pp}: leave them null"
        )
    return possible


def _chunks(
    config: Config, placement: Placement, profiles: Sequence[tuple[int, Profile]], foretold: Foretold | None
) -> _Chunks:
    """Each chunk's times and sizes, from its rank's profile, foretold, or from the configuration (shared evenly by a rank's
    chunks)."""
    share = placement.num_chunks // placement.num_ranks
    counts = config.chunk_layers(placement.num_chunks)
    kinds = in_fp8(config)
    parts = []
    predicted = [] if foretold is None else foretold.parts(placement)
    for chunk, rank in enumerate(placement.ranks):
        first = sum(counts[:chunk])
        layers = kinds[first : first + counts[chunk]]
        candidates = [_measured_chunk(one, chunk, placement, layers) for at, one in profiles if at == rank]
        measured = predicted[chunk] if predicted else reduce(_slower, candidates) if candidates else UNIT
        parts.append(_given(config, rank, share, measured))
    return _Chunks(placement, parts)


def _measured_chunk(one: Profile, chunk: int, placement: Placement, layers: Sequence[bool]) -> Part:
    parts = [one.layers[fp8] for fp8 in layers]
    parts += [one.embedding] * (chunk == 0) + [one.head] * (chunk == placement.num_chunks - 1)
    return reduce(_plus, parts, UNIT)


def _given(config: Config, rank: int, share: int, measured: Part) -> Part:
    """``measured`` with what the configuration gives in its place."""
    costs = config.pipeline.costs

    def one(values: tuple[float, ...] | None, otherwise: float) -> float:
        return otherwise if values is None else values[rank if len(values) > 1 else 0] / share

    m_b = one(costs.m_b, measured.m_b or 1 / share)  # without a profile: the same on all ranks
    m_w = one(costs.m_w, m_b if costs.m_b is not None or not measured.m_b else min(measured.m_w, m_b))
    return Part(one(costs.t_f, measured.t_f), one(costs.t_i, measured.t_i), one(costs.t_w, measured.t_w), m_b, m_w)


def _limit(config: Config, fullest: float, everything: float) -> float:
    """What a rank may hold, in the unit of M_B."""
    text = config.pipeline.memory_limit
    if text is None:
        return 2 * everything
    number, in_bytes = memory_limit(text) or (0.0, False)
    return number if in_bytes else number * fullest


def _plus(a: Part, b: Part) -> Part:
    return Part(a.t_f + b.t_f, a.t_i + b.t_i, a.t_w + b.t_w, a.m_b + b.m_b, a.m_w + b.m_w)


def _slower(a: Part, b: Part) -> Part:
    return Part(max(a.t_f, b.t_f), max(a.t_i, b.t_i), max(a.t_w, b.t_w), max(a.m_b, b.m_b), max(a.m_w, b.m_w))
