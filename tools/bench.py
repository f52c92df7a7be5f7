"""Measure: ``python -m tools.bench contract`` compares the contract's modes on the demo's model, as ratios within one run.

One training changes its mode from step to step, in all orders in turn, so that the modes share objects, memory and machine.
What is reported is the median step time of each mode and ratios to mode off; how fast the machine is cancels out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from qeffect_lm import __version__
from tools.common import ROOT, add_traceback, run_tool


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("what", choices=["contract"], help="contract: enforce and trace against off")
    made.add_argument("--config", type=Path, default=ROOT / "models/configs/demo.yaml", help="(default: the demo's)")
    made.add_argument("--steps", type=int, default=20, help="timed steps per mode (default: %(default)s)")
    made.add_argument("--backend", choices=["host_replay", "eager"], default="host_replay")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    add_traceback(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return run_tool(lambda: contract(arguments), arguments.traceback)


def contract(arguments: argparse.Namespace) -> int:
    """Time the demo's model, both stages' work on one rank, under each mode."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import tempfile

    import torch

    from qeffect_lm.app.assemble import assemble
    from qeffect_lm.config import load_config
    from qeffect_lm.contract.trace import TraceWriter
    from qeffect_lm.data.loader import StepBatch

    scratch = tempfile.TemporaryDirectory(prefix="qeffect-bench-")  # of the trace; removed at the end
    folder = Path(scratch.name)
    base = ["parallel.pp=1", "pipeline.stage_layers=null", f"graphs.backend={arguments.backend}", f"run.dir={folder}"]
    modes = ("off", "enforce", "trace")
    config = load_config(arguments.config, base)
    shape = (config.pipeline.microbatches, config.data.microbatch_size, config.data.seq_len)

    def batch(step: int) -> StepBatch:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, config.model.vocab_size, (*shape[:2], shape[2] + 1), generator=generator)
        mask = torch.ones(shape)
        ids = torch.arange(shape[0] * shape[1]).view(shape[:2])
        return StepBatch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), mask, ids, int(mask.sum()))

    assembly = assemble(config)
    assembly.prepare(batch(0))
    trace = TraceWriter(folder / "trace.jsonl")
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    orders = list(itertools.permutations(modes))  # every mode follows every other equally often
    turns = [mode for turn in range(arguments.steps + 2) for mode in orders[turn % len(orders)]]
    for step, mode in enumerate(turns):
        assembly.ledger.switch(mode, trace if mode == "trace" else None)
        data = batch(step)
        began = time.perf_counter()
        float(assembly.engine.step(step, data).loss)
        if step >= 2 * len(modes):  # the first two turns warm caches up
            times[mode].append(time.perf_counter() - began)
    scratch.cleanup()
    report = figures(arguments, times)
    print(table(report))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def figures(arguments: argparse.Namespace, times: dict[str, list[float]]) -> dict[str, object]:
    """All figures with what they were measured on."""
    import torch

    off = times["off"]
    return {
        "benchmark": "contract",
        "command": f"python -m tools.bench contract --backend {arguments.backend} --steps {arguments.steps}",
        "qeffect_lm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"CPU {platform.machine()}, 1 thread",
        "backend": arguments.backend,
        "median_step_ms": {mode: 1000 * statistics.median(values) for mode, values in times.items()},
        "ratio_of_sums": {mode: sum(values) / sum(off) for mode, values in times.items()},
        "median_of_paired_ratios": {
            mode: statistics.median(a / b for a, b in zip(values, off, strict=True)) for mode, values in times.items()
        },
    }


def table(report: dict) -> str:
    lines = [f"{'mode':8} {'median step ms':>15} {'sum / off':>10} {'median of step/off':>19}"]
    for mode, milliseconds in report["median_step_ms"].items():
        lines.append(
            f"{mode:8} {milliseconds:>15.2f} {report['ratio_of_sums'][mode]:>10.4f} "
            f"{report['median_of_paired_ratios'][mode]:>19.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
