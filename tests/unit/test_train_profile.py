"""``train.profile``: traces read back, tables that add up, the same bits, and nothing at all where it is off."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.actions import parse_action
from pipeline.plan import build_plan
from pipeline.spans import NO_SPANS, SpanKind, action_name, kind_of, wait_name
from qeffect_lm.app import step_profile
from qeffect_lm.app.main import main
from qeffect_lm.app.step_profile import KINDS, TimedSpans, step_table, table_text
from qeffect_lm.config import load_config
from qeffect_lm.errors import UsageError
from tests.runs import assert_same_run, overrides, run_here, write_config
from tests.tiny import config

SHORT = ["train.steps=4", "checkpoint.every=0", "model.num_layers=2", "train.profile.steps=2-3"]
OFF = "train.profile.steps=null"
OWN = re.compile(r"(F|I|W|WAIT|SEND_\w|RECV_\w|COMMIT\w*|REDUCE|STEP|GATHER|REFRESH|STEP_GRAPH)( s\d.*)?|data|step \d+")


def ranges(path: Path) -> list[tuple[str, float, float]]:
    """(name, begin, end) of the trace's ranges of ours, microseconds, in order."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    ours = [e for e in events if e.get("cat") == "user_annotation" and OWN.fullmatch(e["name"])]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in ours), key=lambda one: one[1])


def check_sums(table: dict[str, Any]) -> None:
    for rank in table["ranks"]:
        assert set(rank["kinds"]) == set(KINDS)
        parts = [cell["ms"] for cell in rank["kinds"].values()]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(rank["step_ms"]) and rank["step_ms"] > 0
        assert sum(cell["share"] for cell in rank["kinds"].values()) == pytest.approx(1)


