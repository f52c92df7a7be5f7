"""``python -m tools.explain --violation``: real runs with a fault injected, told in words; and the order found from the records
compared with the ledger's verdict on random programs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.actions import Kind
from pipeline.engine import Engine
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.contract.errors import (
    ContractViolation,
    GradSlotError,
    LeaseRetainedError,
    ScaleOrderError,
    StaleWeightError,
    StreamOrderError,
    WeightGradBeforeInputGradError,
)
from qeffect_lm.contract.streams import HOST, Access
from qeffect_lm.contract.trace import TraceWriter
from tests.tiny import batch, config
from tests.unit.contract_driver import Driver
from tests.unit.in_process import Ranks
from tools.explain import main
from tools.explain.history import Rank, load

pytestmark = pytest.mark.xdist_group("explain")  # the traces are made once
ROOT = Path(__file__).resolve().parents[2]
READ, WRITE, MERGE = Access.READ, Access.WRITE, Access.MAX_MERGE


# ---- faults: what an engine with a bug would do --------------------------------------------------------------


def no_edge(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    edge = engine._edge
    patch.setattr(engine, "_edge", lambda a, b: None if (a, b) == ("compute", "collective") else edge(a, b))


def w_before_i(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    actions = list(engine.actions)
    names = [str(action) for action in actions]
    i, w = names.index("0I1"), names.index("0W1")
    actions[i], actions[w] = actions[w], actions[i]
    patch.setattr(engine, "actions", actions)


def no_w(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "actions", [action for action in engine.actions if str(action) != "0W1"])


def stale(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    engine.ledger.versions.bump(["layers.0.mlp.down.weight"])


def commit_twice(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    commit = engine._handlers[Kind.COMMIT]
    patch.setitem(engine._handlers, Kind.COMMIT, lambda action: (commit(action), commit(action)))


FAULTS = {  # in this order on one run: only the last one leaves it half-updated
    no_edge: StreamOrderError,
    w_before_i: WeightGradBeforeInputGradError,
    no_w: GradSlotError,
    stale: StaleWeightError,
    commit_twice: ScaleOrderError,
}


@pytest.fixture(scope="module", params=["eager", "host_replay"])
def faulty(request, tmp_path_factory) -> Path:
    """Two sound steps, then one step per fault, each ended by its violation."""
    path = tmp_path_factory.mktemp("faulty") / f"{request.param}.jsonl"
    settings = {"contract__mode": "trace", "contract__trace_file": str(path), "graphs__backend": request.param}
    assembly: Assembly = assemble(config(model__num_layers=1, pipeline__microbatches=2, **settings))
    assembly.prepare(batch(0, 2))
    for step in range(2):
        assembly.engine.step(step, batch(step, 2))
    for step, (fault, error) in enumerate(FAULTS.items(), 2):
        with pytest.MonkeyPatch.context() as patch:
            fault(assembly.engine, patch)
            with pytest.raises(error):
                assembly.engine.step(step, batch(step, 2))
        if fault is stale:
            assembly.rebuild_caches()
    return path


def told(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[str, dict[str, str], list[str]]:
    """Title, the facts by label, and the other lines."""
    assert main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    title, *lines = out.splitlines()
    facts = [line.split(maxsplit=1) for line in lines if line.startswith("  ") and line[2:3] != " " and not line.endswith(":")]
    return title, {label: words for label, words in facts}, [line.strip() for line in lines if line.startswith("    ")]


def number(rank: Rank, step: int, who: str, stream: str) -> int:
    (found,) = [r["n"] for r in rank.of("launch") if (r["step"], r["who"], r["stream"]) == (step, who, stream)]
    return found


# ---- streams -----------------------------------------------------------------------------------------------


def test_a_missing_edge(faulty, capsys):
    """Both accesses with action, stream, step and time; the missing edge, what there was instead, what was right before."""
    title, facts, lines = told(capsys, faulty, "--violation")
    (rank,), _ = load([faulty], None)
    first, then = number(rank, 2, "0W1", "compute"), number(rank, 2, "REDUCE", "collective")
    assert title == "violation 1 of 5: StreamOrderError"
    assert facts["first"].startswith(f"0W1 wrote grads_W.0 on stream compute, #{first} in step 2, ")
    assert facts["then"].startswith(f"REDUCE writes it on stream collective, #{then} in step 2, ")
    assert facts["first"].endswith(" ms after its begin") and facts["then"].endswith(" ms after its begin")
    assert facts["missing"] == (
        "an edge from compute to collective: an event recorded on compute after 0W1, which collective waits for before REDUCE"
    )
    assert facts["found"].startswith("collective last waited for compute at #") and ", before it; " in facts["found"]
    assert facts["remedy"].startswith("event = ledger.record('compute') after 0W1")
    assert "ledger.wait('collective', event) before REDUCE" in facts["remedy"]
    right = f"step 1: 0W1 (#{number(rank, 1, '0W1', 'compute')}, write on compute) before REDUCE (#"
    assert lines[0].startswith(right) and "waited for #" in lines[0] and "by collective)" in lines[0]
    assert lines[-1].startswith(f"#{then} REDUCE on collective: write grads_W.0")


def test_a_missing_edge_between_ranks_of_a_pipeline(monkeypatch, capsys, tmp_path):
    """Files of several ranks at once: the violation of any of them, steps side by side."""
    path = tmp_path / "t.jsonl"
    settings = {"parallel__pp": 2, "model__num_layers": 2, "contract__mode": "trace", "contract__trace_file": str(path)}
    ranks = Ranks(config(**settings), monkeypatch)
    ranks.prepare(batch(0))
    ranks.step(0, batch(0))
    engine = ranks.parts[1].engine
    complete = engine._complete

    def forgets(key: tuple[str, int, int]) -> None:
        if key == ("RECV_F", 1, 2):
            engine._pending.pop(key).wait()
        else:
            complete(key)

    monkeypatch.setattr(engine, "_complete", forgets)
    with pytest.raises(StreamOrderError):
        ranks.step(1, batch(1))
    files = [path.with_name("t.rank1.jsonl"), path.with_name("t.rank0.jsonl")]
    title, facts, lines = told(capsys, *files, "--violation")
    assert title == "violation 1 of 1: StreamOrderError, rank 1"
    assert facts["first"].startswith("1RECV_F2 wrote x.1.") and "on stream recv_F" in facts["first"]
    assert facts["then"].startswith("1F2 reads it on stream compute")
    assert "events were recorded on recv_F after 1RECV_F2 at #" in facts["found"]
    assert any("1RECV_F" in line and "before 1F" in line and "(recorded #" in line for line in lines)
    assert main([*map(str, files), "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if not line.startswith(" ")] == ["step 1, rank 0", "step 1, rank 1"]
    assert main([str(files[0]), str(files[0])]) == 2 and "given twice" in capsys.readouterr().err


def standalone(path: Path, *ops: tuple) -> Rank:
    """A ledger without an engine: launches (stream, who, accesses), edges, until the first violation."""
    ledger = Driver(mode="trace", trace=TraceWriter(path)).ledger
    events: list = []
    try:
        for op, *values in ops:
            if op == "launch":
                ledger.launch(*values)
            elif op == "record":
                events.append(ledger.record(*values))
            elif op == "wait":
                ledger.wait(values[0], events[values[1]])
            else:
                ledger.settle()
    except ContractViolation:
        pass
    (rank,), _ = load([path], None)
    return rank


ONE = ("launch", "a", [("x", WRITE), ("y", WRITE)], "one")


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([ONE, ("launch", "b", [("x", READ)], "two")], ["b never waited for a; no event was recorded on a after one"]),
        (
            [ONE, ("record", "a", ["y"]), ("wait", "b", 0), ("launch", "b", [("x", READ)], "two")],
            ["for an event recorded at #2, early, for y only", "recorded on a after one at #2, but none that vouches for x"],
        ),
        (
            [("record", "a"), ONE, ("wait", HOST, 0), ("launch", HOST, [("x", READ)], "two")],
            ["host last waited for a at #3, for an event recorded at #1, before it", "ledger.synchronize(event) before two"],
        ),
        (
            [("launch", HOST, [("x", WRITE)], "one"), ONE, ("launch", HOST, [("x", READ)], "two")],
            ["one wrote x on stream a", "two reads it on stream host"],
        ),
        ([ONE, ("launch", "b", [("x", MERGE, 0, 4)], "")], ["an unnamed max_merge max-merges into it on stream b"]),
        (
            [("launch", "a", [("x", READ)], "one"), ("launch", "b", [("x", WRITE)], "two")],
            ["one read x on stream a", "two writes it"],
        ),
    ],
)
def test_what_there_was_instead_of_an_edge(ops, words, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    standalone(path, *ops)
    _, facts, _ = told(capsys, path, "--violation")
    text = "\n".join(facts.values())
    assert all(part in text for part in words), text
    assert "before the first step" in facts["where"]


# ---- random programs: the walk over edges agrees with the clocks --------------------------------------------

STREAMS, BUFFERS = ("a", "b", HOST), ("x", "y")
OP = st.one_of(
    st.tuples(st.just("launch"), st.sampled_from(STREAMS), st.sampled_from(BUFFERS), st.sampled_from([READ, WRITE, MERGE])),
    st.tuples(st.just("record"), st.sampled_from(STREAMS), st.sampled_from([None, ["x"], ["y"]])),
    st.tuples(st.just("wait"), st.sampled_from(STREAMS), st.integers(0, 5)),
    st.tuples(st.just("edge"), st.sampled_from(STREAMS), st.sampled_from([None, ["x"], ["y"]]), st.sampled_from(STREAMS)),
    st.just(("settle",)),
)
FIRST = ("launch", "a", "x", WRITE)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(OP, min_size=4, max_size=20))
@example([FIRST, ("edge", "a", ["y"], "b"), ("launch", "b", "x", READ)])  # an early event for another buffer
@example([FIRST, ("edge", "a", ["x"], "b"), ("edge", "b", None, HOST), ("launch", "b", "x", READ), ("launch", HOST, "x", READ)])
@example([FIRST, ("edge", "a", None, HOST), ("launch", "b", "x", WRITE)])  # what the host knows, a launch knows
@example([FIRST, ("settle",), ("launch", "b", "x", WRITE)])  # a stream that is new after a settling
def test_the_order_found_again_is_the_ledgers(tmp_path_factory, program):
    """A launch is refused if and only if no path of edges leads to it from a conflicting one before it."""
    path = tmp_path_factory.mktemp("random") / "t.jsonl"
    ops, events = [], 0
    for place, (op, *values) in enumerate(program):
        if op == "launch":
            ops.append((op, values[0], [(values[1], values[2])], f"w{place}"))
        elif op == "record":
            ops.append((op, *values))
            events += 1
        elif op == "edge":
            ops += [("record", values[0], values[1]), ("wait", values[2], events)]
            events += 1
        elif op == "wait" and events:
            ops.append((op, values[0], values[1] % events))
        elif op == "settle":
            ops.append((op,))
    rank = standalone(path, *ops)
    refused = rank.records[-1] if rank.violations else None
    for name, touches in rank.touches.items():
        for place, touch in enumerate(touches):
            pairs = [past for past in touches[:place] if past.conflicts(touch)]
            missing = [past for past in pairs if rank.path(past.n, touch.n, name) is None]
            assert bool(missing) == (refused is not None and touch.n == refused["n"] - 1), (ops, name, touch)
            if missing:
                assert refused is not None and rank.site(refused["n"], refused["earlier"]) in missing


def test_only_the_waits_that_made_the_order_are_told(tmp_path):
    """Not those that stand on the way for another stream's sake."""
    path = tmp_path / "t.jsonl"
    edges = [("record", "a"), ("record", "c"), ("wait", "b", 0), ("wait", "b", 1)]
    rank = standalone(path, ONE, *edges, ("launch", "b", [("x", READ)], "two"))
    first, then = rank.touches["x"]
    (wait,) = rank.path(first.n, then.n, "x") or []
    assert (rank.records[wait]["effect"], rank.records[wait]["source"]) == ("wait", "a")


