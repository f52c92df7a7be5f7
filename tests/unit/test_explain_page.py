"""``--html``: what the page shows, always; and in a headless browser, where there is one, that it shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qeffect_lm.contract.errors import StreamOrderError
from qeffect_lm.contract.streams import Access
from qeffect_lm.contract.trace import TraceWriter
from tests.browser import assert_alone, dump, shown
from tests.tiny import batch, config
from tests.unit.contract_driver import Driver
from tests.unit.in_process import Ranks
from tools.explain import main

pytestmark = pytest.mark.xdist_group("explain")
READ, WRITE = Access.READ, Access.WRITE


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> list[Path]:
    """Two ranks, two steps; in the second, rank 1 does not wait for a receive."""
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    settings = {"parallel__pp": 2, "model__num_layers": 2, "contract__mode": "trace", "contract__trace_file": str(path)}
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(config(**settings), patch)
        ranks.prepare(batch(0))
        ranks.step(0, batch(0))
        engine = ranks.parts[1].engine
        complete = engine._complete

        def forgets(key: tuple[str, int, int]) -> None:
            if key == ("RECV_F", 1, 1):
                engine._pending.pop(key).wait()
            else:
                complete(key)

        patch.setattr(engine, "_complete", forgets)
        with pytest.raises(StreamOrderError):
            ranks.step(1, batch(1))
    return [path.with_name(f"t.rank{rank}.jsonl") for rank in range(2)]


def page(capsys: pytest.CaptureFixture, files: list[Path], *arguments: object) -> Path:
    target = files[0].parent / f"page{len(list(files[0].parent.glob('page*')))}.html"
    assert main([*map(str, files), "--html", str(target), *map(str, arguments)]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: ")
    return target


def test_the_page_stands_alone(traces, capsys):
    """No network, no other file: nothing in it loads anything."""
    assert_alone(page(capsys, traces))


def test_lanes_boxes_and_edges(traces, capsys):
    """Every launch of a sound step is a box on its stream's lane, in host order; every edge an arrow between two boxes."""
    data = shown(page(capsys, traces, "--step", 0))
    (step,) = data["steps"]
    assert step["name"] == "step 0" and data["left_out"] == 0
    first, second = step["ranks"]
    assert (first["label"], second["label"]) == ("rank 0", "rank 1")
    assert first["lanes"][:2] == ["host", "compute"] and {"send_F", "recv_B", "collective"} <= set(first["lanes"])
    for rank in step["ranks"]:
        numbers = [box["n"] for box in rank["boxes"]]
        assert numbers == sorted(numbers) and not any(box["red"] for box in rank["boxes"]) and rank["missing"] is None
        for arrow in rank["arrows"]:
            begin, end = rank["boxes"][arrow["from"]], rank["boxes"][arrow["to"]]
            assert begin["n"] < end["n"] and begin["lane"] == arrow["lane"] != end["lane"] == arrow["end"]
            assert "is recorded" in arrow["lines"][0] and "waits for event" in arrow["lines"][1]
    boxes = {box["name"]: box for box in first["boxes"]}
    assert {"begin", "0F0", "0SEND_F0", "0RECV_B3", "REDUCE", "bump", "commit", "refresh", "end"} <= set(boxes)
    pairs = [(first["boxes"][a["from"]]["name"], first["boxes"][a["to"]]["name"]) for a in first["arrows"]]
    assert ("0F0", "0SEND_F0") in pairs and ("0RECV_B3", "0I3") in pairs and ("0W3", "0RECV_B3") not in pairs
    lines = "\n".join(boxes["0F1"]["lines"])
    assert "read: x.0.1" in lines and "leases of 4 layers: forwarded: retained in slot W0.1" in lines
    assert "cached weights read: 4, version 0" in lines and "eager" in lines


def test_the_conflict(traces, capsys):
    """The violation's step first, its words on top, both accesses red, the missing edge between them, and no other red."""
    data = shown(page(capsys, traces))
    assert data["violation"]["title"] == "violation 1 of 1: StreamOrderError, rank 1"
    assert [label for label, _ in data["violation"]["facts"]][:5] == ["what", "where", "first", "then", "missing"]
    step = data["steps"][data["first"]]
    sound, broken = step["ranks"]
    assert step["name"] == "step 1" and not any(box["red"] for box in sound["boxes"]) and sound["missing"] is None
    red = {place: box["name"] for place, box in enumerate(broken["boxes"]) if box["red"]}
    assert list(red.values()) == ["1RECV_F1", "1F1"]
    assert [broken["missing"]["from"], broken["missing"]["to"]] == list(red)
    real = [(arrow["from"], arrow["to"]) for arrow in broken["arrows"]]
    assert tuple(red) not in real


