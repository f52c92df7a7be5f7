"""Loss curves on the demo's corpus: BF16 beside FP8 with both windows, several seeds each.

A seed decides initial weights, order of the data and dropout; recipes share it, so that a pair of runs differs in the recipe
alone. Losses on held-out text say whether FP8 costs anything: the difference of the recipes' means is compared with the
spread (largest minus smallest) that the seeds alone make in BF16. A control, BF16 with an eighth of the learning rate, must be
outside.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qeffect_lm.app.run import train_run
from qeffect_lm.config import load_config
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.runtime.launch import LaunchEnv
from qeffect_lm.runtime.metrics import read_metrics

RECIPES: dict[str, list[str]] = {
    "bf16": ["precision.fp8.recipe=none"],
    "fp8 step": ["precision.fp8.recipe=delayed", "precision.fp8.window=step"],
    "fp8 microbatch": ["precision.fp8.recipe=delayed", "precision.fp8.window=microbatch"],
}
PLAIN, CONTROL = "bf16", "control"
CONTROL_RATE = 1 / 8


@dataclass(frozen=True)
class Curves:
    """What to run.

    Attributes:
        config: a YAML file; ``overrides`` change single keys of it.
        corpus: prefix of ``PREFIX.train.bin`` and ``PREFIX.valid.bin``.
        folder: where the runs go.
    """

    config: Path
    corpus: Path
    folder: Path
    steps: int
    seeds: Sequence[int]
    overrides: Sequence[str] = ()
    evaluations: int = 6

    def arguments(self, recipe: str, seed: int) -> list[str]:
        """Overrides of one run."""
        made = RECIPES[PLAIN if recipe == CONTROL else recipe]
        given = [
            f"run.seed={seed}",
            f"run.dir={self.folder / f'{recipe} {seed}'.replace(' ', '-')}",
            f"train.steps={self.steps}",
            f"train.eval_every={max(1, self.steps // self.evaluations)}",
            f"data.train={self.corpus}.train",
            f"data.valid={self.corpus}.valid",
            "data.tokenizer=null",
            "checkpoint.every=0",
            "checkpoint.save_at_end=false",
            "checkpoint.resume=never",
            "logging.progress=off",
            "logging.wandb=disabled",
        ]
        given += [*made, *self.overrides]
        if recipe == CONTROL:
            rate = load_config(self.config, given).optim.lr
            given.append(f"optim.lr={rate * CONTROL_RATE!r}")
        return given


def measure(curves: Curves, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all recipes and seeds one after another, and judge them.

    Raises:
        UsageError: no corpus, or fewer than two seeds.
    """
    missing = [Path(f"{curves.corpus}{end}") for end in (".train.bin", ".valid.bin")]
    missing = [path for path in missing if not path.exists()]
    if missing:
        raise UsageError(f"{missing[0]} does not exist: make the demo's corpus with `python -m tools.demo --only-corpus`")
    if len(curves.seeds) < 2:
        raise UsageError("one seed has no spread: give at least two")
    runs = [_one(curves, recipe, seed, say) for seed in curves.seeds for recipe in RECIPES]
    runs.append(_one(curves, CONTROL, curves.seeds[0], say))
    return {
        "config": curves.config.name,
        "overrides": list(curves.overrides),
        "steps": curves.steps,
        "seeds": list(curves.seeds),
        "runs": runs,
        "verdict": verdict(runs),
    }


def _one(curves: Curves, recipe: str, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    began = time.perf_counter()
    config = load_config(curves.config, curves.arguments(recipe, seed))
    said: list[str] = []
    code = train_run(config, LaunchEnv.from_mapping({}), said.append)
    if code:
        raise QEffectError(f"the run of {recipe}, seed {seed}, ended with exit code {code}: {said[-1]}")
    records = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    _forget(config.run.device)
    held_out = [(record.step, record.eval_loss) for record in records if record.eval_loss is not None]
    result = {
        "recipe": recipe,
        "seed": seed,
        "losses": [record.loss for record in records if record.step > 0],
        "held_out": held_out,
        "skipped": sum(record.skipped for record in records),
        "tokens_per_second": statistics.median(r.tokens_per_second or 0.0 for r in records if r.step > 1),
        "seconds": round(time.perf_counter() - began, 1),
    }
    last = held_out[-1]
    say(
        f"{recipe:15} seed {seed}: held-out {last[1]:.4f} at step {last[0]}, {result['tokens_per_second']:,.0f} tokens/s, "
        f"{result['seconds']} s"
    )
    return result


def _forget(device: str) -> None:
    """The run's memory, before the next one takes its own."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def verdict(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per recipe: its held-out losses against BF16's, after each evaluation but the one before training.

    ``within``: at the last evaluation, and on average over all, the means differ by no more than the seeds' spread of BF16.
    """
    steps = [step for step, _ in runs[0]["held_out"] if step > 0]
    by_recipe: dict[str, list[dict[int, float]]] = {}
    for run in runs:
        by_recipe.setdefault(run["recipe"], []).append(dict(map(tuple, run["held_out"])))
    plain = by_recipe[PLAIN]
    spread = [max(r[s] for r in plain) - min(r[s] for r in plain) for s in steps]
    means = [statistics.fmean(r[s] for r in plain) for s in steps]
    found: dict[str, Any] = {"evaluations": steps, "bf16_mean": means, "bf16_spread": spread}
    for recipe, others in by_recipe.items():
        if recipe == PLAIN:
            continue
        away = [statistics.fmean(r[s] for r in others) - mean for s, mean in zip(steps, means, strict=True)]
        finite = all(math.isfinite(value) for value in away)
        average, wide = statistics.fmean(map(abs, away)), statistics.fmean(spread)
        within = finite and abs(away[-1]) <= spread[-1] and average <= wide
        found[recipe] = {"difference": away, "within": within, "mean_difference": average, "mean_spread": wide}
        if recipe != CONTROL:
            pairs = [other[steps[-1]] - own[steps[-1]] for other, own in zip(others, plain, strict=True)]
            found[recipe]["last_difference_of_each_seed"] = pairs
    found["ok"] = all(found[recipe]["within"] for recipe in RECIPES if recipe != PLAIN) and not found[CONTROL]["within"]
    return found


def table(report: dict[str, Any]) -> str:
    """The verdict for people."""
    judged = report["verdict"]
    lines = [f"{'held-out loss at step':24} {'bf16 mean':>10} {'spread':>8}  " + "  ".join(f"{r:>16}" for r in _others(judged))]
    for place, step in enumerate(judged["evaluations"]):
        differences = "  ".join(f"{judged[recipe]['difference'][place]:>+16.4f}" for recipe in _others(judged))
        lines.append(f"{step:>24} {judged['bf16_mean'][place]:>10.4f} {judged['bf16_spread'][place]:>8.4f}  {differences}")
    for recipe in _others(judged):
        lines.append(f"{recipe}: {'within' if judged[recipe]['within'] else 'OUTSIDE'} the seeds' spread")
    return "\n".join(lines)


def _others(judged: dict[str, Any]) -> list[str]:
    return [recipe for recipe in (*RECIPES, CONTROL) if recipe != PLAIN and recipe in judged]
