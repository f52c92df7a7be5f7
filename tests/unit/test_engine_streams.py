"""I4 at work in the engine: every edge it records is needed, and trapped when it is missing."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from pipeline.actions import Kind
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.contract.errors import StreamOrderError
from tests.tiny import batch, config, differing
from tests.unit.engine_support import BACKENDS, TINY, make, step, tensors
from tests.unit.in_process import Ranks


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def drop_edges(assembly: Assembly, drop: Any) -> list[tuple[str, str]]:
    """Leave out the waits that ``drop(source, target, number)`` chooses; returns the list that collects all
    of them.
    """
    clock, seen = assembly.ledger.streams, []
    wait = type(clock).wait

    def patched(target: str, event: Any) -> None:
        if not drop(event.stream, target, len(seen)):
            wait(clock, target, event)
        seen.append((event.stream, target))

    clock.wait = patched  # type: ignore[method-assign]
    return seen


SINGLE = {
    ("compute", "collective"): "REDUCE (write on stream 'collective') is not ordered after 0W3",
    ("collective", "compute"): "STEP (read on stream 'compute') is not ordered after REDUCE",
}


@pytest.mark.parametrize("pair", SINGLE)
def test_edges_of_one_rank(backend, pair):
    """T4: between compute and the collectives; trapped in the first step, every time with the same words."""
    seen = set()
    for _ in range(2):
        assembly = make(backend)
        drop_edges(assembly, lambda source, target, _: (source, target) == pair)
        with pytest.raises(StreamOrderError) as caught:
            step(assembly, 0)
        seen.add(str(caught.value))
    assert len(seen) == 1 and SINGLE[pair] in seen.pop()


def test_each_single_edge_of_one_rank(backend):
    """T4: the four edges of the step's end one by one; what is left are edges of a stream to itself."""
    assembly = make(backend)
    edges = drop_edges(assembly, lambda *_: False)
    step(assembly, 0)
    numbers = [number for number, edge in enumerate(edges) if edge in SINGLE]
    assert len(numbers) == 4 and set(edges) - set(SINGLE) == {("compute", "compute")}
    for number in numbers:
        drop_edges(assembly, lambda _s, _t, n, number=number: n == number)
        with pytest.raises(StreamOrderError):
            step(assembly, 0)
        assembly.engine._broken = None  # the numbers do not matter here


def test_work_is_launched_on_the_stream_that_is_current_then(backend):
    """T1: W's closure exists since F ran on stream A; it runs while B is current: launched on B, after I by a
    recorded edge, and the numbers are the same. Without that edge it is trapped.
    """
    plain = make(backend, pipeline__microbatches=1)
    wanted = step(plain, 0)
    for drop in (False, True):
        assembly = make(backend, pipeline__microbatches=1)
        engine, launched = assembly.engine, []
        current = ["A"]
        engine.compute_stream = lambda current=current: current[0]
        weight_grad = engine._handlers[Kind.W]

        def on_b(action: Any, current: list[str] = current, run: Any = weight_grad) -> None:
            current[0] = "B"
            run(action)

        engine._handlers[Kind.W] = on_b
        launch = assembly.ledger.launch
        assembly.ledger.launch = lambda s, a, w, log=launched, run=launch: log.append((w, s)) or run(s, a, w)  # type: ignore
        drop_edges(assembly, lambda source, target, _, drop=drop: drop and (source, target) == ("A", "B"))
        if drop:
            with pytest.raises(StreamOrderError, match=r"0W0 \(read on stream 'B'\) is not ordered after 0I0"):
                step(assembly, 0)
            continue
        assert step(assembly, 0) == wanted
        assert {("0F0", "A"), ("0I0", "A"), ("0W0", "B")} <= set(launched)


MICROBATCHES = 4


def two_ranks(backend: str, monkeypatch: pytest.MonkeyPatch, when: str = "late", **overrides: Any) -> Ranks:
    settings = {
        "pipeline__microbatches": MICROBATCHES,
        "pipeline__w_delay": 1,
        "parallel__pp": 2,
        **overrides,
    }
    ranks = Ranks(config(**TINY, graphs__backend=backend, **settings), monkeypatch, when=when)
    ranks.prepare(batch(0, MICROBATCHES))
    return ranks


