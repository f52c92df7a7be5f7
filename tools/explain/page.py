"""The picture: one self-contained HTML page with streams as lanes, launches as boxes, edges as arrows, a conflict in red.

:func:`data` makes what the page shows; ``page.html`` draws it, with no network and no other file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qeffect_lm.contract.streams import HOST
from tools import pages
from tools.explain.history import Rank, Record, place_of
from tools.explain.story import commit_text, edge_text, lease_text
from tools.explain.violation import Explanation

STEPS_SHOWN = 6  # without a choice: the last ones, and the violation's
_HOST_ACTS = {
    "begin_step": "begin",
    "end_step": "end",
    "abandon_step": "abandon",
    "commit": "commit",
    "bump": "bump",
    "refresh": "refresh",
    "capture": "capture",
    "settle": "wait for all",
}
_LOOKS = {"F": "f", "I": "i", "W": "w", "B": "i"}

Found = tuple[Rank, Record, Explanation]


def write(path: Path, ranks: Sequence[Rank], found: Found | None, step: int | None) -> str:
    """Write the page; returns a line that says what it shows.

    Raises:
        UsageError: the file cannot be written.
    """
    shown = data(ranks, found, step)
    pages.write(path, pages.fill(Path(__file__).with_name("page.html"), shown))
    names = [one["name"] for one in shown["steps"]]
    span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    left = shown["left_out"]
    return f"{path}: {span}" + (f" ({left} other steps are left out: choose one with --step)" if left else "")


def data(ranks: Sequence[Rank], found: Found | None, step: int | None) -> dict[str, Any]:
    """Everything the page shows, as JSON values; without ``step`` the last steps and the violation's."""
    everything: list[int | None] = [*sorted({s for rank in ranks for s in rank.steps})]
    if any(record["step"] is None and record["effect"] in ("launch", "violation") for r in ranks for record in r.records):
        everything.insert(0, None)
    if step is not None:
        chosen: list[int | None] = [step]
    else:
        last = everything[-STEPS_SHOWN:]
        theirs = [found[1]["step"]] if found else []
        chosen = [s for s in everything if s in last or s in theirs] or [None]
    first = len(chosen) - 1
    if found and found[1]["step"] in chosen:
        first = chosen.index(found[1]["step"])
    return {
        "files": [str(rank.file) for rank in ranks],
        "steps": [_step(ranks, s, found) for s in chosen],
        "first": first,
        "left_out": max(0, len(everything) - len(chosen)) if step is None else 0,
        "violation": None if found is None else _words(found[2]),
        "violations": sum(len(rank.violations) for rank in ranks),
    }


def _words(told: Explanation) -> dict[str, Any]:
    names = ("title", "facts", "sound", "sound_title", "before")
    return {name: getattr(told, name) for name in names}


def _step(ranks: Sequence[Rank], step: int | None, found: Found | None) -> dict[str, Any]:
    name = "before the first step" if step is None else f"step {step}"
    return {"name": name, "ranks": [_Drawing(rank, step, found).result() for rank in ranks]}


