"""Faults in one process: each one is trapped every time, at the first illegal action; without the contract it bites."""

from __future__ import annotations

import re
import threading
from collections import Counter, defaultdict
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from pipeline.actions import Kind
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.contract.errors import ContractViolation, PlanError, ResumeError
from tests.fault_list import FAULTS, NOTHING, SOUND_LOAD, markdown_table
from tests.faults import Fault, Injected, Place, separate_w
from tests.runs import run_here, write_config
from tests.tiny import batch, config, same_bits
from tests.unit.engine_support import BACKENDS
from tests.unit.in_process import LateStream, Ranks

SMALL = {"model__num_layers": 1, "model__vocab_size": 32, "data__seq_len": 8, "pipeline__microbatches": 4}


def data(seed: int, microbatches: int) -> Any:
    return batch(seed, microbatches, sequence=8, vocab=32)


class Trained:
    """One rank, or two in threads, assembled and prepared."""

    def __init__(self, backend: str, seed: int, settings: dict[str, Any], plan: Any = None, when: str = "late") -> None:
        made = config(**{**SMALL, **settings}, graphs__backend=backend, run__seed=seed)
        self.ranks: Ranks | None = None
        self.late: LateStream | None = None  # of the one rank, where there is one
        if made.parallel.pp * made.parallel.dp > 1:
            with pytest.MonkeyPatch.context() as patch:
                self.ranks = Ranks(made, patch, when=when)
                self.parts = self.ranks.parts
                self.ranks.prepare(data(seed, made.pipeline.microbatches))
        else:
            with nullcontext() if plan is None else mock.patch("qeffect_lm.app.assemble.prove_rank"):
                self.parts = [assemble(made, None, plan)]  # a wrong plan gets past the check that comes before
            self.parts[0].prepare(data(seed, made.pipeline.microbatches))
        self.microbatches = made.pipeline.microbatches

    def step(self, number: int, seed: int) -> list[Any]:
        replicas = 1 if self.ranks is None else self.parts[0].mesh.size("dp")
        batches = [data(seed + 1000 * other, self.microbatches) for other in reversed(range(replicas))]

        def one(part: Assembly) -> Any:
            late = self.late if self.ranks is None else self.ranks.wire.late.get(part.mesh.rank)
            with nullcontext() if late is None else late:
                return part.engine.step(number, batches[part.mesh.coord("dp")])

        if self.ranks is None:
            return [one(self.parts[0])]
        with pytest.MonkeyPatch.context() as patch:
            self.ranks.connect(patch)
            return self.ranks.each(one)

    def mend(self) -> None:
        """After an error: the numbers do not matter, and the account starts anew."""
        for part in self.parts:
            part.engine._broken = None
            part.ledger.versions.bump()
            part.rebuild_caches()


def make(fault: Fault, backend: str, seed: int, microbatch: int, when: str = "late", **more: Any) -> Trained:
    """A new engine of the fault's settings."""
    layers = {"model__num_layers": 2} if fault.transfers else {}
    plan = fault.plan(microbatch) if fault.plan else None
    trained = Trained(backend, seed, {**fault.settings, **layers, **more}, plan, when)
    if fault.separate:
        separate_w(trained.parts[0].engine)
    return trained


@cache
def kept(settings: tuple[tuple[str, Any], ...], name: str, backend: str, seed: int, microbatch: int) -> Trained:
    """The same for all faults that ask for the same: an abandoned step leaves nothing behind."""
    fault = FAULTS[name] if name else next(f for f in FAULTS.values() if tuple(f.settings.items()) == settings)
    return make(fault, backend, seed, microbatch)


def reused(fault: Fault, backend: str, seed: int, microbatch: int) -> Trained:
    own = fault.plan is not None or fault.separate
    return kept(tuple(fault.settings.items()), fault.name if own else "", backend, seed, microbatch if fault.plan else 0)


def strike(trained: Trained, fault: Fault, place: Place, sound: int, rng: Random) -> ContractViolation:
    """Some sound steps, then the fault: it is trapped where it must be. Returns the error."""
    engine = trained.parts[fault.rank].engine
    expected = fault.first(engine, place)
    with ExitStack() as stack:
        injected = stack.enter_context(Injected(engine, fault, place, rng))
        for part in trained.parts:
            if part.engine is not engine:  # the others run unevenly too
                stack.enter_context(Injected(part.engine, NOTHING, place, Random(rng.random())))
        with pytest.raises(ContractViolation) as caught:
            for number in range(place.step - sound, place.step + 2):
                trained.step(number, rng.randrange(1 << 20))
    error = caught.value
    where = f"{fault.name} at {place}: {type(error).__name__} in {injected.action}, step {engine._step}: {error}"
    assert type(error) is expected.error and injected.action == expected.action, where
    assert engine._step == expected.step, where
    assert re.search(expected.words, str(error)), where
    return error


