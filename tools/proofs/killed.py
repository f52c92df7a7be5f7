"""Training runs by ``train.py`` that are killed with SIGKILL, resumed and captured anew, against the run that never was.

Both runs save after every step, so that what is compared (every weight, master, moment, scale, history, open slot, cached FP8
weight and generator, the contract's counters and the graph fingerprints) is compared for every step.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint, compare, find_resumable, open_checkpoint, rewrite_checkpoint, step_name
from qeffect_lm.errors import QEffectError
from qeffect_lm.runtime.metrics import read_metrics
from tools.common import environment, kill_after, launch

VOCAB = 512
CONFIG = f"""
model: {{vocab_size: {VOCAB}, hidden_size: 128, num_layers: 4, num_heads: 2, num_kv_heads: 1, ffn_size: 256}}
precision: {{dtype: bfloat16, fp8: {{recipe: delayed, history: 4}}}}
pipeline: {{microbatches: 4}}
data: {{seq_len: 128, microbatch_size: 2}}
optim: {{lr: 2.0e-3, warmup_steps: 4}}
checkpoint: {{every: 1, keep: 0}}
logging: {{progress: 'off'}}
launch: {{timeout_seconds: 120}}
"""
SCALE = "scale/layers.0.attention.qkv.input"
META = ("contract", "data", "tokens", "step", "plan_fingerprint", "graph_fingerprints")


@dataclass(frozen=True)
class Job:
    """A configuration to be killed: schedule and window on ``pp`` ranks."""

    schedule: str
    window: str
    pp: int
    scope: str = "action"
    backend: str = "native"
    dropout: float = 0.1

    @property
    def name(self) -> str:
        words = ["killed", f"pp{self.pp}", self.schedule, self.window, f"dropout {self.dropout:g}"]
        return " ".join([*words, *([self.backend] if self.backend != "native" else []), f"scope {self.scope}"])

    def overrides(self, device: str, steps: int) -> list[str]:
        """Of :data:`CONFIG`."""
        given = [
            f"run.device={device}",
            f"graphs.backend={'cuda_graphs' if device == 'cuda' else 'host_replay'}",
            f"parallel.pp={self.pp}",
            f"pipeline.schedule={self.schedule}",
            f"pipeline.w_delay={int(self.schedule == '1f1b')}",
            f"precision.fp8.window={self.window}",
            f"model.dropout={self.dropout}",
            f"train.steps={steps}",
        ]
        if self.scope != "action":
            given.append(f"graphs.scope={self.scope}")
        if self.backend != "native":
            given.append(f"model.backend={self.backend}")
        return given


class Runs:
    """A folder with a corpus and a configuration, in which jobs run."""

    def __init__(self, folder: Path, device: str, steps: int, more: Sequence[str] = ()) -> None:
        self.folder, self.device, self.steps, self._more = folder, device, steps, list(more)
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "killed.yaml"
        self.config.write_text(CONFIG + f"train: {{steps: {steps}}}\n")
        make_corpus(folder / "corpus")

    def arguments(self, job: Job, name: str) -> list[str]:
        place = [f"run.dir={self.folder / name}", f"data.train={self.folder / 'corpus'}"]
        return [*job.overrides(self.device, self.steps), *self._more, *place]

    def start(self, job: Job, name: str, *more: str) -> Any:
        """Launch all ranks of a run; see :func:`tools.common.launch`."""
        return launch(self.config, [*self.arguments(job, name), *more], job.pp, environment())

    def run(self, job: Job, name: str, *more: str) -> str:
        """To the end; returns the output."""
        return finished(self.start(job, name, *more), name)

    def checkpoint(self, name: str, step: int) -> Checkpoint:
        return open_checkpoint(self.folder / name / "checkpoints" / step_name(step))


def finished(run: Any, name: str) -> str:
    """Wait for a launched run. Raises QEffectError with its output where it failed."""
    code, output = run.wait()
    if code:
        raise QEffectError(f"the run {name!r} ended with exit code {code}:\n{output}")
    return str(output)


def make_corpus(prefix: Path) -> None:
    """Random documents."""
    import numpy as np

    from qeffect_lm.data.indexed import IndexedWriter

    generator = np.random.Generator(np.random.PCG64(1))
    with IndexedWriter(prefix, vocab_size=VOCAB) as writer:
        for _ in range(64):
            writer.add_document(generator.integers(0, VOCAB, 4096))


def check(job: Job, runs: Runs, seed: int = 0) -> dict[str, Any]:
    """Run ``job`` twice at once, kill one at a random step, resume it, compare; then the control."""
    began = time.perf_counter()
    whole, dead, control = (f"{job.name}: {what}".replace(" ", "-").replace(":", "") for what in ("whole", "killed", "control"))
    uninterrupted = runs.start(job, whole)
    victim = runs.start(job, dead)
    kill_at = random.Random(f"{job.name} {seed}").randrange(max(2, runs.steps // 5), runs.steps // 2)
    killed = kill_after(victim, runs.folder / dead / "metrics.jsonl", kill_at)
    _, output = victim.wait()
    if not killed:
        uninterrupted.kill()
        raise QEffectError(f"{job.name} ended before it could be killed:\n{output}")
    shutil.copytree(runs.folder / dead, runs.folder / control)
    resumed = runs.start(job, dead)
    begin_control(runs, job, control)
    changed = runs.start(job, control)
    finished(uninterrupted, whole)
    said = finished(resumed, dead)
    finished(changed, control)
    at = next((line for line in said.splitlines() if line.startswith("resumed at")), "")
    compared, first = compare_runs(runs, whole, dead)
    _, control_first = compare_runs(runs, whole, control, first_step=_step_of(at) + 1)
    saved = [runs.checkpoint(name, step) for name in (whole, dead) for step in (1, runs.steps)]
    prints = {tuple(checkpoint.meta["graph_fingerprints"]) for checkpoint in saved}
    return {
        "cell": job.name,
        "ranks": job.pp,
        "steps": runs.steps,
        "ok": bool(at) and first is None and control_first is not None and len(prints) == 1,
        "first": first,
        "killed_after": kill_at,
        "resumed": at,
        "tensors": compared,
        "fingerprints": sorted(map(list, prints)),
        "control_first": control_first,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _step_of(said: str) -> int:
    """7 for ``resumed at 7, ran …``; 0 where the run does not say so."""
    found = re.match(r"resumed at (\d+)", said)
    return int(found.group(1)) if found else 0


def begin_control(runs: Runs, job: Job, name: str) -> None:
    """One scale half as large again in the newest checkpoint of a run."""
    folder = runs.folder / name / "checkpoints"
    newest = find_resumable(folder)
    if newest is None:
        raise QEffectError(f"{job.name}: no checkpoint to resume from in {folder}")
    saved = open_checkpoint(newest)
    rewrite_checkpoint(saved, runs.folder / name / "changed", {SCALE: saved.read(SCALE) * 1.5})
    shutil.rmtree(newest)
    (runs.folder / name / "changed" / newest.name).rename(newest)


def compare_runs(runs: Runs, a: str, b: str, first_step: int = 1) -> tuple[int, str | None]:
    """(tensors compared, what differs first): losses and norms of all steps, each checkpoint from ``first_step`` on by the
    SHA-256 of every slice, the last one byte by byte."""
    tensors, first = 0, None
    rows = [{m.step: (m.loss, m.grad_norm) for m in read_metrics(runs.folder / name / "metrics.jsonl")} for name in (a, b)]
    for step in range(first_step, runs.steps + 1):
        x, y = runs.checkpoint(a, step), runs.checkpoint(b, step)
        for name in dict.fromkeys([*x.names(), *y.names()]):
            tensors += 1
            if first is None and _digests(x, name) != _digests(y, name):
                first = f"step {step}: {name}"
        different = [key for key in META if x.meta.get(key) != y.meta.get(key)]
        if first is None and different:
            first = f"step {step}: {different[0]}"
        if first is None and rows[0].get(step) != rows[1].get(step):
            first = f"loss of step {step}"
    result = compare(runs.checkpoint(a, runs.steps), runs.checkpoint(b, runs.steps), meta_keys=META)
    if first is None and not result.same:
        first = str(result.first_name or result.meta[0].key)
    return tensors, first


def _digests(checkpoint: Checkpoint, name: str) -> Mapping[Any, str] | None:
    entry = checkpoint.manifest.tensors.get(name)
    return None if entry is None else {(part.start, part.shape): part.sha256 for part in entry.slices}
