"""``python -m tools.plan CONFIG.yaml``: its numbers, its page, its files, a sweep, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from qeffect_lm.app.assemble import make_plan
from qeffect_lm.app.ceilings import ceilings
from qeffect_lm.app.clock import Clock
from qeffect_lm.app.forecast import timed, uneven
from qeffect_lm.app.layout import Layout
from qeffect_lm.app.rehearsal import rehearse
from qeffect_lm.app.sweep import Limits, choices
from qeffect_lm.config import load_config
from tests.browser import assert_alone, dump
from tests.tiny import config

ROOT = Path(__file__).resolve().parents[2]
BENCH, TINY = (str(ROOT / f"models/configs/{name}.yaml") for name in ("bench-s", "tiny"))


def test_steps_as_they_were_measured_on_h200s() -> None:
    """Every row of the recorded runs but auto's, within 10 %: one stage and two, every schedule, W alone and joined; of experts
    one stage."""
    files = (ROOT / f"docs/measurements/{name}-h200.json" for name in ("training", "moe"))
    runs = [run for file in files for run in json.loads(file.read_text(encoding="utf-8"))["runs"]]
    rows = [row for run in runs if run["commit"].startswith(("ccb3e19", "edc2d79", "69ec48c")) for row in run["rows"]]
    known, ratios = {}, []
    for row in rows:
        size, schedule, _, *options = row["case"].split()
        if schedule == "auto":
            continue
        more = [f"parallel.pp={row['pp']}", f"pipeline.schedule={schedule}", f"pipeline.microbatches={row['microbatches']}"]
        settings = load_config(ROOT / f"models/configs/bench-{size.lower()}.yaml", [*more, *options])
        if (size, *options) not in known:
            known[size, *options] = Layout(settings), rehearse(settings, "cuda")
        layout, rehearsed = known[size, *options]
        plan, clock = make_plan(settings), Clock(layout.of(settings), rehearsed, ceilings("h200"), None)
        ratios.append(1000 * (timed(settings, plan, (), clock, plan).seconds or 0.0) / row["ms"])
    assert len(ratios) > 25 and 0.9 < min(ratios) and max(ratios) < 1.1, ratios


def test_the_page_and_its_files(plan_tool, tmp_path: Path) -> None:
    """Numbers that follow from each other, on the terminal, as JSON, SVG and HTML; budget and cost."""
    html, svg = tmp_path / "plan.html", tmp_path / "plan.svg"
    asked = [BENCH, "parallel.pp=2", "pipeline.schedule=zb-h1", "--device", "h200", "--tokens", "1e9", "--price", "2"]
    report = json.loads(plan_tool(*asked, "--json", "--svg", str(svg), "--html", str(html)))
    time, budget = report["time"], report["budget"]
    assert report["tokens_per_step"] == 8 * 1024 and len(report["memory"]) == 2
    assert time["tokens_per_second"] == pytest.approx(8192 / time["step_seconds"])
    assert budget["days"] == pytest.approx(1e9 / time["tokens_per_day"])
    assert budget["gpu_hours"] == pytest.approx(2 * 24 * budget["days"])
    assert budget["cost"] == pytest.approx(2 * budget["gpu_hours"])
    assert any("assumed, not measured: link_gb_s = 400" in line for line in report["assumptions"])
    page = plan_tool(*asked, "--width", "110")
    step = f"{1000 * time['step_seconds']:.4g} ms a step"
    for words in (step, "W leases", "peak: optimizer step", "▒ I input gradient", "GPU-hours"):
        assert words in page
    text = html.read_text()
    assert svg.read_text() in text and "logits" in text and "<script" not in text
    assert_alone(html)


@pytest.mark.parametrize("size", ["1400,900", "500,900"])
def test_the_page_in_a_browser(plan_tool, tmp_path: Path, size: str) -> None:
    """Nothing wider than the screen, bars as long as their shares; the style is the one of all pages."""
    html = tmp_path / "plan.html"
    plan_tool(BENCH, "parallel.pp=2", "run.name=<b>&amp;", "--device", "h200", "--html", str(html))
    probe = """<script>
      const root = document.documentElement, bars = [...document.querySelectorAll(".stack")];
      document.body.dataset.overflow = root.scrollWidth - root.clientWidth;
      const filled = bar => [...bar.children].reduce((sum, part) => sum + part.offsetWidth, 0) / bar.clientWidth;
      document.body.dataset.full = Math.max(...bars.map(filled)).toFixed(2);
      document.body.dataset.paper = getComputedStyle(root).getPropertyValue("--paper");
    </script>"""
    html.write_text(html.read_text().replace("</body>", probe + "</body>"))
    dom, console = dump(html, tmp_path / "profile", size)
    assert console == "" and 'data-overflow="0"' in dom and "<h1>&lt;b&gt;&amp;amp;: " in dom
    assert re.search(r'data-full="(0.9[89]|1.0[01])"', dom) and 'data-paper="#ffffff"' in dom


def test_auto_by_predicted_times(plan_tool) -> None:
    """As good as the best named schedule, labelled; a limit is kept and costs time; given times need no device."""
    asked = [BENCH, "parallel.pp=2", "--json"]
    steps = {}
    for name in ("1f1b", "zb-v", "auto"):
        report = json.loads(plan_tool(*asked, f"pipeline.schedule={name}", "--device", "h200"))
        steps[name] = report["time"]["pipeline_seconds"]
        labelled = any("predicted times; training measures its own" in line for line in report["assumptions"])
        assert labelled == (name == "auto")
    assert steps["auto"] <= steps["zb-v"] * 1.016 < steps["1f1b"]
    auto = [*asked, "pipeline.schedule=auto"]
    held = []
    for more in (["pipeline.memory_limit=1.5"], []):
        memory = json.loads(plan_tool(*auto, "--device", "h200", *more))["memory"]
        held.append(max(rank["categories"]["I leases"] + rank["categories"]["W leases"] for rank in memory))
    assert held[0] < held[1]
    given = json.loads(plan_tool(*auto, *(f"pipeline.costs.t_{kind}=[1]" for kind in "fiw")))
    assert given["time"] is None and any("T_F T_I T_W per rank, given" in line for line in given["assumptions"])


def test_a_cpu_and_its_profile(plan_tool, tmp_path: Path) -> None:
    """No ceilings: it says so. Measured here, the profile gives the times, again and again the same."""
    sizes = ["model.hidden_size=32", "model.ffn_size=48", "model.vocab_size=64", "data.seq_len=16"]
    small = [TINY, *sizes, "graphs.backend=eager"]
    assert json.loads(plan_tool(*small, "--json"))["time"] is None and "no ceilings" in plan_tool(*small, "--width", "120")
    kept = tmp_path / "profile.json"
    first = json.loads(plan_tool(*small, "--measure", str(kept), "--json"))
    again = json.loads(plan_tool(*small, "--profile", str(kept), "--json"))
    assert first["time"] == again["time"] and first["time"]["step_seconds"] > 0
    layer = json.loads(kept.read_text())["layers"]["fp8"]
    assert sum(chunk["F"] for chunk in first["time"]["chunks"]) > 4 * layer["t_f"]
    assert any("times of parts measured: CPU" in line for line in again["assumptions"])
    kept.write_text("{}")
    assert "is no profile" in plan_tool(*small, "--profile", str(kept), code=2)


def test_a_sweep(plan_tool) -> None:
    """All that fit keep the limit and the batch, the fastest first; the counts of the others add up; less memory fits less."""
    asked = [BENCH, "--device", "h200", "--sweep", "--gpus", "4", "--schedules", "1f1b,zb-v", "--json"]
    wide, narrow = (json.loads(plan_tool(*asked, "--memory", size)) for size in ("80GB", "5GB"))
    for report in (wide, narrow):
        rows = report["ranked"]
        assert report["looked_at"] == len(rows) + sum(report["left_out"].values())
        for row in rows:
            assert row["pp"] * row["dp"] * row["cp"] * row["tp"] == 4 and row["ep"] == 1
            assert row["microbatches"] * row["microbatch_size"] * row["dp"] == 8
        assert all(row["peak_bytes"] <= report["memory_limit"] for row in rows)
        speeds = [row["tokens_per_second"] for row in rows]
        assert speeds == sorted(speeds, reverse=True) and len(set(speeds)) > 1
    assert len(narrow["ranked"]) < len(wide["ranked"])
    assert narrow["left_out"].keys() >= {"weights, gradients and optimizer alone are too large"}
    page = plan_tool(*asked[:-1], "--memory", "80GB", "--width", "60")
    assert "layouts, " in page and "…" not in page, "a narrow page breaks lines and cuts off no figure"
    first = wide["ranked"][0]
    row = next(line for line in page.splitlines() if line.split()[:1] == ["1"])
    assert f"{first['tokens_per_second']:,.0f}" in row and f"{first['peak_bytes'] / 2**30:.1f}" in row


def test_what_is_taken_as_simpler_is_said(plan_tool) -> None:
    """Where it holds, and only there: Transformer Engine's layers, and shares that were not worked out."""
    plain = [BENCH, "parallel.dp=2", "optim.zero=1", "--device", "h200", "--json"]
    many = [*plain, "parallel.dp=4096", "model.backend=te", "model.dropout=0.0"]
    said, more = (json.loads(plan_tool(*asked))["assumptions"] for asked in (plain, many))
    assert any("network_gb_s = 45" in line and "not measured" in line for line in said)
    for words in ("Transformer Engine's layers are taken as native", "ZeRO over 4,096 replicas"):
        assert not any(words in line for line in said) and sum(words in line for line in more) == 1, (words, more)


