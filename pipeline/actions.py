"""The words a pipeline plan is written in.

An action says what one rank does with one microbatch of one chunk. A *chunk* is a piece of the model, named
by its global stage number 0 … num_chunks − 1 (a rank may hold several); it is the chunk that acts, so
``2SEND_F0`` is chunk 2 sending its output of microbatch 0 to chunk 3, and ``3RECV_F0`` is chunk 3 receiving
it.

Text form: ``<chunk><kind><microbatch>``, as torch.distributed.pipelining writes it: ``2F0``, ``2I0``,
``2W0``, ``2SEND_F0``. The actions at a step's end belong to a rank, not to a chunk, and are written bare:
``REDUCE``, ``STEP``, ``COMMIT``. In window ``microbatch`` a commit belongs to one F or I of one microbatch:
``2COMMIT_F0``, ``2COMMIT_I0``. A CSV of a plan has one row per rank.
"""

from __future__ import annotations

import csv
import gc
import io
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering

from qeffect_lm.errors import UsageError
from qeffect_lm.units import whole_number


class Kind(StrEnum):
    """What an action does. ``B`` is ``I`` and ``W`` in one."""

    F = "F"
    I = "I"  # noqa: E741 - the field's name for the input gradient
    W = "W"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    COMMIT = "COMMIT"
    REDUCE = "REDUCE"
    STEP = "STEP"


