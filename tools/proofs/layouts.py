"""Parallel layouts against one process: every way to spread a tiny model over up to four gloo processes.

Of each layout, by ``train.py`` in processes of its own:

* *loss*: 12 steps in float32, and in FP8 with delayed scaling, against the same steps in one process. Both take the same
  samples and draw the same dropout masks. Sums are made in another order, nothing else: in float32 that is all. Under FP8 a
  value next to the border of two FP8 numbers falls to the other side of it, a difference of 2⁻⁴ of that value (E5M2: 2⁻³),
  and training carries it on. Control: another seed, in one process, must be further off than the bound.
* *resume*: killed by SIGKILL on all ranks after step 7, restarted, captured anew, trained to the end, against an eager run of
  the same layout that nobody killed: losses and all saved state, generators included, bit for bit. So captured equals eager and
  killed equals uninterrupted at once. Control: the same, with one scale doubled in the checkpoint that it resumes from.
* *checkpoint*: one process's checkpoint resumed in the layout and saved there at once, and the layout's own resumed and saved
  in one process: the same logical tensors, bit for bit, and one Hugging Face export. Control: the checkpoint three steps later.
"""

from __future__ import annotations

import hashlib
import io
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint, compare, find_resumable, open_checkpoint, resolve, rewrite_checkpoint, step_name
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.parallel.mesh import AXES
from qeffect_lm.runtime.metrics import read_metrics
from tools.common import ROOT, environment, kill_after, launch, launch_ranks

STEPS, EVERY, KILL_AT, MICROBATCHES, VOCAB, PROCESSES = 12, 3, 7, 4, 67, 4
BOUNDS = {"float32": 2e-6, "fp8": 0.02}  # of a step's loss, in nats, the worst of 12 steps
SCALE = "scale/layers.0.attention.qkv.input"
META = ("contract", "data", "tokens", "step", "plan_fingerprint", "graph_fingerprints")
CONFIG = f"""
model:
  {{vocab_size: {VOCAB}, hidden_size: 32, num_layers: 4, num_heads: 4, num_kv_heads: 2, head_dim: 16, ffn_size: 64,
   dropout: 0.1}}
precision: {{fp8: {{recipe: delayed, history: 3}}}}
pipeline: {{microbatches: {MICROBATCHES}, w_delay: 1}}
data: {{seq_len: 32, microbatch_size: 2}}
optim: {{lr: 1.0e-2, warmup_steps: 2}}
train: {{steps: {STEPS}}}
checkpoint: {{every: {EVERY}, keep: 0}}
logging: {{progress: 'off'}}
launch: {{timeout_seconds: 120}}
"""


@dataclass(frozen=True)
class Layout:
    """A way to spread the model, and what it is compared with: one process with ``model`` alone."""

    sizes: tuple[tuple[str, int], ...]
    more: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    note: str = ""

    @property
    def world(self) -> int:
        return prod(size for _, size in self.sizes)

    @property
    def name(self) -> str:
        words = [f"{axis} {size}" for axis, size in self.sizes if size > 1]
        return " x ".join(words) + (f", {self.note}" if self.note else "")

    def overrides(self) -> list[str]:
        given = [f"parallel.{axis}={size}" for axis, size in self.sizes]
        sizes = dict(self.sizes)
        own = sizes.get("dp", 1) * sizes.get("ep", 1)  # who has samples of its own
        return [*given, f"pipeline.microbatches={MICROBATCHES // own}", *self.more, *self.model]


