"""Killed, restarted and captured anew on real GPUs: the same bits, the same graphs, and no memory left behind.

    python -m pytest -q tests/gpu/test_resume_gpu.py
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from checkpoint import find_resumable, open_checkpoint
from checkpoint.resume import GRAPHS
from pipeline.step_end import StepEnd
from qeffect_lm.app.assemble import assemble
from qeffect_lm.app.run import train_run
from qeffect_lm.config import load_config
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.graphs.document import fingerprint
from qeffect_lm.runtime.launch import LaunchEnv
from tools import diff
from tools.proofs.cells import Cell
from tools.proofs.killed import Job, Runs, check, finished

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
STEPS = 30
MIB = 2**20


@pytest.mark.parametrize("scope", ["action", "step"])
@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=two_gpus)])
def test_killed_at_a_random_step(pp, scope, tmp_path, capsys):
    """SIGKILL to every rank of ``train.py``; resumed, every checkpoint is that of the run that was never killed."""
    job, runs = Job("zb-v" if scope == "step" else "1f1b", "step", pp, scope), Runs(tmp_path, "cuda", STEPS)
    report = check(job, runs)
    assert report["ok"], report
    folders = sorted(path for path in tmp_path.iterdir() if path.name.endswith(("-whole", "-killed")))
    assert diff.main([str(folder / "checkpoints") for folder in folders]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("pp", [1, pytest.param(2, marks=two_gpus)])
def test_ten_resumes_ten_equal_fingerprints(pp, tmp_path):
    """Ten restarts from one checkpoint, each in processes of its own; documents are equal, not only their hashes."""
    job, runs = Job("1f1b", "step", pp), Runs(tmp_path, "cuda", 6)
    runs.run(job, "whole")
    source = runs.checkpoint("whole", 4)
    started = {f"resume-{n}": runs.start(job, f"resume-{n}", f"checkpoint.resume={source.path}") for n in range(10)}
    for name, run in started.items():
        assert "resumed at 4, ran 5…6 of 6" in finished(run, name)
    wanted = [source.document(rank, GRAPHS) for rank in range(pp)]
    for rank, text in enumerate(wanted):
        assert text is not None and fingerprint(text.splitlines()) == source.meta["graph_fingerprints"][rank]
        assert sum(line.startswith("node kernel ") for line in text.splitlines()) > 100
    for name in started:
        saved = runs.checkpoint(name, 6)
        assert saved.meta["graph_fingerprints"] == source.meta["graph_fingerprints"]
        assert [saved.document(rank, GRAPHS) for rank in range(pp)] == wanted


def changed_sum(self: StepEnd) -> None:
    """One more kernel in one graph; the numbers stay."""
    SUM(self)
    self._mine.mul_(1.0)


SUM = StepEnd.sum_losses_


def here(runs: Runs, job: Job, name: str, *more: str) -> tuple[int, list[str]]:
    """Train in this process; the exit code and what was said."""
    said: list[str] = []
    config = load_config(runs.config, [*runs.arguments(job, name), *more])
    return train_run(config, LaunchEnv.from_mapping({}), said.append), said


def test_another_kernel_is_named(tmp_path, monkeypatch):
    """``ResumeError`` with graph and first node; ``accept_new_graphs`` goes on, and the numbers are the same."""
    job, runs = Job("1f1b", "step", 1), Runs(tmp_path, "cuda", 6)
    assert here(runs, job, "whole")[0] == 0
    source = runs.checkpoint("whole", 4)
    resume = f"checkpoint.resume={source.path}"
    monkeypatch.setattr(StepEnd, "sum_losses_", changed_sum)
    with pytest.raises(ResumeError, match=r"first in graph sum_losses, node \d+: .*'node kernel .* was captured.*accept-new"):
        here(runs, job, "refused", resume)
    code, said = here(runs, job, "accepted", resume, "checkpoint.accept_new_graphs=true")
    assert code == 0 and any("accepted: rank 0's graphs" in line for line in said), said
    assert diff.main([str(runs.folder / name / "checkpoints") for name in ("whole", "accepted")]) == 0


@pytest.mark.parametrize("scope", ["action", "step"])
def test_captured_again_and_again(scope):
    """Torn down and captured anew in one process: one fingerprint, the memory of the first time, and steps go on."""
    cell = Cell("zb-v@2", "step", 256, 4, scope=scope)
    assembly = assemble(cell.config("cuda_graphs", "cuda"), None, cell.make_plan())
    assembly.prepare(cell.batch(0))
    prints, reserved, allocated = set(), [], []
    for number in range(7):
        float(assembly.engine.step(number, cell.batch(number)).loss)
        assembly.capture()
        prints.add(assembly.graph_fingerprint())
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
        allocated.append(torch.cuda.memory_allocated())
    assert len(prints) == 1
    assert max(reserved[2:]) - reserved[1] <= 4 * MIB and max(allocated[2:]) - allocated[1] <= MIB, (reserved, allocated)
    float(assembly.engine.step(7, cell.batch(7)).loss)
    assembly.release()


@pytest.mark.parametrize("scope", ["action", "step"])
def test_everything_torn_down_and_made_anew(scope):
    """New objects each time, as a restart in one process makes them: nothing of the old ones stays."""
    cell = Cell("1f1b", "step", 256, 4, scope=scope)
    prints, left = set(), []
    for _ in range(5):
        assembly = assemble(cell.config("cuda_graphs", "cuda"), None, cell.make_plan())
        assembly.prepare(cell.batch(0))
        prints.add(assembly.graph_fingerprint())
        float(assembly.engine.step(0, cell.batch(0)).loss)
        assembly.release()
        del assembly
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved())
    assert len(prints) == 1 and max(left[2:]) - left[1] <= 4 * MIB, left


def test_a_checkpoint_names_what_was_captured(tmp_path):
    """The document beside the shards lists kernels with their launch shapes, and no address."""
    job, runs = Job("1f1b", "step", 1), Runs(tmp_path, "cuda", 2)
    assert here(runs, job, "run")[0] == 0
    found = find_resumable(Path(runs.folder / "run" / "checkpoints"))
    assert found is not None
    text = open_checkpoint(found).document(0, GRAPHS) or ""
    nodes = [line for line in text.splitlines() if line.startswith("node kernel ")]
    assert any("grid=" in line and "block=" in line and "shared=" in line for line in nodes)
    assert all("(without a name)" not in line and " 0x7f" not in line for line in nodes)