# ---- leases, gradients, versions, epochs ---------------------------------------------------------------------


def test_w_before_i(faulty, capsys):
    title, facts, _ = told(capsys, faulty, "--violation", 2)
    assert title == "violation 2 of 5: WeightGradBeforeInputGradError"
    assert "in step 3" in facts["where"] and "during 0W1" in facts["where"]
    assert facts["needed"] == "the lease of chunk 0, microbatch 1 to be input_grad_done (by I)"
    assert facts["found"].startswith("chunk 0, microbatch 1 forwarded since 0F1, #")
    assert "(I0.0 generation " in facts["found"] and "W0.1 generation " in facts["found"]


def test_a_dropped_w(faulty, capsys):
    title, facts, _ = told(capsys, faulty, "--violation", 3)
    assert title == "violation 3 of 5: GradSlotError"
    assert facts["needed"].startswith("2 contributions to layers.0.attention.qkv.weight in this step")
    assert facts["without"].startswith("W  0F1 (#") and facts["writers"].startswith("0W0 (#") and "0W1" not in facts["writers"]


def test_a_stale_weight(faulty, capsys):
    """Versions needed and found, since which bump, and when the cache was last made."""
    title, facts, _ = told(capsys, faulty, "--violation", 4)
    (rank,), _ = load([faulty], None)
    weight = "layers.0.mlp.down.weight"
    bump = [r for r in rank.of("bump") if list(r["versions"]) == [weight]][-1]
    cast = [r for r in rank.of("refresh") if r["n"] < bump["n"]][-1]
    assert title == "violation 4 of 5: StaleWeightError" and "during 0F0" in facts["where"]
    assert (facts["needed"], facts["found"]) == (f"{weight} at version 3", "a cache of version 2")
    assert facts["since"].startswith(f"version 3 since the bump #{bump['n']} after step 4")
    assert facts["last"] == f"cast  #{cast['n']} in step 1, from version 2"


