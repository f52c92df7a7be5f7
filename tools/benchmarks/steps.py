"""Whole training steps on CPU under each mode of the contract, as ratios within one run."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch

from qeffect_lm.app.assemble import assemble
from qeffect_lm.config import load_config
from qeffect_lm.contract.trace import TraceWriter
from qeffect_lm.data.loader import StepBatch

MODES = ("off", "enforce", "trace")


def measure(config_path: Path, backend: str, steps: int) -> dict[str, dict[str, float]]:
    """Figure → mode → value: median step in ms, and two ratios to mode off.

    One training changes its mode from step to step, in all orders in turn, so that the modes share objects, memory and machine.
    """
    with tempfile.TemporaryDirectory(prefix="qeffect-bench-") as folder:
        base = ["parallel.pp=1", "pipeline.stage_layers=null", f"graphs.backend={backend}", f"run.dir={folder}"]
        config = load_config(config_path, base)
        shape = (config.pipeline.microbatches, config.data.microbatch_size, config.data.seq_len)
        assembly = assemble(config)
        assembly.prepare(_batch(0, shape, config.model.vocab_size))
        trace = TraceWriter(Path(folder) / "trace.jsonl")
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        orders = list(itertools.permutations(MODES))  # every mode follows every other equally often
        turns = [mode for turn in range(steps + 2) for mode in orders[turn % len(orders)]]
        for step, mode in enumerate(turns):
            assembly.ledger.switch(mode, trace if mode == "trace" else None, synchronised=True)
            data = _batch(step, shape, config.model.vocab_size)
            began = time.perf_counter()
            float(assembly.engine.step(step, data).loss)
            if step >= 2 * len(MODES):  # the first two turns warm caches up
                times[mode].append(time.perf_counter() - began)
        trace.close()
    off = times["off"]
    return {
        "median_step_ms": {mode: 1000 * statistics.median(values) for mode, values in times.items()},
        "ratio_of_sums": {mode: sum(values) / sum(off) for mode, values in times.items()},
        "median_of_paired_ratios": {
            mode: statistics.median(a / b for a, b in zip(values, off, strict=True)) for mode, values in times.items()
        },
    }


def _batch(step: int, shape: tuple[int, int, int], vocabulary: int) -> StepBatch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocabulary, (*shape[:2], shape[2] + 1), generator=generator)
    mask = torch.ones(shape)
    ids = torch.arange(shape[0] * shape[1]).view(shape[:2])
    return StepBatch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), mask, ids, int(mask.sum()))
