"""Logging for TensorBoard: what its event files hold, over a resume too; without the package nothing breaks."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qeffect_lm.app import run
from qeffect_lm.app.saving import Saver
from qeffect_lm.runtime.metrics import StepMetrics
from qeffect_lm.runtime.tensorboard_logger import TensorboardLogger
from tests.runs import CONFIG, metrics_of, run_here, write_config


def events(path: Path) -> Iterator[Any]:
    """The records of an event file: length, checksum, data, checksum (TFRecord)."""
    internal = pytest.importorskip("tensorboardX.proto.event_pb2")
    data, position = path.read_bytes(), 0
    while position < len(data):
        (length,) = struct.unpack("<Q", data[position : position + 8])
        event = internal.Event()
        event.ParseFromString(data[position + 12 : position + 12 + length])
        position += 16 + length
        yield event


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events(path):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def metrics(step: int, **extra: Any) -> StepMetrics:
    return StepMetrics(step, 1.0 / step, None, 1e-3, 100 * step, 1e4, 12.5, skipped=step == 7, extra=extra)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_rows_and_a_resume(tmp_path: Path) -> None:
    """Every number under its own step, lists by rank; a resumed process says from which step on its rows count."""
    pytest.importorskip("tensorboardX")
    first = TensorboardLogger(True, tmp_path, config={"train": {"steps": 12}}, notice=pytest.fail)
    for step in range(1, 9):
        first.log(metrics(step, work_ms=[1.5, 2.5], skip_reason="not finite"))
    first.event({"event": "warning", "step": 8, "kind": "spike", "text": "it spiked"})
    first.event({"event": "save_durable", "step": 8})
    (one,) = files(tmp_path)
    told = scalars(one)
    assert [step for step, _ in told["loss"]] == list(range(1, 9)) and told["loss"][1] == (2, 0.5)
    assert [value for _, value in told["work_ms/1"]] == [2.5] * 8 and told["skipped"][6] == (7, 1.0)
    assert "grad_norm" not in told and "skip_reason" not in told and "step" not in told
    texts = {v.tag: v.tensor.string_val[0].decode() for e in events(one) for v in e.summary.value if v.tensor.string_val}
    assert '"steps": 12' in texts["config/text_summary"] and texts["warning/text_summary"] == "it spiked"
    assert len(texts) == 2
    first.finish()
    first.finish()
    first.log(metrics(9))

    second = TensorboardLogger(True, tmp_path, resume_step=5, notice=pytest.fail)
    second.log(metrics(6))
    second.finish()
    both = files(tmp_path)
    assert len(both) == 2 and both[0] == one and scalars(one) == told
    assert scalars(both[1])["loss"] == [(6, pytest.approx(1 / 6))]
    starts = [event for event in events(both[1]) if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in starts] == [(6, 1)]  # START: discard from 6 on
    assert not any(event.HasField("session_log") for event in events(one))


def test_off_absent_and_unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off is silent; else one line that says what is missing, and training goes on."""
    notices: list[str] = []

    def logged(folder: Path, enabled: bool = True) -> None:
        logger = TensorboardLogger(enabled, folder, notice=notices.append)
        logger.log(metrics(1))
        logger.event({"event": "skip", "step": 1, "reason": "not finite"})
        logger.finish()

    logged(tmp_path, enabled=False)
    assert notices == [] and not (tmp_path / "tensorboard").exists()
    pytest.importorskip("tensorboardX")
    (tmp_path / "file").write_text("")
    logged(tmp_path / "file")
    assert len(notices) == 1 and "cannot write to" in notices[0] and "metrics.jsonl only" in notices[0]
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    logged(tmp_path)
    assert len(notices) == 2 and "not installed" in notices[1] and "qeffect-lm[tensorboard]" in notices[1]
    assert not (tmp_path / "tensorboard").exists()


def test_a_failing_writer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line with the first step that is missing; no further attempts."""
    pytest.importorskip("tensorboardX")
    notices: list[str] = []
    logger = TensorboardLogger(True, tmp_path, notice=notices.append)
    logger.log(metrics(1))
    (file,) = files(tmp_path)
    assert [event.step for event in events(file)] == [0, 1]  # there already: a kill loses none

    def broken(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logger._writer, "write_event", broken)
    for step in (2, 3):
        logger.log(metrics(step))
    logger.finish()
    assert len(notices) == 1 and "steps from 2 on" in notices[0] and "No space left" in notices[0]


def test_a_run_that_reports_while_the_next_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a step's row is written once the next is launched, before a checkpoint of its step, and at the end."""
    pytest.importorskip("tensorboardX")
    write_config(tmp_path, CONFIG.replace("{steps: 12}", "{steps: 5}").replace("backend: host_replay", "backend: eager"))
    loop, save, observe = run.train, Saver.save, run.Run.observe
    saved: dict[int, list[int]] = {}
    seen: dict[int, list[int]] = {}

    def told() -> list[int]:
        (file,) = files(tmp_path / "run")
        return [step for step, _ in scalars(file).get("loss", ())]

    def saving(saver: Saver, step: int, *arguments: Any) -> Any:
        saved[step] = told()
        return save(saver, step, *arguments)

    def observing(one: run.Run, step: int, skipped: bool) -> None:
        seen[step] = told()
        observe(one, step, skipped)

    monkeypatch.setattr(run, "train", lambda config, parts, *rest: loop(config, replace(parts, patient=True), *rest))
    monkeypatch.setattr(Saver, "save", saving)
    monkeypatch.setattr(run.Run, "observe", observing)
    assert run_here(tmp_path, "run", "logging.tensorboard=true", "train.eval_every=0")[0] == 0
    assert seen == {step: list(range(1, step)) for step in range(1, 6)}
    assert saved == {3: [1, 2, 3], 5: [1, 2, 3, 4, 5]} and told() == [1, 2, 3, 4, 5]
    rows = metrics_of(tmp_path, "run")
    assert all(row.extra["bubble"] >= 0 and row.extra["peak_leases"] == row.extra["peak_leases_predicted"] for row in rows)
