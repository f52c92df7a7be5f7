"""metrics.jsonl, the progress line and the loss plot."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.runtime.metrics import MetricsWriter, StepMetrics, read_metrics
from qeffect_lm.runtime.plots import plot_loss
from qeffect_lm.runtime.progress import Progress, format_seconds

ROOT = Path(__file__).resolve().parents[2]
FLOATS = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


def _metrics(step: int, loss: float | None = 2.5, **change: Any) -> StepMetrics:
    return StepMetrics(step, loss, 0.5, 1e-3, 100 * step, 1e4, 12.5, scale_epoch=step, **change)


def _same(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def _strict(line: str) -> Any:
    """Parse as a reader would that knows no NaN and no Infinity, as the standard has it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"not JSON: {name}")

    return json.loads(line, parse_constant=refuse)


@settings(max_examples=150, deadline=None)
@given(FLOATS, FLOATS, FLOATS, st.booleans(), st.dictionaries(st.text(min_size=1), st.floats(), max_size=3))
def test_round_trip(
    loss: float | None, norm: float | None, held_out: float | None, skipped: bool, extra: dict[str, Any]
) -> None:
    """Every record, NaN and infinities included, is one line of strict JSON and comes back as it was."""
    extra = {f"x.{key}": value for key, value in extra.items()}
    record = StepMetrics(3, loss, norm, 1e-3, 10, None, 1.5, 2, skipped, held_out, extra)
    line = record.to_json()
    assert "\n" not in line
    parsed = _strict(line)
    assert parsed["step"] == 3 and set(extra) <= set(parsed)
    if loss is not None and not math.isfinite(loss):
        assert parsed["loss"] is None and parsed["nonfinite"]["loss"] == str(loss)
    back = StepMetrics.from_json(line).as_dict()
    assert set(back) == set(record.as_dict())
    assert all(_same(back[key], value) for key, value in record.as_dict().items())


def test_fields() -> None:
    """The promised keys are there, by these names; an extra one may not hide a field."""
    keys = "step loss grad_norm lr tokens tokens_per_second step_ms scale_epoch skipped"
    assert list(_strict(_metrics(1).to_json())) == keys.split()
    assert _strict(_metrics(1, eval_loss=3.0, extra={"bubble": 0.25}).to_json())["bubble"] == 0.25
    for name in ("loss", "nonfinite", "extra"):
        with pytest.raises(ValueError, match=name):
            _metrics(1, extra={name: 1.0})


def _write(path: Path, steps: range, loss: float = 2.5, resume: int | None = None) -> list[str]:
    with MetricsWriter(path, resume) as writer:
        for step in steps:
            writer.write(_metrics(step, loss))
    return writer.notices


def _steps(path: Path) -> list[int]:
    return [record.step for record in read_metrics(path)]


def test_resume_supersedes_and_keeps(tmp_path: Path) -> None:
    """Saved at 5, logged to 8, resumed at 5, twice over: the file runs 1 to 12 once, the rest is beside
    it."""
    path = tmp_path / "deep" / "metrics.jsonl"
    assert _write(path, range(1, 9)) == []
    original = path.read_text().splitlines()
    (notice,) = _write(path, range(6, 11), loss=1.5, resume=5)
    assert "3 lines of steps after 5" in notice and "superseded-1" in notice
    assert path.read_text().splitlines()[:5] == original[:5], "kept lines keep their bytes"
    assert _steps(path) == list(range(1, 11))
    assert [record.loss for record in read_metrics(path)] == [2.5] * 5 + [1.5] * 5
    assert (tmp_path / "deep" / "metrics.jsonl.superseded-1").read_text().splitlines() == original[5:]
    _write(path, range(8, 13), resume=7)
    assert _steps(tmp_path / "deep" / "metrics.jsonl.superseded-2") == [8, 9, 10]
    assert _steps(path) == list(range(1, 13))
    assert _write(path, range(13, 14), resume=12) == [], "nothing to move, nothing to say"
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "metrics.jsonl", "metrics.jsonl.superseded-1", "metrics.jsonl.superseded-2"
    ]  # fmt: skip


def test_fresh_run_in_a_used_folder(tmp_path: Path) -> None:
    """Another run's lines are moved away whole, step 0 too, never appended to and never deleted."""
    path = tmp_path / "metrics.jsonl"
    _write(path, range(0, 4))
    (notice,) = _write(path, range(0, 2))
    assert "4 lines of an earlier run" in notice
    assert _steps(path) == [0, 1] and _steps(tmp_path / "metrics.jsonl.superseded-1") == [0, 1, 2, 3]


