"""What a run leaves in its folder for people and reports: events, scales, timelines, plans; over a crash and a resume too."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from checkpoint import SingleProcess
from pipeline.actions import Kind
from pipeline.plan import Plan, build_plan
from qeffect_lm.app.counts import flop_per_token
from qeffect_lm.app.run_folder import read_events, read_scales, read_timelines
from qeffect_lm.app.watching import Watcher, offsets
from qeffect_lm.errors import QEffectError
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.events import EventLog
from qeffect_lm.runtime.loop import train as real_train
from qeffect_lm.runtime.metrics import StepMetrics
from qeffect_lm.runtime.peaks import peak_flops
from qeffect_lm.runtime.provenance import git_state, versions
from tests.runs import assert_same_run, metrics_of, run_here, write_config
from tests.unit.engine_support import make

KEYS = ("logging.watch_every=2", "logging.scales_every=4", "logging.timeline_every=5", "train.eval_every=6",
        "checkpoint.every=6", "logging.warn_amax_jump=1.0", "logging.warn_every=3")  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole run ``a`` of 12 steps; ``b`` fails in step 9 and is resumed from 6."""
    folder = tmp_path_factory.mktemp("runs")
    write_config(folder)
    assert run_here(folder, "a", *KEYS)[0] == 0

    def failing(config: Any, parts: Any, start: int, tokens: int) -> Any:
        step = parts.step

        def die(number: int, batch: Any) -> Any:
            if number == 9:
                raise QEffectError("the power went")
            return step(number, batch)

        parts.step = die
        return real_train(config, parts, start, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qeffect_lm.app.run.train", failing)
        with pytest.raises(QEffectError, match="power"):
            run_here(folder, "b", *KEYS)
    shutil.copytree(folder / "b", folder / "crashed")
    assert run_here(folder, "b", *KEYS, "logging.warn_every=2")[0] == 0
    return folder


def test_events_tell_the_whole_story(runs: Path) -> None:
    events = read_events(runs / "b")
    kinds = [(one["event"], one["step"]) for one in events if one["event"] not in ("warning",)]
    assert kinds == [
        ("start", 0), ("evaluation", 0), ("evaluation", 6), ("save_durable", 6), ("error", 9),
        ("start", 6), ("evaluation", 12), ("save_durable", 12), ("end", 12),
    ]  # fmt: skip
    assert all(a["time"] <= b["time"] for a, b in zip(events, events[1:], strict=False))
    first, second = (one for one in events if one["event"] == "start")
    assert first["config"] == "config.yaml" and second["config"] == "config.resumed-at-6.yaml"
    assert "resumed_from" not in first and second["resumed_from"].endswith("step_00000006")
    assert first["versions"] == versions() and first["versions"]["python"] and first["git"] == git_state()
    assert first["layout"]["pp"] == 1 and first["tokens_per_step"] == 16 * 2 * 4 and first["steps"] == 12
    assert Plan.from_json((runs / "b" / first["plan"]).read_text()).fingerprint().startswith(Path(first["plan"]).stem)
    (error,) = (one for one in events if one["event"] == "error")
    assert error["text"] == "the power went" and error["kind"] == "QEffectError"
    losses = {m.step: m.eval_loss for m in metrics_of(runs, "b")}
    assert [one["loss"] for one in events if one["event"] == "evaluation"] == [losses[0], losses[6], losses[12]]


def test_scales_are_the_whole_runs_over_a_crash(runs: Path) -> None:
    """Killed after the line of step 8, resumed from 6: the lines are those of an undisturbed run, the old one is aside."""
    whole, resumed = read_scales(runs / "a"), read_scales(runs / "b")
    assert [line.step for line in whole] == [line.step for line in resumed] == [4, 8, 12]
    assert [line.step for line in read_scales(runs / "crashed")] == [4, 8]
    assert (runs / "b" / "scales.jsonl.superseded-1").read_text().startswith('{"step":8,')
    for a, b in zip(whole, resumed, strict=True):
        assert (a.roles, a.amax, a.scale) == (b.roles, b.amax, b.scale)
    # The windows of step 8's line: four, of which the resumed process saw the two that it ran.
    assert set(whole[1].windows) == {4} and set(resumed[1].windows) == {2} and set(resumed[2].windows) == {4}
    line = whole[-1]
    assert line.roles == sorted(line.roles) and len(line.roles) == 4 * 4 * 3
    assert all(0 <= s <= w for s, w in zip(line.saturated, line.windows, strict=True)) and sum(line.saturated) > 0
    for amax, scale, most, excess in zip(line.amax, line.scale, line.fp8_max, line.excess, strict=True):
        assert amax > 0 and scale > 0 and excess >= amax * scale / most * (1 - 1e-4)


def test_metrics_of_what_was_seen(runs: Path) -> None:
    """Told at the observed steps, with the waits and the memory of every logged one."""
    metrics = {m.step: m.extra for m in metrics_of(runs, "a")}
    for step in range(1, 13):
        assert metrics[step]["data_wait_ms"] >= 0 and metrics[step]["memory_bytes"] > 50 * 2**20  # type: ignore[operator]
        assert ("saturation" in metrics[step]) == ("work_ms" in metrics[step]) == (step % 2 == 0)
        assert "mfu" not in metrics[step]  # a CPU has no peak
    told = metrics[12]
    assert 0 < told["saturation"] <= 1 and told["amax_jump"] > 0 and math.isfinite(told["room_bits_max"])  # type: ignore
    (work,) = told["work_ms"]  # type: ignore[misc]
    (m12,) = (m for m in metrics_of(runs, "a") if m.step == 12)
    assert 0 < work <= m12.step_ms  # type: ignore[operator]


def test_timelines_are_the_plans_actions(runs: Path) -> None:
    lines = read_timelines(runs / "b")
    assert [one.step for one in lines] == [1, 5, 7, 10]  # of each process the first
    for one in lines:
        (row,), (predicted,) = one.measured, one.predicted
        assert [piece[0] for piece in row] == [a for a in one.plan.actions[0] if a.is_compute] and row[0][1] == 0.0
        assert all(begin <= end <= following[1] for (_, begin, end), following in zip(row, row[1:], strict=False))
        busy = sum(end - begin for _, begin, end in row)
        assert predicted[-1][2] == pytest.approx(busy)  # one rank never waits


def test_warnings_are_events_and_lines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each once in both; the second process begins its own count of steps without one."""
    jumps = [one for one in read_events(runs / "a") if one["event"] == "warning"]
    assert [one["step"] for one in jumps] == [2, 6, 10] and {one["kind"] for one in jumps} == {"amax_jump"}
    metrics = {m.step: m.extra for m in metrics_of(runs, "a")}
    assert [one["value"] for one in jumps] == [metrics[one["step"]]["amax_jump"] for one in jumps]
    assert jumps[0]["role"] in read_scales(runs / "a")[0].roles and [one["held_back"] for one in jumps] == [0, 1, 1]
    assert run_here(runs, "said", *KEYS, "train.steps=4")[0] == 0
    (said,) = (one for one in read_events(runs / "said") if one["event"] == "warning")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert lines == [f"WARNING: step 2: {said['text']}"] and said["role"] in lines[0]


def test_underflow_is_sampled_when_told_so(runs: Path) -> None:
    """The metrics' means are those of the lines; the run is the one without samples."""
    assert run_here(runs, "sampled", *KEYS, "logging.underflow_every=4", "logging.warn_underflow=0.0")[0] == 0
    assert assert_same_run(runs, "a", "sampled") > 100
    lines = {line.step: line for line in read_scales(runs / "sampled")}
    for step, line in lines.items():
        assert line.underflow is not None and len(line.underflow) == len(line.roles)
        for kind in ("input", "weight", "grad_output"):
            shares = [s for role, s in zip(line.roles, line.underflow, strict=True) if role.endswith(f".{kind}")]
            (extra,) = (m.extra for m in metrics_of(runs, "sampled") if m.step == step)
            assert extra[f"underflow_{kind}"] == pytest.approx(sum(shares) / len(shares), rel=1e-4)  # type: ignore[arg-type]
    assert [one["step"] for one in read_events(runs / "sampled") if one.get("kind") == "underflow"] == [4, 8, 12]
    assert all(line.underflow is None for line in read_scales(runs / "a"))


def test_nothing_is_watched_when_told_so(runs: Path) -> None:
    off = ("logging.watch_every=0", "logging.timeline_every=0", "train.steps=4")
    assert run_here(runs, "off", *off)[0] == 0
    assert not read_scales(runs / "off") and not read_timelines(runs / "off")
    assert all("saturation" not in m.extra and "work_ms" not in m.extra for m in metrics_of(runs, "off"))


def test_clocks_of_ranks_are_put_beside_each_other() -> None:
    """A rank's first F begins when its input has arrived, also where a chunk lies on a V."""
    for schedule, ranks in (("1f1b", 3), ("zb-v", 2)):
        plan = build_plan(schedule, ranks, 4, 0, "step", None)
        work = []
        for row in plan.actions:
            compute = [action for action in row if action.is_compute]
            work.append([time for i in range(len(compute)) for time in (10.0 * i, 10.0 * i + 8.0)])
        assert offsets(plan, work, 0.5) == [rank * 8.5 for rank in range(ranks)]
        assert plan.actions[0][0].kind is Kind.F


def test_damage_is_named(tmp_path: Path) -> None:
    """Of events and scales: a torn end is left out, anything else is an error with file and line."""
    with pytest.raises(QEffectError, match="events from .*events.jsonl: No such file"):
        read_events(tmp_path)
    log = EventLog(tmp_path)
    log.add("start", 0, loss=math.inf, nothing=None)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "sto')
    assert [(one["event"], one["loss"]) for one in read_events(tmp_path)] == [("start", "inf")]
    log.add("end", 3)
    assert [one["event"] for one in read_events(tmp_path)] == ["start", "end"]
    (tmp_path / "scales.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(QEffectError, match="scales.jsonl: the line of step 1"):
        read_scales(tmp_path)
    (tmp_path / "timelines.jsonl").write_text(json.dumps({"step": 4, "plan": "absent"}) + "\n")
    with pytest.raises(QEffectError, match="timelines.jsonl: the line of step 4"):
        read_timelines(tmp_path)
    with pytest.raises(QEffectError, match="cannot write events"):
        EventLog(tmp_path / "absent").add("start", 0)


def test_git_state(tmp_path: Path) -> None:
    """Commit and whether tracked files differ; None without a checkout, also for a folder that somebody's checkout ignores."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert git_state(tmp_path) is None
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    (tmp_path / "installed").mkdir()
    git("init")
    git("add", "code")
    git("commit", "-m", "first")
    clean = git_state(tmp_path / "code")
    assert clean is not None and len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "code" / "b.py").write_text("untracked")
    assert git_state(tmp_path / "code") == clean
    (tmp_path / "code" / "a.py").write_text("2")
    assert git_state(tmp_path / "code") == clean | {"dirty": True}
    assert git_state(tmp_path / "installed") is None


def test_peaks_and_mfu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names as torch tells them; model FLOP of all tokens over the peak of all GPUs; none where the peak is not known."""
    named = {
        "NVIDIA H200": (989, 1979), "NVIDIA H100 80GB HBM3": (989, 1979), "NVIDIA H100 PCIe": (756, 1513),
        "NVIDIA H100 NVL": (835, 1671), "NVIDIA H20": (148, 296), "NVIDIA B200": (2250, 4500), "NVIDIA L4": (121, 242),
        "NVIDIA L40S": (362, 733), "NVIDIA A100-SXM4-80GB": (312, None), "NVIDIA A10": (125, None),
        "NVIDIA GeForce RTX 3060": (None, None), "NVIDIA A1000": (None, None),
    }  # fmt: skip
    for name, peaks in named.items():
        found = [peak_flops(name, fp8) for fp8 in (False, True)]
        assert found == [None if peak is None else peak * 1e12 for peak in peaks], name
    assembly = make()
    config = assembly.config.model_copy(update={"run": assembly.config.run.model_copy(update={"dir": str(tmp_path)})})
    watcher = Watcher(config, assembly, Mesh({"dp": 4}), SingleProcess(), 0, False, False)
    step = StepMetrics(1, 1.0, 1.0, 1.0, 10, 5000.0, 10.0)
    assert watcher.peak is None and "mfu" not in watcher.complete(step).extra
    watcher.peak = 1e12
    flop = flop_per_token(config, assembly.model.parameters())
    assert watcher.complete(step).extra["mfu"] == pytest.approx(flop * 5000 / 4e12, rel=1e-12)
    assert flop == watcher.facts()["flop_per_token"] > 6 * 10_000
