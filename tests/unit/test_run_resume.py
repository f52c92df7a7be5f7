"""Resuming a run whose configuration, folder or checkpoints changed meanwhile."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest

from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.lock import holding
from tests.runs import CONFIG, checkpoint_of, metrics_of, run_here, write_config


@pytest.fixture(scope="module", params=["eager", "host_replay"])
def folder(request, tmp_path_factory) -> Path:
    """A finished run of 6 steps, ``whole``, with checkpoints at 3 and 6."""
    path = tmp_path_factory.mktemp(request.param)
    write_config(path, CONFIG.replace("{steps: 12}", "{steps: 6}").replace("backend: host_replay", f"backend: {request.param}"))
    assert run_here(path, "whole")[0] == 0
    return path


WARN = [
    "train.steps=9",
    "optim.weight_decay=0.2",
    "optim.beta1=0.8",
    "optim.clip_norm=null",
    "optim.schedule=cosine",
    "optim.eps=1e-7",
    "pipeline.schedule=gpipe",
    "pipeline.w_delay=0",
    "model.dropout=0.0",
]


@pytest.mark.parametrize("change", WARN)
def test_keys_marked_warn_may_change(folder, change):
    """The change is printed, the run goes on to its end, and where graphs changed it says that they were captured anew."""
    name = f"warn-{change.split('=')[0]}"
    shutil.copytree(folder / "whole", folder / name)
    code, said = run_here(folder, name, "train.steps=8", change)
    assert code == 0
    assert any(change.split("=")[0] in line for line in said if "changed" in line)
    assert any("captured anew" in line for line in said)
    assert checkpoint_of(folder, name).step == (9 if "train.steps" in change else 8)


def test_a_longer_run_equals_one_that_was_longer_from_the_start(folder):
    """Extending a run (flat learning rate): bitwise what a long run would have done."""
    flat = ["optim.min_lr_ratio=1", "optim.warmup_steps=0"]
    assert run_here(folder, "short", *flat)[0] == 0
    assert run_here(folder, "short", *flat, "train.steps=8")[0] == 0
    assert run_here(folder, "long", *flat, "train.steps=8")[0] == 0
    rows = [[(m.step, m.loss, m.grad_norm) for m in metrics_of(folder, name)] for name in ("short", "long")]
    assert rows[0] == rows[1]


def test_finished_run_started_again(folder):
    code, said = run_here(folder, "whole")
    assert code == 0 and said[-1] == "resumed at 6, ran no step of 6"


def test_damaged_newest_checkpoint_names_the_one_before(folder):
    shutil.copytree(folder / "whole", folder / "damaged")
    shard = next((folder / "damaged/checkpoints/step_00000006").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ResumeError, match="step_00000003"):
        run_here(folder, "damaged", "train.steps=9")
    shutil.move(folder / "damaged/checkpoints/step_00000006", folder / "damaged/away")
    code, said = run_here(folder, "damaged")
    assert code == 0 and said[-1] == "resumed at 3, ran 4…6 of 6"


def test_a_branch_restarts_with_the_same_command(folder):
    """``checkpoint.resume=PATH`` begins a branch; started again, it goes on from the branch's own newest checkpoint."""
    source = folder / "whole" / "checkpoints" / "step_00000003"
    args = [f"checkpoint.resume={source}", "optim.lr=0.02"]
    code, said = run_here(folder, "branch", *args, "train.steps=4")
    assert code == 0 and "resumed at 3, ran 4…4 of 4" in said
    code, said = run_here(folder, "branch", *args, "train.steps=6")
    assert code == 0 and "resumed at 4, ran 5…6 of 6" in said
    other = folder / "whole" / "checkpoints" / "step_00000006"
    with pytest.raises(UsageError, match="does not exist"):
        run_here(folder, "branch", f"checkpoint.resume={folder / 'nowhere'}")
    code, said = run_here(folder, "branch2", f"checkpoint.resume={other}", "train.steps=7")
    assert code == 0
    with pytest.raises(UsageError, match="step_00000007"):
        run_here(folder, "branch2", f"checkpoint.resume={source}", "train.steps=9")


def _hold(path: Path, ready, release) -> None:
    with holding(path):
        ready.set()
        release.wait(60)


def test_two_runs_in_one_folder(folder):
    """The second is refused, naming the first's process; once the first is gone (killed, even) the folder is free."""
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(folder / "whole", ready, release))
    process.start()
    try:
        assert ready.wait(60)
        with pytest.raises(UsageError, match=f"process {process.pid} on "):
            run_here(folder, "whole", "train.steps=7")
    finally:
        process.kill()
        process.join()
    assert run_here(folder, "whole")[0] == 0
