"""Errors a user meets: one clear message with what to do, exit 2 for usage and 1 for failure, no traceback, nothing lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint import open_checkpoint, resolve
from checkpoint.resume import restore
from qeffect_lm.app.main import main
from qeffect_lm.errors import UsageError
from tests.runs import CONFIG, checkpoint_of, make_corpus, metrics_of, overrides, run_here, write_config
from tools.common import TRAIN
from tools.plan import main as plan_tool


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A configuration and one finished run, ``whole`` (6 steps, checkpoints at 3 and 6)."""
    path = tmp_path_factory.mktemp("errors")
    write_config(path, CONFIG.replace("{steps: 12}", "{steps: 6}").replace("backend: host_replay", "backend: eager"))
    assert run_here(path, "whole")[0] == 0
    return path


def environment() -> dict[str, str]:
    """This process's variables, without a launcher's."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_SIZE"))}


def command(folder: Path, capsys, *arguments: str) -> tuple[int, str]:
    """The command line in this process: exit code and stderr."""
    code = main([str(folder / "tiny.yaml"), *arguments], environment())
    return code, capsys.readouterr().err


def test_unknown_key_names_the_nearest(folder, capsys):
    code, err = command(folder, capsys, "optim.learning_rate=1", "optim.weight_decya=0.1")
    assert code == 2 and "weight_decya" in err and "weight_decay" in err and "Traceback" not in err


def test_wrong_type_names_key_and_unit(folder, capsys):
    code, err = command(folder, capsys, "train.max_minutes=soon")
    assert code == 2 and "train.max_minutes" in err and "soon" in err and "minutes" in err


def test_missing_and_empty_corpus(folder, capsys, tmp_path):
    code, err = command(folder, capsys, f"run.dir={tmp_path}", f"data.train={tmp_path / 'nowhere'}")
    assert code == 2 and "nowhere" in err
    for key in ("data.train", "data.valid"):  # nothing is left behind of a run that never began
        given = [f"run.dir={tmp_path / 'never'}", f"data.train={folder / 'corpus'}", f"{key}={tmp_path / 'nowhere'}"]
        code, err = command(folder, capsys, *given)
        assert code == 2 and "nowhere" in err and not (tmp_path / "never").exists()
    make_corpus(tmp_path / "short", documents=1, length=5)
    code, err = command(folder, capsys, f"run.dir={tmp_path / 'run'}", f"data.train={tmp_path / 'short'}")
    assert code == 2 and "5 tokens" in err and "seq_len 16" in err
    code, err = command(folder, capsys, f"run.dir={tmp_path / 'run'}")
    assert code == 2 and "data.train" in err and "tools.preprocess" in err


def test_vocabulary_that_disagrees(folder, capsys, tmp_path):
    """Token ids beyond the model's vocabulary, and a tokenizer of another size."""
    code, err = command(folder, capsys, *overrides(folder, str(tmp_path / "v"), "model.vocab_size=32"))
    assert code == 2 and "model.vocab_size is 32" in err
    from qeffect_lm.data.tokenizer import train_sentencepiece

    text = Path(__file__).read_text()
    train_sentencepiece([text], tmp_path / "small", vocab_size=400)
    code, err = command(folder, capsys, *overrides(folder, str(tmp_path / "t"), f"data.tokenizer={tmp_path / 'small.model'}"))
    assert code == 2 and "400" in err and "model.vocab_size" in err


def test_checkpoint_of_another_model_or_recipe(folder, capsys):
    for change in ("model.ffn_size=64", "precision.fp8.recipe=current", "precision.fp8.history=4", "data.seq_len=8"):
        code, err = command(folder, capsys, *overrides(folder, "whole", "train.steps=9", change))
        assert code == 2 and change.split("=")[0] in err and "whole" in err, change
    assert checkpoint_of(folder, "whole").step == 6


