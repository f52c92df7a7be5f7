"""A graph-plan document's fingerprint, and where two documents differ first.

The document (:mod:`pipeline.fingerprint` writes it) has a line for everything that a re-capture must reproduce. ``graph NAME``
begins a graph; its ``effects``, ``node`` and ``operation`` lines follow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

PARTS = {"effects": 1, "node": 2, "operation": 3, "graph": 4}  # in the order in which a graph has them; the plan is 0
LAST = 5
LONGEST = 400  # characters of a line that an error quotes


def fingerprint(lines: Sequence[str]) -> str:
    """SHA-256 of a document, 64 hexadecimal digits; of a plan alone it is the plan's."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def first_difference(saved: Sequence[str], now: Sequence[str]) -> str | None:
    """In words where two documents differ first: the graph and its node; None where they are equal."""
    for place in range(max(len(saved), len(now))):
        a = saved[place] if place < len(saved) else None
        b = now[place] if place < len(now) else None
        if a != b:
            if _part(a) < _part(b):  # a line more on one side; the other goes on with something else
                b = None
            elif _part(b) < _part(a):
                a = None
            where = _where(saved if a is not None else now, place)
            return f"first in {where}: {_quoted(a)} was saved, {_quoted(b)} was captured"
    return None


def _part(line: str | None) -> int:
    return LAST if line is None else PARTS.get(line.split(" ", 1)[0], 0)


def _where(lines: Sequence[str], place: int) -> str:
    """``graph 0F i=0 w=0, node 17``: counted from 0 among the lines of its kind in its graph."""
    kind = lines[place].split(" ", 1)[0]
    if kind not in ("node", "operation", "effects"):
        return "the list of graphs" if kind == "graph" else "the plan"
    start = next(i for i in range(place, -1, -1) if lines[i].startswith("graph "))
    graph = lines[start]
    if kind == "effects":
        return f"{graph}, its effects"
    return f"{graph}, {kind} {sum(line.startswith(f'{kind} ') for line in lines[start:place])}"


def _quoted(line: str | None) -> str:
    if line is None:
        return "nothing"
    return repr(line if len(line) <= LONGEST else f"{line[:LONGEST]}…")
