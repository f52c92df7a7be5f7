"""Run the parity matrix: schedule × stages × eager/captured × killed × window, each cell with its control.

Each cell trains a tiny model by ``train.py`` and compares losses and every saved tensor, bit for bit, with a plain run: one
process, eager, GPipe, never killed (window ``microbatch``: the same schedule and stages, eager and never killed, since
there the order of commits is part of the arithmetic). A killed cell gets SIGKILL on all ranks in the middle and resumes. The
control of a cell is the same cell with one thing changed (another seed; killed: one scale doubled in the checkpoint) and must
differ.

With ``--parallel``: every layout of tensor, pipeline, data, expert and context parallelism that fits four processes, against
one (:mod:`tools.proofs.layouts`): loss within a bound, killed and captured against eager and whole, checkpoints there and back.

With ``--device cuda``: engines in lock step, eager and captured, compared after each of 50 steps
(:mod:`tools.proofs.lockstep`), runs killed and resumed (:mod:`tools.proofs.killed`), and a float64 reference
(:mod:`tools.proofs.double`), each with a control; on one GPU and, where there are two, as two pipeline ranks too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from qeffect_lm.errors import QEffectError, UsageError
from tools.common import add_traceback, environment, kill_after, launch, run_tool
from tools.proofs import matrix as gpu

STEPS, EVERY, KILL_AT, VOCAB = 12, 3, 7, 64
CONFIG = """
model: {vocab_size: 64, hidden_size: 32, num_layers: 4, num_heads: 4, num_kv_heads: 2, ffn_size: 48, dropout: 0.1}
precision: {fp8: {recipe: delayed, history: 3}}
pipeline: {microbatches: 4, w_delay: 1}
data: {seq_len: 32, microbatch_size: 4}
optim: {lr: 1.0e-2, warmup_steps: 2}
checkpoint: {keep: 0}
logging: {progress: 'off'}
launch: {timeout_seconds: 60}
"""


TWO_CHUNKS = ("interleaved-1f1b", "zb-v", "dualpipev")
OWN_LAG = ("zb-h1", "zb-h2", "zb-v", "dualpipev", "auto")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipev", "auto")
LAYERS = 4


@dataclass(frozen=True)
class Cell:
    schedule: str
    stages: int
    execution: str
    killed: bool
    window: str

    @property
    def name(self) -> str:
        return "-".join([self.schedule, f"pp{self.stages}", self.execution, "killed" if self.killed else "whole", self.window])

    def overrides(self) -> list[str]:
        given = [
            f"pipeline.schedule={self.schedule}",
            f"parallel.pp={self.stages}",
            f"graphs.backend={'host_replay' if self.execution == 'captured' else 'eager'}",
            f"precision.fp8.window={self.window}",
        ]
        if self.schedule in OWN_LAG:
            given.append("pipeline.w_delay=0")
        if self.schedule == "auto" and self.window == "microbatch":  # its plan is part of the arithmetic: no times of the day
            given += [f"pipeline.costs.{name}=[1.0]" for name in ("t_f", "t_i", "t_w")]
        chunks = self.stages * (2 if self.schedule in TWO_CHUNKS else 1)
        if chunks > LAYERS:
            given.append(f"pipeline.stage_layers={[int(chunk < LAYERS) for chunk in range(chunks)]}")
        return given

    def reference(self) -> Cell:
        if self.window == "step":
            return Cell("gpipe", 1, "eager", False, "step")
        return Cell(self.schedule, self.stages, "eager", False, "microbatch")


@dataclass
class Verdict:
    """``tensors`` compared bit for bit; ``first`` names the first that differs; ``control`` names what its control changed."""

    cell: Cell
    equal: bool
    tensors: int
    first: str | None
    control_differs: bool
    control_first: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.equal and self.control_differs


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tools.parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print the matrix as JSON")
    made.add_argument("--all", action="store_true", help="every schedule at 1, 2 and 3 stages: 192 cells")
    made.add_argument("--schedule", nargs="*", choices=SCHEDULES, metavar="NAME", help=f"of {', '.join(SCHEDULES)}")
    made.add_argument("--stages", nargs="*", type=int)
    made.add_argument("--execution", nargs="*", choices=["eager", "captured"])
    made.add_argument("--killed", nargs="*", choices=["no", "yes"])
    made.add_argument("--window", nargs="*", choices=["step", "microbatch"])
    made.add_argument("--parallel", action="store_true", help="layouts against one process, instead of schedules")
    made.add_argument("--layout", nargs="*", metavar="NAME", help="with --parallel: of these names; all without it")
    made.add_argument("--keep", type=Path, help="keep all runs in this folder")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    gpu.add_arguments(made)
    add_traceback(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return run_tool(lambda: parity(arguments), arguments.traceback)


def parity(arguments: argparse.Namespace) -> int:
    """Run all cells; exit code 0 when every cell is equal and every control differs."""
    if arguments.device == "cuda":
        return gpu.run(arguments, lambda text: print(text, flush=True))
    gpu.refuse_on_cpu(arguments)
    if arguments.parallel:
        return parallel(arguments)
    if arguments.layout is not None:
        raise UsageError("--layout goes with --parallel")
    cells = cells_of(arguments)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="qeffect-parity-"))
    matrix = Matrix(folder)
    verdicts = []
    try:
        if not arguments.json:
            print(f"{'cell':45} {'against':43} {'tensors':>8}  result")
        for cell in cells:
            verdicts.append(matrix.check(cell))
            if not arguments.json:
                print(line(verdicts[-1]), flush=True)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    passed = sum(verdict.ok for verdict in verdicts)
    if arguments.json:
        rows = [{**asdict(v.cell), **{k: x for k, x in asdict(v).items() if k != "cell"}, "ok": v.ok} for v in verdicts]
        print(json.dumps({"cells": rows, "passed": passed, "failed": len(verdicts) - passed}, indent=1))
    else:
        print(f"{passed} cells bitwise equal with a control that differs, {len(verdicts) - passed} not")
    return 0 if passed == len(verdicts) else 1


def parallel(arguments: argparse.Namespace) -> int:
    """Check layouts; exit code 0 when each is as it must be."""
    from tools.proofs import layouts

    asked = [name for name in ("schedule", "stages", "execution", "killed", "window") if getattr(arguments, name) is not None]
    if asked or arguments.all:
        raise UsageError(f"--{(asked or ['all'])[0]} has no meaning with --parallel: leave it out")
    chosen = layouts.chosen(arguments.layout)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="qeffect-parity-"))
    rows = []
    try:
        table = layouts.Layouts(folder)
        told = sys.stderr if arguments.json else sys.stdout
        print(layouts.HEADER, file=told)
        for layout in chosen:
            try:
                rows.append(table.check(layout))
            except QEffectError as error:  # the others are worth knowing
                rows.append(layouts.Row(layout.name, faults=[str(error)]))
            print(layouts.line(rows[-1]), flush=True, file=told)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    failed = sum(not row.ok for row in rows)
    if arguments.json:
        print(json.dumps(layouts.as_json(rows), indent=1))
    else:
        passed = len(rows) - failed
        counted = "layout" if passed == 1 else "layouts"
        print(f"{passed} {counted} within the bounds, equal where they must be, with controls that differ; {failed} not")
    return 1 if failed else 0


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """What was asked for; otherwise GPipe and 1F1B in every way on 1 and 2 stages, and the others captured and killed on 2."""
    asked = [arguments.schedule, arguments.stages, arguments.execution, arguments.killed, arguments.window]
    defaults: list[list] = [["gpipe", "1f1b"], [1, 2], ["eager", "captured"], ["no", "yes"], ["step", "microbatch"]]
    if arguments.all:
        defaults[:2] = [list(SCHEDULES), [1, 2, 3]]
    schedules, stages, executions, killed, windows = (one or other for one, other in zip(asked, defaults, strict=True))
    cells = [
        Cell(schedule, number, execution, kill == "yes", window)
        for window, schedule, number, execution, kill in itertools.product(windows, schedules, stages, executions, killed)
    ]
    if not arguments.all and not any(asked):
        cells += [Cell(schedule, 2, "captured", True, "step") for schedule in SCHEDULES[2:]]
    return cells


def line(verdict: Verdict) -> str:
    cell = verdict.cell
    against = cell.reference().name if cell.reference() != cell else "itself run again"
    result = "equal" if verdict.equal else f"DIFFERENT: {verdict.first}"
    control = f"control differs ({verdict.control_first})" if verdict.control_differs else "CONTROL DOES NOT DIFFER"
    return f"{cell.name:45} {against:43} {verdict.tensors:>8}  {result}; {control}"


class Matrix:
    """Runs cells in a folder and compares them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._corpus(folder)
        self.config = folder / "parity.yaml"
        self.config.write_text(CONFIG + f"train: {{steps: {STEPS}}}\n")
        self._references: dict[Cell, Path] = {}

    @staticmethod
    def _corpus(folder: Path) -> None:
        import numpy as np

        from qeffect_lm.data.indexed import IndexedWriter

        generator = np.random.Generator(np.random.PCG64(1))
        with IndexedWriter(folder / "corpus", vocab_size=VOCAB) as writer:
            for _ in range(64):
                writer.add_document(generator.integers(0, VOCAB, 1024))

    def check(self, cell: Cell) -> Verdict:
        began = time.monotonic()
        reference = self._reference(cell.reference())
        if cell.killed:
            run = self._killed(cell)
            control = self._tampered(cell, run)
        else:
            run = self._run(cell, cell.name)
            control = self._run(cell, f"{cell.name}-control", ["run.seed=99"])
        equal, first, tensors = self._compare(reference, run)
        control_equal, control_first, _ = self._compare(reference, control)
        return Verdict(cell, equal, tensors, first, not control_equal, control_first, time.monotonic() - began)

    def _reference(self, cell: Cell) -> Path:
        if cell not in self._references:
            self._references[cell] = self._run(cell, f"reference-{cell.name}")
        return self._references[cell]

    def _overrides(self, cell: Cell, name: str) -> list[str]:
        return [*cell.overrides(), f"run.dir={self.folder / name}", f"data.train={self.folder / 'corpus'}"]

    def _run(self, cell: Cell, name: str, more: Sequence[str] = ()) -> Path:
        run = launch(self.config, [*self._overrides(cell, name), *more], cell.stages, environment())
        code, output = run.wait()
        if code:
            raise QEffectError(f"the run of {name} ended with exit code {code}:\n{output}")
        return self.folder / name

    def _killed(self, cell: Cell) -> Path:
        """Start, SIGKILL every rank after step KILL_AT, resume to the end."""
        target = self.folder / cell.name
        overrides = [*self._overrides(cell, cell.name), f"checkpoint.every={EVERY}"]
        run = launch(self.config, overrides, cell.stages, environment())
        killed = kill_after(run, target / "metrics.jsonl", KILL_AT)
        _, output = run.wait()
        if not killed:
            raise QEffectError(f"{cell.name} ended before it could be killed:\n{output}")
        shutil.copytree(target, self.folder / f"{cell.name}-dead")
        return self._run(cell, cell.name, [f"checkpoint.every={EVERY}"])

    def _tampered(self, cell: Cell, run: Path) -> Path:
        """The control of a killed cell: resume from its checkpoint with one scale doubled."""
        from checkpoint import find_resumable, open_checkpoint, rewrite_checkpoint

        dead = self.folder / f"{cell.name}-dead"
        found = find_resumable(dead / "checkpoints")
        if found is None:
            raise QEffectError(f"{dead} has no checkpoint to resume from")
        saved = open_checkpoint(found)
        name = "scale/layers.0.attention.qkv.input"
        control = self.folder / f"{cell.name}-control"
        rewrite_checkpoint(saved, control / "checkpoints", {name: saved.read(name) * 2})
        return self._run(cell, control.name)

    @staticmethod
    def _compare(a: Path, b: Path) -> tuple[bool, str | None, int]:
        """Losses from the metrics, then all tensors of the last checkpoint; generators and data cursor included."""
        from checkpoint import compare, open_checkpoint, resolve
        from qeffect_lm.runtime.metrics import read_metrics

        losses = [{m.step: m.loss for m in read_metrics(run / "metrics.jsonl")} for run in (a, b)]
        first_resumed = min(losses[1])
        for step, loss in losses[0].items():
            if step >= first_resumed and losses[1].get(step) != loss:
                return False, f"loss of step {step}", 0
        x, y = (open_checkpoint(resolve(run / "checkpoints")) for run in (a, b))
        result = compare(x, y, meta_keys=("data", "contract", "tokens"))
        # Generators belong to ranks: a layout with fewer ranks has fewer of them.
        odd = [name for name in [*result.only_in_a, *result.only_in_b] if not name.startswith("rng/")]
        fine = not result.different and not result.meta and not odd
        return fine, None if fine else str(result.first_name or odd[0]), len(result.equal)


if __name__ == "__main__":
    sys.exit(main())
