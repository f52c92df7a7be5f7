"""Mode ``trace``: what is written, by whom, and that a file always reads back, torn, appended to, or of another format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qeffect_lm.contract import trace as trace_module
from qeffect_lm.contract.errors import (
    CaptureError,
    ContractViolation,
    LeaseError,
    NotForwardedError,
    ScaleOrderError,
    StaleHandleError,
    StaleWeightError,
    StreamOrderError,
)
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.contract.streams import Access
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.contract.trace import FORMAT, TraceWriter, buffer_name, read_trace
from qeffect_lm.errors import UsageError
from tests.unit.contract_driver import LAYERS, WEIGHTS, Driver

READ, WRITE, MERGE = Access.READ, Access.WRITE, Access.MAX_MERGE


@pytest.fixture(params=["eager", "replay"])
def how(request) -> str:
    return request.param


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "deep" / "trace.jsonl"


def traced(path: Path, how: str = "eager", **kwargs) -> Driver:
    return Driver(how, mode="trace", trace=TraceWriter(path), **kwargs)


def records(path: Path) -> list[dict]:
    runs, remarks = read_trace(path)
    assert remarks == []
    return runs[-1].records


def full_step(driver: Driver, step: int, epoch: int) -> None:
    driver.ledger.begin_step(step)
    for kind in "FIW":
        for microbatch in range(2):
            driver.act(kind, microbatch, slot=microbatch)
    driver.ledger.versions.bump()
    driver.ledger.commit(epoch)
    driver.refresh()
    driver.ledger.end_step()


def without(record: dict, *names: str) -> dict:
    return {key: value for key, value in record.items() if key not in names}


# ---- what is written ---------------------------------------------------------------------------------------


def test_a_step_in_its_order(how, path):
    """One record per action with its slots, generations and effects; then bump, commit, refresh, end."""
    driver = traced(path, how)
    full_step(driver, 4, 0)
    told = records(path)
    assert [record["n"] for record in told] == list(range(len(told)))
    begin = next(place for place, record in enumerate(told) if record["effect"] == "begin_step")
    assert told[begin] == {"n": begin, "effect": "begin_step", "step": 4}
    effects = [record["effect"] for record in told[begin:]]
    act = "replay" if how == "replay" else "action"
    assert effects == ["begin_step", *[act] * 6, "bump", "commit", "refresh", "end_step"]
    acts = told[begin + 1 : begin + 7]
    assert [(r["kind"], r["microbatch"], r["beta"]) for r in acts] == [
        *[("F", 0, None), ("F", 1, None)],
        *[("I", 0, 0), ("I", 1, 1), ("W", 0, 0), ("W", 1, 1)],
    ]
    assert without(acts[1], "n", "effect", "t") == {
        **{"kind": "F", "chunk": 0, "microbatch": 1, "beta": None, "epoch": 0},
        **{"i_slot": "I0.1", "i_generation": 1, "w_slot": "W0.1", "w_generation": 1},
        **{"layers": list(LAYERS), "roles": ["a.input", "b.input"], "empty": [], "weights": list(WEIGHTS), "grads": []},
    }
    assert (acts[2]["roles"], acts[2]["grads"]) == (["b.grad_output", "a.grad_output"], ["norm.weight"])
    assert (acts[4]["i_slot"], acts[4]["layers"], acts[4]["grads"]) == (None, ["b", "a"], ["b.weight", "a.weight"])
    bump, commit, refresh = told[begin + 7 : begin + 10]
    assert bump["versions"] == dict.fromkeys([*WEIGHTS, "norm.weight"], 1)
    assert without(commit, "n", "effect") == {"by": "COMMIT", "epoch": 0, "directions": ["forward", "backward"]}
    assert refresh["versions"] == dict.fromkeys(WEIGHTS, 1) and refresh["epoch"] == 1


def test_generations_epochs_and_times_move(how, path):
    driver = traced(path, how)
    for step in range(3):
        full_step(driver, step, step)
    acts = [r for r in records(path) if r.get("kind") == "F" and r["microbatch"] == 1]
    assert [(r["epoch"], r["i_generation"], r["w_generation"]) for r in acts] == [(0, 1, 1), (1, 2, 2), (2, 3, 3)]
    times = [r["t"] for r in records(path) if "t" in r]
    assert all(t >= 0 for t in times) and any(times)


def test_streams_launches_and_edges(path):
    """Launches with their accesses and byte ranges, events by stream and tick, early ones with their buffers."""
    ledger = traced(path).ledger
    ledger.launch("compute", [(("x", 0, 1), WRITE), ("amax", MERGE), ("y", READ, 0, 64)], "0F0")
    full = ledger.record("compute")
    early = ledger.record("compute", covers=iter([("x", 0, 1)]))
    ledger.wait("copy", full)
    ledger.synchronize(early)
    ledger.settle()
    launch, first, second, wait, host, settle = records(path)[-6:]
    assert without(launch, "n", "t") == {
        **{"effect": "launch", "stream": "compute", "who": "0F0"},
        "accesses": [["x.0.1", "write"], ["amax", "max_merge"], ["y", "read", 0, 64]],
    }
    assert (first["stream"], first["buffers"], second["buffers"]) == ("compute", None, ["x.0.1"])
    assert first["tick"] != second["tick"]
    assert (wait["stream"], wait["source"], wait["tick"]) == ("copy", "compute", first["tick"])
    assert (host["stream"], host["tick"], settle["effect"]) == ("host", second["tick"], "settle")


def test_the_parts_used_directly_are_traced_too(path):
    """A bump, an edge, a commit, a cast, an access or an EMPTY is written whoever makes it."""
    ledger = traced(path).ledger
    start = len(records(path))
    ledger.versions.bump(iter(["a.weight"]))
    ledger.streams.launch("a")
    ledger.streams.access("a", "x", WRITE, "one", 0, 8)
    ledger.streams.wait("b", ledger.streams.record("a"))
    ledger.timeline.commit(0, by="CALIBRATION", calibration=True)
    ledger.versions.refreshed("a.weight", epoch=1, layouts=["rows"])
    ledger.grads.report_empty("a.weight")
    told = records(path)[start:]
    expected = ["bump", "launch", "launch", "record", "wait", "commit", "refresh", "empty"]
    assert [record["effect"] for record in told] == expected
    assert told[0]["versions"] == {"a.weight": 1} and ledger.versions.versions["a.weight"] == 1
    assert told[2]["accesses"] == [["x", "write", 0, 8]] and told[5]["by"] == "CALIBRATION"


def test_an_empty_report_is_told_apart(path):
    ledger = traced(path).ledger
    ledger.begin_step(0)
    with ledger.action("F", 0, 0, slots=(Slot("I", 0, 0), Slot("W", 0, 0))) as scope:
        scope.report_empty("a.input")
        scope.report_amax("b.input")
    act = records(path)[-1]
    assert (act["roles"], act["empty"]) == (["a.input", "b.input"], ["a.input"])


def test_only_mode_trace_writes_and_switching_ends_it(path):
    writer = TraceWriter(path)
    driver = Driver(mode="enforce", trace=writer)
    full_step(driver, 0, 0)
    driver.ledger.switch("trace", writer)
    full_step(driver, 1, 1)
    driver.ledger.switch("enforce")
    full_step(driver, 2, 2)
    driver.ledger.streams.record("a")
    assert [r["step"] for r in records(path) if r["effect"] == "begin_step"] == [1]
    assert not {"record", "bump", "require"} & (vars(driver.ledger.streams).keys() | vars(driver.ledger.versions).keys())


# ---- violations --------------------------------------------------------------------------------------------


def stale_read(ledger: Ledger) -> None:
    ledger.versions.bump(["a.weight"])
    ledger.versions.require("a.weight", "rows", epoch=0, reader="evaluation")


def stale_handle(ledger: Ledger) -> None:
    ledger.begin_step(0)
    slots = Slot("I", 0, 0), Slot("W", 0, 0)
    ledger.leases.open(0, 0, *slots)
    handle = ledger.leases.retain(0, 0, "a", None)
    ledger.leases.abandon()
    ledger.leases.consume(handle)


def nested(ledger: Ledger) -> None:
    ledger.begin_step(0)
    slots = Slot("I", 0, 0), Slot("W", 0, 0)
    with ledger.action("F", 0, 0, slots=slots), ledger.action("F", 0, 1, slots=slots):
        pass


def unreported(ledger: Ledger) -> None:
    ledger.declare_roles("F", 0, ["a.input"])
    ledger.begin_step(0)
    with ledger.action("F", 0, 0, slots=(Slot("I", 0, 0), Slot("W", 0, 0))):
        pass


def race(ledger: Ledger) -> None:
    ledger.launch("a", [("x", WRITE, 0, 8)], "one")
    ledger.launch("b", [("y", WRITE), ("x", READ, 4, 6)], "two")


def race_by_hand(ledger: Ledger) -> None:
    ledger.streams.access("a", "x", WRITE, "one", 0, 8)
    ledger.streams.access("b", "x", READ, "two", 4, 6)


@pytest.mark.parametrize(
    ("cause", "error", "doing"),
    [
        (stale_read, StaleWeightError, None),
        (stale_handle, StaleHandleError, None),
        (nested, LeaseError, "0F0"),
        (unreported, ScaleOrderError, "0F0"),
        (race, StreamOrderError, None),
        (race_by_hand, StreamOrderError, None),
        (lambda ledger: ledger.commit(7), ScaleOrderError, None),
        (lambda ledger: ledger.timeline.commit(7), ScaleOrderError, None),
        (lambda ledger: ledger.grads.check_complete(1), ContractViolation, None),
        (lambda ledger: ledger.leases.require("W", 0, 0), NotForwardedError, None),
    ],
)
def test_a_violation_is_written_once_as_it_is_raised(cause, error, doing, path):
    """Through whichever entry point it comes, and before anybody handles it: class, words, place."""
    ledger = traced(path).ledger
    with pytest.raises(ContractViolation) as caught:
        cause(ledger)
    (told,) = [record for record in records(path) if record["effect"] == "violation"]
    assert issubclass(type(caught.value), error) and told["class"] == type(caught.value).__name__
    assert told["message"] in str(caught.value) and told["doing"] == doing
    assert told["place"] == json.loads(json.dumps(caught.value.place, default=str))
    assert told["n"] == records(path)[-1]["n"]
    try:
        raise caught.value
    except ContractViolation:
        ledger.abandon_step()
    assert [record["effect"] for record in records(path)].count("violation") == 1


@pytest.mark.parametrize("cause", [race, race_by_hand])
def test_a_race_is_written_with_both_accesses(cause, path):
    ledger = traced(path).ledger
    with pytest.raises(StreamOrderError):
        cause(ledger)
    told = records(path)[-1]
    assert told["earlier"] == {"who": "one", "access": "write", "stream": "a", "buffer": "x", "lo": 4, "hi": 6}
    assert told["later"] == {"who": "two", "access": "read", "stream": "b", "buffer": "x", "lo": 4, "hi": 6}
    ledger.settle()
    assert records(path)[-1]["effect"] == "settle"  # what comes after it is written as before


def test_an_action_that_breaks_off_is_written_before_its_violation(path):
    """What it did until then, the refused effect included; a broken action without a violation too."""
    driver = traced(path)
    ledger = driver.ledger
    ledger.begin_step(0)
    ledger.versions.bump(["b.weight"])
    with pytest.raises(StaleWeightError):
        driver.act("F", 0)
    broken, told = records(path)[-2:]
    assert (broken["effect"], broken["kind"], broken["layers"], broken["weights"]) == ("broken", "F", ["a"], list(WEIGHTS))
    assert (told["effect"], told["doing"], told["place"]["layer"]) == ("violation", "0F0", "b.weight")
    ledger.abandon_step()
    ledger.begin_step(1)
    with pytest.raises(ZeroDivisionError), ledger.action("F", 0, 1, slots=(Slot("I", 0, 1), Slot("W", 0, 1))) as scope:
        scope.report_amax("a.input")
        raise ZeroDivisionError
    last = records(path)[-1]
    assert (last["effect"], last["microbatch"], last["roles"]) == ("broken", 1, ["a.input"])


def test_an_abandoned_step_says_why(path):
    """A violation that none of the ledger's parts raised is written then; others were; no exception, no reason."""
    ledger = traced(path).ledger
    ledger.begin_step(3)
    try:
        raise CaptureError("a storage moved", tensor="w")
    except CaptureError:
        ledger.abandon_step()
    ledger.abandon_step()
    *_, settle, told, first, again, second = records(path)
    assert (settle["effect"], told["class"], told["place"]) == ("settle", "CaptureError", {"tensor": "w"})
    assert first["effect"] == "abandon_step" and first["error"].startswith("CaptureError: a storage moved")
    assert (again["effect"], second["error"]) == ("settle", None)


