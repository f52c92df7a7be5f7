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
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering

from qeffect_lm.errors import UsageError


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

_RANK_OF_KIND = {kind: place for place, kind in enumerate(Kind)}
_NUMBER = r"0|[1-9][0-9]*"  # one spelling per number, so that text and action correspond one to one
_CHUNK_ACTION = re.compile(
    rf"({_NUMBER})(SEND_F|RECV_F|SEND_B|RECV_B|COMMIT_F|COMMIT_I|F|I|W|B)({_NUMBER})", re.ASCII
)


@total_ordering
@dataclass(frozen=True, slots=True)
class Action:
    """One action of a plan.

    Args:
        kind: what is done.
        chunk: global stage number; None for ``REDUCE``, ``STEP`` and the step's ``COMMIT``.
        microbatch: 0 … m − 1; None exactly when ``chunk`` is.
        detail: for a ``COMMIT`` of one microbatch the direction that rolls, ``"F"`` or ``"I"``; else None.

    Raises:
        UsageError: the parts do not fit together (a chunkless ``F``, a ``STEP`` of a chunk, a negative
            number).
    """

    kind: Kind
    chunk: int | None = None
    microbatch: int | None = None
    detail: str | None = None

    def __post_init__(self) -> None:
        if type(self.kind) is not Kind:
            object.__setattr__(self, "kind", Kind(self.kind))
        if (self.chunk is None) != (self.microbatch is None):
            raise UsageError(f"{self.kind} needs chunk and microbatch, or neither")
        if self.chunk is None:
            if self.kind not in STEP_END and self.kind is not Kind.COMMIT:
                raise UsageError(f"{self.kind} needs a chunk and a microbatch")
        elif self.kind in STEP_END:
            raise UsageError(f"{self.kind} belongs to a rank, it takes no chunk")
        elif self.chunk < 0 or self.microbatch < 0:  # type: ignore[operator]
            raise UsageError(
                f"{self.kind} of chunk {self.chunk}, microbatch {self.microbatch}: numbers start at 0"
            )
        wanted = ("F", "I") if self.kind is Kind.COMMIT and self.chunk is not None else (None,)
        if self.detail not in wanted:
            raise UsageError(f"{self.kind} with detail {self.detail!r}; allowed here: {wanted}")

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
        name = f"{self.kind}_{self.detail}" if self.detail else str(self.kind)
        return f"{self.chunk}{name}{self.microbatch}"

    def __lt__(self, other: object) -> bool:
        """By chunk, microbatch, kind (F before I before W …); actions without a chunk come last."""
        if not isinstance(other, Action):
            return NotImplemented
        return self._order() < other._order()

    def _order(self) -> tuple[bool, int, int, int, str]:
        chunkless = self.chunk is None
        return chunkless, self.chunk or 0, self.microbatch or 0, _RANK_OF_KIND[self.kind], self.detail or ""


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
