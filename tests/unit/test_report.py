"""``tools.report``: what the page holds, of real runs and of damaged, hostile, long and unfinished ones; and in a browser."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.actions import Kind
from pipeline.plan import build_plan
from pipeline.simulate import simulate
from qeffect_lm.app.run_folder import ScaleLine, read_scales, read_timelines
from tests.browser import assert_alone, dump, shown
from tests.runs import metrics_of, run_here, write_config
from tools.report import main
from tools.report.fp8 import maps
from tools.report.series import evenly, line, moving_mean, thin

pytestmark = pytest.mark.xdist_group("report")
KEYS = (
    "logging.watch_every=1",
    "logging.scales_every=1",
    "logging.timeline_every=2",
    "train.eval_every=2",
    "checkpoint.every=2",
)
NASTY = "<!--<script>alert(1)</script>\u2028\"'&"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a``: 4 steps, then resumed to 6 with another clip_norm; ``b``: 3 steps with another rate."""
    folder = tmp_path_factory.mktemp("runs")
    write_config(folder)
    assert run_here(folder, "a", *KEYS, "train.steps=4")[0] == 0
    assert run_here(folder, "a", *KEYS, "train.steps=6", "optim.clip_norm=0.25")[0] == 0
    assert run_here(folder, "b", *KEYS, "train.steps=3", "optim.lr=0.03", "logging.timeline_every=0")[0] == 0
    return folder


def report(target: Path, *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--output", str(target)]) == 0
    assert_alone(target)
    return shown(target)


def chart(data: dict[str, Any], group: str, key: str) -> dict[str, Any]:
    return next(one for one in data[group]["charts"] if one["key"] == key)


def lines(path: Path, *records: object, torn: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records) + torn)