def test_missing_history_is_refused_by_name(folder):
    """S7: one amax history is not in the checkpoint: refused by name before anything is written, never defaulted."""
    from qeffect_lm.app.assemble import assemble
    from qeffect_lm.app.sources import make_loader
    from qeffect_lm.config import load_config
    from qeffect_lm.contract.errors import ResumeError
    from qeffect_lm.parallel.mesh import Mesh

    config = load_config(folder / "tiny.yaml", overrides(folder, "whole"))
    saved = checkpoint_of(folder, "whole")
    name = "amax_history/layers.2.mlp.down.grad_output"
    del saved.manifest.tensors[name]
    assembly = assemble(config)
    before = {item.name: item.tensor.clone() for item in assembly.logical_tensors()}
    loader = make_loader(config, Mesh({}))
    from checkpoint import SingleProcess

    with pytest.raises(ResumeError, match="amax_history/layers.2.mlp.down.grad_output"):
        restore(saved, assembly, loader, SingleProcess(), Mesh({}).coords, {})
    from tests.tiny import differing

    after = {item.name: item.tensor for item in assembly.logical_tensors()}
    keep = {n for n in before if before[n].dtype.itemsize > 1}
    assert differing({n: before[n] for n in keep}, {n: after[n] for n in keep}) == []


def test_tampered_weight_scale_is_refused(folder, tmp_path):
    """A cached weight that its master and scale do not give back, byte for byte, is named."""
    from checkpoint import rewrite_checkpoint

    saved = checkpoint_of(folder, "whole")
    name = "scale/layers.1.mlp.down.weight"
    rewrite_checkpoint(saved, tmp_path / "run" / "checkpoints", {name: saved.read(name) * 2})
    from qeffect_lm.contract.errors import ResumeError

    with pytest.raises(ResumeError, match="cached_weight/layers.1.mlp.down.weight"):
        run_here(folder, str(tmp_path / "run"), "train.steps=9")


def test_only_a_partial_checkpoint(folder, capsys, tmp_path):
    """C8: a folder with only a partial checkpoint: non-zero, never a silent fresh start."""
    shutil.copytree(folder / "whole" / "checkpoints" / "step_00000006", tmp_path / "run" / "checkpoints" / "step_00000006")
    (tmp_path / "run" / "checkpoints" / "step_00000006" / "manifest.json").unlink()
    code, err = command(folder, capsys, *overrides(folder, str(tmp_path / "run")))
    assert code == 1 and "step_00000006" in err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_never_resume_over_existing_checkpoints(folder, capsys):
    code, err = command(folder, capsys, *overrides(folder, "whole", "checkpoint.resume=never"))
    assert code == 2 and "step_00000006" in err
    earlier = folder / "whole" / "checkpoints" / "step_00000003"
    code, err = command(folder, capsys, *overrides(folder, "whole", f"checkpoint.resume={earlier}"))
    assert code == 2 and "step_00000006" in err


def test_data_cursor_of_another_corpus(folder, capsys, tmp_path):
    make_corpus(tmp_path / "other", seed=9)
    arguments = overrides(folder, "whole", "train.steps=9")
    code, err = command(folder, capsys, *arguments, f"data.train={tmp_path / 'other'}")
    assert code == 2 and "dataset" in err


def test_samples_once_each_over_saves_and_resumes(folder):
    """C2: save at 3, resume, save at 6, resume: the cursor counts every sample once."""
    assert run_here(folder, "twice", "train.steps=3")[0] == 0
    assert checkpoint_of(folder, "twice").meta["data"]["next_sample"] == 3 * 8
    assert run_here(folder, "twice", "train.steps=6")[0] == 0
    assert checkpoint_of(folder, "twice").meta["data"]["next_sample"] == 6 * 8
    assert [m.step for m in metrics_of(folder, "twice")] == [1, 2, 3, 4, 5, 6]
    per_step = 4 * 2 * 16  # microbatches, sequences, tokens
    assert [m.tokens for m in metrics_of(folder, "twice")] == [per_step * step for step in range(1, 7)]
    assert checkpoint_of(folder, "twice").meta["tokens"] == 6 * per_step


