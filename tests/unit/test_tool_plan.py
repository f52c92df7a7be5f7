"""``python -m tools.plan``: numbers, drawings, files and errors."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeline.actions import from_csv, parse_action
from pipeline.plan import build_plan, make_plan
from pipeline.schedules import SCHEDULES
from pipeline.simulate import simulate
from pipeline.timeline_picture import blocks, svg
from tests.unit.test_pipeline_paper import ROWS
from tools import plan as tool
from tools.common import ROOT

PAPER = ["--stages", "8", "--microbatches", "24", "--costs", "18.522,18.086,9.337,0.601"]


def test_json_of_the_paper_s_first_row(plan_tool) -> None:
    for name, rate, peak in (("1f1b", 0.2431, 8), ("zb-h1", 0.1585, 8), ("zb-h2", 0.1083, 15), ("zb-v", 0.0728, 8)):
        report = json.loads(plan_tool("--schedule", name, *PAPER, "--json"))
        assert report["valid"] is True and round(report["bubble_rate"], 4) == rate
        assert max(report["peak_activations"]) == peak and len(report["peak_activations"]) == 8
        assert report["makespan"] >= report["cost"] and report["makespan_bubble_rate"] >= report["bubble_rate"]
        assert report["notes"] == [] and "auto" not in report


def test_json_has_the_actions(plan_tool) -> None:
    """They are the plan: parsed again they are valid and give the same numbers."""
    report = json.loads(plan_tool("--schedule", "zb-v", "--stages", "3", "--microbatches", "4", "--costs", "4,2,2,1", "--json"))
    rows = [[parse_action(word) for word in row] for row in report["actions"]]
    plan = make_plan("zb-v", rows, SCHEDULES["zb-v"].placement(3), 4)
    assert plan.fingerprint() == report["fingerprint"] == build_plan("zb-v", 3, 4).fingerprint()
    assert simulate(plan, 2, 1, 1, 1).makespan == report["makespan"]
    assert report["placement"] == [0, 1, 2, 2, 1, 0]
    assert "published for 5 microbatches" in report["notes"][0]


def test_published_and_engine_form_of_1f1b(plan_tool) -> None:
    arguments = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--csv"]
    assert plan_tool(*arguments) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert plan_tool(*arguments, "--w-delay", "0") == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"
    assert plan_tool(*arguments, "--w-delay", "stage") == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_csv(plan_tool) -> None:
    """One row per rank; lowered it is the whole plan, and reads back."""
    size = ["--stages", "2", "--microbatches", "3"]
    out = plan_tool("--schedule", "interleaved-1f1b", "--chunks", "3", *size, "--csv", "--w-delay", "0")
    assert [len(row) for row in csv.reader(io.StringIO(out))] == [27, 27]
    lowered = plan_tool("--schedule", "zb-h2", *size, "--csv", "--lowered")
    assert tuple(map(tuple, from_csv(lowered))) == build_plan("zb-h2", 2, 3).actions


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_drawn(plan_tool, name: str) -> None:
    """Small ones with a name on each piece of work, in Unicode; all with the summary."""
    out = plan_tool("--schedule", name, "--stages", "3", "--microbatches", "4", "--width", "120")
    assert "rank 2" in out and "F3" in out and "··" in out and f"{name}: 3 stages, 4 microbatches: valid, no deadlock" in out
    assert max(map(len, out.splitlines())) <= 120 + 40 and "bubble rate" in out


def test_large_steps_are_drawn_whole(plan_tool) -> None:
    out = plan_tool("--schedule", "zb-h1", *PAPER, "--width", "100")
    rows = [line for line in out.splitlines() if line.startswith("rank ")]
    assert len(rows) == 8 and {len(row) for row in rows} == {100}
    assert all(block in out for block in "█▒░·")
    assert rows[0][8] == "█" and rows[7][8] == "·" and "░░░░" in rows[7]


def test_blocks_show_what_takes_most_of_a_column() -> None:
    plan = build_plan("1f1b", 2, 1)
    picture = blocks(plan, simulate(plan, 2, 1, 1), width=8 + 14)  # of makespan 7: two columns for each unit
    lines = picture.splitlines()
    assert lines[1:3] == ["rank 0  ████······▒▒░░", "rank 1  ····████▒▒░░··"]
    coarse = blocks(plan, simulate(plan, 2, 1, 1), width=8 + 2).splitlines()  # columns of 3.5 units
    assert coarse[1:3] == ["rank 0  █·", "rank 1  ·▒"]


def test_svg(plan_tool, tmp_path: Path) -> None:
    """Well-formed; a box per piece of work with its name, within the picture, no two of a rank on top of each other."""
    file = tmp_path / "zb-v.svg"
    plan_tool("--schedule", "zb-v", "--stages", "3", "--microbatches", "4", "--svg", str(file), "--csv")
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    boxes: dict[float, list[tuple[float, float, str]]] = {}
    for box in root.iter(f"{space}rect"):
        title = box.find(f"{space}title")
        if title is not None:
            left, size = float(box.get("x", 0)), float(box.get("width", 0))
            boxes.setdefault(float(box.get("y", 0)), []).append((left, left + size, (title.text or "").partition(":")[0]))
    plan = build_plan("zb-v", 3, 4)
    for row, (_, drawn) in zip(plan.actions, sorted(boxes.items()), strict=True):
        assert [name for _, _, name in drawn] == [str(action) for action in row if action.is_compute]
        assert all(one[1] <= other[0] + 0.02 for one, other in zip(drawn, drawn[1:], strict=False))
        assert drawn[-1][1] <= float(root.get("width", 0))
    assert "bubble rate 7.69 %" in file.read_text(encoding="utf-8")


def test_svg_text_is_escaped() -> None:
    plan = build_plan("1f1b", 1, 1)
    ElementTree.fromstring(svg(plan, simulate(plan, 1, 1, 1), "a < b & c"))


def test_auto(plan_tool) -> None:
    p, m, times, _, h1, *_ = ROWS[0]
    report = json.loads(plan_tool("--schedule", "auto", *PAPER, "--memory-limit", "8", "--effort", "0.05", "--json"))
    assert report["bubble_rate"] < 0.0728 < h1 and max(report["peak_activations"]) <= p
    assert round(report["auto"]["named"]["zb-v"], 4) == 0.0728 and "zb-h2" not in report["auto"]["named"]
    assert report["auto"]["lower_bound"] <= report["cost"] and 0 <= report["auto"]["at_most_above_optimum"] < 0.02


def test_auto_prints_its_distance(plan_tool) -> None:
    arguments = ["--schedule", "auto", "--stages", "2", "--microbatches", "3", "--costs", "5,4,3,0.5"]
    out = plan_tool(*arguments, "--memory-limit", "2", "--placements", "linear")
    assert "at most 2.33 % above the optimum (lower bound 43)" in out
    assert "0.00 % above the optimum of this placement (44)" in out
    assert "named schedules within the limit: 1f1b" in out and "made from: zb-h1" in out
    whole = json.loads(plan_tool(*arguments, "--objective", "makespan", "--json"))
    assert whole["auto"]["lower_bound"] <= whole["makespan"]


def test_uneven_stages_and_bytes(plan_tool) -> None:
    report = json.loads(
        plan_tool(
            "--schedule", "auto", "--stages", "2", "--microbatches", "4", "--costs", "1:2,0:2,1:2,0.1", "--memory", "2GiB,1GiB",
            "--memory-limit", "5GiB", "--placements", "linear", "--json",
        )
    )  # fmt: skip
    assert max(report["peak_activations"]) <= 2.5 and report["cost"] >= 24
    small = "--schedule", "zb-h1", "--stages", "2", "--microbatches", "4"
    plain = json.loads(plan_tool(*small, "--costs", "1:2,1:2,1:2,0", "--json"))
    assert plain["cost"] == 24


def test_w_of_several_microbatches_as_one_product(plan_tool) -> None:
    sizes = "--stages", "2", "--microbatches", "5"
    report = json.loads(plan_tool("--schedule", "1f1b", *sizes, "--coalesce-w", "2", "--json"))
    plan = build_plan("1f1b", 2, 5, coalesce_w=2)
    assert (report["coalesce_w"], report["fingerprint"]) == (2, plan.fingerprint())
    assert report["w_slots"] == [sum(slots.w_slots.count.values()) for slots in plan.slots] == [4, 2]
    assert "coalesce_w" not in json.loads(plan_tool("--schedule", "1f1b", *sizes, "--json"))
    drawn = plan_tool("--schedule", "1f1b", *sizes, "--coalesce-w", "2")
    assert "W of 2 microbatches as one product; W-slots per rank: 4 2" in drawn
    proved = plan_tool("--schedule", "1f1b", *sizes, "--coalesce-w", "2", "--check")
    assert proved.startswith("1f1b: 2 stages, 5 microbatches, window step, coalesce_w 2: proved")
    assert "--plan FILE says all that --coalesce-w would" in plan_tool("--check", "--plan", "x", "--coalesce-w", "2", code=2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--schedule", "zb-x"], "unknown schedule 'zb-x'; use one of 1f1b"),
        (["--schedule", "1f1b", "--stages", "0"], "p=0"),
        (["--schedule", "1f1b", "--microbatches", "0"], "m=0"),
        (["--schedule", "1f1b", "--stages", "two"], "invalid int value"),
        (["--schedule", "zb-v", "--chunks", "3"], "two chunks per rank, not 3"),
        (["--schedule", "interleaved-1f1b", "--chunks", "0"], "at least one chunk"),
        (["--schedule", "zb-h1", "--w-delay", "1"], "itself sets when W runs"),
        (["--schedule", "1f1b", "--w-delay", "-1"], "expected one argument|number of microbatches"),
        (["--schedule", "1f1b", "--w-delay", "late"], "number of microbatches"),
        (["--schedule", "zb-h2", "--memory-limit", "2"], "zb-h2 holds 3 on rank 0, above the memory limit 2"),
        (["--schedule", "auto", "--memory-limit", "0.5"], "below one microbatch"),
        (["--schedule", "auto", "--memory-limit", "much"], "--memory-limit: a number"),
        (["--schedule", "auto", "--memory-limit", "4GB"], "needs --memory MB,MW in bytes"),
        (["--schedule", "auto", "--chunks", "2"], "auto chooses chunks"),
        (["--schedule", "auto", "--placements", "ring"], "unknown placement ring"),
        (["--schedule", "auto", "--coalesce-w", "2"], "auto itself places each W: leave --coalesce-w out"),
        (["--schedule", "1f1b", "--coalesce-w", "0"], "coalesce_w=0: W of 1"),
        (["--schedule", "zb-v", "--coalesce-w", "5", "--check"], "coalesce_w=5: W of 1 .* to 4 microbatches"),
        (["--schedule", "1f1b", "--coalesce-w", "2", "--check", "--window", "microbatch"], "does not go with window"),
        (["--schedule", "1f1b", "--costs", "1,2,3"], "four times"),
        (["--schedule", "1f1b", "--costs", "1,2,x,0"], "--costs, W: a number"),
        (["--schedule", "1f1b", "--costs", "1,2,nan,0"], "--costs, W: a number"),
        (["--schedule", "1f1b", "--costs", "1:2:3,1,1,0"], "one for each of the 2 stages, not 3"),
        (["--schedule", "1f1b", "--costs", "0,0,0,0"], "all zero"),
        (["--schedule", "1f1b", "--memory", "1,2"], "MW ≤ MB"),
        (["--schedule", "1f1b", "--memory", "1"], "two sizes"),
        (["--schedule", "1f1b", "--width", "20"], "at least 72 columns"),
        (["--schedule", "1f1b", "--svg", "/nowhere/x.svg"], "cannot write /nowhere/x.svg"),
        (["--schedule", "1f1b", "--json", "--csv"], "not allowed with"),
        (["--what"], "required|unrecognized"),
    ],
)
def test_errors_are_one_line_and_exit_2(plan_tool, arguments: list[str], reason: str) -> None:
    sizes = [] if arguments == ["--what"] else ["--stages", "2", "--microbatches", "4"]
    assert re.search(reason, plan_tool(*sizes, *arguments, code=2))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--schedule", "1f1b", "--objective", "span"], "--objective goes with --schedule auto"),
        (["--schedule", "1f1b", "--placements", "v"], "--placements goes with --schedule auto"),
        (["--schedule", "1f1b", "--effort", "0"], "--effort goes with --schedule auto"),
        (["--schedule", "1f1b", "--lowered"], "--lowered goes with --json or --csv"),
        (["--schedule", "1f1b", "--json", "--width", "90"], "--width is of the drawing, which --json and --csv leave out"),
        (["--schedule", "1f1b", "--check", "--width", "90"], "--check draws nothing: leave --width out"),
        (["--schedule", "1f1b", "--check", "--json", "--lowered"], "--check draws nothing: leave --lowered out"),
        (["--schedule", "1f1b", "--check", "--costs", "1,1,1,0"], "--costs has no meaning with --check, but for auto"),
        (["--schedule", "1f1b", "--check", "--memory-limit", "3"], "--memory-limit has no meaning with --check, but for auto"),
        (["--schedule", "1f1b", "--check", "--effort", "1"], "--effort goes with --schedule auto"),
    ],
)
def test_options_that_would_be_ignored(plan_tool, arguments: list[str], reason: str) -> None:
    assert reason in plan_tool(*arguments, "--stages", "2", "--microbatches", "4", code=2)


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "tools.plan", "--schedule", "zb-h1", *PAPER, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and round(json.loads(done.stdout)["bubble_rate"], 4) == 0.1585
    wrong = subprocess.run([*command[:3], "--schedule", "x", *PAPER], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and wrong.stdout == ""


# ---- --check ---------------------------------------------------------------------------------------------------------

SMALL = ["--schedule", "zb-h1", "--stages", "2", "--microbatches", "3", "--check"]
PROPERTIES = ["leases", "slots", "scales", "caches", "edges", "workspaces", "gradients", "messages", "progress"]


def rejected(capsys, *arguments: str) -> str:
    """What a rejecting check prints: on stdout, with exit code 1."""
    assert tool.main(arguments) == 1
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_check_prints_a_line_per_property(plan_tool) -> None:
    out = plan_tool(*SMALL)
    first, *lines = out.splitlines()
    assert first.startswith("zb-h1: 2 stages, 3 microbatches, window step: proved for every interleaving, ")
    assert [line.split()[0] for line in lines] == PROPERTIES
    assert "  leases      12 microbatches of a chunk consumed exactly once, F then I then W" in lines
    report = json.loads(plan_tool(*SMALL, "--window", "microbatch", "--json"))
    assert report["valid"] is True and list(report["proved"]) == PROPERTIES and report["window"] == "microbatch"
    assert report["proved"]["leases"] == 12 and report["proved"]["messages"] == 12
    auto = json.loads(plan_tool("--schedule", "auto", *SMALL[2:], "--effort", "0.05", "--json"))
    assert auto["valid"] is True and auto["proved"]["leases"] == 12 * auto["proved"]["caches"] // 24


def test_check_of_files(plan_tool, capsys, tmp_path: Path) -> None:
    """A stored plan, a checkpoint's manifest or folder, and a plan with effects of its own, sound and broken."""
    plan = build_plan("1f1b", 2, 2, 1)
    stored, folder, effects = tmp_path / "plan.json", tmp_path / "step_00000001", tmp_path / "effects.json"
    stored.write_text(plan.to_json())
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "meta": {"plan": plan.to_json()}}))
    proved = json.loads(plan_tool("--plan", str(stored), "--check", "--json", "--effects", str(effects)))["proved"]
    for file in (folder, folder / "manifest.json", effects):
        assert json.loads(plan_tool("--plan", str(file), "--check", "--json"))["proved"] == proved
    assert plan_tool("--plan", str(effects), "--check").startswith("1f1b with effects of its own: 2 stages")
    text = effects.read_text()
    assert text.count('"wait compute e3",') == 1
    effects.write_text(text.replace('"wait compute e3",', '"wait recv_F e3",', 1))
    arguments = "--plan", str(effects), "--check"
    out = rejected(capsys, *arguments)
    assert re.match(r"rejected at rank 0, position 24, action 0I0: StreamOrderError: 0I0 .* not ordered after 0RECV_B0", out)
    report = json.loads(rejected(capsys, *arguments, "--json"))
    assert (report["valid"], report["rank"], report["position"], report["action"]) == (False, 0, 24, "0I0")
    assert report["reason"].startswith("StreamOrderError: 0I0")
    words = plan.to_json().replace("1W0 1W1", "1W1 1W0").replace("1I1 1W0", "1I1 1W1")
    stored.write_text(words.replace("0W1", "0W0"))
    assert rejected(capsys, "--plan", str(stored), "--check").startswith("rejected at rank 0, position ")