def test_a_second_commit(faulty, capsys):
    title, facts, lines = told(capsys, faulty, "--violation", 5)
    (rank,), _ = load([faulty], None)
    commit = rank.of("commit")[-1]
    assert title == "violation 5 of 5: ScaleOrderError"
    assert (facts["needed"], facts["found"]) == ("epoch 3", "epoch 4 is the current one")
    assert facts["since"] == f"epoch 4 since COMMIT, #{commit['n']} in step 6"
    assert lines[0] == f"#{commit['n']} in step 6: COMMIT closes epoch 3: scales of epoch 4 from here on"


def test_a_retained_slot(tmp_path, capsys):
    """Who holds the slot, since when, in which generation."""
    path = tmp_path / "t.jsonl"
    driver = Driver(mode="trace", trace=TraceWriter(path))
    driver.ledger.begin_step(5)
    driver.act("F", 0)
    with pytest.raises(LeaseRetainedError):
        driver.act("F", 1)
    _, facts, _ = told(capsys, path, "--violation")
    assert facts["needed"] == "the slot free, at generation 1"
    assert facts["found"].startswith("chunk 0, microbatch 0 forwarded since 0F0, #2 in step 5")


def test_every_violation_can_be_told(tmp_path, capsys):
    """Also those without a picture of streams, without a step, and of classes that others raise."""
    path = tmp_path / "t.jsonl"
    driver = Driver(mode="trace", trace=TraceWriter(path))
    ledger = driver.ledger

    def fails(call, *args, **kwargs) -> None:
        with pytest.raises(ContractViolation):
            call(*args, **kwargs)

    fails(driver.act, "W", 3)
    fails(ledger.versions.require, "norm.weight", "rows", epoch=0)
    fails(ledger.versions.require, "a.weight", "rows", epoch=4)
    fails(ledger.grads.write, "nobody", 0)
    fails(ledger.grads.write, "a.weight", 1)
    ledger.begin_step(1)
    fails(driver.act, "I", 0)
    driver.act("F", 0)
    fails(driver.act, "F", 0)
    fails(ledger.end_step)
    (rank,), _ = load([path], None)
    assert len(rank.violations) >= 8
    for place, record in enumerate(rank.violations, 1):
        title, facts, _ = told(capsys, path, "--violation", place)
        assert title.endswith(record["class"]) and facts["what"] == record["message"]
    assert main([str(path), "--html", str(tmp_path / "t.html"), "--violation", "8"]) == 0


