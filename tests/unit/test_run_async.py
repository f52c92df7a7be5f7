"""Runs that save in the background: the same checkpoints, three events of each, failures at the next step and at the end."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint import CheckpointError, find_resumable, scan, step_name, writer
from checkpoint.staging import Staging
from qeffect_lm.app.dry_run import describe
from qeffect_lm.app.main import main
from qeffect_lm.app.run import Run, train_run
from qeffect_lm.config import load_config
from qeffect_lm.runtime.launch import LaunchEnv
from tests.crashing import Operation, Watched
from tests.runs import CONFIG, assert_same_run, metrics_of, overrides, run_here, write_config
from tests.unit.test_run_errors import environment

ASYNC = "checkpoint.async_save=true"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and ``whole``: 6 steps, saved synchronously every 2."""
    path = tmp_path_factory.mktemp("async")
    text = CONFIG.replace("{steps: 12}", "{steps: 6}").replace("num_layers: 4", "num_layers: 2").replace("every: 3", "every: 2")
    write_config(path, text.replace("backend: host_replay", "backend: eager"))
    assert run_here(path, "whole")[0] == 0
    return path


def disk(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """``act`` happens when the shard of ``step`` is about to be written."""

    def before(_: int, operation: Operation) -> None:
        if operation.name == "create" and operation.path.suffix == ".safetensors" and step_name(step) in str(operation.path):
            act()

    monkeypatch.setattr(writer, "FileOps", lambda: Watched(before))


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def events_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]


def test_the_same_checkpoints_and_three_events_of_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also resumed from one that was written in the background. A synchronous run has the last of them alone."""
    assert run_here(folder, "copied", ASYNC)[0] == 0
    assert assert_same_run(folder, "whole", "copied") > 100
    shutil.rmtree(folder / "copied" / "checkpoints" / step_name(6))
    with open(folder / "copied" / "events.jsonl", "a") as file:
        file.write('{"event": "reque')  # a full disk cut it
    code, said = run_here(folder, "copied", ASYNC)
    assert code == 0 and "resumed at 4, ran 5…6 of 6" in said
    assert assert_same_run(folder, "whole", "copied") > 100
    for step, saves in ((2, 1), (4, 1), (6, 2)):
        told = [one["event"] for one in events_of(folder, "copied") if one["step"] == step]
        told = [event for event in told if event.startswith("save_") and event != "save_waiting"]
        assert told == ["save_requested", "save_staged", "save_durable"] * saves
    lines = capsys.readouterr().out.splitlines()
    assert "checkpoint of step 2 requested" in lines
    assert any(line.startswith("checkpoint of step 6 durable: ") for line in lines)
    extras = {one.step: one.extra for one in metrics_of(folder, "copied")}
    assert extras[3]["checkpoint_stall_ms"] > 0 and "checkpoint_stall_ms" not in extras[2]
    at_once = [(one["event"], one["step"]) for one in events_of(folder, "whole") if one["event"].startswith("save_")]
    assert at_once == [("save_durable", 2), ("save_durable", 4), ("save_durable", 6)]


def test_a_failure_ends_the_run_at_the_next_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: exit code 1 with the message of the save, the checkpoint before it survives, and the next start goes on from it."""
    disk(monkeypatch, 4, full)
    step = Run.next_batch

    def slowly(self: Run) -> Any:
        deadline = time.monotonic() + 20
        while _requested(folder / "full", 4) and not self.saver.failed and time.monotonic() < deadline:
            time.sleep(0.01)
        return step(self)

    monkeypatch.setattr(Run, "next_batch", slowly)
    with pytest.raises(CheckpointError, match=r"step 4 was not saved: rank 0: .*ENOSPC.*step_00000002 survives"):
        run_here(folder, "full", ASYNC)
    assert metrics_of(folder, "full")[-1].step == 5  # the step in which it was noticed
    assert [one["event"] for one in events_of(folder, "full")][-2:] == ["save_failed", "error"]
    monkeypatch.undo()
    code, said = run_here(folder, "full", ASYNC)
    assert code == 0 and "resumed at 2, ran 3…6 of 6" in said
    assert_same_run(folder, "whole", "full")


def _requested(run: Path, step: int) -> bool:
    path = run / "events.jsonl"
    return path.exists() and f'"save_requested", "step": {step}' in path.read_text()


def test_a_failure_of_the_last_save_is_the_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    disk(monkeypatch, 6, full)
    code = main([str(folder / "tiny.yaml"), *overrides(folder, "last", ASYNC)], environment())
    captured = capsys.readouterr()
    assert code == 1 and "error: the checkpoint of step 6 was not saved: rank 0: " in captured.err
    assert "ran 1…6 of 6" not in captured.out
    newest = find_resumable(folder / "last" / "checkpoints")
    assert newest is not None and newest.name == step_name(4)


class Stopped:
    """SIGTERM has come."""

    requested = None


@pytest.mark.parametrize("how", ["SIGTERM", "an error in a step"])
def test_what_is_being_written_is_finished_before_the_run_ends(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Also when another error ends the run. With a disk on which a write takes a while; the save at the end waits for it."""
    name = how.replace(" ", "-")

    def slow() -> None:
        until = time.monotonic() + (20 if how == "SIGTERM" else 0.3)
        while time.monotonic() < until and "save_waiting" not in {one["event"] for one in events_of(folder, name)}:
            time.sleep(0.01)

    disk(monkeypatch, 2, slow)
    signals = Stopped()
    step, said = Run.next_batch, []

    def third(self: Run) -> Any:
        if self.saver.news():  # step 2 was just saved, or is being
            if how == "SIGTERM":
                signals.requested = "SIGTERM"  # type: ignore[assignment]
            else:
                raise ValueError("step 3 broke")
        return step(self)

    monkeypatch.setattr(Run, "next_batch", third)
    config = load_config(folder / "tiny.yaml", overrides(folder, name, ASYNC))
    if how == "SIGTERM":
        assert train_run(config, LaunchEnv.from_mapping({}), said.append, signals) == 0  # type: ignore[arg-type]
        assert "stopped by SIGTERM at step 3 of 6, saved" in said[-1]
        assert [(one["step"], one["other"]) for one in events_of(folder, name) if one["event"] == "save_waiting"] == [(3, 2)]
    else:
        with pytest.raises(ValueError, match="step 3 broke"):
            train_run(config, LaunchEnv.from_mapping({}), said.append, signals)  # type: ignore[arg-type]
    kept = [(one.step, one.fault) for one in scan(folder / name / "checkpoints")]
    assert kept == [(2, None), (3, None)][: 2 if how == "SIGTERM" else 1]
    monkeypatch.undo()
    assert run_here(folder, name, ASYNC)[0] == 0
    assert_same_run(folder, "whole", name)


def test_the_dry_run_says_what_the_copy_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, reserve = [], Staging.reserve

    def reserved(self: Staging, tensors: Any) -> None:
        reserve(self, tensors)
        sizes.append(self.nbytes)

    monkeypatch.setattr(Staging, "reserve", reserved)
    more = ["model.hidden_size=128", "train.steps=1"]
    assert run_here(folder, "sized", ASYNC, *more)[0] == 0
    pattern = r"saving in the background: up to ([\d.]+) MiB of host memory"
    found = re.search(pattern, describe(load_config(folder / "tiny.yaml", overrides(folder, "sized", ASYNC, *more))))
    assert found is not None and len(set(sizes)) == 1
    assert sizes[0] < float(found[1]) * 2**20 < 1.2 * sizes[0]
    assert re.search(pattern, describe(load_config(folder / "tiny.yaml", overrides(folder, "sized", *more)))) is None