def words_of(error: ContractViolation) -> str:
    """The message without what counts the steps of the run."""
    text = str(error).split(" [")[0]
    return re.sub(r"\b(epoch|version|step|with|at|is|to|claimed while \() ?\d+", r"\1 N", text)


def repeat(name: str, backend: str, times: int, seeds: int) -> None:
    """``times`` different runs: model seed, data, step, number of sound steps before, microbatch, pauses."""
    fault = FAULTS[name]
    rng = Random(f"{name} {backend}")
    said: dict[tuple[int, int], set[str]] = defaultdict(set)
    struck: Counter[int] = Counter()
    for number in range(times):
        microbatch = fault.microbatches[number % len(fault.microbatches)]
        trained = reused(fault, backend, number % seeds, microbatch)
        sound = 0 if fault.plan else rng.randrange(3)
        place = Place(rng.randrange(3, 1000), microbatch)
        error = strike(trained, fault, place, sound, rng)
        said[microbatch, trained.parts[0].plan.microbatches].add(words_of(error))
        struck[microbatch] += 1
        trained.mend()
    assert sum(struck.values()) == times and set(struck) == set(fault.microbatches)
    assert all(len(messages) == 1 for messages in said.values()), said


NAMES = list(FAULTS)
IDS = [name.replace("→", ">").replace(" ", "-") for name in NAMES]


