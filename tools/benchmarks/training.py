"""Whole training steps on GPUs: milliseconds, tokens/s, memory, and the bubble measured against the plan's.

One process a GPU. The engine and everything around it is the one that trains; only tokens and weights are made up. A step is
timed from one host synchronisation to the next, optimizer included: the median on the slowest rank. ``stream`` is the mean of
steps that follow each other without a host wait.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint import GroupCommunicator, SingleProcess
from pipeline.engine import Engine
from pipeline.measure import Meter
from qeffect_lm.app.assemble import Assembly, assemble, mesh_of
from qeffect_lm.app.auto_plan import choose_plan
from qeffect_lm.app.counts import flop_per_token
from qeffect_lm.config import Config, load_config
from qeffect_lm.data.loader import StepBatch
from qeffect_lm.errors import UsageError
from tools.benchmarks.weights import drawn_on_device

WARM_UP = 6


@dataclass(frozen=True)
class Case:
    """One row: a preset with a schedule and a number of microbatches."""

    size: str
    schedule: str
    microbatches: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([self.size, self.schedule, f"m={self.microbatches}", *self.overrides])

    def config(self, presets: Path, world: int, *more: str) -> Config:
        """On ``world`` ranks: as many stages as the axes of ``overrides`` leave.

        Raises:
            UsageError: these do not divide the ranks.
        """
        given = [
            f"pipeline.schedule={self.schedule}",
            f"pipeline.microbatches={self.microbatches}",
            *self.overrides,
            *more,
        ]
        preset = presets / f"bench-{self.size.lower()}.yaml"
        axes = [override for override in self.overrides if override.startswith("parallel.")]
        sizes = load_config(preset, ["parallel.pp=1", *axes]).parallel.sizes
        others = math.prod(sizes.values()) // sizes["pp"]
        if world % others:
            raise UsageError(f"{world} ranks do not divide by {' x '.join(axes)}: start a multiple of {others}")
        return load_config(preset, [f"parallel.pp={world // others}", *given])


def batches(config: Config, replica: int = 0) -> Iterator[StepBatch]:
    """Random tokens of a replica, other ones each step."""
    shape = (config.pipeline.microbatches, config.data.microbatch_size, config.data.seq_len)
    generator = torch.Generator().manual_seed(config.run.seed + 1000 * replica)
    ids = torch.arange(shape[0] * shape[1]).view(shape[:2])
    while True:
        tokens = torch.randint(0, config.model.vocab_size, (*shape[:2], shape[2] + 1), generator=generator)
        mask = torch.ones(shape)
        valid = config.parallel.samples * int(mask.sum())
        yield StepBatch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), mask, ids, valid)


def measure(case: Case, presets: Path, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one case on all ranks of the process group; every rank returns the same figures."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = case.config(presets, world)
    comm = GroupCommunicator() if world > 1 else SingleProcess()
    mesh = mesh_of(config, dist.get_rank() if world > 1 else 0)
    mesh.create_groups()
    data = batches(config, mesh.coord("samples"))
    inputs = [next(data) for _ in range(4)]
    torch.cuda.reset_peak_memory_stats()
    peaks: dict[str, float] = {}
    with drawn_on_device():
        assembly = assemble(config, mesh, choose_plan(config, mesh, comm, lambda: inputs[0], say))
    peaks["assemble"] = _peak_gib()
    began = time.perf_counter()
    assembly.prepare(inputs[0])
    torch.cuda.synchronize()
    prepare_s = time.perf_counter() - began
    peaks["calibrate and capture"] = _peak_gib()
    figures = timed(assembly.engine, inputs, steps, world)
    peaks["steps"] = _peak_gib()
    captured = assembly.engine.captured
    mine = {
        "prepare_s": prepare_s,
        "graphs": 0 if captured is None else len(captured.graphs()),
        "pool_gib": 0.0 if captured is None else captured.bytes() / 2**30,
        **figures,
        "peak_gib": peaks,
        "alloc_gib": max(peaks.values()),
    }
    if captured is not None and captured.step is not None:  # once more, with times in the graph
        assembly.config = case.config(presets, world, "graphs.timed=true")
        assembly.capture()
    bubble = measured_bubble(assembly, inputs)
    flop = flop_per_token(config, assembly.model.parameters())
    every = comm.broadcast(comm.gather(mine))
    assembly.release()  # graphs before the communicators that they hold
    if assembly.transport is not None:
        assembly.transport.close()
    slowest = max(row["ms"] for row in every)
    del assembly, captured
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "case": case.name,
        "pp": mesh.size("pp"),
        "layout": config.parallel.sizes,
        "microbatches": case.microbatches,
        "ms": slowest,
        "tokens_per_second": 1e3 * inputs[0].tokens / slowest,
        "model_tflops_per_gpu": flop * 1e-9 * inputs[0].tokens / slowest / world,
        **{key: max(row[key] for row in every) for key in ("stream_ms", "prepare_s")},
        **{key: [row[key] for row in every] for key in ("alloc_gib", "peak_gib", "reserved_gib", "pool_gib", "graphs")},
        "losses": mine["losses"],
        **bubble,
    }


def timed(engine: Engine, inputs: list[StepBatch], steps: int, world: int) -> dict[str, Any]:
    """Warm-up, then steps with a host wait after each, then steps without; memory at its peak."""
    number = 0

    def step() -> torch.Tensor:
        nonlocal number
        number += 1
        return engine.step(number - 1, inputs[number % len(inputs)]).loss

    losses = [float(step()) for _ in range(WARM_UP)]
    milliseconds = []
    for _ in range(steps):
        _meet(world)
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - began))
    _meet(world)
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    stream = 1e3 * (time.perf_counter() - began) / steps
    return {
        "ms": statistics.median(milliseconds),
        "stream_ms": stream,
        "losses": [*losses, float(loss)],
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def measured_bubble(assembly: Assembly, inputs: list[StepBatch]) -> dict[str, Any]:
    """One watched step, after one that makes the meter look sizes up."""
    meter = Meter(assembly.engine, assembly.register.knows)
    for step in range(2):
        watch = meter.start()
        float(assembly.engine.step(step, inputs[step]).loss)
    report = meter.report(watch)
    return {key: report[key] for key in ("bubble", "bubble_predicted", "bubble_per_rank")}


def _peak_gib() -> float:
    """What the allocator gave out at most since the last call; memory that a graph uses counts where it was captured."""
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def _meet(world: int) -> None:
    torch.cuda.synchronize()
    if world > 1:
        dist.barrier()
        torch.cuda.synchronize()


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'case':44} {'ms':>8} {'stream':>8} {'tokens/s':>10} {'GiB':>6} {'held':>6} {'graphs':>6} {'bubble':>7} "
        f"{'predicted':>9} loss"
    ]
    for row in rows:
        lines.append(
            f"{row['case']:44} {row['ms']:>8.2f} {row['stream_ms']:>8.2f} {row['tokens_per_second']:>10,.0f} "
            f"{max(row['alloc_gib']):>6.2f} {max(row['reserved_gib']):>6.2f} {max(row['graphs']):>6} "
            f"{row['bubble']:>7.3f} {row['bubble_predicted']:>9.3f} "
            f"{row['losses'][0]:>7.3f}..{row['losses'][-1]:>7.3f}"
        )
    return "\n".join(lines)