def step(number: int, **values: object) -> dict[str, object]:
    return {"step": number, "loss": 4.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": number, "step_ms": 5.0} | values


def run_of(folder: Path, steps: int, runs: int = 1) -> Path:
    """A run's folder as a long run leaves it: a line a step, events, 50 steps a line of scales of 240 tensors."""
    folder.mkdir()
    rows = [
        f'{{"step":{n},"loss":{9 - math.log1p(n):.5f},"grad_norm":{1 + n % 7},"lr":0.001,"tokens":{n * 4096},'
        f'"tokens_per_second":{9000 + n % 50},"step_ms":{300 + n % 13},"skipped":false,"data_wait_ms":0.{n % 9},'
        f'"memory_bytes":40000000000,"saturation":0.0{n % 9},"bubble":0.1{n % 9},"bubble_predicted":0.1}}'
        for n in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    saves = [{"event": "save_durable", "step": n, "time": 1e9 + n, "bytes": 10**9} for n in range(0, steps, 20)]
    lines(folder / "events.jsonl", {"event": "start", "step": 0, "time": 1e9}, *saves)
    kinds = ("input", "weight", "grad_output")
    roles = [f"layers.{n}.{part}.{kind}" for n in range(20) for part in ("a", "b", "c", "d") for kind in kinds]
    values = {
        "amax": [0.37] * 240,
        "scale": [600.5] * 240,
        "windows": [50] * 240,
        "saturated": [3] * 240,
        "excess": [1.5] * 240,
    }
    first: dict[str, object] = {"roles": roles, "fp8_max": [448.0] * 240}
    rest = json.dumps(values)[1:]
    head = [json.dumps(first)[1:-1] + ", "] + [""] * (steps // 50)
    lines(folder / "scales.jsonl", *(f'{{"step": {50 * n + 50}, {head[n]}{rest}' for n in range(steps // 50)))
    return folder


# ---- real runs -----------------------------------------------------------------------------------------------------------


def test_curves_are_the_metrics(runs: Path, tmp_path: Path) -> None:
    """Every value of the files, in its unit; two runs over each other; the evaluations; what one of them lacks is said."""
    data = report(tmp_path / "r.html", runs / "a", runs / "b")
    assert [run["label"] for run in data["runs"]] == ["a", "b"] and data["runs"][0]["status"] == "finished"
    for place, name in enumerate("ab"):
        metrics = metrics_of(runs, name)
        loss, held_out = (one for one in chart(data, "loss", "loss")["lines"] if one["run"] == place)
        told = [(m.step, float(f"{m.loss:.5g}")) for m in metrics if m.loss is not None]
        assert list(zip(loss["s"], loss["v"], strict=True)) == told and len(told) == (6, 3)[place]
        evals = [(m.step, float(f"{m.eval_loss:.5g}")) for m in metrics if m.eval_loss is not None]
        assert list(zip(held_out["s"], held_out["v"], strict=True)) == evals and held_out["points"]
        memory = next(one for one in chart(data, "speed", "memory")["lines"] if one["run"] == place)
        last = metrics[-1].extra["memory_bytes"]
        assert memory["v"][-1] == float(f"{last / 2**30:.5g}")  # type: ignore[operator]
        for group, key in (
            ("speed", "step"),
            ("optimizer", "norm"),
            ("optimizer", "lr"),
            ("fp8", "saturation"),
            ("pipeline", "bubble"),
        ):
            assert any(one["run"] == place for one in chart(data, group, key)["lines"]), key
    assert any(one.startswith("Model FLOP utilisation: not recorded (") for one in data["speed"]["lacks"])
    assert any(one.startswith("b: no timelines.jsonl") for one in data["pipeline"]["lacks"])


def test_a_resume_and_differences(runs: Path, tmp_path: Path) -> None:
    data = report(tmp_path / "r.html", runs / "a", runs / "b")
    assert [0, 4, "optim.clip_norm", "1.0", "0.25"] in data["config"]["resumes"]["rows"]
    assert {row[2] for row in data["config"]["resumes"]["rows"]} == {"optim.clip_norm", "train.steps", "steps"}
    different = {key: values for key, *values in data["config"]["different"]}
    assert (
        different["optim.lr"] == ["0.01", "0.03"] and "optim.clip_norm" not in different and "model.num_layers" not in different
    )
    kinds = [(kind, number) for run, kind, number, _, _ in data["events"]["rows"] if run == 0 and kind != "warning"]
    first = [("start", 0), ("evaluation", 0), ("evaluation", 2), ("save", 2), ("evaluation", 4), ("save", 4), ("end", 4)]
    assert kinds == [*first, ("restart", 4), ("evaluation", 6), ("save", 6), ("end", 6)]
    marks = {(mark["kind"], mark["step"]) for mark in data["marks"] if mark["run"] == 0}
    assert {("restart", 4), ("save", 2), ("evaluation", 6)} <= marks and not any(kind == "end" for kind, _ in marks)
    versions = {key: values for key, *values in data["provenance"]["rows"]}
    assert versions["python version"][0] == versions["python version"][1] and "device" in versions


def test_the_timeline_is_the_chosen_steps(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured and predicted of each F, I and W as the run's folder has them; the last step unless told; others are refused."""
    recorded = {one.step: one for one in read_timelines(runs / "a")}
    assert max(recorded) > min(recorded)
    for arguments, number in (([], max(recorded)), (["--step", min(recorded)], min(recorded))):
        (drawn,) = report(tmp_path / "r.html", runs / "a", *arguments)["pipeline"]["timelines"]
        told = recorded[number]
        assert drawn["step"] == number and drawn["steps"] == sorted(recorded)
        (lane,), (measured,), (predicted,) = drawn["lanes"], told.measured, told.predicted
        assert lane["kinds"] == "".join(action.kind.value for action, _, _ in measured)
        assert lane["begin"] == [round(begin, 3) for _, begin, _ in measured]
        assert lane["to"] == [round(end, 3) for _, _, end in predicted]
        assert [(c, m) for c, m in zip(lane["chunks"], lane["microbatches"], strict=True)] == [a.key for a, _, _ in measured]
        span, work = measured[-1][2] - measured[0][1], sum(end - begin for _, begin, end in measured)
        assert drawn["bubble"] == [pytest.approx((span - work) / span, rel=1e-3), pytest.approx(0.0, abs=1e-9)]
    assert main([str(runs / "a"), "--step", "99"]) == 2
    assert f"the nearest are {', '.join(map(str, sorted(recorded)))}" in capsys.readouterr().err


def test_heat_maps_are_the_lines_of_scales(runs: Path, tmp_path: Path) -> None:
    (drawn,) = report(tmp_path / "r.html", runs / "a")["fp8"]["maps"]
    scales = read_scales(runs / "a")
    assert drawn["steps"] == [one.step for one in scales] and set(drawn["kinds"]) == {"input", "weight", "grad_output"}
    for kind, found in drawn["kinds"].items():
        assert len(found["rows"]) == 16 and found["rows"][0] == "0.attention.out"
        for row, label in enumerate(found["rows"]):
            place = scales[0].roles.index(f"layers.{label}.{kind}")
            for column, told in enumerate(scales):
                cell = row * len(scales) + column
                assert found["amax"][cell] == (float(f"{told.amax[place]:.4g}") or None)
                if told.windows[place]:
                    assert found["saturated"][cell] == float(f"{told.saturated[place] / told.windows[place]:.3g}")


# ---- thinning ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(2, 40))
def test_thinning_keeps_the_extremes(values: list[float], count: int) -> None:
    steps = [3 * n for n in range(len(values))]
    kept = thin(steps, values, count)
    assert kept == sorted(set(kept)) and len(kept) <= 2 * count + 2 and {0, len(values) - 1} <= set(kept)
    assert {min(values), max(values)} <= {values[n] for n in kept}
    assert evenly(values, count)[-1] == values[-1] and len(evenly(values, count)) <= count


def test_lines_of_the_page() -> None:
    """NaN and infinity are marks, not values; the mean is centred, and shorter at the ends."""
    made = line([(n, math.nan if n == 3 else math.inf if n == 9 else float(n)) for n in range(60)], 100, smooth=True)
    assert made["bad"] == [(3, "nan"), (9, "inf")] and made["bads"] == 2 and 3 not in made["s"] and len(made["s"]) == 58
    assert made["window"] == 5 and len(made["ms"]) == len(made["mv"]) == 58
    np.testing.assert_allclose(moving_mean([1, 2, 3, 4, 5, 6], 3), [1.5, 2, 3, 4, 5, 5.5])
    assert "mv" not in line([(1, 1.0)], 100, smooth=True)


def test_many_tensors_and_steps_share_rows_and_columns() -> None:
    """The largest amax, the smallest scale, all saturated over all windows; of more tensors than rows a row per layer."""
    roles = [f"layers.{n}.{part}.input" for n in range(12) for part in "abcdef"]
    told = [
        ScaleLine(
            n,
            roles,
            [448.0] * 72,
            [n + 1.0 + i for i in range(72)],
            [100.0 - n - i for i in range(72)],
            [4] * 72,
            [n % 3] * 72,
            [1.0] * 72,
        )
        for n in range(300)
    ]
    told[7].amax[0] = 0.0  # no window yet
    made = maps(told, 1)
    found = made["kinds"]["input"]
    assert found["rows"] == [f"layer {n}" for n in range(12)] and len(made["steps"]) == 120 and made["each"] == 3
    assert made["steps"][-1] == 299 and found["amax"][-1] == 300.0 + 71 and found["scale"][-1] == 100 - 299 - 71
    assert found["amax"][0] == 2 + 5 and found["saturated"][0] == pytest.approx(sum((0, 1)) / 8, rel=1e-2)
    assert maps(told, 16)["each"] > 3


def test_pages_of_long_runs_stay_small(tmp_path: Path) -> None:
    """Three times the steps: hardly more bytes."""
    sizes = []
    for steps in (6000, 18_000):
        report(tmp_path / f"{steps}.html", run_of(tmp_path / str(steps), steps))
        sizes.append((tmp_path / f"{steps}.html").stat().st_size)
    assert sizes[1] < 1.1 * sizes[0] and sizes[1] < 500_000


@pytest.mark.long
def test_a_hundred_thousand_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path / "long", 100_000)
    begun = time.monotonic()
    data = report(tmp_path / "r.html", run)
    assert time.monotonic() - begun < 90 and (tmp_path / "r.html").stat().st_size < 1_000_000
    assert data["events"]["counts"]["save"] == 5000 and len(data["events"]["rows"]) <= 600 and data["events"]["left"] > 4000
    assert chart(data, "loss", "loss")["lines"][0]["n"] == 100_000 and sum(mark["of"] for mark in data["marks"]) == 5000


# ---- what files may hold -------------------------------------------------------------------------------------------------


def test_what_is_lacking_is_said(tmp_path: Path) -> None:
    lines(tmp_path / "m" / "metrics.jsonl", step(1), step(2, skipped=True, skip_reason="spike"))
    lines(
        tmp_path / "e" / "events.jsonl",
        {"event": "start", "step": 0, "time": 1e9},
        {"event": "evaluation", "step": 3, "loss": 2.5},
    )
    data = report(tmp_path / "r.html", tmp_path / "m", tmp_path / "e")
    for part, words in (("loss", "e: no metrics.jsonl"), ("events", "m: no events.jsonl"), ("config", "m: no config.yaml")):
        assert words in data[part]["lacks"]
    assert any(one.startswith("m: no scales.jsonl") for one in data["fp8"]["lacks"])
    assert [run["status"] for run in data["runs"]] == ["no events: how it ended is not known", "still running, or killed"]
    assert [mark["step"] for mark in data["marks"] if mark["kind"] == "skip"] == [2]  # of the metrics
    assert (
        chart(data, "loss", "loss")["lines"][-1] | {"s": [3], "v": [2.5], "run": 1} == chart(data, "loss", "loss")["lines"][-1]
    )


def test_a_run_that_still_writes(tmp_path: Path) -> None:
    """A torn last line of each file is no error, and what is not finite is marked."""
    run = tmp_path / "run"
    bad = step(3, loss=None, nonfinite={"loss": "-inf"})
    lines(run / "metrics.jsonl", step(1), step(2), bad, step(4), torn='{"step": 5, "lo')
    earlier = [{"event": "start", "step": 0, "time": 1}, {"event": "skip", "step": 3, "time": 2}]
    lines(run / "events.jsonl", *earlier, {"event": "start", "step": 0, "time": 3}, torn='{"event": "sk')
    lines(run / "scales.jsonl", torn="{")
    lines(run / "timelines.jsonl", torn='{"step":1')
    data = report(tmp_path / "r.html", run)
    (loss,) = chart(data, "loss", "loss")["lines"]
    assert loss["s"] == [1, 2, 4] and loss["bad"] == [[3, "-inf"]] and not data["marks"]
    assert data["events"]["lacks"] == ["run: 2 events of an earlier run in the same folder are left out"]


def test_damage_and_wrong_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage outside the metrics is told in its section; values of the wrong kind are not drawn."""
    run = tmp_path / "run"
    odd = step(2, loss="high", step_ms=[1], lr=10**400, memory_bytes=True, eval_loss={}, mfu="x", peak_leases=3, bubble=None)
    lines(run / "metrics.jsonl", step(1), odd, step(3, tokens="many", tokens_per_second=-0.0))
    events = [{"event": 3, "step": 1}, {"event": "start", "step": 1, "git": 3, "layout": [], "versions": "x", "time": 1e300}]
    lines(run / "events.jsonl", *events, {"event": "warning", "step": "x"}, {"event": "save_new", "step": 2, "bytes": "all"})
    lines(
        run / "scales.jsonl",
        {
            "step": 1,
            "roles": ["a.input"],
            "fp8_max": [1],
            "amax": 3,
            "scale": [1],
            "windows": [],
            "saturated": [],
            "excess": [],
        },
    )
    lines(run / "timelines.jsonl", {"step": 1, "plan": "../x", "work_ms": 3})
    (run / "config.yaml").write_text("a: &a [1,2]\nb: &b [*a,*a]\nc: [*b,*b]\nd: {e: {}, f: 2026-01-01}\n? [1]\n: x\n")
    (run / "config.resumed-at-3.yaml").write_text("[")
    data = report(tmp_path / "r.html", run)
    notes = capsys.readouterr().err
    for part in ("scales.jsonl: the line of step 1", "timelines.jsonl: the line of step 1", "config"):
        assert part in notes
    assert chart(data, "loss", "loss")["lines"][0]["s"] == [1, 3] and data["fp8"]["lacks"][-1].startswith(
        "run: scales.jsonl cannot be read"
    )
    assert {row[1] for row in data["events"]["rows"]} == {"start", "saving"}  # since the last fresh start
    bomb = "a: &a0 [1]\n" + "".join(f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))
    (run / "config.yaml").write_text(bomb)
    assert "more than 2000 keys" in report(tmp_path / "r.html", run)["config"]["lacks"][0]


def test_many_ranks_are_drawn_in_part(tmp_path: Path) -> None:
    plan = build_plan("1f1b", 32, 64, 0, "step", None)
    clock = simulate(plan, 2.0, 1.0, 1.0, 0.25)
    work, offsets = [], []
    for row, begins, ends in zip(plan.actions, clock.start, clock.end, strict=True):
        mine = [(b, e) for action, b, e in zip(row, begins, ends, strict=True) if action.kind in (Kind.F, Kind.I, Kind.W)]
        offsets.append(mine[0][0])
        work.append([time - mine[0][0] for pair in mine for time in pair])
    name = plan.fingerprint()[:12]
    run = tmp_path / "run"
    lines(run / "metrics.jsonl", step(1))
    (run / "plans").mkdir()
    (run / "plans" / f"{name}.json").write_text(plan.to_json())
    lines(run / "timelines.jsonl", {"step": 1, "plan": name, "message_ms": 0.25, "offsets_ms": offsets, "work_ms": work})
    (drawn,) = report(tmp_path / "r.html", run)["pipeline"]["timelines"]
    ranks = [lane["rank"] for lane in drawn["lanes"]]
    assert drawn["ranks"] == 32 and ranks[0] == 0 and ranks[-1] == 31 and len(ranks) == 4000 // 192 and not drawn["cut"]
    assert drawn["bubble"] == [pytest.approx(clock.bubble, rel=1e-3)] * 2
    for lane in drawn["lanes"]:
        assert lane["begin"] == pytest.approx(lane["from"], abs=2e-3) and lane["end"] == pytest.approx(lane["to"], abs=2e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "absent is no folder"),
        (["empty"], "neither metrics.jsonl nor events.jsonl"),
        (["damaged"], "line 1 is not a metrics record"),
        (["good", "--output", "metrics.jsonl"], "has to end in .html"),
        (["good", "--output", "empty.html"], "it is a folder"),
        (["good", "--output", "absent/r.html"], "No such file"),
        (["good", "--step", "1"], "none was recorded"),
        (["good"] * 17, "at most 16"),
    ],
)
def test_wrong_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "empty.html"):
        (tmp_path / folder).mkdir()
    lines(tmp_path / "damaged" / "metrics.jsonl", "x", step(1))
    lines(tmp_path / "good" / "metrics.jsonl", step(1))
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert words in told.err and told.err.startswith("error: ") and told.out == "" and sorted(tmp_path.rglob("*")) == before


# ---- in a browser --------------------------------------------------------------------------------------------------------

PROBE = """
<script>
  const area = document.querySelector('[data-chart="loss"] .hover'), frame = area.getBoundingClientRect();
  const go = (element, x, y) => element.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y, bubbles: true}));
  go(area, frame.right - 1, frame.top + 20);
  document.body.dataset.tip = at("tip").innerText;
  const map = document.querySelector('[data-map="input amax"] .hover');
  const box = map.getBoundingClientRect();
  go(map, box.left + 1, box.top + 1);
  document.body.dataset.cell = at("tip").innerText;
  const path = () => document.querySelector('[data-chart="loss"] .curve').getAttribute("d"), before = path();
  document.querySelector('[data-chart="loss"] .head button').click();
  document.body.dataset.log = before !== path();
  const marks = () => document.querySelectorAll('[data-chart="loss"] .plot .glyph').length, all = marks();
  at("marks").click();
  document.body.dataset.marks = `${all} ${marks()}`;
  at("marks").click();
  at("axis").value = "tokens";
  at("axis").dispatchEvent(new Event("change"));
  document.body.dataset.moved = before !== path();
  const there = document.querySelector('[data-chart="loss"] .hover'), end = there.getBoundingClientRect();
  go(there, end.right - 1, end.top + 20);
  document.body.dataset.tokens = at("tip").innerText;
  document.body.dataset.axes = [...at("axis").options].map(one => one.value).join(" ");
  document.body.dataset.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
</script>
"""


@pytest.mark.parametrize("size", ["1400,900", "500,900"])
def test_in_a_browser(runs: Path, tmp_path: Path, size: str) -> None:
    """Drawn in full, told under the pointer, nothing wider than the screen, and the console is silent."""
    target = tmp_path / "r.html"
    data = report(target, *(runs / name for name in "ab"))
    target.write_text(target.read_text().replace("</body>", PROBE + "</body>"))
    dom, console = dump(target, tmp_path / "profile", size)
    assert console == "" and "data-error" not in dom and 'data-overflow="0"' in dom
    (told,) = re.findall(r'data-tip="([^"]*)"', dom)
    last = metrics_of(runs, "a")[-1]
    assert told.startswith("step 6") and f"{last.loss:.5g}" in told and "a: evaluation" in told and "save" in told
    (told,) = re.findall(r'data-tokens="([^"]*)"', dom)
    assert 'data-axes="step tokens hours"' in dom and 'data-moved="true"' in dom
    assert told.startswith(f"{last.tokens} tokens") and f"{last.loss:.5g}" in told and "(step 6)" in told and "b: " not in told
    (cell,) = re.findall(r'data-cell="([^"]*)"', dom)
    first = data["fp8"]["maps"][0]
    assert cell.startswith(f"{first['kinds']['input']['rows'][0]} input, step {first['steps'][0]}")
    drawn_marks = sum(mark["kind"] != "other" for mark in data["marks"])
    assert 'data-log="true"' in dom and f'data-marks="{drawn_marks} 0"' in dom and drawn_marks > 8
    drawn = set(re.findall(r'data-chart="([^"]*)"', dom))
    assert drawn == {one["key"] for group in ("loss", "speed", "optimizer", "pipeline", "fp8") for one in data[group]["charts"]}
    pieces = len(data["pipeline"]["timelines"][0]["lanes"][0]["kinds"])
    assert dom.count('class="piece ') == 2 * pieces == 24
    assert dom.count("<image ") == 3 * 3  # amax, scale, saturated windows of three kinds, of the run that is open


def test_the_axes(tmp_path: Path) -> None:
    """Tokens and hours at each step; of steps that were not logged, the next one's time; none where a line lacks them or tokens
    fall; a long run's map keeps its ends and is short."""
    lines(tmp_path / "a" / "metrics.jsonl", step(0, loss=None, step_ms=None, tokens=0), step(1, tokens=7, step_ms=3.6e6),
          step(4, tokens=28, step_ms=7.2e6))  # fmt: skip
    lines(tmp_path / "b" / "metrics.jsonl", step(6, tokens=9), step(7, tokens=8, step_ms=None))
    lines(tmp_path / "c" / "metrics.jsonl", step(6, tokens=9, step_ms=3.6e6), step(7, tokens=12, step_ms=3.6e6))
    a, b, c, d = report(tmp_path / "r.html", *(tmp_path / name for name in "abc"), run_of(tmp_path / "d", 5000))["runs"]
    assert a["axes"] == {"step": [0, 1, 4], "tokens": [0, 7, 28], "hours": [0, 1, 7]}
    assert b["axes"] == {"step": [5, 6, 7], "tokens": None, "hours": None}
    assert c["axes"] == {"step": [5, 6, 7], "tokens": [9, 9, 12], "hours": [0, 1, 2]}
    axes = d["axes"]
    assert 200 < len(axes["step"]) == len(axes["tokens"]) == len(axes["hours"]) <= 300
    assert axes["step"][-1] == 5000 and axes["tokens"] == [4096 * number for number in axes["step"]]


def test_hostile_texts_in_a_browser(tmp_path: Path) -> None:
    """Names, keys and messages are text wherever they stand; none becomes markup, none ends the data."""
    run = tmp_path / NASTY.replace("/", "_")
    lines(run / "metrics.jsonl", step(1, **{NASTY: 3.0}), step(2, **{NASTY: 4.0}))
    about = {"device": NASTY, "versions": {NASTY: NASTY}, "git": {"commit": NASTY}, "schedule": NASTY, "config": "config.yaml"}
    again = {"event": "start", "step": 1, "time": 2, "resumed_from": NASTY, **about, "device": "x"}
    failed = {"event": "error", "step": 1, "kind": NASTY, "text": NASTY * 900}
    lines(
        run / "events.jsonl",
        {"event": "start", "step": 0, "time": 1, **about},
        {"event": NASTY, "step": 1, NASTY: 3},
        again,
        failed,
    )
    lines(run / "config.yaml", {NASTY: {NASTY: NASTY}})
    role = f"{NASTY}.input"
    lines(
        run / "scales.jsonl",
        {
            "step": 1,
            "roles": [role],
            "fp8_max": [1.0],
            "amax": [1.0],
            "scale": [1.0],
            "windows": [1],
            "saturated": [0],
            "excess": [1.0],
        },
    )
    target = tmp_path / "r.html"
    report(target, run)
    assert target.stat().st_size < 100_000 and target.read_text().count("<script") == 2
    dom, console = dump(target, tmp_path / "profile")
    assert console == "" and "data-error" not in dom and dom.count("<script") == 2
    body = dom[dom.index("<main") : dom.index('<script id="data"')]
    assert body.count("&lt;!--&lt;script&gt;alert(1)") > 8 and "<!--" not in body