def test_layers_that_do_not_divide() -> None:
    assert uneven(config(), 2) is None
    assert uneven(config(), 3) == (
        "4 layers do not divide by 3 chunks: 1 left over (as many as layers 3); chunks 0 hold 2, the others 1"
    )
    limits = Limits(gpus=8, memory=1e12, batch=16)
    reasons = [reason for choice, reason in choices(config(pipeline__microbatches=8), limits) if choice is None]
    assert "more stages than decoder layers" in reasons and "more chunks than decoder layers" in reasons


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([TINY, "--schedule", "zb-v"], "--schedule is of a schedule by itself"),
        ([TINY, "--gpus", "8"], "--gpus goes with --sweep"),
        (["--schedule", "1f1b", "--stages", "2", "--microbatches", "4", "--device", "h200"], "--device is of a run"),
        ([BENCH, "--device", "h300"], "no ceilings of device 'h300': use one of h200"),
        ([BENCH, "--device", "h200", "--sweep"], "--sweep needs --gpus N and --memory SIZE"),
        ([BENCH, "--device", "h200", "--sweep", "--gpus", "2", "--memory", "80"], "a size with its unit"),
        ([BENCH, "--sweep", "--gpus", "2", "--memory", "80GB"], "name the device"),
        ([TINY, "--price", "2"], "--price needs times"),
        ([BENCH, "pipeline.schedule=auto", "parallel.pp=2"], "auto needs times: name a device"),
        (["nothing.yaml"], "nothing.yaml"),
    ],
)
def test_what_it_refuses(plan_tool, arguments: list[str], words: str) -> None:
    assert words in plan_tool(*arguments, code=2)