# ---- resources ---------------------------------------------------------------------------------------------


def lines_of(capsys: pytest.CaptureFixture, *arguments: object) -> list[str]:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_timeline_of_a_lease(faulty, capsys):
    lines = lines_of(capsys, faulty, "--lease", "0,1", "--step", 1)
    words = [" ".join(line.split()[1:]) for line in lines[1:]]
    assert [word.split()[0] for word in words if " stream " in word] == ["0INPUT1", "0F1", "0F1", "0I1", "0W1"]
    moves = [word for word in words if " lease " in word]
    graph = " (graph)" if "host_replay" in faulty.name else ""
    assert moves == [
        f"0F1 lease 5 layers forwarded: retained in slot W0.1, generation 2{graph}",
        f"0I1 lease 5 layers input gradient done{graph}",
        f"0W1 lease 5 layers free: consumed from slot W0.1, generation 2{graph}",
    ]
    one = lines_of(capsys, faulty, "--lease", "0,1,layers.0.mlp.down", "--step", 1)
    assert len(one) == 4 and all("layers.0.mlp.down" in line for line in one[1:])
    assert any("violation" in line for line in lines_of(capsys, faulty, "--lease", "0,1", "--step", 3))


def test_the_timeline_of_a_buffer(faulty, capsys):
    """Each access, with the event that ordered it after the last conflicting one, or that nothing does."""
    lines = lines_of(capsys, faulty, "--buffer", "grads_W.0", "--step", 1)
    assert [line.split()[1] for line in lines[1:]] == ["0W0", "0W1", "REDUCE", "STEP", "STEP"]
    assert "write on collective, after 0W1 (#" in lines[3] and "by event compute@" in lines[3]
    assert "read on compute, after REDUCE (#" in lines[4] and "by event collective@" in lines[4]
    assert lines_of(capsys, faulty, "--buffer", "('grads_W', 0)", "--step", 1) == lines
    broken = lines_of(capsys, faulty, "--buffer", "grads_W.0", "--step", 2)
    assert "write on collective, and nothing orders it after 0W1 (#" in broken[3]
    assert "violation" in broken[4] and "StreamOrderError" in broken[4]


