"""I4: the stream clock, against a brute-force happens-before oracle and rule by rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.errors import ContractViolation, StreamOrderError
from qeffect_lm.contract.streams import HOST, WHOLE, Access, StreamClock

READ, WRITE, MERGE = Access.READ, Access.WRITE, Access.MAX_MERGE
CONFLICTS = {
    (READ, WRITE),
    (WRITE, READ),
    (WRITE, WRITE),
    (READ, MERGE),
    (MERGE, READ),
    (WRITE, MERGE),
    (MERGE, WRITE),
}
STREAMS = (HOST, "a", "b", "c")
BUFFERS = ("x", "y")


# ---- the oracle: a graph of everything that happened, and a search through it ------------------------------


@dataclass
class Oracle:
    """Nodes in order of time; an edge has the set of buffers it vouches for (None: all)."""

    edges: dict[int, list[tuple[int, frozenset[Hashable] | None]]] = field(default_factory=lambda: defaultdict(list))
    last: dict[str, int] = field(default_factory=dict)  # the last node of each stream
    accesses: list[tuple[int, str, Hashable, Access, int, int]] = field(default_factory=list)
    size: int = 0

    def node(self, stream: str) -> int:
        """The next node of a stream, after its last one."""
        self.size += 1
        if stream in self.last:
            self.edges[self.last[stream]].append((self.size, None))
        self.last[stream] = self.size
        return self.size

    def edge(self, source: int, target: int, covers: frozenset[Hashable] | None = None) -> None:
        self.edges[source].append((target, covers))

    def ordered(self, source: int, target: int, buffer: Hashable) -> bool:
        """A path over edges that vouch for the buffer."""
        seen, todo = {source}, [source]
        while todo:
            for successor, covers in self.edges[todo.pop()]:
                if successor not in seen and (covers is None or buffer in covers):
                    seen.add(successor)
                    todo.append(successor)
        return target in seen

    def races(self, stream: str, buffer: Hashable, kind: Access, lo: int, hi: int) -> set[str]:
        """The streams with a conflicting access that is not ordered before this one; empty: the access
        happens.
        """
        here = self.node(stream)
        bad = {
            other
            for node, other, what, past, start, end in self.accesses
            if what == buffer
            and max(lo, start) < min(hi, end)
            and (past, kind) in CONFLICTS
            and not self.ordered(node, here, buffer)
        }
        if not bad:
            self.accesses.append((here, stream, buffer, kind, lo, hi))
        return bad

    def settle(self) -> None:
        """Everything so far comes before everything later on the streams there are, and on the host."""
        self.last.setdefault(HOST, self.node(HOST))
        before = dict(self.last)
        barrier = self.size = self.size + 1
        for stream, node in before.items():
            self.edge(node, barrier)
            self.last[stream] = barrier


def check_program(program: list[tuple]) -> int:
    """Run a program on clock and oracle; they must agree on every access. Returns how many were refused."""
    clock, oracle = StreamClock(), Oracle()
    events: list[tuple] = []
    refused = 0
    for op, *args in program:
        if op == "launch":
            clock.launch(args[0])
            if args[0] != HOST:
                oracle.edge(oracle.node(HOST), oracle.node(args[0]))
        elif op == "record":
            stream, covers = args
            events.append(
                (
                    clock.record(stream, covers),
                    oracle.node(stream),
                    None if covers is None else frozenset(covers),
                )
            )
        elif op == "wait" and events:
            stream, which = args
            event, node, covers = events[which % len(events)]
            if stream == HOST:
                clock.synchronize(event)
            else:
                clock.wait(stream, event)
            oracle.edge(node, oracle.node(stream), covers)
        elif op == "settle":
            clock.settle()
            oracle.settle()
        elif op == "forget":
            clock.forget(args[0])
            oracle.accesses = [access for access in oracle.accesses if access[2] != args[0]]
        elif op == "access":
            stream, buffer, kind, lo, hi = args
            bad = oracle.races(stream, buffer, kind, lo, hi)
            try:
                clock.access(stream, buffer, kind, "", lo, hi)
            except StreamOrderError as error:
                refused += 1
                assert error.place["other_stream"] in bad, (program, error)
            else:
                assert not bad, (program, op, args, bad)
    return refused


streams = st.sampled_from(STREAMS)
buffers = st.sampled_from(BUFFERS)
ranges = st.tuples(st.integers(0, 6), st.integers(1, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
an_access = st.tuples(st.just("access"), streams, buffers, st.sampled_from(list(Access)), ranges).map(lambda t: (*t[:4], *t[4]))
covers = st.one_of(st.none(), st.none(), st.lists(buffers, unique=True, max_size=2))
edges = st.one_of(
    st.tuples(st.just("launch"), streams),
    st.tuples(st.just("record"), streams, covers),
    st.tuples(st.just("wait"), streams, st.integers(0, 9)),
)
rare = st.one_of(st.just(("settle",)), st.tuples(st.just("forget"), buffers))
blocks = st.tuples(st.lists(st.one_of(edges, edges, edges, rare), max_size=4), an_access).map(
    lambda block: [*block[0], block[1]]
)
programs = st.lists(blocks, min_size=6, max_size=16).map(lambda many: [step for block in many for step in block])


@settings(max_examples=200)
@given(programs)
def test_raises_exactly_when_the_oracle_sees_a_race(program):
    """T4: over random programs of accesses, events (early ones too), waits, launches and settlements."""
    check_program(program)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(list(Access)), ranges), min_size=2, max_size=6),
    st.data(),
)
def test_a_chain_of_edges_orders_everything_and_one_missing_edge_does_not(accesses, data):
    """T4: accesses in a chain of record and wait never raise; without one of the edges the verdict is the
    oracle's.
    """
    program: list[tuple] = []
    for number, (stream, kind, (lo, hi)) in enumerate(accesses):
        if number:
            program.append(("wait", stream, number - 1))
        program += [("access", stream, "x", kind, lo, hi), ("record", stream, None)]
    assert check_program(program) == 0
    waits = [place for place, step in enumerate(program) if step[0] == "wait"]
    dropped = data.draw(st.sampled_from(waits))
    check_program([step for place, step in enumerate(program) if place != dropped])


def test_all_short_histories():
    """Every sequence of three accesses on two streams, with every choice of full, early or no edge in
    between.
    """
    refused = 0
    steps = list(product("ab", Access))
    for first, second, third in product(steps, repeat=3):
        for edge_one, edge_two in product((None, "full", "early", "other"), repeat=2):
            program: list[tuple] = [("access", *_place(first))]
            for after, before, edge in ((first, second, edge_one), (second, third, edge_two)):
                if edge is not None:
                    which = sum(step[0] == "record" for step in program)
                    program += [
                        ("record", after[0], {"full": None, "early": ("x",), "other": ("y",)}[edge]),
                        ("wait", before[0], which),
                    ]
                program.append(("access", *_place(before)))
            refused += check_program(program) > 0
    assert refused > 500


def _place(step: tuple[str, Access]) -> tuple[str, str, Access, int, int]:
    return (step[0], "x", step[1], 0, 4)


# ---- rule by rule ------------------------------------------------------------------------------------------


def ordered_pair(clock: StreamClock, source: str, target: str, covers=None) -> None:
    clock.wait(target, clock.record(source, covers))


def test_the_error_names_both_sides_and_the_remedy():
    """T2: initialised on a side stream, first used on another with no edge."""
    clock = StreamClock()
    clock.launch("side")
    clock.access("side", "weight", WRITE, "INIT")
    clock.launch("compute")
    with pytest.raises(StreamOrderError) as caught:
        clock.access("compute", "weight", READ, "0F0")
    text = str(caught.value)
    for part in (
        "0F0",
        "INIT",
        "'compute'",
        "'side'",
        "'weight'",
        "read",
        "write",
        "record an event on 'side'",
    ):
        assert part in text
    assert caught.value.place == {
        "buffer": "weight",
        "stream": "compute",
        "other_stream": "side",
        "since_tick": 1,
        "known_tick": 0,
    }
    assert isinstance(caught.value, ContractViolation)
    ordered_pair(clock, "side", "compute")
    clock.access("compute", "weight", READ, "0F0")


def test_an_access_without_a_name_is_called_by_its_kind():
    clock = StreamClock()
    clock.access("a", "x", MERGE)
    with pytest.raises(StreamOrderError, match=r"^read \(read on stream 'b'\) is not ordered after max_merge"):
        clock.access("b", "x", READ)


def test_the_ticks_in_the_error_say_what_is_known():
    clock = StreamClock()
    for _ in range(2):
        clock.access("a", "x", READ)
        ordered_pair(clock, "a", "b")
    clock.record("a")
    clock.access("a", "x", READ, "late")
    with pytest.raises(StreamOrderError) as caught:
        clock.access("b", "x", WRITE)
    assert (caught.value.place["since_tick"], caught.value.place["known_tick"]) == (4, 2)
    early = StreamClock()
    early.access("a", "x", READ)
    ordered_pair(early, "a", "b", ["x"])
    early.access("a", "x", READ)
    with pytest.raises(StreamOrderError) as caught:
        early.access("b", "x", WRITE)
    assert (caught.value.place["since_tick"], caught.value.place["known_tick"]) == (2, 1)


def test_max_merges_commute_with_each_other_and_with_nothing_else():
    """Amax slots: microbatches on several streams merge in any order; a roll must come after all, a merge
    after the roll.
    """
    for order in permutations("abc"):
        clock = StreamClock()
        for stream in order:
            clock.access(stream, "amax", MERGE, f"merge {stream}")
        assert sorted(_refusals(clock, "roll", WRITE)) == ["a", "b", "c"]
        with pytest.raises(StreamOrderError):
            clock.access("a", "amax", MERGE)
        ordered_pair(clock, "roll", "a")
        clock.access("a", "amax", MERGE)
        with pytest.raises(StreamOrderError):
            clock.access("roll", "amax", READ)


def _refusals(clock: StreamClock, stream: str, kind: Access) -> list[str]:
    """The streams that errors of an access name one after the other, each ordered as soon as it is named."""
    named: list[str] = []
    while len(named) < 10:
        try:
            clock.access(stream, "amax", kind)
            break
        except StreamOrderError as error:
            named.append(str(error.place["other_stream"]))
            ordered_pair(clock, named[-1], stream)
    return named


def test_reads_do_not_order_each_other_but_hold_a_write_back():
    clock = StreamClock()
    clock.access("a", "x", READ)
    clock.access("b", "x", READ)
    ordered_pair(clock, "a", "c")
    with pytest.raises(StreamOrderError, match="'b'"):
        clock.access("c", "x", WRITE)


def test_an_early_event_covers_only_its_buffers():
    """graph → caller: what the event does not list is not vouched for, directly or through a third stream."""
    clock = StreamClock()
    for buffer in ("dx", "grads"):
        clock.access("graph", buffer, WRITE)
    event = clock.record("graph", covers=["dx"])
    clock.wait("send", event)
    clock.access("send", "dx", READ)
    with pytest.raises(StreamOrderError, match="grads"):
        clock.access("send", "grads", READ)
    ordered_pair(clock, "send", "third")  # a full event of a stream that knows only part
    clock.access("third", "dx", READ)
    with pytest.raises(StreamOrderError):
        clock.access("third", "grads", READ)
    clock.wait("chained", clock.record("send", covers=["dx"]))  # an early event passes on what it is about
    clock.access("chained", "dx", READ)
    clock.wait("fourth", clock.record("send", covers=["grads"]))
    with pytest.raises(StreamOrderError):
        clock.access("fourth", "dx", WRITE)


def test_the_host_is_a_stream():
    """A launch orders what the host knows, a synchronisation what the event knows; the host's later work
    neither.
    """
    clock = StreamClock()
    clock.access(HOST, "x", WRITE, "fill")
    clock.launch("a")
    clock.access("a", "x", READ)
    with pytest.raises(StreamOrderError):  # a launch is no promise for the host
        clock.access(HOST, "x", WRITE)
    clock.synchronize(clock.record("a"))
    clock.access(HOST, "x", WRITE, "refill")
    with pytest.raises(StreamOrderError, match="refill"):  # launched before the refill
        clock.access("a", "x", READ)
    clock.launch("b")
    clock.access("b", "x", READ)


def test_a_launch_carries_what_the_host_knows_through_an_early_event():
    clock = StreamClock()
    for buffer in ("x", "y"):
        clock.access("a", buffer, WRITE)
    clock.synchronize(clock.record("a", covers=["x"]))
    clock.launch("b")
    clock.access("b", "x", READ)
    with pytest.raises(StreamOrderError):
        clock.access("b", "y", READ)


def test_an_event_vouches_for_what_came_before_it_only():
    clock = StreamClock()
    event = clock.record("a")
    clock.access("a", "x", WRITE)
    clock.wait("b", event)
    with pytest.raises(StreamOrderError):
        clock.access("b", "x", READ)


def test_an_event_is_a_copy():
    """What the stream or its overlays learn later does not enter an event recorded before."""
    clock = StreamClock()
    clock.access("a", "x", WRITE)
    ordered_pair(clock, "a", "b", ["x"])
    early = clock.record("b")
    clock.access("a", "x", WRITE)
    ordered_pair(clock, "a", "b", ["x"])
    clock.wait("c", early)
    with pytest.raises(StreamOrderError):
        clock.access("c", "x", READ)


@pytest.mark.parametrize(
    ("lo", "hi", "conflict"),
    [
        (0, 4, False),
        (8, 12, False),
        (0, 5, True),
        (7, 9, True),
        (4, 8, True),
        (5, 6, True),
        (0, 12, True),
        (6, 6, False),
    ],
)
def test_only_overlapping_bytes_conflict(lo, hi, conflict):
    clock = StreamClock()
    clock.access("a", "x", WRITE, lo=4, hi=8)
    if conflict:
        with pytest.raises(StreamOrderError):
            clock.access("b", "x", READ, lo=lo, hi=hi)
    else:
        clock.access("b", "x", READ, lo=lo, hi=hi)


def test_a_range_without_an_end_is_the_whole_buffer():
    clock = StreamClock()
    clock.access("a", "x", WRITE, lo=1 << 40, hi=(1 << 40) + 1)
    with pytest.raises(StreamOrderError):
        clock.access("b", "x", READ)
    assert WHOLE > 1 << 60


def test_a_refused_access_leaves_no_trace():
    """Over two ranges of which one conflicts: neither remembers an access that never ran."""
    clock = StreamClock()
    clock.access("a", "x", READ, lo=4, hi=8)
    with pytest.raises(StreamOrderError):
        clock.access("b", "x", WRITE, lo=0, hi=8)
    clock.access("c", "x", READ, lo=0, hi=4)


def test_forget_ends_a_history():
    clock = StreamClock()
    clock.access("a", "x", WRITE)
    clock.access("a", "y", WRITE)
    assert clock.buffers == ("x", "y")
    clock.forget("x")
    clock.forget("never seen")
    assert clock.buffers == ("y",)
    clock.access("b", "x", WRITE)
    with pytest.raises(StreamOrderError):
        clock.access("b", "y", WRITE)


def test_settle_orders_the_past_before_the_future_and_nothing_in_the_future():
    clock = StreamClock()
    clock.access("a", "x", WRITE)
    clock.access("b", "y", WRITE)
    clock.settle()
    clock.launch("new")  # a stream that did not exist yet is launched by a host that waited
    clock.access("new", "x", READ)
    clock.access("a", "y", WRITE, "later")
    with pytest.raises(StreamOrderError, match="later"):
        clock.access("b", "y", WRITE)


def test_a_self_edge_changes_nothing():
    """Work of one stream is in order by itself."""
    clock = StreamClock()
    clock.access("a", "x", WRITE)
    clock.access("a", "x", WRITE)
    ordered_pair(clock, "a", "a")
    clock.access("a", "x", WRITE)
    clock.launch(HOST)
    with pytest.raises(StreamOrderError):
        clock.access(HOST, "x", READ)


def test_the_verdict_does_not_depend_on_repetition():
    """Deterministic: the same edges give the same message."""

    def message() -> str:
        clock = StreamClock()
        for stream in ("a", "b"):
            clock.access(stream, "x", MERGE, stream)
        with pytest.raises(StreamOrderError) as caught:
            clock.access("c", "x", READ, "roll")
        return str(caught.value)

    assert len({message() for _ in range(5)}) == 1