def _sizes(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


SHARED = ("model.num_kv_heads=1",)
EXPERTS = ("model.family=mixtral", "model.moe.num_experts=4", "model.moe.aux_loss_coef=0.01")
SPREAD = ("parallel.bucket_mib=0.01", "optim.zero=1")


def _products() -> Iterator[Layout]:
    """Every product of the axes in twos that fits four processes; with experts where they are spread."""
    for sizes in product((1, 2), repeat=len(AXES)):
        given = {axis: size for axis, size in zip(AXES, sizes, strict=True) if size > 1}
        if 1 < prod(sizes) <= PROCESSES:
            yield Layout(_sizes(**given), model=EXPERTS if "ep" in given else ())


LAYOUTS = (
    *sorted(_products(), key=lambda layout: (len(layout.sizes), "ep" in dict(layout.sizes))),
    Layout(_sizes(dp=2, tp=2), SPREAD, note="shared optimizer state"),
    Layout(_sizes(dp=2, ep=2), SPREAD, EXPERTS, note="shared optimizer state"),
    Layout(_sizes(dp=2, cp=2), SPREAD, note="shared optimizer state"),
    Layout(_sizes(tp=2), model=EXPERTS, note="experts"),
    Layout(_sizes(tp=2), ("parallel.sequence_parallel=false",), note="all tokens on every rank"),
    Layout(_sizes(tp=4), (), SHARED, note="four ranks share one KV head"),
)


@dataclass
class Row:
    """What was found of a layout; ``faults`` in words, none where all is as it must be."""

    layout: str
    loss: dict[str, float] = field(default_factory=dict)
    control: dict[str, float] = field(default_factory=dict)
    resumed: int = 0  # tensors that were compared
    carried: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.faults


class Layouts:
    """Runs layouts in a folder and compares them."""

    def __init__(self, folder: Path) -> None:
        import numpy as np

        from qeffect_lm.data.indexed import IndexedWriter

        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.Generator(np.random.PCG64(1))
        with IndexedWriter(folder / "corpus", vocab_size=VOCAB) as writer:
            for _ in range(32):
                writer.add_document(generator.integers(0, VOCAB, 2048) // 2)
        self.config = folder / "layouts.yaml"
        self.config.write_text(CONFIG)
        self._done: dict[str, Path] = {}

    def check(self, layout: Layout) -> Row:
        """All of a layout's comparisons."""
        began, row = time.monotonic(), Row(layout.name)
        alone = Layout((), (), layout.model)
        for precision, bound in BOUNDS.items():
            one = self._losses(self._run(alone, precision, "whole"))
            other = self._losses(self._run(alone, precision, "seed", "run.seed=99"))
            mine = self._losses(self._run(layout, precision, "whole"))
            row.loss[precision], row.control[precision] = (_worst(one, found) for found in (mine, other))
            if row.loss[precision] > bound:
                row.faults.append(f"{precision} loss off by {row.loss[precision]:.2g}, more than {bound:g}")
            if row.control[precision] <= bound:
                row.faults.append(f"the control of the {precision} loss is off by {row.control[precision]:.2g} only")
        self._resume(layout, row)
        self._carry(alone, layout, row)
        row.seconds = round(time.monotonic() - began, 1)
        return row

    # ---- runs --------------------------------------------------------------------------------------------------

    def _run(self, layout: Layout, precision: str, what: str, *more: str) -> Path:
        """Train to the end, once for each set of arguments."""
        name = "-".join([layout.name or "one", *layout.model, precision, what]).replace(" ", "").replace(",", "-")
        if name not in self._done:
            run = launch(self.config, self._arguments(layout, name, precision, *more), max(1, layout.world), environment())
            code, output = run.wait()
            if code:
                raise QEffectError(f"the run {name} ended with exit code {code}:\n{output}")
            self._done[name] = self.folder / name
        return self._done[name]

    def _arguments(self, layout: Layout, name: str, precision: str, *more: str) -> list[str]:
        numbers = ["precision.fp8.recipe=none"] if precision == "float32" else []
        return [*layout.overrides(), *numbers, f"run.dir={self.folder / name}", f"data.train={self.folder / 'corpus'}", *more]

    @staticmethod
    def _losses(run: Path) -> dict[int, float]:
        return {m.step: m.loss for m in read_metrics(run / "metrics.jsonl") if m.loss is not None}

    # ---- killed, restarted, captured anew ----------------------------------------------------------------------

    def _resume(self, layout: Layout, row: Row) -> None:
        whole = self._run(layout, "fp8", "whole")
        captured = ("graphs.backend=host_replay",)
        name = f"{whole.name}-killed"
        target = self.folder / name
        arguments = self._arguments(layout, name, "fp8", *captured)
        run = launch(self.config, arguments, layout.world, environment())
        killed = kill_after(run, target / "metrics.jsonl", KILL_AT)
        _, output = run.wait()
        if not killed:
            raise QEffectError(f"{name} ended before it could be killed:\n{output}")
        found = find_resumable(target / "checkpoints")
        if found is None:
            raise QEffectError(f"{target} has no checkpoint to resume from:\n{output}")
        saved = open_checkpoint(found)
        control = self.folder / f"{name}-control"
        rewrite_checkpoint(saved, control / "checkpoints", {SCALE: saved.read(SCALE) * 2})
        self._run(layout, "fp8", "whole-killed", *captured)
        self._run(layout, "fp8", "whole-killed-control", *captured)
        # A graph's fingerprint is no eager run's.
        first, row.resumed = self._difference(whole, target, META[:-1])
        if first is not None:
            row.faults.append(f"killed and captured differs from eager and whole: {first}")
        if self._difference(whole, control, META[:-1])[0] is None:
            row.faults.append("a scale doubled in the checkpoint makes no difference after a resume")

    def _difference(self, a: Path, b: Path, keys: Sequence[str]) -> tuple[str | None, int]:
        losses, after = self._losses(a), self._losses(b)
        for step, loss in losses.items():
            if after.get(step, loss) != loss:
                return f"loss of step {step}", 0
        return _first(open_checkpoint(resolve(a / "checkpoints")), open_checkpoint(resolve(b / "checkpoints")), keys)

    # ---- carried between layouts -------------------------------------------------------------------------------

    def _carry(self, alone: Layout, layout: Layout, row: Row) -> None:
        one, mine = self._run(alone, "fp8", "whole"), self._run(layout, "fp8", "whole")
        for source, into in ((one, layout), (mine, alone)):
            at = source / "checkpoints" / step_name(2 * EVERY)
            name = f"{mine.name}-carried-{'there' if into is layout else 'back'}"
            arguments = self._arguments(into, name, "fp8", f"checkpoint.resume={at}")
            command = [sys.executable, "-m", "tools.proofs.carry", str(self.config), *arguments]
            environ = {**environment(), "PYTHONPATH": str(ROOT)}
            code, output = launch_ranks(command, max(1, into.world), environ).wait()
            if code:
                raise QEffectError(f"carrying {at} to {into.name or 'one process'} ended with exit code {code}:\n{output}")
            carried = open_checkpoint(resolve(self.folder / name / "checkpoints"))
            first, row.carried = _first(open_checkpoint(at), carried, ("contract", "data", "tokens", "step"), generators=False)
            if first is not None:
                row.faults.append(f"{name}: {first} is not what it was")
            if self._exported(at) != self._exported(carried.path):
                row.faults.append(f"{name}: another Hugging Face export")
            later = open_checkpoint(source / "checkpoints" / step_name(3 * EVERY))
            if _first(later, carried, (), generators=False)[0] is None:
                row.faults.append(f"{name}: equal to the checkpoint of {EVERY} steps later")

    def _exported(self, path: Path) -> str:
        """SHA-256 of the exported weights."""
        from tools import convert

        target = self.folder / "export"
        shutil.rmtree(target, ignore_errors=True)
        with redirect_stdout(io.StringIO()):
            code = convert.main(["--from", "native", "--to", "hf", str(path), str(target), "--quiet"])
        if code:
            raise QEffectError(f"{path} could not be exported")
        files = sorted(target.glob("*.safetensors"))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _worst(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of two runs' losses."""
    if one.keys() != other.keys() or not one:
        raise QEffectError(f"losses of steps {sorted(one)} and of {sorted(other)}")
    return max(abs(one[step] - other[step]) for step in one)


def _first(a: Checkpoint, b: Checkpoint, keys: Sequence[str], *, generators: bool = True) -> tuple[str | None, int]:
    """The first difference, and how many tensors are equal. Generators belong to ranks: those of one layout are compared."""
    result = compare(a, b, meta_keys=keys)
    odd = [name for name in (*result.only_in_a, *result.only_in_b) if generators or not name.startswith("rng/")]
    different = [d.name for d in result.different if generators or not d.name.startswith("rng/")]
    first = [*different, *odd, *(str(item) for item in result.meta)]
    return (first[0] if first else None), len(result.equal)


def chosen(names: Sequence[str] | None) -> list[Layout]:
    """The layouts of these names, all without any.

    Raises:
        UsageError: there is none of that name.
    """
    known = {_key(layout.name): layout for layout in LAYOUTS}
    for name in names or ():
        if _key(name) not in known:
            raise UsageError(f"--layout {name!r}: the layouts are {'; '.join(layout.name for layout in LAYOUTS)}")
    return [known[_key(name)] for name in names] if names else list(LAYOUTS)


def _key(name: str) -> tuple[frozenset[str], str]:
    """Axes in any order, and the note."""
    axes, _, note = name.partition(",")
    return frozenset(axis.strip() for axis in axes.split(" x ")), note.strip()


HEADER = f"{'layout':34} {'float32 loss':>13} {'FP8 loss':>9} {'controls':>15}  {'killed, resumed':16} there and back"


def line(row: Row) -> str:
    """One layout for people."""
    loss, control = ({name: told.get(name, math.nan) for name in BOUNDS} for told in (row.loss, row.control))
    controls = " ".join(f"{control[name]:.2f}" for name in BOUNDS)
    resumed, carried = f"equal ({row.resumed})", f"equal ({row.carried})"
    faults = f"  FAULT: {'; '.join(row.faults)}" if row.faults else ""
    numbers = f"{loss['float32']:>13.1e} {loss['fp8']:>9.4f} {controls:>15}"
    return f"{row.layout:34} {numbers}  {resumed:16} {carried:14} [{row.seconds} s]{faults}"


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The table with its bounds."""
    return {"bounds": BOUNDS, "steps": STEPS, "layouts": [{**vars(row), "ok": row.ok} for row in rows]}