@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_torn_last_line(tmp_path: Path, cut: int) -> None:
    """A line cut anywhere: moved aside if it lost data, completed if it lost only its end; reading tolerates
    it."""
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    expected = [1, 2, 3] if cut == 1 else [1, 2]
    assert _steps(path) == expected
    notices = _write(path, range(4, 5), resume=3)
    assert _steps(path) == [*expected, 4]
    torn = tmp_path / "metrics.jsonl.superseded-1"
    if cut == 1:
        assert not notices and not torn.exists() and path.read_bytes().startswith(whole)
    else:
        assert "torn" in notices[0] and torn.read_bytes() == whole.splitlines()[2][: 1 - cut] + b"\n"


def test_rubbish_in_the_middle(tmp_path: Path) -> None:
    """A line that is no record is named by the reader, and moved aside, not lost, by the next writer."""
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 3))
    first, second = path.read_bytes().splitlines(keepends=True)
    for rubbish in (b"\x00\x00\x00\n", b'{"step": 1.5}\n', b"[]\n", b'{"step": 7, "nonfinite": 3}\n'):
        path.write_bytes(first + rubbish + second)
        if b"nonfinite" not in rubbish:
            with pytest.raises(QEffectError, match="line 2 is not"):
                read_metrics(path)
        (notice,) = _write(path, range(3, 4), resume=2)
        assert "torn" in notice and _steps(path) == [1, 2, 3]
        moved = sorted(tmp_path.glob("*.superseded-*"), key=os.path.getmtime)
        assert any(file.read_bytes() == rubbish for file in moved)
        _write(path, range(1, 1))


