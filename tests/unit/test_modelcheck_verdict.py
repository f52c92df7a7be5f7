"""The simulator on programs whose verdict is plain to see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qeffect_lm.modelcheck.program import (
    FORWARD,
    HOST,
    MAX_MERGE,
    READ,
    WRITE,
    Abandon,
    Begin,
    Bump,
    Commit,
    Consume,
    End,
    Launch,
    Move,
    Optimizer,
    Program,
    Read,
    Record,
    Refresh,
    Settle,
    Touch,
    Wait,
    ZeroIdle,
)
from qeffect_lm.modelcheck.verdict import judge

READS = (Read("a", "rows"), Read("b", "columns"))


def on(stream: str, kind: str, buffer: str = "x", lo: int = 0, hi: int = 8) -> Launch:
    return Launch(stream, None, (Touch(buffer, kind, lo, hi),))


def early(event: int, stream: str, *covers: str) -> Record:
    return Record(event, stream, frozenset(covers))


EDGES = [  # (operations, place of the first illegal one)
    ([on("s1", WRITE), on("s1", WRITE)], None),
    ([on("s1", WRITE), on("s2", READ)], 1),
    ([on("s1", READ), on("s2", READ), on("s3", READ)], None),
    ([on("s1", MAX_MERGE), on("s2", MAX_MERGE), on("s3", READ)], 2),
    ([on("s1", MAX_MERGE), on("s2", WRITE)], 1),
    ([on("s1", WRITE, hi=4), on("s2", WRITE, lo=4)], None),
    ([on("s1", WRITE, hi=5), on("s2", WRITE, lo=4)], 1),
    ([on(HOST, WRITE), on("s1", READ)], None),
    ([on("s1", WRITE), on(HOST, READ)], 1),
    ([on("s1", WRITE), Record(1, "s1"), Wait("s2", 1), on("s2", READ)], None),
    ([Record(1, "s1"), on("s1", WRITE), Wait("s2", 1), on("s2", READ)], 3),
    ([on("s1", WRITE), Record(1, "s1"), on("s2", READ), Wait("s2", 1)], 2),
    ([on("s1", WRITE), Wait("s2", 1), Record(1, "s1"), on("s2", READ)], 3),  # waited for before it was recorded
    ([on("s1", WRITE), Record(1, "s1"), Wait(HOST, 1), on("s2", READ)], None),
    ([on("s1", WRITE), Record(1, "s1"), Wait("s2", 1), Record(2, "s2"), Wait("s3", 2), on("s3", READ)], None),
    ([on("s1", WRITE), Settle(), on("s2", READ), on(HOST, WRITE)], 3),
    ([on("s1", WRITE), Abandon(), on("s2", READ)], None),
    ([on("s1", READ), on("s2", READ), Record(1, "s2"), Wait("s3", 1), on("s3", WRITE)], 4),
]
EARLY = [
    ([on("s1", WRITE), early(1, "s1", "x"), Wait("s2", 1), on("s2", READ)], None),
    ([on("s1", WRITE), early(1, "s1", "y"), Wait("s2", 1), on("s2", READ)], 3),
    ([on("s1", WRITE), early(1, "s1", "x"), Wait("s2", 1), Record(2, "s2"), Wait("s3", 2), on("s3", READ)], None),
    ([on("s1", WRITE), Record(1, "s1"), Wait("s2", 1), early(2, "s2", "y"), Wait("s3", 2), on("s3", READ)], 5),
    ([on("s1", WRITE), early(1, "s1", "x"), Wait("s2", 1), early(2, "s2", "y"), Wait("s3", 2), on("s3", READ)], 5),
    ([on("s1", WRITE), early(1, "s1", "x"), Wait(HOST, 1), on("s2", READ)], None),
    ([on("s1", WRITE), early(1, "s1", "y"), Wait(HOST, 1), on("s2", READ)], 3),
    ([on("s1", WRITE), early(1, "s1", "y"), Wait("s2", 1), Settle(), on("s2", READ)], None),
]


@pytest.mark.parametrize(("ops", "first"), [*EDGES, *EARLY])
def test_edges(ops, first):
    verdict = judge(Program("step", tuple(ops)))
    assert verdict.first == first and set(verdict.reasons) == (set() if first is None else {"StreamOrderError"})


def moves(*keys: tuple[int, int], order: str = "FIW") -> list[Launch]:
    """F, I and W of microbatches one after the other, over the first slots, on one stream."""
    result = []
    for number, key in enumerate(keys):
        for kind in order:
            beta = None if kind == "F" else int(number > 0)
            result.append(Launch("s1", Move(kind, *key, 0, 0, beta, READS if kind != "W" else ())))
    return result


def program(*ops, window: str = "step", keys=((0, 0),)) -> Program:
    return Program(window, tuple(op if not isinstance(op, Move | Commit) else Launch("s1", op) for op in ops), keys)


def work(what) -> Launch:
    return Launch("s1", what)


END = [work(Optimizer(1)), work(Commit(0)), work(Refresh()), End()]
STEP = [Begin(), *moves((0, 0)), *END]
FWD, IGRAD, WGRAD = STEP[1:4]


def changed(launch: Launch, **fields) -> Launch:
    return replace(launch, work=replace(launch.work, **fields))  # type: ignore[type-var]


def test_a_sound_step_and_its_repetition():
    assert judge(program(*STEP)).first is None
    second = [Begin(), *moves((0, 0)), work(Optimizer(1)), work(Commit(1)), work(Refresh()), End()]
    assert judge(program(*STEP, *second)).first is None
    assert judge(program(*STEP, *second[:-3], work(Refresh()), End())).reasons.keys() == {"ScaleOrderError"}


@pytest.mark.parametrize(
    ("ops", "first", "kind"),
    [
        ([FWD], 0, "LeaseError"),
        ([Begin(), IGRAD], 1, "NotForwardedError"),
        ([Begin(), FWD, WGRAD], 2, "WeightGradBeforeInputGradError"),
        ([Begin(), FWD, IGRAD, IGRAD], 3, "InputGradTwiceError"),
        ([Begin(), FWD, IGRAD, WGRAD, WGRAD], 4, "WeightGradTwiceError"),
        ([Begin(), FWD, changed(FWD, microbatch=1)], 2, "LeaseRetainedError"),
        ([Begin(), FWD, changed(FWD, i_slot=1, w_slot=1)], 2, "LeaseRetainedError"),
        ([Begin(), FWD, changed(IGRAD, w_slot=1)], 2, "StaleHandleError"),
        ([Begin(), FWD, IGRAD, changed(WGRAD, i_slot=1)], 3, "StaleHandleError"),
        ([Begin(), FWD, IGRAD, End()], 3, "LeaseLeakError"),
        ([Begin(), FWD, IGRAD, Begin()], 3, "LeaseLeakError"),
        ([Begin(), FWD, work(Consume(0, 0))], 2, "WeightGradBeforeInputGradError"),
        ([Begin(), FWD, IGRAD, work(Consume(0, 0)), WGRAD], 4, "WeightGradTwiceError"),
        ([Begin(), FWD, IGRAD, WGRAD, changed(FWD, microbatch=1), work(Consume(0, 0))], 5, "StaleHandleError"),
        ([Begin(), FWD, Abandon(), work(Consume(0, 0))], 3, "StaleHandleError"),
        ([Begin(), changed(FWD, part="open"), changed(FWD, microbatch=1, i_slot=1, w_slot=1)], 2, "LeaseError"),
        ([Begin(), FWD, IGRAD, WGRAD, End()], 4, "ScaleOrderError"),
        ([Begin(), FWD, IGRAD, WGRAD, work(Commit(1))], 4, "ScaleOrderError"),
        ([Begin(), FWD, IGRAD, work(Commit(0)), work(Commit(1))], 4, "ScaleOrderError"),
        ([Begin(), FWD, IGRAD, work(Commit(0, (FORWARD,)))], 3, "ScaleOrderError"),
        ([Begin(), FWD, work(Commit(0))], 2, "ScaleOrderError"),
        ([Begin(), FWD, IGRAD, WGRAD, work(Commit(0)), changed(FWD, microbatch=1, reads=())], 5, "ScaleOrderError"),
        ([Begin(), FWD, changed(IGRAD, part="open"), work(Commit(0))], 3, "ScaleOrderError"),
        ([Begin(), changed(FWD, epoch=1)], 1, "ScaleOrderError"),
        ([Begin(), changed(FWD, silent=("a.input",))], 1, "ScaleOrderError"),
        ([Begin(), work(Bump(("a",))), FWD], 2, "StaleWeightError"),
        ([Begin(), work(Bump(("a",))), changed(FWD, reads=READS[1:])], None, ""),
        ([Begin(), work(Bump(("a",))), work(Refresh()), FWD], None, ""),
        ([Begin(), work(Refresh(layouts=("columns",))), FWD], 2, "StaleWeightError"),
        ([Begin(), changed(FWD, reads=(Read("a", "rows", 1),))], 1, "StaleWeightError"),
        ([Begin(), FWD, changed(IGRAD, beta=1)], 2, "GradSlotError"),
        ([Begin(), FWD, IGRAD, WGRAD, work(Optimizer(2))], 4, "GradSlotError"),
        ([Begin(), FWD, IGRAD, WGRAD, work(Optimizer(1)), work(Optimizer(1))], 5, "GradSlotError"),
        ([Begin(), FWD, IGRAD, changed(WGRAD, idle=True), work(Optimizer(1))], 4, "GradSlotError"),
        ([Begin(), FWD, IGRAD, changed(WGRAD, idle=True), work(ZeroIdle()), work(Optimizer(1))], None, ""),
    ],
)
def test_hidden_state(ops, first, kind):
    """One illegal action at the end of a sound beginning."""
    verdict = judge(program(*ops))
    assert verdict.first == first and (first is None or kind in verdict.reasons), verdict


def test_window_microbatch():
    f1 = changed(FWD, microbatch=1, i_slot=1, w_slot=1)
    roll = work(Commit(0, (FORWARD,)))
    assert judge(program(Begin(), FWD, roll, f1, window="microbatch")).first is None
    assert judge(program(Begin(), FWD, f1, window="microbatch")).first == 2
    assert judge(program(Begin(), roll, window="microbatch")).first == 1
    assert judge(program(Begin(), FWD, roll, work(Commit(1, (FORWARD,))), window="microbatch")).first == 3


def test_a_wrong_value_is_seen_in_another_order_than_the_launched_one():
    """The refresh runs on a stream that does not wait for the optimizer: launched in a sound order, made from old masters."""
    ops = list(STEP)
    ops[6] = replace(ops[6], stream="s2")
    verdict = judge(program(*ops))
    assert verdict.first == 6 and "StreamOrderError" in verdict.reasons
    ops[6:7] = [Record(1, "s1"), Wait("s2", 1), ops[6]]
    assert judge(program(*ops)).first is None


def test_values_of_other_buffers_are_those_of_the_order_of_launching():
    """An early event that vouches for every buffer but one: that one alone is in question."""
    buffers = ("params", "scales", "amax", "caches")
    for missing in buffers:
        covers = [buffer for buffer in buffers if buffer != missing]
        ops = [*STEP[:6], early(1, "s1", *covers), Wait("s2", 1), replace(STEP[6], stream="s2")]
        assert judge(program(*ops)).first == 8
    assert judge(program(*STEP[:6], early(1, "s1", *buffers), Wait("s2", 1), replace(STEP[6], stream="s2"))).first is None


def test_a_program_reads_well():
    text = str(program(Begin(), FWD, early(1, "s1", "x"), Wait("s2", 1), on("s2", READ, "y", 2, 4)))
    assert text.splitlines() == [
        "window step, every window waits for [(0, 0)]",
        "  0  begin step",
        "  1  launch on s1: 0F0 slots I0 W0 reads a.rows b.columns",
        "  2  record e1 on s1 covering only x",
        "  3  s2 waits for e1",
        "  4  launch on s2: read y[2:4]",
    ]
