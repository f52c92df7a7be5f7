"""What a run notes of itself beside its metrics, for people who watch it and for reports afterwards (docs/logging.md).

Nothing here is part of a step: histories are looked at between steps (:mod:`qeffect_lm.runtime.scale_watch`), times are those
that the meter took anyway, and what ranks tell each other goes in one message at a logged step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.comm import Communicator
from pipeline.actions import Kind
from pipeline.batch import StepInput
from pipeline.calibrate import sample_underflow
from pipeline.measure import StepWatch
from pipeline.plan import Plan
from pipeline.simulate import Simulation, simulate
from pipeline.timeline_picture import svg
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.app.counts import active_parameters, flop_per_token
from qeffect_lm.config import Config
from qeffect_lm.fp8.recipes import FORMATS, DelayedScaling
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.alarms import Alarms
from qeffect_lm.runtime.events import EventLog
from qeffect_lm.runtime.metrics import StepMetrics, Value
from qeffect_lm.runtime.peaks import peak_flops
from qeffect_lm.runtime.provenance import device_name, git_state, memory_bytes, versions
from qeffect_lm.runtime.scale_watch import ScaleWatch, Windows
from qeffect_lm.runtime.step_lines import StepLines, write_atomically

SCALES, TIMELINES, PLANS = "scales.jsonl", "timelines.jsonl", "plans"


class Watcher:
    """One rank's part; the leading rank writes files and warns.

    ``observe`` and ``publish`` are called on all ranks at the same steps, the others on the leading one.
    """

    def __init__(
        self, config: Config, assembly: Assembly, mesh: Mesh, comm: Communicator, start: int, resumed: bool, leads: bool
    ) -> None:
        self._config, self._assembly, self._mesh, self._comm = config, assembly, mesh, comm
        self._settings, self._last = config.logging, start
        self._total = sum(math.prod(spec.shape) for spec in assembly.model.parameters())
        self._flop = flop_per_token(config, assembly.model.parameters())
        self._device = assembly.flat.device
        fp8 = config.precision.fp8.recipe != "none"
        self.peak = peak_flops(device_name(self._device), fp8) if self._device.type == "cuda" else None
        self.format = "FP8" if fp8 else "BF16"
        every, window = self._settings.watch_every, assembly.timeline.window
        commits = assembly.plan.microbatches if window == "microbatch" else 1
        self._scales = ScaleWatch(assembly.timeline) if every and config.precision.fp8.recipe == "delayed" else None
        self._whole = self._scales is not None and self._scales.reaches(every, commits)
        self._looks: list[Callable[[], Windows]] = []  # that nobody was told of yet
        self._observed, self._skipped = False, 0
        self._timeline: int | None = None  # the last step whose timeline was written
        self._stages = [mesh_stage(mesh, rank) for rank in range(mesh.world)]
        self.events = EventLog(config.run.dir)
        self.alarms = Alarms(self._settings, self._warn)
        self.say: Callable[[str], object] = lambda _: None
        self._unwritten: Windows | None = None
        self._underflow: dict[str, tuple[int, int]] | None = None  # this rank's, that nobody was told of yet
        self._shares: dict[str, float] = {}  # all roles', for the next line of scales
        self._files: dict[str, StepLines] = {}
        if leads:
            resume_step = start if resumed else None
            folder = Path(config.run.dir)
            self._files = {name: StepLines(folder / name, resume_step, name.split(".")[0]) for name in (SCALES, TIMELINES)}
        self._roles_told = False

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    # ---- all ranks ---------------------------------------------------------------------------------------------------

    def observe(self, step: int, skipped: bool) -> None:
        """Step ``step`` (from 1) is done or was skipped. At some of them a look at the histories: one copy to the host."""
        every = self._settings.watch_every
        if not every:
            return
        self._skipped += skipped
        if step % every == 0:
            self._observed = True
            if self._scales is not None:
                self._looks.append(self._scales.look(self._skipped))
            self._skipped = 0
        elif self._scales is not None and not self._whole and (step + 1) % every == 0:
            self._scales.restart()  # histories are too short to tell of more than one step
            self._skipped = 0

    def sample(self, step: int, batch: StepInput) -> None:
        """At some steps: how much of each FP8 tensor becomes zero, on the step's first microbatch; collective then."""
        every = self._settings.underflow_every
        if every and step % every == 0 and self._config.precision.fp8.recipe == "delayed":
            self._underflow = sample_underflow(self._assembly.engine, batch, recipe_of(self._assembly))

    def publish(self, step: int, watch: StepWatch | None, t_comm: float, data_wait_ms: float) -> dict[str, Value]:
        """Further metrics of the logged step ``step``; collective where something is due, which all ranks know alike.

        Args:
            watch: what the meter saw of the step; None where nothing was measured.
        """
        times = watch is not None and bool(watch.marks) and self._due(self._settings.timeline_every, self._timeline, step)
        if not (self._observed or times or self._underflow is not None):
            return {}
        mine: dict[str, Any] = {"wait": data_wait_ms}
        if watch is not None and watch.marks:
            mine["busy"] = 1000 * watch.busy()
        # Replicas have the same scales. Peers have too, but for experts': of what several tell, the first one's counts. What
        # becomes zero is counted of each one's pieces and tokens.
        first = self._mesh.coord("replicas") == 0
        if first and self._looks:
            mine["windows"] = reduce(Windows.merge, (look() for look in self._looks))
        if first and self._underflow:
            mine["underflow"] = self._underflow
        if first and self._mesh.coord("experts") == 0 and times and watch is not None:
            mine["work"] = watch.work()
        observed, self._observed, self._looks, self._underflow = self._observed, False, [], None
        if times:
            self._timeline = step
        gathered = self._comm.gather(mine)
        if gathered is None:
            return {}
        if times:
            self._write_timeline(step, [rank["work"] for rank in gathered if "work" in rank], t_comm)
        shares = shares_of([rank["underflow"] for rank in gathered if "underflow" in rank])
        told = self._judge_underflow(step, shares) if shares else {}
        if not observed:
            return told
        told["work_ms"] = [round(rank["wait"] + rank.get("busy", 0.0), 3) for rank in gathered]
        parts = [rank["windows"] for rank in gathered if "windows" in rank]
        return told | (self._judge(step, reduce(Windows.join, parts).sorted()) if parts else {})

    # ---- the leading rank --------------------------------------------------------------------------------------------

    def complete(self, metrics: StepMetrics) -> StepMetrics:
        """With what follows from a step's figures: memory, model FLOP utilisation; warns, and notes what happened."""
        extra: dict[str, Value] = {**metrics.extra, "memory_bytes": memory_bytes(self._device)}
        if self.peak is not None and metrics.tokens_per_second is not None:
            extra["mfu"] = self._flop * metrics.tokens_per_second / (self.peak * self._mesh.world)
        if "bubble" not in extra and self._mesh.size("pp") > 1:
            extra["bubble_plan"] = self.bubble_plan
        if metrics.skipped:
            told = {"reason": extra.get("skip_reason"), "loss": metrics.loss, "grad_norm": metrics.grad_norm}
            self.events.add("skip", metrics.step, **told)
        if metrics.eval_loss is not None:
            self.events.add("evaluation", metrics.step, loss=metrics.eval_loss)
        self.alarms.spike(metrics)
        work = extra.get("work_ms")
        if isinstance(work, list) and metrics.step_ms is not None:
            self.alarms.stragglers(metrics.step, metrics.step_ms, [float(ms) for ms in work], self._stages)
        return replace(metrics, extra=extra)

    @cached_property
    def bubble_plan(self) -> float:
        """The plan's bubble where every F, I and W of a layer takes the same time and messages take none."""
        return self._simulated().bubble

    def _simulated(self) -> Simulation:
        plan = self._assembly.plan
        layers = [float(max(1, n)) for n in self._config.chunk_layers(plan.placement.num_chunks)]
        return simulate(plan, layers, layers, layers)

    def facts(self) -> dict[str, Any]:
        """What runs: layout, device, sizes, versions and sources. None where something does not apply."""
        config, plan, specs = self._config, self._assembly.plan, self._assembly.model.parameters()
        data = config.data
        return {
            "steps": config.train.steps,
            "layout": dict(self._mesh.sizes),
            "schedule": plan.schedule,
            "device": device_name(self._device),
            "parameters": self._total,
            "active_parameters": active_parameters(specs),
            "tokens_per_step": data.seq_len * data.microbatch_size * plan.microbatches * config.parallel.samples,
            "flop_per_token": self._flop,
            "peak_flops": self.peak,
            "peak_format": None if self.peak is None else self.format,
            "bubble_plan": self.bubble_plan,
            "versions": versions(),
            "git": git_state(),
        }

    def write_plan(self) -> tuple[str, str]:
        """The plan's own document and its picture, under its fingerprint: a run that goes on in another layout has several.

        Returns the document's name in the run's folder, and the picture (SVG).
        """
        plan = self._assembly.plan
        name = f"{PLANS}/{plan.fingerprint()[:12]}"
        path = Path(self._config.run.dir) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = svg(plan, self._simulated(), f"{self._config.run.name}: {plan.schedule}")
        write_atomically(path, plan.to_json().encode())
        write_atomically(path.with_suffix(".svg"), picture.encode())
        return f"{name}.json", picture

    def _write_timeline(self, step: int, work: list[list[float]], t_comm: float) -> None:
        plan = self._assembly.plan
        self._files[TIMELINES].append_record(
            step,
            plan=plan.fingerprint()[:12],
            message_ms=round(1000 * t_comm, 4),
            offsets_ms=[round(one, 4) for one in offsets(plan, work, 1000 * t_comm)],
            work_ms=[[round(one, 4) for one in row] for row in work],
        )

    def _judge_underflow(self, step: int, shares: dict[str, float]) -> dict[str, Value]:
        """The mean over the tensors of each kind."""
        self.alarms.underflow(step, shares)
        self._shares = shares
        told: dict[str, Value] = {}
        for kind in FORMATS:
            of_kind = [share for role, share in shares.items() if role.endswith(f".{kind}")]
            if of_kind:
                told[f"underflow_{kind}"] = sum(of_kind) / len(of_kind)
        return told

    def _judge(self, step: int, windows: Windows) -> dict[str, Value]:
        self.alarms.scales(step, windows)
        self._unwritten = windows if self._unwritten is None else self._unwritten.merge(windows)
        every = self._settings.scales_every
        if every and step // every > self._last // every:
            self._last = step
            self._write_scales(step, self._unwritten)
            self._unwritten = None
        room, seen = windows.room, int(windows.seen.sum())
        told: dict[str, Value] = {}
        if seen:
            told |= {"saturation": int(windows.saturated.sum()) / seen, "saturation_excess": float(windows.excess.max())}
        if windows.jump.max(initial=0.0) > 0:
            told["amax_jump"] = float(windows.jump.max())
        if np.isfinite(room).any():
            told["room_bits_max"] = float(np.nanmax(room))
        return told

    def _write_scales(self, step: int, windows: Windows) -> None:
        roles = {} if self._roles_told else {"roles": windows.names, "fp8_max": windows.fp8_max.tolist()}
        self._roles_told = True
        self._files[SCALES].append_record(
            step,
            **roles,
            amax=[_short(value) for value in windows.amax],
            scale=[_short(value) for value in windows.scale],
            windows=windows.seen.tolist(),
            saturated=windows.saturated.tolist(),
            excess=[_short(value) for value in windows.excess],
            **({"underflow": [_short(self._shares.get(role, math.nan)) for role in windows.names]} if self._shares else {}),
        )
        self._shares = {}

    def _warn(self, kind: str, step: int, text: str, values: dict[str, Any]) -> None:
        self.events.add("warning", step, kind=kind, text=text, **values)
        self.say(f"WARNING: step {step}: {text}")

    @staticmethod
    def _due(every: int, last: int | None, step: int) -> bool:
        return bool(every) and (last is None or step // every > last // every)


def recipe_of(assembly: Assembly) -> DelayedScaling:
    """The recipe that the rank's layers share; one of its own for a rank without FP8 layers."""
    for stage in assembly.engine.stages.values():
        for module in stage.chunk.modules():
            recipe = getattr(module, "recipe", None)
            if isinstance(recipe, DelayedScaling):
                return recipe
    return DelayedScaling()


def mesh_stage(mesh: Mesh, rank: int) -> int:
    """The pipeline stage of a rank."""
    return Mesh(mesh.sizes, rank).coord("pp")


def _short(value: float) -> float | None:
    """Five digits; None for what is not finite."""
    return float(f"{float(value):.5g}") if math.isfinite(value) else None


def offsets(plan: Plan, work: Sequence[Sequence[float]], message: float) -> list[float]:
    """When each rank's clock begins (its first F), in the unit of ``work``, on a common one.

    Clocks of machines do not agree, so a rank's first F is taken to begin when its input, the end of the F before it, has
    arrived: ``message`` after that end.
    """
    ends = []
    for row, times in zip(plan.actions, work, strict=True):
        compute = [action for action in row if action.is_compute]
        ends.append({action.key: times[2 * i + 1] for i, action in enumerate(compute) if action.kind is Kind.F})
    known: dict[int, float] = {}

    def begin(rank: int) -> float:
        if rank not in known:
            first = next(action for action in plan.actions[rank] if action.kind is Kind.F)
            chunk, microbatch = first.key
            source = plan.placement.source(chunk, "F")
            if source is None:
                known[rank] = 0.0
            else:
                other = plan.placement.ranks[source]
                known[rank] = begin(other) + ends[other][source, microbatch] + message
        return known[rank]

    return [begin(rank) for rank in range(plan.num_ranks)]


def shares_of(counts: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, float]:
    """Of all ranks' counts (:func:`~pipeline.calibrate.sample_underflow`) each role's share of non-zero values that becomes
    zero; 0 where all are zero."""
    lost, nonzero = Counter[str](), Counter[str]()
    for rank in counts:
        for role, (some, every) in rank.items():
            lost[role] += some
            nonzero[role] += every
    return {role: lost[role] / max(every, 1) for role, every in nonzero.items()}