@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_trapped_ten_times_of_ten(name):
    """Eagerly or from graphs in turn; the long test takes both for each."""
    repeat(name, BACKENDS[NAMES.index(name) // 2 % 2], 10, 1)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_trapped_a_hundred_times_of_a_hundred(name, backend):
    repeat(name, backend, 100, 10)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_the_same_place_gives_the_same_words(name):
    """Whole messages, counters included, of two runs from the start that differ in data and pauses."""
    fault = FAULTS[name]
    errors = []
    for seed in (1, 2):
        microbatch = fault.microbatches[-1]
        trained = make(fault, "eager", seed, microbatch)
        errors.append(str(strike(trained, fault, Place(1, microbatch), 0 if fault.plan else 1, Random(seed))))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_trapped_where_nothing_is_wrong(backend):
    """The control: the wrapping alone, with the settings of every fault."""
    for fault in FAULTS.values():
        if fault.plan is not None:
            continue
        trained = reused(fault, backend, 0, 0)
        with Injected(trained.parts[fault.rank].engine, NOTHING, Place(1), Random(3)):
            for number in range(2):
                trained.step(number, number)


# ---- without the contract --------------------------------------------------------------------------------------


def values(trained: Trained) -> dict[str, list[torch.Tensor]]:
    """Copies of what may come out wrong, of all ranks."""
    found: dict[str, list[torch.Tensor]] = {"gradients": [], "scales": [], "weights": [], "caches": []}
    for part in trained.parts:
        found["gradients"].append(part.flat.grad_buffer)
        found["scales"] += [part.timeline.scale, part.timeline.history]
        found["weights"].append(part.flat.master_buffer)
        for cached in part.cache.cached.values():
            found["caches"] += [cached.rows.view(torch.uint8), cached.scale_inv]  # type: ignore[union-attr]
    return {name: [tensor.clone() for tensor in tensors] for name, tensors in found.items()}


def slow_device(trained: Trained, fault: Fault) -> None:
    """The producer of the missing edge becomes late: a stream of the rank here, a message in :func:`delay_message`."""
    if fault.late not in ("compute", "collective"):
        return
    follow = frozenset({"send_B"}) if fault.name == "compute→recv_F" else frozenset()  # it waits for the same work
    late = LateStream(trained.parts[fault.rank].engine, fault.late, follow)
    if trained.ranks is None:
        trained.late = late
    else:
        trained.ranks.wire.late[fault.rank] = late
        trained.ranks.wire.when = "at_once" if fault.changes else "early"  # the network is as fast as it may be


def delay_message(trained: Trained, fault: Fault, place: Place) -> None:
    """In the step of the fault: what is received comes while its buffer's last reader is late, or what is sent moves only when
    its buffer was written again."""
    if trained.ranks is None:
        return
    wire, engine = trained.ranks.wire, trained.parts[fault.rank].engine
    if fault.name == "compute→recv_F":
        wire.blocking.add(("F", place.microbatch))
    if fault.name != "send_B→compute":
        return
    index, chunk = engine._slots.i_slots.index, min(engine.stages)
    before = max(m for m in range(place.microbatch) if index[chunk, m] == index[chunk, place.microbatch])
    gate = wire.held["B", before] = threading.Event()
    run = engine._handlers[Kind.I]

    def then_open(action: Any) -> None:
        run(action)
        if action.microbatch == place.microbatch:
            gate.set()

    engine._handlers[Kind.I] = then_open


def run_off(fault: Fault, faulty: bool, delayed: bool) -> dict[str, list[torch.Tensor]]:
    """Three steps in mode off, the fault in the second: losses, and everything after the second and the third."""
    place = Place(1, 1 if 1 in fault.microbatches else fault.microbatches[0])
    more: dict[str, Any] = {"contract__mode": "off", **({"parallel__dp": 2} if fault.replicas else {})}
    if fault.plan is not None and not faulty:
        trained = Trained("host_replay", 7, {**fault.settings, **more})
    else:
        trained = make(fault, "host_replay", 7, place.microbatch, **more)
    engine = trained.parts[fault.rank].engine
    if delayed:
        slow_device(trained, fault)
    inside = fault if faulty else SOUND_LOAD if fault.load else NOTHING
    result: dict[str, list[torch.Tensor]] = defaultdict(list)
    with Injected(engine, inside, place):
        for number in range(3):
            if delayed and faulty and number == place.step:
                delay_message(trained, fault, place)
            result["loss"] += [trained.step(number, number)[0].loss.clone()]
            if trained.ranks is not None:
                trained.ranks.wire.blocking.clear()
                trained.ranks.wire.held.clear()
            if number:
                for kind, tensors in values(trained).items():
                    result[kind] += tensors
    return result


def wrong(a: dict[str, list[torch.Tensor]], b: dict[str, list[torch.Tensor]]) -> tuple[str, ...]:
    return tuple(kind for kind in a if not all(same_bits(x, y) for x, y in zip(a[kind], b[kind], strict=True)))


CHEAP = ("drop W", "I-slot reused", "refresh skipped", "recv_F→compute")  # in the normal suite too


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, id=i, marks=() if n in CHEAP else pytest.mark.long) for n, i in zip(NAMES, IDS, strict=True)],
)
def test_without_the_contract_the_numbers_are_wrong(name):
    """Mode off, from graphs. Left-out edges: with the producer as late as the other edges allow (and, first, with all
    edges and just as late: nothing is wrong). What the table of docs/contract.md says comes out wrong does, and no more.
    """
    fault = FAULTS[name]
    sound = run_off(fault, faulty=False, delayed=False)
    assert len({float(loss) for loss in sound["loss"]}) == 3
    if fault.late is not None:
        assert wrong(sound, run_off(fault, faulty=False, delayed=True)) == ()
    assert wrong(sound, run_off(fault, faulty=True, delayed=True)) == fault.changes
    assert bool(fault.changes) != bool(fault.why_not)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.plan is not None])
def test_a_plan_with_wrong_slots_is_refused_before_it_runs(name):
    """The traps above are for what this check would miss."""
    fault = FAULTS[name]
    assert fault.plan is not None
    with pytest.raises(PlanError):
        assemble(config(**{**SMALL, **fault.settings}), None, fault.plan(1))


def test_a_resume_that_does_not_make_its_caches(tmp_path: Path, monkeypatch):
    """Loaded weights whose caches were not made again are refused by name, before any step."""
    write_config(tmp_path)
    assert run_here(tmp_path, "run", "train.steps=2", "checkpoint.every=2")[0] == 0
    monkeypatch.setattr(Assembly, "rebuild_caches", lambda self: None)
    with pytest.raises(ResumeError, match="cached_weight/layers.0.attention.qkv.weight"):
        run_here(tmp_path, "run", "train.steps=4")


def test_the_documentation_lists_the_faults():
    text = (Path(__file__).parents[2] / "docs" / "contract.md").read_text()
    assert markdown_table() in text
