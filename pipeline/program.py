"""A plan *with its effects*: for each rank the explicit program of one optimizer step, in host order.

A :class:`Program` is data. It has a text of one operation a line, and round trips through JSON, so that a plan can be checked
with effects of one's own: W on a stream of its own, other slots, other edges. :func:`pipeline.effects.program` writes the
engine's; :func:`pipeline.prove.prove` checks any.

    begin                                         the step begins
    launch compute 0F1 i=0 w=1 epoch=0 version=0 : x.0.0=read retained_I.0.0=write …
    record compute e3                             an event after all work launched on the stream so far
    wait send_F e3                                work launched on the stream from here on waits for it
    launch send_F 0SEND_F1 to=1 : out.0.0=read    a transfer is posted
    complete 0SEND_F1                             the host waits for the transfer
    end                                           the step ends

What is launched is named ``<chunk><work><microbatch>``, or by its work alone; :data:`WORKS` lists them. Fields: ``i``, ``w``
the slots of F, I, W; ``beta`` 0 where I or W writes its gradients first, else 1; where W of several microbatches is one product
(``coalesce_w``) ``members``, how many microbatches' operands a W multiplies (0: a later one does), and ``joint``, the beta of
that product; ``epoch`` the scale epoch that is read (F, I),
closed (commits) or used (REFRESH), and ``version`` the parameters' version that is read (F, I), made (STEP) or cached
(REFRESH), both counted from the step's start; ``to``, ``from`` a transfer's other rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.schedules import Placement
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import shown

FORMAT = 1
COMPUTE, COLLECTIVE, SAVING = "compute", "collective", "saving"
BEGIN, LAUNCH, RECORD, WAIT, COMPLETE, END = KINDS = ("begin", "launch", "record", "wait", "complete", "end")
ACCESSES = ("read", "write", "max_merge")

Buffer = str | tuple[str | int, ...]
BufferAccesses = tuple[tuple[Buffer, Any], ...]  # an access is one of ACCESSES or the contract's enum, which equals it

WORKS: Mapping[str, str] = {
    "F": "forward of a microbatch",
    "I": "its input gradient",
    "W": "its weight gradients",
    "INPUT": "a microbatch's key, tokens and targets are written into its slot",
    "LOSS": "the loss of a microbatch is kept",
    "PASS_F": "an output goes to the next chunk, on the same rank",
    "PASS_B": "an input gradient goes to the chunk before, on the same rank",
    "SEND_F": "an output leaves for another rank",
    "RECV_F": "it arrives",
    "SEND_B": "an input gradient leaves for another rank",
    "RECV_B": "it arrives",
    "REDUCE_F": "window microbatch: the open forward amax are max-merged over replicas",
    "REDUCE_I": "the same for the backward ones",
    "COMMIT_F": "window microbatch: forward scales roll",
    "COMMIT_I": "backward scales roll",
    "REDUCE_G": "replicas: the gradients of a chunk are reduced, right after their last writer",
    "DIVISOR": "the loss divisor of the step",
    "SUM": "losses are added in microbatch order",
    "REDUCE": "amax and losses are reduced over replicas, and gradients that no REDUCE_G took",
    "NORM": "the rank's part of the gradient norm",
    "GATHER": "all ranks exchange their parts",
    "STEP": "vote, norm, clip, optimizer; the parameters' version moves on",
    "COMMIT": "window step: all scales roll",
    "REFRESH": "every cached weight is made, once",
}
STEP_WORKS = frozenset(("DIVISOR", "SUM", "REDUCE", "NORM", "GATHER", "STEP", "COMMIT", "REFRESH"))  # of a rank, not a chunk
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_ACTION = {  # the plan's action that a piece of work belongs to, where the names differ
    "LOSS": "F",
    "PASS_F": "F",
    "PASS_B": "I",
    "SUM": "REDUCE",
    "NORM": "STEP",
    "REDUCE_F": "COMMIT_F",
    "REDUCE_I": "COMMIT_I",
}
_FIELDS = {"i": "i_slot", "w": "w_slot", "beta": "beta", "members": "members", "joint": "joint_beta"}
_FIELDS |= {"epoch": "epoch", "version": "version"}
_NAME = re.compile(rf"(\d+)?({'|'.join(sorted(WORKS, key=len, reverse=True))})(\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation; which fields it has depends on ``kind`` (see the module)."""

    kind: str
    stream: str = ""
    work: str = ""
    chunk: int | None = None
    microbatch: int | None = None
    accesses: BufferAccesses = ()
    event: int | None = None
    peer: int | None = None
    i_slot: int | None = None
    w_slot: int | None = None
    beta: int | None = None
    epoch: int | None = None
    version: int | None = None
    members: int | None = None
    joint_beta: int | None = None

    @property
    def name(self) -> str:
        """``0F1``; for an event's operations and the step's ends their text."""
        if not self.work:
            return str(self)
        return self.work if self.chunk is None else f"{self.chunk}{self.work}{self.microbatch}"

    @property
    def who(self) -> str:
        """The plan's action it belongs to, as the ledger is told."""
        work = _ACTION.get(self.work, self.work)
        return work if self.chunk is None else f"{self.chunk}{work}{self.microbatch}"

    @property
    def key(self) -> tuple[int, int]:
        """(chunk, microbatch) of work that has them."""
        assert self.chunk is not None and self.microbatch is not None, f"{self.work} has no chunk"
        return self.chunk, self.microbatch

    def __str__(self) -> str:
        if self.kind in (BEGIN, END):
            return self.kind
        if self.kind in (RECORD, WAIT):
            return f"{self.kind} {self.stream} e{self.event}"
        if self.kind == COMPLETE:
            return f"{self.kind} {self.name}"
        words = [self.kind, self.stream, self.name]
        words += [f"{word}={getattr(self, name)}" for word, name in _FIELDS.items() if getattr(self, name) is not None]
        if self.peer is not None:
            words.append(f"{'to' if self.work.startswith('SEND') else 'from'}={self.peer}")
        return " ".join([*words, ":", *(f"{buffer_text(buffer)}={access}" for buffer, access in self.accesses)])


