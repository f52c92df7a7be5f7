"""Capturing a rank's plan in one transaction: every distinct (kind, chunk, I-slot, W-slot, beta) and the step's end as graphs
of their own, or the whole step as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pipeline.actions import Action, Kind
from pipeline.captured import Captured
from pipeline.engine import Engine
from pipeline.epochs import check_commits
from pipeline.plan import GraphKey
from pipeline.program import COLLECTIVE
from pipeline.step_graph import GraphMarks, cut, make
from qeffect_lm.contract.leases import Joint, Slot
from qeffect_lm.contract.ledger import Scope, Summary
from qeffect_lm.fp8.cache import LAYOUTS
from qeffect_lm.graphs.backend import Graph, GraphBackend
from qeffect_lm.graphs.register import HiddenStateRegister
from qeffect_lm.graphs.transaction import transaction

WARM_UP = -1  # a microbatch that no plan and no capture uses


def capture(engine: Engine, backend: GraphBackend, register: HiddenStateRegister) -> Captured:
    """Capture a graph for each action of the engine's rank, and install them.

    Declared state (parameters, scales, optimizer, generators, the ledger's account) has the same bytes before and after; an
    exception leaves the engine eager and usable.

    Raises:
        CaptureError: something a graph must not freeze, or an address the register does not know.
    """
    keys = engine.plan.graph_keys(engine.rank)
    captured = Captured(check_addresses=register.check_watched)
    with preparing(engine, backend, register), engine.ledger.recording():
        engine.ledger.begin_step(-1)
        if backend.warms_up:
            _warm_up(engine)
        places: dict[tuple[int, int, int], list[GraphKey]] = {}
        for key in keys:
            places.setdefault((key.chunk, key.i_slot, key.w_slot), []).append(key)
        for number, (place, mine) in enumerate(places.items()):
            _capture_slot(engine, backend, register, captured, place, mine, -2 - number)
        _capture_end(engine, backend, register, captured)
    return _installed(engine, captured)


def capture_step(
    engine: Engine, backend: GraphBackend, register: HiddenStateRegister, *, optimizer: bool = True, timed: bool = False
) -> Captured:
    """Capture the rank's whole step as one graph (:mod:`pipeline.step_graph`), and install it; collective over the pipeline.

    The step runs under the ledger while it is captured: a plan that breaks the contract raises here. ``optimizer`` False leaves
    the step's end in graphs of its own; ``timed`` has the graph record when each F, I and W begins and ends (GPU). Otherwise as
    :func:`capture`.
    """
    captured = Captured(check_addresses=register.check_watched, checked=engine.ledger.checks)
    inside = engine.actions[: cut(engine.actions, optimizer)]
    ledger = engine.ledger
    with preparing(engine, backend, register):
        if backend.warms_up:
            with ledger.recording():
                ledger.begin_step(-1)
                _warm_up(engine)
                _connect(engine)
                ledger.abandon_step()
        engine.summaries = {}

        def work() -> None:
            engine.run_actions(inside)
            if optimizer:
                engine.finish()
            else:
                engine.settle()
                engine.join_reductions()

        marks = GraphMarks()
        with ledger.recording(checked=True), engine.rehearsal(backend.across):
            engine.watch = marks if timed else None
            graph = backend.capture(f"the step of rank {engine.rank}", work, register=register)
            _check_end(engine, inside, optimizer)
        captured.step = make(engine, graph, optimizer, marks.marks)
        if not optimizer:
            with ledger.recording():
                _capture_end(engine, backend, register, captured)
    return _installed(engine, captured)


def _check_end(engine: Engine, inside: Sequence[Action], optimizer: bool) -> None:
    """Of the step that was captured, what only its end or the next step would find: replays take it for granted."""
    ledger = engine.ledger
    if not ledger.checks:
        return
    ledger.leases.end_step()
    check_commits(ledger.timeline, engine.first_epochs, inside, ledger.step)
    if optimizer:
        for name in engine.cache.names:
            for layout in LAYOUTS:
                ledger.versions.require(name, layout, epoch=ledger.weight_epoch(), reader="the step after the captured one")
    else:
        ledger.grads.zero_empty_()
        ledger.grads.check_complete(engine.plan.microbatches)


@contextmanager
def preparing(engine: Engine, backend: GraphBackend, register: HiddenStateRegister) -> Iterator[None]:
    """Inside, work runs on real state; afterwards nothing of it is left. Older graphs are given up first: new ones may want
    their memory."""
    if engine.captured is not None:
        engine.captured.release()
        engine.captured = None
    try:
        with engine.ledger.untraced(), transaction(register, engine.ledger, copy_guarded=not backend.warms_up):
            yield
    finally:
        engine.summaries = engine.watch = None
        for stage in engine.stages.values():
            for slot in stage.slots:
                slot.saved = None


def _installed(engine: Engine, captured: Captured) -> Captured:
    engine.captured = captured
    engine.ledger.captured(len(captured.graphs()))
    if engine.divisor.is_cuda:
        torch.cuda.empty_cache()  # what checksums were made in
    return captured


def _capture_end(engine: Engine, backend: GraphBackend, register: HiddenStateRegister, captured: Captured) -> None:
    for name, work in engine.end_work().items():

        def end(work=work) -> None:  # noqa: ANN001 (bound now, run at once)
            with torch.no_grad():
                work()

        captured.end[name] = backend.capture(name, end, register=register)


def _warm_up(engine: Engine) -> None:
    """Every kind of work once, eagerly, where it will be captured: libraries allocate and compile outside of any capture."""
    coalesced = engine.plan.coalesce_w > 1
    keys = engine.plan.graph_keys(engine.rank)
    with engine.computing():
        for chunk, stage in engine.stages.items():
            slots = (Slot("I", chunk, 0), Slot("W", chunk, 0))
            slot = stage.slots[0]
            works = (("F", stage.forward), ("I", stage.input_grad), ("W", stage.weight_grad))
            alone = Joint() if coalesced else None
            products = {key.joint.members: key.joint for key in keys if key.chunk == chunk and key.joint is not None}
            for beta, joint in ((0, alone), (1, alone), *((1, joint) for joint in products.values())):
                for kind, work in works:  # F again, since I and W use up what it left
                    first = beta if kind != "F" else None
                    with engine.ledger.action(kind, chunk, WARM_UP, beta=first, slots=slots, joint=joint) as scope:
                        work(slot, scope)
        with torch.no_grad():
            engine.end.veto_()
            pieces = engine.end_work()
            if "refresh" in pieces:  # before a commit rolls scales: the caches, of which no copy is kept, come out the same
                pieces.pop("refresh")()
            for piece in pieces.values():
                piece()
    if engine.divisor.is_cuda:  # the graphs' pools cannot use what this and calibration leave in the allocator's cache
        torch.cuda.synchronize(engine.divisor.device)
        torch.cuda.empty_cache()


def _connect(engine: Engine) -> None:
    """Every collective of a step's end, once: NCCL connects at the first use, which a capture refuses. All ranks call it."""
    engine.streams.synchronize_all()  # a gather would take back the veto under which the rehearsed optimizer still runs
    with engine.computing(), engine.streams.current(COLLECTIVE):
        if engine.end.replicated:
            for chunk in engine.stages:
                engine.end.reduce_gradients_(chunk)
        end = engine.end
        for work in (end.reduce_, end.gather_loss_, end.gather_, end.share_, end.merge_weight_amax_):
            work()
    engine.streams.synchronize_all()


def _capture_slot(
    engine: Engine,
    backend: GraphBackend,
    register: HiddenStateRegister,
    captured: Captured,
    place: tuple[int, int, int],
    keys: Sequence[GraphKey],
    microbatch: int,
) -> None:
    """F once, then I and W for each beta of ``keys``, over one pair of slots; ``microbatch`` is a number no plan uses."""
    chunk, i_slot, w_slot = place
    stage = engine.stages[chunk]
    slot = stage.slots[i_slot]
    leases = engine.ledger.leases
    shares: list[Graph] = []

    coalesced = engine.plan.coalesce_w > 1

    def record(kind: Kind, beta: int | None, work, product: Joint | None = None) -> None:  # noqa: ANN001
        key = GraphKey(kind, chunk, i_slot, w_slot, beta, product)
        joint = Joint() if coalesced and product is None else product
        summary: list[Summary] = []

        def inside() -> None:
            slots = (Slot("I", chunk, i_slot), Slot("W", chunk, w_slot))
            with engine.ledger.action(str(kind), chunk, microbatch, beta=beta, slots=slots, joint=joint) as scope:
                work(scope)
                summary.append(scope.summarise())
                engine.ledger.check_roles(str(kind), chunk, microbatch, summary[0].roles)
                engine.ledger.check_collectives(str(kind), chunk, microbatch, summary[0].collectives)

        several = "" if product is None else f", of {product.members} microbatches with beta {product.beta}"
        label = f"{chunk}{kind} (I-slot {i_slot}, W-slot {w_slot}, beta {beta}{several})"
        graph = backend.capture(label, inside, register=register, shares=shares)
        captured.actions[key] = (graph, summary[0])
        shares.append(graph)

    record(Kind.F, None, lambda scope: stage.forward(slot, scope))
    left = leases.payloads(chunk, microbatch)
    betas = sorted({key.beta for key in keys if key.beta is not None})
    for number, beta in enumerate(betas):
        leases.put_back(chunk, microbatch, left)
        keep = number < len(betas) - 1

        def input_grad(scope: Scope, keep: bool = keep) -> None:
            stage.input_grad(slot, scope, keep=keep)

        record(Kind.I, beta, input_grad)
        payloads = leases.payloads(chunk, microbatch)
        captured.retained.setdefault(place, []).extend(t for payload in payloads.values() for t in payload.tensors())
        products = dict.fromkeys(key.joint for key in keys if key.kind is Kind.W and key.beta == beta)
        for product in products or (None,):
            leases.put_back(chunk, microbatch, payloads)
            record(Kind.W, beta, lambda scope: stage.weight_grad(slot, scope), product)