@pytest.mark.parametrize("graphs", [["graphs.backend=eager"], [], ["graphs.scope=step"]], ids=["eager", "actions", "step"])
def test_a_run(
    tmp_path: Path, graphs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every action of the plan once a step under its name, in the plan's order, inside its step; and no bit differs."""
    write_config(tmp_path)
    code, _ = run_here(tmp_path, "on", *SHORT, *graphs)
    folder = tmp_path / "on" / "profile"
    assert code == 0 and {path.name for path in folder.iterdir()} == {
        "rank0.step2-3.json.gz", "time.step2-3.json", "time.step2-3.txt",
    }  # fmt: skip
    found = ranges(folder / "rank0.step2-3.json.gz")
    plan = build_plan("1f1b", 1, 4, 1)
    names = [action_name(action, plan.slots[0]) for action in plan.actions[0]] + ["REFRESH"]
    names.insert(names.index("STEP") + 1, "GATHER")
    assert {"F s0 mb3 slot0", "I s0 mb3 slot0", "W s0 mb3 slot1", "REDUCE", "STEP", "COMMIT"} <= set(names)
    if "graphs.scope=step" in graphs:
        names = ["STEP_GRAPH"]
    assert [name for name, *_ in found] == ["data", "step 2", *names, "data", "step 3", *names]
    for name in ("step 2", "step 3"):
        (begin, end), at = next(one[1:] for one in found if one[0] == name), [one[0] for one in found].index(name)
        assert all(begin <= one[1] <= one[2] <= end for one in found[at + 1 : at + 1 + len(names)])

    table = json.loads((folder / "time.step2-3.json").read_text())
    check_sums(table)
    assert (table["steps"], table["count"], table["device"]) == ("2-3", 2, "cpu")
    times = {kind: cell["ms"] for kind, cell in table["ranks"][0]["kinds"].items()}
    kind, pick = ("step graph", "STEP_GRAPH") if len(names) == 1 else ("W", "W s")
    in_trace = sum(end - begin for name, begin, end in found if name.startswith(pick)) / 2000
    assert times[kind] == pytest.approx(in_trace, rel=0.25, abs=0.5) and times["data"] > 0
    text = (folder / "time.step2-3.txt").read_text()
    assert text in capsys.readouterr().out and "rank 0" in text and f"{times[kind]:.2f}" in text

    monkeypatch.setattr(step_profile, "StepProfiler", None)  # nobody makes one
    entered = []
    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", lambda self: entered.append(self.name))
    assert run_here(tmp_path, "off", *SHORT, *graphs, OFF)[0] == 0
    assert not (tmp_path / "off" / "profile").exists() and not [name for name in entered if OWN.fullmatch(name)]
    assert_same_run(tmp_path, "on", "off")


def test_where_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Another folder, two traces; a run that is stopped in the midst writes what it has; steps behind a resume are said; a
    folder that cannot be written to later costs the trace and no training."""
    write_config(tmp_path)
    away = f"train.profile.dir={tmp_path / 'away'}"
    write = step_profile.profile.export_chrome_trace

    def failing(self: Any, path: str) -> None:
        if "step1" in path:
            raise OSError(28, "No space left on device")
        write(self, path)

    monkeypatch.setattr(step_profile.profile, "export_chrome_trace", failing)
    code, _ = run_here(tmp_path, "run", *SHORT, away, "train.profile.steps=[1,4]")
    assert code == 0 and "rank0.step1.json.gz (No space left on device); training goes on" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "away").glob("*")} == {
        "time.step1.json", "time.step1.txt", "rank0.step4.json.gz", "time.step4.json", "time.step4.txt",
    }  # fmt: skip
    code, _ = run_here(tmp_path, "run", *SHORT, "train.profile.steps=2", "train.steps=5")
    assert code == 0 and "train.profile.steps 2: all of them are behind this run" in capsys.readouterr().out
    answers = iter([None, None, "the test"])
    monkeypatch.setattr("qeffect_lm.app.run._stopper", lambda *_: lambda: next(answers))
    monkeypatch.setattr(step_profile.profile, "export_chrome_trace", write)
    assert run_here(tmp_path, "stopped", *SHORT, "train.profile.steps=1-4")[0] == 0
    folder = tmp_path / "stopped" / "profile"
    assert json.loads((folder / "time.step1-2.json").read_text())["count"] == 2 and (folder / "rank0.step1-2.json.gz").exists()


def test_times_of_nested_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, on a clock of whole seconds: what lies inside of a span is not counted with it, a failure closes it."""
    clock = iter(map(float, range(100)))
    monkeypatch.setattr(step_profile.time, "perf_counter", lambda: next(clock))
    spans = TimedSpans(torch.device("cpu"))
    plan = build_plan("1f1b", 2, 2)
    receive = next(action for action in plan.actions[0] if str(action) == "0RECV_B1")
    with spans.piece("REDUCE", SpanKind.REDUCE), spans.action(receive, plan.slots[0]):  # 0, 1
        with pytest.raises(OSError), spans.wait(("RECV_B", 0, 1)):  # 2
            raise OSError  # 3, 4, 5
    with spans.piece("REFRESH", SpanKind.REFRESH):  # 6
        pass  # 7
    took = spans.seconds()
    assert {kind: value for kind, value in took.items() if value} == {
        SpanKind.REDUCE: 2.0, SpanKind.SEND_RECV: 2.0, SpanKind.WAIT: 1.0, SpanKind.REFRESH: 1.0,
    }  # fmt: skip
    assert not any(spans.seconds().values())


def test_names_and_kinds() -> None:
    """Of two stages: messages and their waits; commits of a microbatch; one name for each action of a rank."""
    plan = build_plan("zb-h1", 2, 3, window="microbatch")
    for rank in range(2):
        names = Counter(action_name(action, plan.slots[rank]) for action in plan.actions[rank])
        assert max(names.values()) == 1 and {"COMMIT_F s0 mb2", "SEND_F s0 mb2", "RECV_B s0 mb0"} <= set(names) or rank
    assert kind_of(parse_action("1SEND_B0")) is SpanKind.SEND_RECV and kind_of(parse_action("COMMIT")) is SpanKind.COMMIT
    assert kind_of(parse_action("STEP")) == "optimizer" and kind_of(parse_action("1COMMIT_I0")) == "commit"
    assert wait_name(("RECV_F", 1, 3)) == "WAIT RECV_F s1 mb3" and wait_name(("SEND_F", 0, 1)) == "WAIT SEND_F s0 slot1"
    assert NO_SPANS.action(parse_action("STEP"), plan.slots[0]) is NO_SPANS.piece("REFRESH", SpanKind.REFRESH)


def test_the_table_of_many_ranks() -> None:
    rows = [{**dict.fromkeys(KINDS, 0.0), "F": 10.0 + rank, "other": 10.0} for rank in range(9)]
    table = step_table("5", 1, "cpu", rows)
    check_sums(table)
    lines = table_text(table).splitlines()
    assert lines[0].endswith("9 ranks") and lines[1].split() == ["mean", "least", "most"] and len(lines) == 5
    assert lines[2].split() == ["F", "14.00", "58.3", "%", "10.00", "41.7", "%", "18.00", "75.0", "%"]
    assert table_text(step_table("5", 1, "cpu", rows[:2])).splitlines()[1].split() == ["rank", "0", "rank", "1"]


@pytest.mark.parametrize(
    ("given", "kept", "steps"),
    [
        ("3-5", "3-5", [(3, 5)]),
        ([5, 3, 4, 9, 9], "3-5,9", [(3, 5), (9, 9)]),
        (7, "7", [(7, 7)]),
        ("[3, 7-8]", "3,7-8", [(3, 3), (7, 8)]),
        (None, None, []),
    ],
)
def test_ways_to_write_steps(given: Any, kept: str | None, steps: list[tuple[int, int]]) -> None:
    made = config(train__profile__steps=given)
    assert made.train.profile.steps == kept and made.train.profile.ranges() == steps
    assert type(made).from_dict(made.to_dict()) == made


@pytest.mark.parametrize("given", ["0", "5-3", "a", "3-", "", [], [1, True], [2.5], True, "1-x", "11", "-1", "1--2", {"a": 1}])
def test_bad_steps(given: Any) -> None:
    with pytest.raises(UsageError, match=r"train\.profile\.steps"):
        config(train__profile__steps=given)


def test_bad_keys_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path)
    (tmp_path / "file").touch()
    assert main([str(path), *overrides(tmp_path, "no", "train.profile.steps=5-3")], {}) == 2
    said = capsys.readouterr().err
    assert "train.profile.steps: '5-3' given, where 5-3 is no range" in said and "Traceback" not in said
    with pytest.raises(UsageError, match=r"train\.profile\.dir: cannot make the folder"):
        run_here(tmp_path, "no", *SHORT, f"train.profile.dir={tmp_path / 'file' / 'x'}")
    assert not (tmp_path / "no").exists(), "before anything is written"
    with pytest.raises(UsageError, match="at most 100"):
        load_config(path, overrides(tmp_path, "no", "train.steps=500", "train.profile.steps=1-101"))
