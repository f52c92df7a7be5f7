"""Measure: ``python -m tools.bench contract`` compares the contract's modes on the demo's model, as ratios within one run.

The training of one mode follows the other in turns, step by step, in one process, so that both see the same machine. What is
reported is the median step time of each mode and the ratio of the sums; how fast the machine is cancels out.
"""

from __future__ import annotations

import argparse
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

    engines = {}
    for mode in modes:
        assembly = assemble(load_config(arguments.config, [*base, f"contract.mode={mode}"]))
        assembly.prepare(batch(0))
        engines[mode] = assembly.engine
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    losses: dict[str, list[float]] = {mode: [] for mode in modes}
    for step in range(arguments.steps + 2):
        for mode in modes if step % 2 else reversed(modes):
            data = batch(step)
            began = time.perf_counter()
            result = engines[mode].step(step, data)
            loss = float(result.loss)
            if step >= 2:  # the first two warm caches up
                times[mode].append(time.perf_counter() - began)
            losses[mode].append(loss)
    if losses["off"] != losses["enforce"] or losses["off"] != losses["trace"]:
        print("error: the modes do not train alike", file=sys.stderr)
        return 1
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