def test_steps_must_increase(tmp_path: Path) -> None:
    """No step twice in one file, also not one that a resume kept."""
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    with MetricsWriter(path, 3) as writer:
        with pytest.raises(ValueError, match="step 3 follow those of step 3"):
            writer.write(_metrics(3))
        writer.write(_metrics(4))


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from qeffect_lm.runtime.metrics import MetricsWriter, StepMetrics
writer = MetricsWriter(sys.argv[1])
for step in range(1, 8):
    writer.write(StepMetrics(step, 1.0, 1.0, 1.0, step, 1.0, 1.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_loses_nothing(tmp_path: Path) -> None:
    """Every line written before a SIGKILL is in the file."""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(ROOT)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert _steps(path) == list(range(1, 8))


def test_full_disk(tmp_path: Path) -> None:
    """A write that fails half way is an error with the path, and leaves no half line behind."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(_metrics(1))
        file = writer._file

        class Full:
            def write(self, data: memoryview) -> int:
                if len(data) < 20:
                    raise OSError(28, "No space left on device")
                return file.write(data[: len(data) // 2])

            fileno, close = file.fileno, file.close

        writer._file = Full()  # type: ignore[assignment]
        with pytest.raises(QEffectError, match="metrics.jsonl: No space left"):
            writer.write(_metrics(2))
        writer._file = file
        writer.write(_metrics(2))
    assert _steps(path) == [1, 2]


def test_unwritable_and_missing(tmp_path: Path) -> None:
    """Errors name the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(QEffectError, match="cannot write metrics to .*file/metrics.jsonl"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")
    with pytest.raises(QEffectError, match="cannot read metrics from .*absent"):
        read_metrics(tmp_path / "absent")


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


EXTRA = {"mfu": 0.4123, "memory_bytes": 3 * 2**30, "bubble": 0.051, "bubble_plan": 0.09, "data_wait_ms": 1.6}


def _show(mode: str, stream: io.StringIO, steps: int = 40, seconds: float = 1.0) -> Progress:
    clock = _Clock()
    with Progress(steps, mode=mode, stream=stream, interval_seconds=10.0, clock=clock) as progress:
        for step in range(1, steps + 1):
            clock.now += seconds
            extra = EXTRA | ({"checkpoint_stall_ms": 120.4} if step == 25 else {})
            held_out = 3.5 if step == 15 else None
            progress.update(_metrics(step, 5.0 - step / 10, skipped=step == 7, eval_loss=held_out, extra=extra))
            if step == 25:
                progress.message("saved step 25")
    return progress


def test_plain_lines() -> None:
    """Every ten seconds, at the first and last step and each evaluation; all values; no control
    characters."""
    stream = io.StringIO()
    assert _show("auto", stream).mode == "plain"
    lines = stream.getvalue().splitlines()
    shown = [int(match[1]) for line in lines if (match := re.match(r"step (\d+)/40  ", line))]
    assert shown == [1, 11, 15, 25, 35, 40]
    rest = "norm 0.500  lr 1.0e-03  MFU 41.2%  mem 3 GiB  bubble 5.1%  scale epoch 40  data wait 2 ms"
    assert lines[-1] == f"step 40/40  loss 1.000  skipped 1  10,000 tok/s  ETA 0:00  12 ms  {rest}"
    assert [line.split()[1] for line in lines if line.endswith("checkpoint stall 120 ms")] == ["25/40"]
    held_out = [line for line in lines if "held-out 3.500" in line]
    assert len(held_out) == 1 and held_out[0].startswith("step 15/40")  # said where it was measured, not repeated
    assert "saved step 25" in lines and "held-out" not in lines[1] and "skipped" not in lines[0]
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_bar_stays_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal two lines are redrawn in place and cut to the width; messages stand above them."""
    for width in (60, 150):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        stream = _Terminal()
        assert _show("auto", stream).mode == "bar"
        message, first, second = _screen(stream.getvalue())
        assert message == "saved step 25" and "40/40  loss 1.000" in first and second.strip().startswith("norm 0.500  lr")
        assert max(map(len, (first, second))) <= width
        assert ("checkpoint stall 120 ms" in second) == (width == 150) and ("━" in first) == (width == 150)


def _screen(written: str) -> list[str]:
    """What a terminal shows: lines, with what rich uses of the control sequences (up, erase line, return)."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part.startswith("\x1b"):
            if part.endswith("A"):
                row -= int(part[2:-1] or 1)
            elif part.endswith("K"):
                lines[row] = ""
            else:
                assert part[-1] in "mhl", part
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


def test_bar_redraws_are_limited() -> None:
    """Steps of a millisecond do not each redraw the line; the last state is shown all the same."""
    stream = _Terminal()
    _show("bar", stream, steps=5000, seconds=0.001)
    assert 5 < stream.getvalue().count("/5000") < 15 and "5000/5000" in stream.getvalue()


def test_stopping_early_shows_the_last_step() -> None:
    """A run that ends before its last step (time limit, signal) still shows where it got to."""
    stream = io.StringIO()
    with Progress(40, mode="plain", stream=stream, clock=_Clock()) as progress:
        for step in range(1, 4):
            progress.update(_metrics(step))
    assert re.findall(r"step (\d+)/40", stream.getvalue()) == ["1", "3"]


def test_off_and_errors() -> None:
    """Off shows only messages; an unknown mode is a usage error."""
    stream = io.StringIO()
    _show("off", stream)
    assert stream.getvalue() == "saved step 25\n"
    with pytest.raises(UsageError, match="logging.progress.*auto, bar, plain, off"):
        Progress(1, mode="fancy")


def test_times_and_odd_values() -> None:
    """Time left follows step times; values that are missing or not finite are shown, not crashed on."""
    texts = {
        5: "0:05",
        65: "1:05",
        3600: "1:00:00",
        90061: "1 day 1:01:01",
        180000: "2 days 2:00:00",
        math.inf: "?",
    }
    assert {seconds: format_seconds(seconds) for seconds in texts} == texts
    stream = io.StringIO()
    with Progress(101, start_step=50, mode="plain", stream=stream) as progress:
        progress.update(StepMetrics(51, math.nan, math.inf, None, 0, None, 2000.0))
    assert stream.getvalue().startswith("step 51/101  loss nan  ETA 1:40  2,000 ms  norm inf\n")


def test_plot(tmp_path: Path) -> None:
    """A PNG of the promised kind comes out, from a file and from records, with gaps and marks, and no
    pyplot."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 81):
            loss = math.inf if step == 30 else 8 * math.exp(-step / 30)
            writer.write(_metrics(step, loss, skipped=step == 30, eval_loss=loss if step % 20 == 0 else None))
    before = "matplotlib.pyplot" in sys.modules
    out = plot_loss(path, tmp_path / "new" / "loss.png", held_out=[(0, 8.0)], unigram_entropy=6.5, title="t")
    assert ("matplotlib.pyplot" in sys.modules) == before
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", data[16:24]) == (1200, 720)
    assert [file.name for file in out.parent.iterdir()] == ["loss.png"]
    for records in (read_metrics(path)[:1], read_metrics(path)[:20]):
        assert plot_loss(records, tmp_path / "few.png").stat().st_size > 5000


def test_plot_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to draw, a folder that cannot be made, and no matplotlib: each says what to do."""
    pytest.importorskip("matplotlib")
    with pytest.raises(QEffectError, match="nothing to draw"):
        plot_loss([_metrics(1, math.nan)], tmp_path / "loss.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(QEffectError, match="cannot write the picture .*file/loss.png"):
        plot_loss([_metrics(1)], tmp_path / "file" / "loss.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(QEffectError, match=r"qeffect-lm\[plot\]"):
        plot_loss([_metrics(1)], tmp_path / "loss.png")