def buffer_text(buffer: Buffer) -> str:
    return buffer if isinstance(buffer, str) else ".".join(map(str, buffer))


def _buffer(word: str) -> Buffer:
    head, *rest = word.split(".")
    return (head, *(int(part) if part.isdigit() else part for part in rest)) if rest else head


def parse_op(line: str) -> Op:
    """The inverse of ``str(op)``.

    Raises:
        ValueError: not an operation.
    """
    head, _, tail = line.partition(" : ")
    kind, *words = head.removesuffix(" :").split()
    try:
        if kind in (BEGIN, END) and not words:
            return Op(kind)
        if kind in (RECORD, WAIT):
            stream, event = words
            return Op(kind, stream, event=int(event.removeprefix("e")))
        if kind == COMPLETE:
            work = parse_name(*words)
            if work["work"] not in TRANSFERS:
                raise ValueError("only transfers are completed")
            return Op(kind, **work)
        if kind == LAUNCH:
            stream, name, *fields = words
            return Op(kind, stream, **parse_name(name), **_numbers(fields), accesses=_accesses(tail.split()))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{line!r} is no operation of a program: {error}") from None
    raise ValueError(f"{line!r} is no operation of a program: it begins with one of {', '.join(KINDS)}")


def parse_name(name: str) -> dict[str, Any]:
    """Work, chunk and microbatch of a name such as ``0F1``, as fields of an :class:`Op`. Raises ValueError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no work")
    chunk, work, microbatch = match.groups()
    if (chunk is None or microbatch is None) != (work in STEP_WORKS) or (chunk is None) != (microbatch is None):
        raise ValueError(f"{name!r}: {work} takes {'no chunk' if work in STEP_WORKS else 'a chunk and a microbatch'}")
    return {"work": work} if chunk is None else {"work": work, "chunk": int(chunk), "microbatch": int(microbatch)}


def _numbers(words: Iterable[str]) -> dict[str, int]:
    found = {}
    for word in words:
        name, _, number = word.partition("=")
        found["peer" if name in ("to", "from") else _FIELDS.get(name, f"(no field {name!r})")] = int(number)
    return found


def _accesses(words: Iterable[str]) -> BufferAccesses:
    found = []
    for word in words:
        buffer, _, access = word.partition("=")
        if access not in ACCESSES:
            raise ValueError(f"{word!r} is no access: write BUFFER={'|'.join(ACCESSES)}")
        found.append((_buffer(buffer), access))
    return tuple(found)


@dataclass(frozen=True)
class Program:
    """What every rank does in one optimizer step: ``rows[rank]`` in host order.

    ``unordered`` declares that F, I and W of a chunk may leave microbatch order, so that sums depend on the schedule.
    ``coalesce_w``: how many microbatches' W of one weight are one product.
    """

    schedule: str
    placement: Placement
    microbatches: int
    window: str
    rows: tuple[tuple[Op, ...], ...]
    unordered: bool = False
    coalesce_w: int = 1

    def with_row(self, rank: int, row: Iterable[Op]) -> Program:
        """The same program with another row for one rank."""
        return replace(self, rows=(*self.rows[:rank], tuple(row), *self.rows[rank + 1 :]))

    def to_json(self) -> str:
        """The whole program; its operations as text, so that the file can be edited."""
        document = {
            "effects": FORMAT,
            "schedule": self.schedule,
            "placement": list(self.placement.ranks),
            "microbatches": self.microbatches,
            "window": self.window,
            "unordered": self.unordered,
            **({"coalesce_w": self.coalesce_w} if self.coalesce_w > 1 else {}),
            "ranks": [[str(op) for op in row] for row in self.rows],
        }
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The inverse of :meth:`to_json`.

        Raises:
            PlanError: not a program, or of a newer format; names rank and position of a line it cannot read.
        """
        try:
            document = json.loads(text)
            if document["effects"] != FORMAT:
                raise PlanError(f"a program of format {document['effects']}; this version reads format {FORMAT}")
            placement, microbatches = Placement(tuple(document["placement"])), document["microbatches"]
            window, lines = document["window"], document["ranks"]
            if not isinstance(microbatches, int) or microbatches < 1 or window not in ("step", "microbatch"):
                raise ValueError(f"microbatches {microbatches!r}, window {window!r}")
            if len(lines) != placement.num_ranks:
                raise ValueError(f"{len(lines)} ranks, the placement has {placement.num_ranks}")
            rows = tuple(tuple(_parsed(line, rank, place) for place, line in enumerate(row)) for rank, row in enumerate(lines))
            unordered = document.get("unordered", False) is True
            joined = document.get("coalesce_w", 1)
            if type(joined) is not int or not 1 <= joined <= microbatches:
                raise ValueError(f"coalesce_w {joined!r} with {microbatches} microbatches")
            return cls(str(document["schedule"]), placement, microbatches, window, rows, unordered, joined)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise PlanError(f"not a plan with its effects: {type(error).__name__}: {shown(str(error))}") from None


def _parsed(line: str, rank: int, position: int) -> Op:
    try:
        return parse_op(line)
    except ValueError as error:
        raise PlanError(str(error), rank=rank, position=position) from None