COMPUTE = frozenset({Kind.F, Kind.I, Kind.W, Kind.B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
STEP_END = frozenset({Kind.REDUCE, Kind.STEP})  # never with a chunk; COMMIT comes with and without
_PLAIN = COMPUTE | SENDS | RECEIVES  # with a chunk and a microbatch, without a detail

_RANK_OF_KIND = {kind: place for place, kind in enumerate(Kind)}
_NUMBER = r"0|[1-9][0-9]{0,17}"  # one spelling per number, so that text and action correspond one to one
_CHUNK_ACTION = re.compile(
    rf"({_NUMBER})(SEND_F|RECV_F|SEND_B|RECV_B|COMMIT_F|COMMIT_I|F|I|W|B)({_NUMBER})", re.ASCII
)


@total_ordering
@dataclass(frozen=True, slots=True, init=False)
class Action:
    """One action of a plan.

    Args:
        kind: what is done.
        chunk: global stage number; None for ``REDUCE``, ``STEP`` and the step's ``COMMIT``.
        microbatch: 0 … m − 1; None exactly when ``chunk`` is.
        detail: for a ``COMMIT`` of one microbatch the direction that rolls, ``"F"`` or ``"I"``; else None.

    Raises:
        UsageError: the parts do not fit together (a chunkless ``F``, a ``STEP`` of a chunk, a negative
            number, something that is no whole number).
    """

    kind: Kind
    chunk: int | None
    microbatch: int | None
    detail: str | None

    def __init__(
        self, kind: Kind, chunk: int | None = None, microbatch: int | None = None, detail: str | None = None
    ) -> None:
        plain = type(kind) is Kind and kind in _PLAIN and detail is None and type(chunk) is type(microbatch) is int
        if not plain or chunk < 0 or microbatch < 0:  # type: ignore[operator]
            kind, chunk, microbatch = _checked(kind, chunk, microbatch, detail)
        _SET_KIND(self, kind)
        _SET_CHUNK(self, chunk)
        _SET_MICROBATCH(self, microbatch)
        _SET_DETAIL(self, detail)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if other.__class__ is not self.__class__:
            return NotImplemented
        assert isinstance(other, Action)
        return (
            self.microbatch == other.microbatch
            and self.kind is other.kind
            and self.chunk == other.chunk
            and self.detail == other.detail
        )

    @property
    def key(self) -> tuple[int, int]:
        """(chunk, microbatch) of an action that has them."""
        if self.chunk is None or self.microbatch is None:
            raise UsageError(f"{self} belongs to a rank, it has no (chunk, microbatch)")
        return self.chunk, self.microbatch

    @property
    def is_compute(self) -> bool:
        """True for F, I, W and B."""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        if self.chunk is None:
            return str(self.kind)
        if self.detail:
            return f"{self.chunk}{self.kind}_{self.detail}{self.microbatch}"
        return f"{self.chunk}{self.kind}{self.microbatch}"

    def __lt__(self, other: object) -> bool:
        """By chunk, microbatch, kind (F before I before W …); actions without a chunk come last."""
        if not isinstance(other, Action):
            return NotImplemented
        return self._order() < other._order()

    def _order(self) -> tuple[bool, int, int, int, str]:
        chunkless = self.chunk is None
        return chunkless, self.chunk or 0, self.microbatch or 0, _RANK_OF_KIND[self.kind], self.detail or ""


def _checked(
    kind: Kind, chunk: int | None, microbatch: int | None, detail: str | None
) -> tuple[Kind, int | None, int | None]:
    """The parts of an action, if they fit together."""
    if type(kind) is not Kind:
        kind = Kind(kind)
    if (chunk is None) != (microbatch is None):
        raise UsageError(f"{kind} needs chunk and microbatch, or neither")
    if chunk is None or microbatch is None:
        if kind not in STEP_END and kind is not Kind.COMMIT:
            raise UsageError(f"{kind} needs a chunk and a microbatch")
    elif kind in STEP_END:
        raise UsageError(f"{kind} belongs to a rank, it takes no chunk")
    else:
        chunk, microbatch = whole_number(f"the chunk of {kind}", chunk), whole_number(f"the microbatch of {kind}", microbatch)
        if chunk < 0 or microbatch < 0:
            raise UsageError(f"{kind} of chunk {chunk}, microbatch {microbatch}: numbers start at 0")
    wanted = ("F", "I") if kind is Kind.COMMIT and chunk is not None else (None,)
    if detail not in wanted:
        raise UsageError(f"{kind} with detail {detail!r}; allowed here: {wanted}")
    return kind, chunk, microbatch


# What a frozen dataclass's own __init__ does by name, four times for each of a large plan's million actions.
_SET_KIND, _SET_CHUNK = Action.__dict__["kind"].__set__, Action.__dict__["chunk"].__set__
_SET_MICROBATCH, _SET_DETAIL = Action.__dict__["microbatch"].__set__, Action.__dict__["detail"].__set__

place_of: Callable[[Action], tuple[int, int]] = operator.attrgetter("chunk", "microbatch")
""":attr:`Action.key` of an action that is known to have one; for loops over all actions of a plan."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """While a large plan is made: its million small objects are in no cycle, and Python's collector would look at them again
    and again, a quarter of the time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def parse_action(text: str) -> Action:
    """The action that ``str(action)`` wrote. Raises :class:`UsageError` on anything else."""
    word = text.strip()
    if word in ("REDUCE", "STEP", "COMMIT"):
        return Action(Kind(word))
    match = _CHUNK_ACTION.fullmatch(word)
    if match is None:
        raise UsageError(
            f"{text!r} is no action; write <chunk><kind><microbatch>, such as 2F0; or REDUCE, STEP, COMMIT"
        )
    chunk, name, microbatch = match.groups()
    if name.startswith("COMMIT_"):
        return Action(Kind.COMMIT, int(chunk), int(microbatch), name[-1])
    return Action(Kind(name), int(chunk), int(microbatch))


def format_actions(actions: Iterable[Action]) -> str:
    """One rank's actions as words separated by spaces."""
    return " ".join(map(str, actions))


def parse_actions(text: str) -> list[Action]:
    """The inverse of :func:`format_actions`."""
    return [parse_action(word) for word in text.split()]


def to_csv(plan: Sequence[Sequence[Action]]) -> str:
    """One row per rank, one cell per action."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([map(str, row) for row in plan])
    return out.getvalue()


def from_csv(text: str) -> list[list[Action]]:
    """The inverse of :func:`to_csv`; also reads compute-only files of torch.distributed.pipelining.

    Empty cells are idle time and are skipped. Raises :class:`UsageError` naming row and cell of a word it
    cannot read.
    """
    plan = []
    for rank, row in enumerate(csv.reader(io.StringIO(text))):
        actions = []
        for place, cell in enumerate(row):
            if not cell.strip():
                continue
            try:
                actions.append(parse_action(cell))
            except UsageError as error:
                raise UsageError(f"row {rank}, cell {place}: {error}") from None
        plan.append(actions)
    return plan