def test_check_with_mutants(plan_tool) -> None:
    out = plan_tool("--schedule", "1f1b", "--stages", "1", "--microbatches", "1", "--check", "--mutants", "40")
    assert out.splitlines()[-1].startswith("all 40 ") and out.splitlines()[-1].endswith(" 0") and "MISSED" not in out
    arguments = ["--schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--check", "--json", "--mutants", "30"]
    mutants = json.loads(plan_tool(*arguments))["mutants"]
    assert mutants["total"] == 30 and mutants["survivors_wrong"] == mutants["rejected_without_place"] == []
    parts = ("rejected_wrong", "rejected_by_rule", "rejected_without_program", "rejected_unknown")
    assert mutants["rejected"] == sum(mutants[part] for part in parts) == 30 - mutants["survivors_equal"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--plan", "/nowhere/plan.json"], "cannot read /nowhere/plan.json: No such file"),
        (["--plan", __file__], "is no plan: not JSON"),
        (["--plan", str(Path(__file__).parent)], "is no checkpoint and holds no complete one"),
        (["--plan", "OTHER"], "is no plan: not a stored plan"),
        (["--plan", "EFFECTS"], "is no plan: not a plan with its effects"),
        (["--plan", "LINE"], r"is no plan: 'jump' is no operation of a program.*\[rank=0, position=1\]"),
        (["--plan", "NEWER"], "a program of format 2"),
        (["--plan", "x", "--schedule", "1f1b"], "--plan FILE says all that --schedule would"),
        (["--plan", "x", "--chunks", "2", "--w-delay", "1"], "--plan FILE says all that --chunks, --w-delay would"),
        (["--plan", "x", "--costs", "1,1,1,1"], "--costs has no meaning for a stored plan"),
        (["--plan", "DIGITS"], "is no plan: not JSON .*4300 digits"),
        (["--plan", "DEEP"], "is no plan: not JSON .*recursion"),
        (["--plan", "FAR"], "each rank from 0 on must hold at least one chunk"),
        ([*SMALL, "--mutants", "9" * 5000], "--mutants: a number of at most 6 digits"),
        (["--schedule", "1f1b"], "required: --stages, --microbatches"),
        ([*SMALL, "--mutants", "few"], "--mutants few: a number from 1 on, or 'all'"),
        ([*SMALL, "--svg", "x.svg"], "--check draws nothing"),
        ([*SMALL, "--csv"], "--check draws nothing"),
        ([*SMALL, "--effects", "/nowhere/e.json"], "cannot write /nowhere/e.json"),
        (["--schedule", "zb-x", "--stages", "1", "--microbatches", "1"], "unknown schedule 'zb-x'"),
    ],
)
def test_errors_of_check(plan_tool, tmp_path: Path, arguments: list[str], reason: str) -> None:
    program = {"effects": 1, "schedule": "x", "placement": [0], "microbatches": 1, "window": "step"}
    program["ranks"] = [["begin", "jump"]]
    files = {"OTHER": "{}", "EFFECTS": '{"effects": 1}', "LINE": json.dumps(program), "NEWER": '{"effects": 2}'}
    files |= {"DIGITS": '{"format": ' + "1" * 5000 + "}", "DEEP": "[" * 100_000}
    stored = json.loads(build_plan("1f1b", 1, 1).to_json())
    files["FAR"] = json.dumps({**stored, "placement": [0, 10**15]})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = [str(tmp_path / word) if word in files else word for word in arguments]
    assert re.search(reason, plan_tool("--check", *given, code=2))


def test_a_stored_plan_that_claims_a_lot(capsys, tmp_path: Path) -> None:
    """Rejected for what it lacks, without a table of what it would have."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**json.loads(build_plan("1f1b", 1, 1).to_json()), "microbatches": 10**18}))
    assert "0F1 is missing" in rejected(capsys, "--plan", str(file), "--check")


def test_what_belongs_to_check(plan_tool) -> None:
    for word, value in (("--plan", "x"), ("--window", "step"), ("--effects", "x"), ("--mutants", "3")):
        assert f"{word} goes with --check" in plan_tool(*SMALL[:-1], word, value, code=2)
