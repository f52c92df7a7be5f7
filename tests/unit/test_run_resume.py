"""Resuming a run whose configuration, folder or checkpoints changed meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from checkpoint import open_checkpoint
from checkpoint.resume import GRAPHS
from pipeline.step_end import StepEnd
from qeffect_lm.app.main import main
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.errors import UsageError
from qeffect_lm.graphs.document import fingerprint
from qeffect_lm.runtime.lock import holding
from tests.runs import CONFIG, checkpoint_of, metrics_of, overrides, run_here, write_config


@pytest.fixture(scope="module", params=[pytest.param("eager", marks=pytest.mark.long), "host_replay"])
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


def test_another_batch_is_said_loudly(folder):
    """Half the microbatches, on as many replicas: the step is another one, and the remedy has the right number."""
    shutil.copytree(folder / "whole", folder / "half")
    with pytest.raises(UsageError, match=r"microbatches = 4, or set data\.accept_batch=true"):
        run_here(folder, "half", "train.steps=8", "pipeline.microbatches=2")
    code, said = run_here(folder, "half", "train.steps=8", "pipeline.microbatches=2", "data.accept_batch=true")
    assert code == 0 and checkpoint_of(folder, "half").meta["data"]["next_sample"] == 6 * 8 + 2 * 4
    (line,) = [line for line in said if line.startswith("WARNING")]
    wanted = "parallel.dp x parallel.ep x pipeline.microbatches = 4"
    assert line.endswith(f"takes 4 sequences now, 8 before: the same batch needs {wanted}")
    assert checkpoint_of(folder, "half").meta["data"]["batches"] == [[0, 8], [48, 4]]


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


def changed_sum(self: StepEnd) -> None:
    """Another operation in one graph; the numbers stay."""
    SUM(self)
    self._mine.mul_(1.0)


SUM = StepEnd.sum_losses_


def test_other_graphs_are_refused_by_their_first_node(folder, monkeypatch):
    """A graph that a library or a change of code made otherwise: named, unless it is accepted. (Eager has none.)"""
    captured = "host_replay" in folder.name
    for name in ("changed", "accepted", "flag"):
        shutil.copytree(folder / "whole", folder / name)
    assert any(file.endswith(".txt.gz") for file in checkpoint_of(folder, "changed").manifest.files)
    checkpoint = checkpoint_of(folder, "changed")
    lines = (checkpoint.document(0, GRAPHS) or "").splitlines()
    assert fingerprint(lines) == checkpoint.meta["graph_fingerprints"][0] and lines[0] == "plan 1"
    assert any(line.startswith("graph 0F i=0 w=0") for line in lines) == captured
    number = sum(line.startswith("operation ") for line in lines[lines.index("graph sum_losses") :]) if captured else 0
    monkeypatch.setattr(StepEnd, "sum_losses_", changed_sum)
    if captured:
        wanted = rf"rank 0's graphs are not .*first in graph sum_losses, operation {number}: nothing was saved, .*mul_.*accept"
        with pytest.raises(ResumeError, match=wanted) as caught:
            run_here(folder, "changed")
        assert "away" not in str(caught.value)  # the checkpoint is not at fault
    code, said = run_here(folder, "accepted", "checkpoint.accept_new_graphs=true")
    assert code == 0 and any("accepted: rank 0's graphs" in line for line in said) == captured
    args = [str(folder / "tiny.yaml"), *overrides(folder, "flag"), "--accept-new-graphs"]
    assert main(args, {**os.environ}) == 0


def test_a_damaged_list_of_nodes_is_told_to_all_ranks(folder, monkeypatch):
    """It is read where the graphs differ, on the rank that it belongs to; the others hear of it like of any difference."""
    if "host_replay" not in folder.name:
        return
    shutil.copytree(folder / "whole", folder / "unread")
    file = next((folder / "unread/checkpoints/step_00000006").glob("*.txt.gz"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(StepEnd, "sum_losses_", changed_sum)
    with pytest.raises(ResumeError, match=r"rank 0's graphs are not .*cannot be read: .*is damaged"):
        run_here(folder, "unread")


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.long)])
def test_equal_fingerprints_of_resumes(folder, times):
    """A run saved after each step, resumed three or ten times from copies: each re-capture has the manifest's fingerprint."""
    whole = f"prints-{times}"
    assert run_here(folder, whole, "checkpoint.every=1")[0] == 0
    saved = {name: open_checkpoint(folder / whole / "checkpoints" / f"step_{name:08d}") for name in (1, 3, 6)}
    prints = {tuple(checkpoint.meta["graph_fingerprints"]) for checkpoint in saved.values()}
    assert len(prints) == 1
    for number in range(times):
        source = saved[(1, 3, 6)[number % 3]].path
        name = f"again-{times}-{number}"
        steps = 6 if number % 3 < 2 else 7
        code, _ = run_here(folder, name, f"checkpoint.resume={source}", f"train.steps={steps}")
        assert code == 0
        if steps == 6:  # a longer run has a longer table of learning rates
            prints.add(tuple(checkpoint_of(folder, name).meta["graph_fingerprints"]))
    assert len(prints) == 1


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


def test_two_runs_with_one_folder_of_checkpoints(folder):
    """They would clear away each other's unfinished saves: the second is refused, whatever its ``run.dir``; one run alone may
    have it in its ``run.dir`` itself."""
    shared = f"checkpoint.dir={folder / 'shared'}"
    busy = pytest.raises(UsageError, match=r"shared is in use .*another checkpoint.dir")
    with holding(folder / "shared"), busy:
        run_here(folder, "second", shared, "train.steps=1")
    assert run_here(folder, "second", shared, "train.steps=1")[0] == 0
    assert run_here(folder, "third", f"checkpoint.dir={folder / 'third'}", "train.steps=1")[0] == 0