def test_a_violation_of_a_replay(path):
    driver = traced(path, "replay")
    driver.ledger.begin_step(9)
    with pytest.raises(NotForwardedError):
        driver.act("I", 0)
    told = records(path)[-1]
    assert (told["effect"], told["class"], told["doing"]) == ("violation", "NotForwardedError", "0I0")
    driver.ledger.abandon_step()
    driver.ledger.timeline.begin_window()
    with pytest.raises(ScaleOrderError):
        driver.ledger.timeline.commit(0, (Direction.FORWARD,))
    assert records(path)[-1]["doing"] is None


# ---- the file ----------------------------------------------------------------------------------------------


def test_names_are_written_once(how, path):
    """A repeated step costs a few dozen bytes per action, whatever the number of layers."""
    driver = traced(path, how)
    sizes = []
    for step in range(4):
        before = path.stat().st_size
        full_step(driver, step, step)
        sizes.append(path.stat().st_size - before)
    assert sizes[0] > 2 * sizes[3] and sizes[3] < 12 * 30
    names = [line for line in path.read_text().splitlines() if line.startswith('["="')]
    assert len(names) == len({line.split(",", 2)[2] for line in names})
    (run,), _ = read_trace(path)
    assert sum(run.bytes.values()) == path.stat().st_size
    assert run.bytes["names"] == sum(len(line) + 1 for line in names)