def test_what_is_left_out_is_said(tmp_path, capsys):
    """The last steps, and the violation's, wherever it was; the line says how many are missing."""
    path = tmp_path / "t.jsonl"
    driver = Driver(mode="trace", trace=TraceWriter(path))
    for step in range(12):
        driver.ledger.begin_step(step)
        if step == 2:
            driver.ledger.launch("a", [("x", WRITE)], "</script>")
            with pytest.raises(StreamOrderError):
                driver.ledger.launch("b", [("x", READ)], "two")
        driver.ledger.abandon_step()
    assert main([str(path), "--html", str(tmp_path / "t.html")]) == 0
    assert capsys.readouterr().out.endswith("step 2 to step 11 (5 other steps are left out: choose one with --step)\n")
    data = shown(tmp_path / "t.html")
    assert [one["name"] for one in data["steps"]] == [f"step {step}" for step in (2, *range(6, 12))]
    assert data["first"] == 0 and data["left_out"] == 5
    assert [box["name"] for box in data["steps"][0]["ranks"][0]["boxes"] if box["red"]] == ["</script>", "two"]


def test_a_violation_without_a_launch_is_on_the_hosts_lane(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    driver = Driver(mode="trace", trace=TraceWriter(path))
    driver.ledger.begin_step(0)
    driver.act("F", 0)
    with pytest.raises(Exception, match="W before I"):
        driver.act("W", 0)
    assert main([str(path), "--html", str(tmp_path / "t.html")]) == 0
    (rank,) = shown(tmp_path / "t.html")["steps"][0]["ranks"]
    assert [(box["name"], box["red"], rank["lanes"][box["lane"]]) for box in rank["boxes"]] == [
        *[("begin", False, "host"), ("0F0", True, "host"), ("WeightGradBeforeInputGrad", True, "host")]
    ]


# ---- in a browser ------------------------------------------------------------------------------------------

CLICK = """
<script>
  const boxes = document.querySelectorAll(".conflict");
  boxes[boxes.length - 1].dispatchEvent(new MouseEvent("click", {bubbles: true}));
  document.body.dataset.told = at("details").textContent;
  at("fit").click();
  document.body.dataset.fit = at("picture").getAttribute("width") + " " + at("scroll").clientWidth;
  const wide = document.querySelectorAll("#picture .box").length;
  show(0);
  document.body.dataset.other = wide + " " + document.querySelectorAll("#picture .conflict, #picture .missing").length;
  show(data.first);
</script>
"""


def test_in_a_browser(traces, capsys, tmp_path):
    """All boxes and arrows are drawn, the conflict is red, a click tells, steps change, and the console is silent."""
    target = page(capsys, traces)
    data = shown(target)
    clicked = tmp_path / "clicked.html"
    clicked.write_text(target.read_text().replace("</body>", CLICK + "</body>"))
    dom, console = dump(clicked, tmp_path / "profile")
    assert console == "" and "data-error" not in dom
    ranks = data["steps"][data["first"]]["ranks"]
    boxes = re.findall(r'<g class="box ([^"]*)" data-n="(\d+)"', dom)
    assert sorted(int(n) for _, n in boxes) == sorted(box["n"] for rank in ranks for box in rank["boxes"])
    red = {box["n"] for rank in ranks for box in rank["boxes"] if box["red"]}
    assert {int(n) for look, n in boxes if "conflict" in look} == red and len(red) == 2
    picture = dom[dom.index('<svg id="picture"') :]
    assert picture.count('class="missing"') == 1
    assert picture.count('class="edge"') == sum(len(rank["arrows"]) for rank in ranks) > 10
    assert "1F1 on compute" in re.findall(r'data-told="([^"]*)"', dom)[0]
    width, view = map(float, re.findall(r'data-fit="([^"]*)"', dom)[0].split())
    assert 0.5 * view < width <= view
    assert re.findall(r'data-other="([^"]*)"', dom) == [f"{len(boxes)} 0"]
    words = dom[dom.index('<section id="violation"') : dom.index("</section>")]
    assert "StreamOrderError, rank 1" in words and "an edge from recv_F to compute" in words


def test_a_sound_trace_in_a_browser(traces, capsys, tmp_path):
    target = page(capsys, traces[:1], "--step", 0)
    dom, console = dump(target, tmp_path / "profile")
    assert console == "" and "data-error" not in dom and "no violation" in dom
    picture = dom[dom.index('<svg id="picture"') : dom.index("<script")]
    assert picture.count("<g ") == len(shown(target)["steps"][0]["ranks"][0]["boxes"]) > 20
    assert '<section id="violation" hidden' in dom and "conflict" not in picture and "missing" not in picture
