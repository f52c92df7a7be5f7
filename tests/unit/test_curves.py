"""Loss curves of several recipes and seeds: the runs, the verdict, the picture."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from qeffect_lm.errors import UsageError
from tests.runs import CONFIG, make_corpus
from tools import plot
from tools.benchmarks.curves import CONTROL, RECIPES, Curves, measure, table, verdict


def made_up(shifts: dict[str, float], spread: float = 0.02, seeds: int = 3) -> list[dict[str, Any]]:
    """Runs whose held-out losses are known: falling, with ``spread`` between the seeds, and shifted per recipe."""
    runs = []
    for recipe, shift in shifts.items():
        for seed in range(1 if recipe == CONTROL else seeds):
            noise = random.Random(f"{recipe} {seed}")
            points = [(0, 8.0)] + [(s, 8.0 - s / 60 + shift + spread * seed / (seeds - 1)) for s in (50, 100, 150)]
            losses = [8.0 - s / 60 + noise.gauss(0, 0.1) for s in range(150)]
            runs.append({"recipe": recipe, "seed": seed, "held_out": points, "losses": losses})
    return runs


@pytest.mark.parametrize(
    ("step", "microbatch", "control", "ok"),
    [(0.01, -0.01, 0.5, True), (0.03, 0.0, 0.5, False), (0.0, -0.03, 0.5, False), (0.0, 0.0, 0.01, False)],
)
def test_verdict(step, microbatch, control, ok):
    """Inside of the spread, above it, below it; a control that the criterion does not notice is no control."""
    judged = verdict(made_up({"bf16": 0.0, "fp8 step": step, "fp8 microbatch": microbatch, CONTROL: control}))
    assert judged["ok"] == ok and judged["evaluations"] == [50, 100, 150]
    assert judged["bf16_spread"] == pytest.approx([0.02] * 3)
    assert judged["fp8 step"]["difference"] == pytest.approx([step] * 3)
    assert judged["fp8 step"]["within"] == (abs(step) < 0.02)
    worse = made_up({"bf16": 0.0, "fp8 step": float("nan"), "fp8 microbatch": 0.0, CONTROL: 1.0})
    assert not verdict(worse)["ok"]


@pytest.mark.long
def test_runs_and_picture(tmp_path: Path):
    """Real runs, tiny: the recipes differ, a seed is shared by all of them, and the report can be drawn."""
    pytest.importorskip("matplotlib")
    make_corpus(tmp_path / "c.train")
    make_corpus(tmp_path / "c.valid", documents=4, seed=2)
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    said: list[str] = []
    wanted = Curves(tmp_path / "tiny.yaml", tmp_path / "c", tmp_path / "runs", 6, (1, 2), evaluations=2)
    report = measure(wanted, said.append)
    assert [(run["recipe"], run["seed"]) for run in report["runs"][:4]] == [*((r, 1) for r in RECIPES), ("bf16", 2)]
    assert len(report["runs"]) == len(said) == 7 and report["runs"][-1]["recipe"] == CONTROL
    first = [run["losses"] for run in report["runs"]]
    assert all(len(losses) == 6 for losses in first) and len({tuple(losses) for losses in first}) == 7
    assert first[0][0] == pytest.approx(first[1][0], rel=1e-2) and first[0][0] == first[6][0]  # the same weights and data
    assert [step for step, _ in report["runs"][0]["held_out"]] == [0, 3, 6] and "fp8 step" in table(report)
    file = tmp_path / "curves.json"
    file.write_text(json.dumps(report))
    assert plot.main([str(file)]) == 0 and (tmp_path / "curves.png").stat().st_size > 10_000
    file.write_text("{}")
    assert plot.main([str(file)]) == 2
    with pytest.raises(UsageError, match=r"d\.train\.bin does not exist"):
        measure(Curves(tmp_path / "tiny.yaml", tmp_path / "d", tmp_path / "runs", 6, (1, 2)), said.append)
    with pytest.raises(UsageError, match="one seed"):
        measure(Curves(tmp_path / "tiny.yaml", tmp_path / "c", tmp_path / "runs", 6, (1,)), said.append)
