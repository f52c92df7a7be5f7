"""The list of faults, and the table of them in docs/contract.md."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from pipeline.actions import Kind
from pipeline.engine import Engine
from qeffect_lm.contract.errors import (
    InputGradTwiceError,
    ScaleOrderError,
    StaleWeightError,
    WeightGradTwiceError,
)
from tests.faults import (
    END,
    SCHEDULE,
    SIDE,
    Fault,
    Place,
    Trap,
    after_dropped_w,
    after_wrong_w,
    at,
    load,
    next_reader,
    next_step,
    no_bump,
    no_completion,
    no_edge,
    no_mark,
    no_refresh,
    shared_slot,
    skip,
    slot_retained,
    stream_error,
    twice,
    wrong_microbatch,
)

ALWAYS = ("loss", "gradients", "scales", "weights", "caches")


def _settings(**values: Any) -> MappingProxyType[str, Any]:
    return MappingProxyType(values)


ROLLING = _settings(precision__fp8__window="microbatch")
PLAIN = _settings()
PIPELINE = _settings(parallel__pp=2)


def _collective(
    word: str, to_collective: bool, changes: tuple[str, ...], settings: Any, microbatches: tuple[int, ...]
) -> Fault:
    source, target = ("compute", "collective") if to_collective else ("collective", "compute")
    first = stream_error("STEP" if (word, target) == ("REDUCE", "compute") else word, target, source)
    place = {"COMMIT_F": "nCOMMIT_Fm", "COMMIT_I": "nCOMMIT_Im"}.get(word, word)
    what = f"no edge {source} → {target} in {place}"
    illegal = f"{'STEP' if (word, target) == ('REDUCE', 'compute') else place} on {target}"
    return Fault(
        f"{word} {source}→{target}",
        what,
        no_edge(word, source, target),
        first,
        "StreamOrderError",
        illegal,
        settings,
        microbatches=microbatches,
        late=source,
        changes=changes,
        replicas=True,
    )


def _send(rank: int, d: str, work: str) -> list[Fault]:
    """Both edges of the sends of a direction, made by ``work`` on ``rank``."""
    send = f"send_{d}"
    return [
        Fault(
            f"compute→{send}",
            f"no edge compute → {send}: the send does not wait for {work}",
            no_edge(f"SEND_{d}", "compute", send),
            stream_error(f"SEND_{d}", send, "compute"),
            "StreamOrderError",
            f"nSEND_{d}m on {send}",
            PIPELINE,
            rank,
            late="compute",
            changes=ALWAYS,
        ),
        Fault(
            f"{send}→compute",
            f"no edge {send} → compute: {work} does not wait for the send of its buffer",
            no_completion(work, f"SEND_{d}"),
            stream_error(work, "compute", send),
            "StreamOrderError",
            f"n{work}m on compute",
            PIPELINE,
            rank,
            microbatches=(2, 3) if rank == 0 else (1, 2, 3),
            late=send,
            changes=() if d == "F" else ALWAYS,
            why_not="" if d == "B" else "the slot is free only after the reader's gradient came back, so after the send",
        ),
    ]


def _receive(rank: int, d: str, work: str, microbatches: tuple[int, ...]) -> list[Fault]:
    """Both edges of the receives of a direction, read by ``work`` on ``rank``."""
    receive = f"recv_{d}"
    return [
        Fault(
            f"compute→{receive}",
            f"no edge compute → {receive}: the receive does not wait for the buffer's last reader"
            + (", nor the one before, whose edge would do" if d == "B" else ""),
            no_edge(f"RECV_{d}", "compute", receive, before=int(d == "B")),
            stream_error(f"RECV_{d}", receive, "compute"),
            "StreamOrderError",
            f"nRECV_{d}m on {receive}",
            PIPELINE,
            rank,
            microbatches=microbatches,
            late="compute",
            changes=ALWAYS if d == "F" else (),
            why_not="" if d == "F" else "the message answers an F that the same stream runs after the last reader",
        ),
        Fault(
            f"{receive}→compute",
            f"no edge {receive} → compute: {work} does not wait for what it reads",
            no_completion(work, f"RECV_{d}"),
            stream_error(work, "compute", receive),
            "StreamOrderError",
            f"n{work}m on compute",
            PIPELINE,
            rank,
            late=receive,
            changes=ALWAYS,
        ),
    ]


EDGES = [
    _collective("REDUCE", True, ALWAYS, PLAIN, (0,)),
    _collective("REDUCE", False, ALWAYS, PLAIN, (0,)),
    _collective("STEP", True, ALWAYS, PLAIN, (0,)),
    _collective("STEP", False, ALWAYS, PLAIN, (0,)),
    _collective("COMMIT_F", True, ("scales",), ROLLING, (0, 1, 2, 3)),
    _collective("COMMIT_F", False, ("scales",), ROLLING, (0, 1, 2, 3)),
    _collective("COMMIT_I", True, ALWAYS, ROLLING, (0, 1, 2, 3)),
    _collective("COMMIT_I", False, ALWAYS, ROLLING, (0, 1, 2, 3)),
    Fault(
        "I→W",
        "W on a stream of its own: no edge I → W",
        no_mark,
        stream_error("W", SIDE, "compute"),
        "StreamOrderError",
        f"nWm on {SIDE}",
        _settings(pipeline__microbatches=1),
        microbatches=(0,),
        late="compute",
        changes=ALWAYS,
    ),
    *_send(0, "F", "F"),
    *_send(1, "B", "I"),
    *_receive(1, "F", "F", (1, 2, 3)),
    *_receive(0, "B", "I", (2, 3)),
]

STATE = [
    Fault(
        "commit twice",
        "COMMIT runs twice",
        twice(Kind.COMMIT),
        at(ScaleOrderError, "COMMIT", "COMMIT closes forward epoch"),
        "ScaleOrderError",
        "the second COMMIT",
        why_not="slots without an amax do not roll",
    ),
    Fault(
        "commit skipped",
        "COMMIT does not run",
        skip(Kind.COMMIT),
        lambda engine, place: Trap(ScaleOrderError, END, "its plan's commits lead to", place.step),
        "ScaleOrderError",
        "the end of the step, before the refresh",
        changes=ALWAYS,
    ),
    *(
        Fault(
            f"commit {kind} twice",
            f"window `microbatch`: nCOMMIT_{kind}m runs twice",
            twice(Kind.COMMIT, str(kind)),
            at(ScaleOrderError, f"COMMIT_{kind}", f"0COMMIT_{kind}{{m}} closes {direction} epoch"),
            "ScaleOrderError",
            f"the second nCOMMIT_{kind}m",
            ROLLING,
            why_not="slots without an amax do not roll",
        )
        for kind, direction in ((Kind.F, "forward"), (Kind.I, "backward"))
    ),
    *(
        Fault(
            f"commit {kind} skipped",
            f"window `microbatch`: nCOMMIT_{kind}m does not run",
            skip(Kind.COMMIT, str(kind)),
            next_reader(kind),
            "ScaleOrderError",
            f"the next {kind}; after the last one the end of the step",
            ROLLING,
            changes=ALWAYS,
        )
        for kind in (Kind.F, Kind.I)
    ),
    Fault(
        "refresh skipped",
        "the weight caches are not made again after STEP",
        no_refresh,
        next_step,
        "StaleWeightError",
        "the next step's first F",
        changes=ALWAYS,
    ),
    Fault(
        "no bump, no refresh",
        "STEP writes the parameters, moves no version, and no cache is made again",
        no_bump,
        lambda engine, place: Trap(StaleWeightError, END, "STEP writes each parameter once and says so", place.step),
        "StaleWeightError",
        "the end of the step",
        changes=ALWAYS,
    ),
    Fault(
        "load without refresh",
        "other weights are loaded, their caches stay",
        load(refresh=False),
        at(StaleWeightError, "0F0", "0F0 needs .* refresh the cache after the last bump"),
        "StaleWeightError",
        "the first F after the load",
        changes=ALWAYS,
        load=True,
    ),
    *(
        Fault(
            f"{kind}-slot reused",
            f"a plan gives a microbatch the {kind}-slot that the one before it still holds",
            lambda injected: None,
            slot_retained(kind),
            "LeaseRetainedError",
            "nFm of the second microbatch",
            _settings(pipeline__schedule=SCHEDULE[resource]),
            microbatches=(1, 2, 3),
            changes=ALWAYS,
            plan=shared_slot(resource),
        )
        for kind, resource in (("I", "i_slots"), ("W", "w_slots"))
    ),
    Fault(
        "drop W",
        "W of a microbatch does not run",
        skip(Kind.W),
        after_dropped_w,
        "LeaseRetainedError, GradSlotError",
        "the F that claims its W-slot; else the next W (no first writer) or STEP (a contribution missing)",
        changes=ALWAYS,
    ),
    Fault(
        "W twice",
        "W of a microbatch runs twice",
        twice(Kind.W),
        at(WeightGradTwiceError, "W", "W runs a second time.* microbatch={m}"),
        "WeightGradTwiceError",
        "the second nWm",
        changes=ALWAYS,
    ),
    Fault(
        "W of the wrong microbatch",
        "W of the next microbatch runs in its place",
        wrong_microbatch,
        after_wrong_w,
        "NotForwardedError, WeightGradBeforeInputGradError, WeightGradTwiceError, GradSlotError, LeaseRetainedError",
        "that W, if its lease or beta is wrong; else the F that claims the slot of the one left out, or that W's own turn",
        changes=ALWAYS,
    ),
    Fault(
        "I twice",
        "I of a microbatch runs twice",
        twice(Kind.I),
        at(InputGradTwiceError, "I", "I runs a second time.* microbatch={m}"),
        "InputGradTwiceError",
        "the second nIm",
        changes=ALWAYS,
    ),
]

FAULTS = {fault.name: fault for fault in [*EDGES, *STATE]}


def _unreachable(engine: Engine, place: Place) -> Trap:
    raise AssertionError("nothing is wrong")


NOTHING = Fault("nothing", "", lambda injected: None, _unreachable, "", "")  # the wrapping alone
SOUND_LOAD = Fault("load and refresh", "", load(refresh=True), _unreachable, "", "")


def markdown_table() -> str:
    """The table for the docs: the fault, its error, the first illegal action, and what comes out wrong without the contract."""
    lines = ["| fault | error | first illegal action | wrong without the contract |", "|---|---|---|---|"]
    for fault in FAULTS.values():
        changes = ", ".join(fault.changes) or f"nothing: {fault.why_not}"
        lines.append(f"| {fault.what} | `{fault.error}` | {fault.illegal} | {changes} |")
    return "\n".join(lines)