def test_names_are_defined_anew_when_there_are_too_many(path, monkeypatch):
    """Every record reads back whatever was forgotten in between."""
    monkeypatch.setattr(trace_module, "NAMES_KEPT", 5)
    ledger = traced(path).ledger
    for number in range(12):
        ledger.launch(f"s{number % 7}", [(("x", number), WRITE)], f"w{number}")
        ledger.record(f"s{number % 7}")
    told = records(path)
    launches = [r for r in told if r["effect"] == "launch"]
    assert [(r["stream"], r["who"], r["accesses"]) for r in launches] == [
        (f"s{n % 7}", f"w{n}", [[f"x.{n}", "write"]]) for n in range(12)
    ]
    assert [r["stream"] for r in told if r["effect"] == "record"] == [f"s{n % 7}" for n in range(12)]
    assert len(ledger._tracer._writer._ids) <= 8


def test_a_killed_process_and_a_second_run(path):
    """A torn last line is left out with a remark; a run appended after it reads by itself, names included."""
    full_step(traced(path), 0, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    (run,), remarks = read_trace(path)
    assert len(remarks) == 1 and "is incomplete (its process was killed)" in remarks[0]
    assert run.records == read_records(whole)[:-1]
    full_step(traced(path, "replay"), 7, 0)
    (first, second), remarks = read_trace(path)
    assert first.records == run.records and len(remarks) == 1
    assert [r["step"] for r in second.records if r["effect"] == "begin_step"] == [7]
    assert second.records[0]["n"] == 0


def read_records(content: bytes) -> list[dict]:
    names: dict = {}
    told = [trace_module._expand(json.loads(line), names) for line in content.splitlines()[1:]]
    return [{"n": n, **record} for n, record in enumerate(r for r in told if r is not None)]


def test_every_cut_reads(path):
    """Wherever a process is killed, the whole lines before it are read."""
    driver = traced(path)
    full_step(driver, 0, 0)
    whole = path.read_bytes()
    cut = path.with_name("cut.jsonl")
    header = whole.index(b"\n") + 1
    for end in range(header, len(whole), 37):
        cut.write_bytes(whole[:end])
        (run,), remarks = read_trace(cut)
        lines = whole[:end].count(b"\n") - 1 - whole[:end].count(b'\n["="')
        assert len(run.records) in (lines, lines + 1) and len(remarks) <= 1


def test_a_closed_writer_takes_no_more(path):
    writer = TraceWriter(path, {"rank": 3})
    writer.write("s", 1)
    writer.close()
    writer.close()
    writer.write("z")
    assert writer.intern("late") == 0
    (run,), _ = read_trace(path)
    assert run.about["rank"] == 3 and "started" in run.about
    assert run.records == [{"n": 0, "effect": "begin_step", "step": 1}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"", "is empty: not a trace"),
        (b"step 3, loss 2.1\n", "line 1: not a trace: 'step 3, loss 2.1'"),
        (b"\x89PNG\r\n\x1a\n", "line 1: not a trace"),
        (b'{"n": 0, "effect": "begin_step", "step": 0}\n', "an older version of QEffect LM"),
        (b'["qeffect-trace",99,{}]\n["s",0]\n', f"format 99, and this version reads format {FORMAT}"),
        (b'["qeffect-trace"]\n', "not the header of a trace"),
        (b'["qeffect-trace",1,{}]\n["s",0]\nhello\n["z"]\n', "line 3: not a record of a trace: 'hello'"),
        (b'["qeffect-trace",1,{}]\n["l",5,0]\n', "line 2: not a record of a trace"),
        (b'["qeffect-trace",1,{}]\n["s"]\n', "line 2: not a record of a trace"),
        (b'["qeffect-trace",1,{}]\n[]\n', "line 2: not a record of a trace"),
        (b'["qeffect-trace",1,{}]\n7\n', "line 2: not a record of a trace"),
        (b'["qeffect-trace",1,{}]\n["?",7]\n', "line 2: not a record of a trace"),
    ],
)
def test_what_is_no_trace_is_refused(content, message, tmp_path):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_buffer_names():
    assert [buffer_name(b) for b in ("x", ("x", 0, 1), 7)] == ["x", "x.0.1", "7"]


def test_the_format_is_documented():
    """The page describes the file with the lines of the module's docstring, and every record that is written is among them."""
    block = [line[4:] for line in (trace_module.__doc__ or "").splitlines() if line.startswith("    ")]
    page = (Path(__file__).resolve().parents[2] / "docs/explain.md").read_text()
    assert "```\n" + "\n".join(block) + "\n```" in page
    assert all(f'["{code}"' in "\n".join(block) for code in [*trace_module._EFFECTS, "=", trace_module.MAGIC])