def test_generators_before_the_next_step(folder):
    """C1: every generator's state just before step 4, in the run that went on and in the one that resumed: equal bytes."""
    import random

    import numpy as np
    import torch

    from qeffect_lm.app import run as run_module
    from qeffect_lm.runtime.rng import generator_tensors

    seen: dict[str, dict] = {}
    original = run_module.Run.next_batch

    def drawing(self):
        """A step that draws from every generator, as a user's callback might."""
        if self.loader.state()["next_sample"] == 3 * 8:
            seen[self.config.run.dir] = generator_tensors()
        random.random(), np.random.normal(), torch.rand(3)
        return original(self)

    run_module.Run.next_batch = drawing  # type: ignore[method-assign]
    try:
        assert run_here(folder, "drawn")[0] == 0
        shutil.copytree(folder / "drawn" / "checkpoints" / "step_00000003", folder / "again" / "checkpoints" / "step_00000003")
        assert run_here(folder, "again")[0] == 0
    finally:
        run_module.Run.next_batch = original  # type: ignore[method-assign]
    a, b = seen[str(folder / "drawn")], seen[str(folder / "again")]
    assert set(a) == set(b) >= {"torch", "numpy", "python"}
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["python"], generator_tensors()["python"])


def test_nonfinite_policy(folder):
    """S8: an infinity in the masters' gradients: skip goes on and says so, raise ends with exit code 1's error."""
    from qeffect_lm.app.assemble import Assembly
    from qeffect_lm.runtime.loop import NonFiniteError

    original = Assembly.prepare

    def broken(self, batch) -> None:
        """The gradient of one norm weight becomes infinite in step 2 only."""
        original(self, batch)
        reduce = self.engine.end.reduce_

        def reduce_once() -> None:
            if self.engine._step == 1:
                self.flat.grad("final_norm.weight")[0] = float("inf")
            reduce()

        self.engine.end.reduce_ = reduce_once

    Assembly.prepare = broken  # type: ignore[method-assign]
    try:
        assert run_here(folder, "skips")[0] == 0
        with pytest.raises(NonFiniteError, match="step 2"):
            run_here(folder, "raises", "optim.nonfinite=raise")
    finally:
        Assembly.prepare = original  # type: ignore[method-assign]
    assert [m.skipped for m in metrics_of(folder, "skips")] == [False, True, False, False, False, False]
    rates = [m.lr for m in metrics_of(folder, "skips")]
    assert rates[:3] == [0.005, 0.01, 0.01] and rates[4] < rates[3] == 0.01  # it did not advance over the skipped step


def test_full_disk_at_save(folder, tmp_path):
    """A save that the disk refuses (here: a limit on file sizes): exit 1, the previous checkpoint survives and is named."""
    run = tmp_path / "run"
    shutil.copytree(folder / "whole", run)
    arguments = [str(folder / "tiny.yaml"), *overrides(folder, str(run), "train.steps=9")]

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    done = subprocess.run(
        [sys.executable, str(TRAIN), *arguments],
        env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        capture_output=True,
        text=True,
        preexec_fn=small_files,
    )
    assert done.returncode == 1, done.stderr
    assert "step_00000006" in done.stderr and "Traceback" not in done.stderr
    assert open_checkpoint(resolve(run / "checkpoints")).step == 6
    assert not [p for p in (run / "checkpoints").iterdir() if p.name.startswith((".tmp", "step_00000009"))]


