"""One run carried over layouts by ranks in processes of their own, as train.py is launched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from checkpoint import open_checkpoint
from checkpoint.sums import of_checkpoint, state_digest
from qeffect_lm.app.inference import load_for_inference
from qeffect_lm.inference.generator import Generator
from qeffect_lm.inference.sampling import Sampling
from tests.resharding import assert_equal
from tests.runs import CONFIG, checkpoint_of, metrics_of, overrides, run_here, write_config
from tests.tiny import differing
from tools.common import environment, launch

STEPS = "train.steps=16"


def carried(folder: Path, name: str, source: Path, world: int, *more: str) -> str:
    """Resume from ``source`` to the end in another layout; what was said."""
    arguments = overrides(folder, name, STEPS, f"checkpoint.resume={source}", "checkpoint.every=4", *more)
    code, output = launch(folder / "tiny.yaml", arguments, world, environment()).wait()
    assert code == 0, output
    (said,) = re.findall(r"logical state of \d+ tensors equal to the checkpoint's, digest (\w+)", output)
    assert said == state_digest(of_checkpoint(open_checkpoint(source)))
    return output


def losses(folder: Path, name: str) -> dict[int, tuple[float | None, float | None]]:
    return {m.step: (m.loss, m.grad_norm) for m in metrics_of(folder, name)}


@pytest.mark.long
def test_one_run_over_four_layouts(tmp_path):
    """One process → ZB-V on two stages → two stages and two replicas that share the optimizer's state → one process again."""
    write_config(tmp_path, CONFIG)
    assert run_here(tmp_path, "one", STEPS, "checkpoint.every=4")[0] == 0
    whole = losses(tmp_path, "one")

    def step(name: str, number: int) -> Path:
        return tmp_path / name / "checkpoints" / f"step_{number:08d}"

    carried(tmp_path, "stages", step("one", 4), 2, "parallel.pp=2", "pipeline.schedule=zb-v", "pipeline.w_delay=0")
    assert losses(tmp_path, "stages") == {n: row for n, row in whole.items() if n > 4}
    assert assert_equal(checkpoint_of(tmp_path, "one"), checkpoint_of(tmp_path, "stages")) > 200

    layout = ("parallel.pp=2", "parallel.dp=2", "optim.zero=1", "pipeline.microbatches=2")
    output = carried(tmp_path, "grid", step("stages", 8), 4, *layout)
    assert "now on pp=2 dp=2, saved on pp=2" in output and "WARNING" not in output
    near = losses(tmp_path, "grid")
    assert near[9][0] == pytest.approx(whole[9][0], rel=1e-14) and near[9][1] == pytest.approx(whole[9][1], rel=1e-6)
    assert [near[n][0] for n in range(9, 17)] == pytest.approx([whole[n][0] for n in range(9, 17)], rel=1e-3)
    assert checkpoint_of(tmp_path, "grid").meta["data"] == checkpoint_of(tmp_path, "one").meta["data"]

    models = {name: load_for_inference(tmp_path / name / "checkpoints").model for name in ("one", "stages", "grid")}
    held = {name: {n: t.view(torch.uint8) for n, t in model.tensors.items() if t.dim()} for name, model in models.items()}
    assert differing(held["one"], held["stages"]) == [] and len(held["grid"]) == len(held["one"])
    made = {name: list(Generator(model, Sampling(0), 2).run([[1, 2, 3], [9]], 20)) for name, model in models.items()}
    assert made["one"] == made["stages"] and len(made["grid"]) == 40, "one process generates from any layout"

    output = carried(tmp_path, "again", step("grid", 12), 1, "data.microbatch_size=2")
    again = losses(tmp_path, "again")
    assert again[13][0] == pytest.approx(near[13][0], rel=1e-14)
    assert [again[n][0] for n in range(13, 17)] == pytest.approx([near[n][0] for n in range(13, 17)], rel=1e-3)
    output = carried(tmp_path, "other batch", step("grid", 12), 2, "parallel.dp=2", "data.accept_batch=true")
    warning = "WARNING: a step takes 16 sequences now, 8 before: the same batch needs parallel.dp x pipeline.microbatches = 4"
    assert warning in output
