"""What a trace says, put in order: one :class:`Rank` per file, and which launches its recorded edges order.

The order is found again from the records alone, by walking back over edges, not with the ledger's clocks: a path between two
launches is what ordered them, and where there is none, an edge is missing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from qeffect_lm.contract.streams import HOST, WHOLE
from qeffect_lm.contract.trace import read_trace
from qeffect_lm.errors import UsageError

Record = dict[str, Any]
ACTION = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d+)")  # chunk, kind, microbatch: 0F1, 1RECV_F3
_CONFLICTS = {"read": ("write", "max_merge"), "write": ("read", "write", "max_merge"), "max_merge": ("read", "write")}


class Touch(NamedTuple):
    """One access of a buffer by the launch with record number ``n``; bytes [lo, hi)."""

    n: int
    who: str
    stream: str
    access: str
    lo: int
    hi: int

    def conflicts(self, other: Touch) -> bool:
        return other.access in _CONFLICTS[self.access] and self.lo < other.hi and other.lo < self.hi


@dataclass
class Rank:
    """One rank's run: records with ``step`` (the last one begun, None before the first) and ``inside`` (whether it had not
    ended) added. ``label`` is empty where there is one rank only."""

    label: str
    file: Path
    about: dict[str, Any]
    records: list[Record]
    bytes: dict[str, int]
    runs: int = 1
    touches: dict[str, list[Touch]] = field(default_factory=lambda: defaultdict(list))
    edges: dict[int, list[tuple[int, frozenset[str] | None]]] = field(default_factory=dict)  # record → (earlier, buffers)

    def __post_init__(self) -> None:
        step: int | None = None
        inside = False
        last: dict[str, int] = {}  # stream → its last record
        events: dict[tuple[str, int], int] = {}
        for record in self.records:
            n, effect = record["n"], record["effect"]
            step = record["step"] if effect == "begin_step" else step
            inside = effect == "begin_step" or (inside and effect not in ("end_step", "abandon_step"))
            record["step"], record["inside"] = step, inside
            if effect in ("settle", "capture"):
                self.edges[n] = [(before, None) for before in last.values()]
                last = {stream: n for stream in [*last, HOST]}
            elif effect in ("launch", "record", "wait"):
                stream = record["stream"]
                after = [stream, HOST] if effect == "launch" else [stream]
                self.edges[n] = [(last[name], None) for name in dict.fromkeys(after) if name in last]
                if effect == "record":
                    events[stream, record["tick"]] = n
                elif effect == "wait" and (record["source"], record["tick"]) in events:
                    record["event"] = event = events[record["source"], record["tick"]]
                    covers = self.records[event]["buffers"]
                    self.edges[n].append((event, None if covers is None else frozenset(covers)))
                last[stream] = n
                for buffer, access, *span in record.get("accesses", ()):
                    lo, hi = span or (0, WHOLE)
                    self.touches[buffer].append(Touch(n, record["who"], stream, access, lo, hi))

    @property
    def steps(self) -> list[int]:
        return sorted({record["step"] for record in self.records if record["effect"] == "begin_step"})

    @cached_property
    def violations(self) -> list[Record]:
        return self.of("violation")

    def of(self, *effects: str) -> list[Record]:
        return [record for record in self.records if record["effect"] in effects]

    def before(self, n: int, *effects: str) -> Iterator[Record]:
        """The records before ``n``, newest first."""
        return (record for record in reversed(self.records[:n]) if record["effect"] in effects)

    def path(self, earlier: int, later: int, buffer: str) -> list[int] | None:
        """What orders launch ``later`` after launch ``earlier`` for ``buffer``: the waits and settlings on the way, oldest
        first; None if nothing does."""
        came: dict[int, int] = {later: -1}
        queue = [later]
        for n in queue:
            if n == earlier:
                way = []
                while n != -1:
                    way.append(n)
                    n = came[n]
                pairs = zip(way, [None, *way], strict=False)  # with what came before: a wait counts where its event did
                return [n for n, before in pairs if self._crosses(n, before)]
            for before, covers in self.edges.get(n, ()):
                if before >= earlier and before not in came and (covers is None or buffer in covers):
                    came[before] = n
                    queue.append(before)
        return None

    def _crosses(self, n: int, before: int | None) -> bool:
        record = self.records[n]
        return record["effect"] in ("settle", "capture") or (record["effect"] == "wait" and record.get("event") == before)

    def site(self, n: int, site: Record | None) -> Touch | None:
        """The access that a violation with number ``n`` names: the newest one before it that fits."""
        if site is None:
            return None
        lo, hi = site.get("lo", 0), site.get("hi", WHOLE)
        wanted = (site["who"], site["stream"], site["access"])
        for touch in reversed(self.touches[site["buffer"]]):
            if touch.n < n and (touch.who, touch.stream, touch.access) == wanted and touch.lo < hi and lo < touch.hi:
                return touch
        return None

    def when(self, record: Record) -> str:
        """Where a record stands: ``#12 in step 3, 4.1 ms after its begin``."""
        if record["step"] is None:
            return f"#{record['n']} before the first step"
        if not record["inside"]:
            return f"#{record['n']} after step {record['step']}"
        time = f", {record['t'] / 1000:.1f} ms after its begin" if "t" in record else ""
        return f"#{record['n']} in step {record['step']}{time}"


def load(paths: Sequence[Path], number: int | None) -> tuple[list[Rank], list[str]]:
    """The chosen run (None: the last) of every file, in the order of their ranks, and remarks about the files.

    Raises:
        UsageError: a file that is no trace, a run that is not there, a file given twice.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError("a trace is given twice")
    ranks, remarks = [], []
    for path in paths:
        runs, said = read_trace(path)
        remarks += said
        if number is not None and not 1 <= number <= len(runs):
            raise UsageError(f"--run {number}: {path} holds runs 1 to {len(runs)}")
        run = runs[-1 if number is None else number - 1]
        if not run.records:
            raise UsageError(f"{path} holds a header and nothing else: the run wrote no effect")
        ranks.append(Rank("", path, run.about, run.records, run.bytes, len(runs)))
    numbers = [rank.about.get("rank") for rank in ranks]
    if len(ranks) > 1:
        known = None not in numbers and len(set(numbers)) == len(numbers)
        for rank in ranks:
            rank.label = f"rank {rank.about['rank']}" if known else rank.file.stem
        if known:
            ranks.sort(key=lambda rank: int(rank.about["rank"]))
    return ranks, remarks


def place_of(who: str) -> tuple[int, str, int] | None:
    """(chunk, kind, microbatch) of an action's name, None for others (``REDUCE``)."""
    match = ACTION.fullmatch(who)
    return (int(match[1]), match[2], int(match[3])) if match else None