def test_unwritable_run_dir(folder, capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, err = command(folder, capsys, *overrides(folder, str(tmp_path / "file" / "run")))
    assert code in (1, 2) and "file" in err and "Traceback" not in err and "unexpected" not in err


def test_dry_run_and_help(folder, capsys):
    assert main([str(folder / "tiny.yaml"), "--dry-run", "parallel.pp=2"], environment()) == 0
    out = capsys.readouterr().out
    for word in ("parameters:", "rank 0", "rank 1", "memory per pipeline rank", "gradients", "optimizer", "activations", "F0"):
        assert word in out
    with pytest.raises(SystemExit) as stop:
        main(["--help"], environment())
    assert stop.value.code == 0
    text = capsys.readouterr().out
    from qeffect_lm.config import Config
    from qeffect_lm.config_help import describe

    assert all(key.split(".")[-1] in text for key in describe(Config))


def test_the_plan_of_a_run_is_found(folder, capsys):
    """`tools.plan --plan` takes what diff and generate take: a run, its folder of checkpoints, one of them."""
    for path in (folder / "whole", folder / "whole" / "checkpoints", resolve(folder / "whole")):
        assert plan_tool(["--plan", str(path), "--check"]) == 0
        assert "proved for every interleaving" in capsys.readouterr().out


def test_a_missing_file_alone_is_asked_for(capsys):
    with pytest.raises(SystemExit) as stop:
        main([], environment())
    assert stop.value.code == 2 and capsys.readouterr().err.endswith("arguments are required: CONFIG.yaml\n")


def test_dry_run_says_what_training_would_miss(folder, capsys, tmp_path):
    """ep without experts is refused as in training; a corpus or tokenizer that is not there yet is a note."""
    code, err = command(folder, capsys, "--dry-run", "parallel.ep=2", "precision.fp8.recipe=none")
    assert code == 2 and "parallel.ep 2: model.family 'llama' has no experts" in err
    code, err = command(folder, capsys, f"run.dir={tmp_path / 'run'}", "parallel.ep=2", "precision.fp8.recipe=none")
    assert code == 2 and "has no experts" in err and "start 2 processes" not in err
    code, err = command(folder, capsys, f"run.dir={tmp_path / 'run'}", "parallel.tp=2", "precision.fp8.recipe=none")
    assert code == 2 and "start 2 processes" in err
    missing = tmp_path / "later.model"
    assert main([str(folder / "tiny.yaml"), "--dry-run", f"data.tokenizer={missing}"], environment()) == 0
    out = capsys.readouterr().out
    assert "data.train is not set" in out and "later.model does not exist" in out


def test_requeue_code_is_not_for_torchrun(folder):
    """torchrun's agent takes any other code than 0 for a failure and would start a stopped run again."""
    from qeffect_lm.app.run import exit_code
    from qeffect_lm.config import load_config
    from qeffect_lm.runtime.launch import LaunchEnv

    config = load_config(folder / "tiny.yaml", ["checkpoint.requeue_exit_code=99"])
    assert exit_code(config, LaunchEnv(launcher="slurm"), True) == 99 == exit_code(config, LaunchEnv(), True)
    assert exit_code(config, LaunchEnv(launcher="torchrun"), True) == 0 == exit_code(config, LaunchEnv(), False)


def test_a_parameter_without_a_spec_is_named(folder, monkeypatch):
    """A layer added without its ParameterSpec."""
    from models.decoder import Decoder

    original = Decoder.parameters
    monkeypatch.setattr(
        Decoder, "parameters", lambda self, layers=None: [s for s in original(self, layers) if s.name != "final_norm.weight"]
    )
    with pytest.raises(UsageError, match="final_norm.weight"):
        run_here(folder, "nospec")


def test_plot_tool(folder, capsys):
    from tools import plot

    assert plot.main([str(folder / "whole")]) == 0
    picture = Path(capsys.readouterr().out.strip())
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 10_000
    assert plot.main([str(folder / "nothing")]) == 2


def test_resolved_config_is_beside_the_run(folder):
    from qeffect_lm.config import load_config

    saved = load_config(folder / "whole" / "config.yaml")
    assert saved == load_config(folder / "tiny.yaml", overrides(folder, "whole"))


def test_metrics_fields(folder):
    line = json.loads((folder / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    wanted = {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_ms", "scale_epoch", "skipped"}
    assert wanted <= set(line)