def test_the_timelines_of_a_weight_a_scale_a_slot_and_a_stream(faulty, capsys):
    weight = lines_of(capsys, faulty, "--weight", "layers.0.mlp.down.weight", "--step", 1)
    text = "\n".join(weight)
    assert "written: version 2 from here on" in text and "cached at version 2 with the scale of epoch 3" in text
    assert "main gradient overwritten (beta 0)" in text and "main gradient added to (beta 1)" in text
    scale = lines_of(capsys, faulty, "--scale", "layers.0.mlp.down.input", "--step", 1)
    assert [line.split()[1] for line in scale[1:]] == ["0F0", "0F1", "scale"] and "COMMIT closes epoch 2" in scale[3]
    slot = lines_of(capsys, faulty, "--slot", "W0.1", "--step", 1)
    assert [" ".join(line.split()[1:]) for line in slot[1:]] == [
        "0F1 lease W0.1 taken, generation 2",
        "0I1 lease W0.1 written (output gradients), generation 2",
        "0W1 lease W0.1 read for the last time and free, generation 2",
    ]
    taken = lines_of(capsys, faulty, "--slot", "I0.0", "--step", 0)
    assert [line.split()[1] for line in taken[1:]] == ["0F0", "0I0", "0F1", "0I1"]
    assert "read for the last time and free, generation 2" in taken[-1]
    stream = lines_of(capsys, faulty, "--stream", "collective", "--step", 1)
    words = [" ".join(line.split()[1:]) for line in stream[1:]]
    assert words[0].startswith("stream waits for event compute@") and words[1].startswith("REDUCE stream write grads_W.0")
    assert any(word.startswith("stream event collective@") and word.endswith("is recorded") for word in words)


# ---- the command -------------------------------------------------------------------------------------------


def test_size(faulty, capsys):
    """Bytes by record, adding up to the file's; per step and per action without the names."""
    lines = lines_of(capsys, faulty, "--size")
    assert lines[0] == f"{faulty}: {faulty.stat().st_size} bytes in this run"
    parts = {line.split()[1]: int(line.split()[0]) for line in lines[1:] if line.startswith("  ")}
    assert sum(parts.values()) == faulty.stat().st_size and {"names", "launch", "wait", "violation"} <= set(parts)
    assert "bytes per step without the names" in lines[-2] and "bytes per F, I or W" in lines[-1]


def test_a_reader_that_leaves_is_no_traceback(faulty):
    command = f"{sys.executable} -m tools.explain {faulty} --kind scale | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert (done.stdout, done.stderr) == ("before the first step\n", "")


def test_nothing_to_tell(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    standalone(path, ONE)
    assert main([str(path), "--violation"]) == 1
    assert capsys.readouterr().err == "the trace holds no violation\n"
    with pytest.raises(SystemExit) as caught:
        main(["--violation", str(path)])
    assert caught.value.code == 2 and "give the TRACE before --violation" in capsys.readouterr().err