class _Drawing:
    """One rank's step: boxes in host order, a column each."""

    def __init__(self, rank: Rank, step: int | None, found: Found | None) -> None:
        self.rank = rank
        self.told = found[2] if found is not None and found[0] is rank else None
        self.lanes: list[str] = [HOST]
        self.boxes: list[dict[str, Any]] = []
        self.arrows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._last: dict[str, int] = {}  # stream → its last box
        self._from: dict[tuple[str, int], int | None] = {}  # event → the box it was recorded after
        self._open: list[dict[str, Any]] = []  # arrows whose target stream has launched nothing yet
        self._cached: dict[str, int] = {}
        for record in rank.records:
            if record["effect"] == "refresh":
                self._cached.update(record["versions"])
            if record["step"] == step:
                self._add(record, found)

    def _lane(self, stream: str) -> int:
        if stream not in self.lanes:
            self.lanes.append(stream)
        return self.lanes.index(stream)

    def _add(self, record: Record, found: Found | None) -> None:
        effect = record["effect"]
        if effect == "launch":
            self._box(record, record["stream"], record["who"] or "launch", _look(record["who"]), _accesses(record))
        elif effect in ("action", "replay", "broken"):
            self._effects(record)
        elif effect == "record":
            self._from[record["stream"], record["tick"]] = self._last.get(record["stream"])
        elif effect == "wait":
            self._edge(record)
        elif effect == "violation":
            if self.told is not None and found is not None and record is found[1] and self.told.refused is None:
                self._box(record, HOST, record["class"].removesuffix("Error"), "host", [record["message"]], red=True)
        elif effect in _HOST_ACTS:
            self._box(record, HOST, _HOST_ACTS[effect], "host", [_host_text(record)])

    def _box(self, record: Record, stream: str, name: str, look: str, lines: list[str], red: bool = False) -> None:
        number = len(self.boxes)
        red = red or (self.told is not None and record["n"] in self.told.involved)
        time = record.get("t")
        head = f"#{record['n']} {name} on {stream}" + ("" if time is None else f", {time / 1000:.2f} ms")
        box = {"n": record["n"], "lane": self._lane(stream), "name": name, "look": look, "red": red, "lines": [head, *lines]}
        self.boxes.append(box)
        self._last[stream] = number
        for arrow in [arrow for arrow in self._open if arrow["stream"] == stream]:
            arrow["to"] = number
            self._open.remove(arrow)

    def _effects(self, record: Record) -> None:
        """What an action did, added to the box of its launch (or a box of its own: a ledger without streams)."""
        name = f"{record['chunk']}{record['kind']}{record['microbatch']}"
        lines = []
        if record["layers"]:
            lines.append(f"leases of {len(record['layers'])} layers: {lease_text(record)}")
        if record["roles"]:
            lines.append(f"scales of epoch {record['epoch']}: {len(record['roles'])} roles reported")
        if record["weights"]:
            versions = sorted({str(self._cached.get(weight, "unknown")) for weight in record["weights"]})
            lines.append(f"cached weights read: {len(record['weights'])}, version {', '.join(versions)}")
        if record["grads"]:
            lines.append(f"main gradients written: {len(record['grads'])}, beta {record['beta']}")
        if record.get("collectives"):
            lines.append(f"exchanges with tensor-parallel peers: {len(record['collectives'])}")
        if record.get("joined"):
            text = f"{len(record['joined'])}, beta {record['joint_beta']}"
            lines.append(f"main gradients written by one product of several microbatches: {text}")
        how = {"action": "eager", "replay": "replayed graph", "broken": "broke off"}[record["effect"]]
        box = next((box for box in reversed(self.boxes) if box["name"] == name and "how" not in box), None)
        if box is None:
            self._box(record, HOST, name, _look(name), [])
            box = self.boxes[-1]
        box["how"] = how
        box["lines"] += [*lines, how]

    def _edge(self, record: Record) -> None:
        source, target = record["source"], record["stream"]
        if source == target:
            return
        begin = self._from.get((source, record["tick"]))
        self._lane(source)
        event = self.rank.records[record["event"]] if "event" in record else None
        early = event is not None and event["buffers"] is not None
        lines = ([f"#{event['n']} {edge_text(event)}"] if event is not None else []) + [f"#{record['n']} {edge_text(record)}"]
        arrow: dict[str, Any] = {"from": begin, "lane": self._lane(source), "to": None, "end": self._lane(target)}
        # "at": where it ends if nothing follows on its stream.
        arrow |= {"early": early, "lines": lines, "stream": target, "at": len(self.boxes)}
        key = (source, target, begin, self._last.get(target))
        if key in self.arrows:
            self.arrows[key]["lines"] += lines
            return
        self.arrows[key] = arrow
        self._open.append(arrow)  # its target is filled in by the next launch

    def result(self) -> dict[str, Any]:
        missing = None
        if self.told is not None and self.told.missing is not None:
            source, early, target, late = self.told.missing
            numbers = {box["n"]: place for place, box in enumerate(self.boxes)}
            if late in numbers:
                what = f"missing: {target} does not wait for {source} here"
                missing = {"from": numbers.get(early), "lane": self._lane(source), "to": numbers[late], "lines": [what]}
        arrows = [{key: value for key, value in arrow.items() if key != "stream"} for arrow in self.arrows.values()]
        return {
            "label": self.rank.label,
            "lanes": self.lanes,
            "boxes": self.boxes,
            "arrows": arrows,
            "missing": missing,
        }


def _look(who: str) -> str:
    place = place_of(who)
    if place is None:
        return "end"
    return _LOOKS.get(place[1], "transfer" if place[1].startswith(("SEND", "RECV")) else "other")


def _accesses(record: Record) -> list[str]:
    lines = []
    for access in ("read", "write", "max_merge"):
        mine = ((buffer, span) for buffer, kind, *span in record["accesses"] if kind == access)
        names = [buffer + (f"[{span[0]}:{span[1]}]" if span else "") for buffer, span in mine]
        if names:
            lines.append(f"{access}: {', '.join(names)}")
    return lines


def _host_text(record: Record) -> str:
    effect = record["effect"]
    if effect == "commit":
        return commit_text(record)
    if effect in ("bump", "refresh"):
        versions = sorted(set(record["versions"].values()))
        which = ", ".join(map(str, versions))
        scales = f", with the scales of epoch {record['epoch']}" if effect == "refresh" else ""
        return f"{len(record['versions'])} weights, version {which}{scales}"
    if effect == "abandon_step":
        return record["error"] or "no reason given"
    return {"begin_step": "the step begins", "end_step": "no lease is left", "settle": "the host waits for every stream"}.get(
        effect, f"{record.get('graphs')} graphs captured, everything put back"
    )