@lru_cache(maxsize=1)
def one_rank() -> tuple[list[float], dict[str, torch.Tensor]]:
    assembly = make(pipeline__microbatches=MICROBATCHES, pipeline__w_delay=1)
    losses = [step(assembly, number)[0] for number in range(3)]
    return losses, tensors(assembly)


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_send_holds_its_buffer_and_a_receive_is_waited_for(backend, when, schedule, monkeypatch):
    """T3: whether messages move as early or as late as they may, two ranks compute what one does, and no
    transfer is left.
    """
    ranks = two_ranks(backend, monkeypatch, when, pipeline__schedule=schedule)
    losses, state = one_rank()
    for number in range(3):
        results = ranks.step(number, batch(number, MICROBATCHES))
        assert [float(result.loss) for result in results] == [losses[number]] * 2
        for transport, assembly in zip(ranks.transports, ranks.parts, strict=True):
            assert len(transport.pending) == 2 * MICROBATCHES and all(p.message.done and p.waited for p in transport.pending)
            assert assembly.engine._pending == {} and assembly.engine._events == {}
    both: dict[str, torch.Tensor] = {}
    for assembly in ranks.parts:
        both.update(tensors(assembly))
    assert differing(both, state) == []


@pytest.mark.parametrize("when", ["early", "late"])
def test_edges_of_transfers(backend, when, monkeypatch):
    """T4: producer → send, send → next producer, reader → receive, receive → reader, each left out on one
    rank: trapped in the first step, at the same place whatever the timing of the messages.
    """
    ranks = two_ranks(backend, monkeypatch, when)
    for (rank, source, target), first in FIRST_TRAPS.items():
        clock = ranks.parts[rank].ledger.streams
        drop_edges(ranks.parts[rank], lambda s, t, _, pair=(source, target): (s, t) == pair)
        with pytest.raises(StreamOrderError) as caught:
            ranks.step(0, batch(0, MICROBATCHES))
        del clock.wait
        mend(ranks)
        assert str(caught.value).startswith(first), str(caught.value)
        transfer = source if target == "compute" else target
        assert {caught.value.place["stream"], caught.value.place["other_stream"]} == {"compute", transfer}


FIRST_TRAPS = {
    (0, "compute", "send_F"): "0SEND_F0 (read on stream 'send_F') is not ordered after 0F0 (write",
    (0, "send_F", "compute"): "0F2 (write on stream 'compute') is not ordered after 0SEND_F0 (read",
    (0, "compute", "recv_B"): "0RECV_B2 (write on stream 'recv_B') is not ordered after 0I0 (read",
    (0, "recv_B", "compute"): "0I0 (read on stream 'compute') is not ordered after 0RECV_B0 (write",
    (1, "compute", "recv_F"): "1RECV_F1 (write on stream 'recv_F') is not ordered after 1I0 (read",
    (1, "recv_F", "compute"): "1F0 (read on stream 'compute') is not ordered after 1RECV_F0 (write",
    (1, "compute", "send_B"): "1SEND_B0 (read on stream 'send_B') is not ordered after 1I0 (write",
    (1, "send_B", "compute"): "1I1 (write on stream 'compute') is not ordered after 1SEND_B0 (read",
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_each_single_edge_of_transfers(schedule, monkeypatch):
    """T3, T4: the edges of every single transfer of a step, dropped in turn, on both ranks. An edge vouches
    for its own transfer only: a neighbour's does not hide that one is missing. (Waits for one stream right
    after one another count as one; a receive's edge from its buffer's last reader may be implied by that
    of the receive before it.)
    """
    ranks = two_ranks("eager", monkeypatch, pipeline__schedule=schedule)
    missed = []
    for rank, assembly in enumerate(ranks.parts):
        edges = drop_edges(assembly, lambda *_: False)
        ranks.step(0, batch(0, MICROBATCHES))
        del assembly.ledger.streams.wait
        for numbers in runs(edges):
            source, target = edges[numbers[0]]
            if source == target or target.startswith("recv"):
                continue
            drop_edges(assembly, lambda _s, _t, n, numbers=numbers: n in numbers)
            try:
                for _ in range(2):
                    ranks.step(0, batch(0, MICROBATCHES))
                missed.append((rank, source, target, numbers))
            except StreamOrderError as error:
                assert {error.place["stream"], error.place["other_stream"]} == {source, target}
            del assembly.ledger.streams.wait
            mend(ranks)
            ranks.step(0, batch(0, MICROBATCHES))
    assert missed == []


def mend(ranks: Ranks) -> None:
    """Go on after an error: the numbers do not matter here, and the wire is empty again."""
    for part_ in ranks.parts:
        part_.engine._broken = None


def runs(edges: list[tuple[str, str]]) -> list[list[int]]:
    """The numbers of equal edges right after one another, together."""
    found: list[list[int]] = []
    for number, edge in enumerate(edges):
        if found and edges[found[-1][0]] == edge:
            found[-1].append(number)
        else:
            found.append([number])
    return found
