"""The lines of a timeline: every record of a rank told in words, and the ones that concern one thing chosen."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tools.explain.history import Rank, Record, Touch, place_of

KINDS = ("lease", "weight", "scale", "grad", "stream", "step", "violation")


@dataclass(frozen=True)
class Entry:
    """One effect on one thing. ``subject`` is a layer, weight or role; ``action`` is ``0F1`` or empty."""

    number: int
    step: int | None
    kind: str
    text: str
    action: str = ""
    subject: str = ""
    microbatch: int | None = None
    rank: str = ""

    def concerns(self, layer: str) -> bool:
        """True for the layer itself, its weight and roles, and for everything below a prefix such as ``layers.0``."""
        return self.subject == layer or self.subject.startswith(f"{layer}.")

    @property
    def whole_step(self) -> bool:
        return not self.action and not self.subject


def entries(rank: Rank) -> list[Entry]:
    """Everything that happened on a rank, in its order."""
    cached: dict[str, int] = {}
    told: list[Entry] = []
    for record in rank.records:
        if record["effect"] == "refresh":
            cached.update(record["versions"])
        told += [replace(entry, rank=rank.label) for entry in _entries(record, cached)]
    return told


def _entries(record: Record, cached: dict[str, int]) -> Iterator[Entry]:
    effect, number, step = record["effect"], record["n"], record["step"]
    if effect == "launch":
        place = place_of(record["who"])
        yield Entry(number, step, "stream", launch_text(record), record["who"], microbatch=place[2] if place else None)
    elif effect in ("action", "replay", "broken"):
        yield from _act_entries(record, cached)
    elif effect == "commit":
        text = commit_text(record)
        yield Entry(number, step, "scale", text)
        yield Entry(number, step, "step", text)
    elif effect in ("refresh", "bump"):
        versions = record["versions"]
        for weight, version in versions.items():
            yield Entry(number, step, "weight", _weight_text(record, version), subject=weight)
        if effect == "refresh":
            text = f"refresh: {len(versions)} weights cached with the scales of epoch {record['epoch']}"
        else:
            text = f"bump: {len(versions)} parameters written"
        yield Entry(number, step, "step", text)
    elif effect == "empty":
        yield Entry(number, step, "grad", "no work (EMPTY)", subject=record["name"])
    elif effect in ("record", "wait", "settle"):
        yield Entry(number, step, "stream", edge_text(record))
    elif effect == "violation":
        yield Entry(number, step, "violation", f"{record['class']}: {record['message']}", record["doing"] or "")
    else:
        texts = {
            "begin_step": "begins",
            "end_step": "ends: no lease is left",
            "abandon_step": f"abandoned: {record.get('error') or 'no reason given'}",
            "capture": f"{record.get('graphs')} graphs captured, everything put back",
        }
        yield Entry(number, step, "step", texts[effect])


EXCHANGES = {"gather": "gathered", "scatter": "summed, each rank keeps its tokens,", "sum": "summed"}


def _act_entries(record: Record, cached: dict[str, int]) -> Iterator[Entry]:
    """The effects of an action, eager or a graph's."""
    number, step, kind, epoch = record["n"], record["step"], record["kind"], record["epoch"]
    how = {"replay": " (graph)", "broken": " (broke off)"}.get(record["effect"], "")
    action = f"{record['chunk']}{kind}{record['microbatch']}"

    def entry(what: str, text: str, subject: str) -> Entry:
        return Entry(number, step, what, text + how, action, subject, record["microbatch"])

    for role in record["roles"]:
        amax = "has no amax to report (EMPTY)" if role in record["empty"] else "reports its amax"
        yield entry("scale", f"reads the scale of epoch {epoch} and {amax}", role)
    for weight in record["weights"]:
        yield entry("weight", f"read, version {cached.get(weight, 'unknown')}", weight)
    for layer in record["layers"]:
        yield entry("lease", lease_text(record), layer)
    for names, beta in ((record["grads"], record["beta"]), (record.get("joined", ()), record.get("joint_beta"))):
        for name in names:
            yield entry("grad", f"main gradient {'overwritten (beta 0)' if beta == 0 else 'added to (beta 1)'}", name)
    for exchange in record.get("collectives", ()):
        layer, _, what = exchange.rpartition(".")
        yield entry("collective", f"{EXCHANGES.get(what, what)} over tensor-parallel peers", layer)
    for name in record.get("idle", ()):
        yield entry("grad", "left to the W of a later microbatch, which multiplies these operands with its own", name)


def lease_text(record: Record) -> str:
    """What an action does to the lease of each of its layers."""
    slot = f"slot {record['w_slot']}, generation {record['w_generation']}"
    texts = {"F": f"forwarded: retained in {slot}", "I": "input gradient done", "W": f"free: consumed from {slot}"}
    return texts[record["kind"]]


def launch_text(record: Record, most: int | None = None) -> str:
    """What a launch touches; ``most`` names at most so many accesses."""
    touched = [f"{access} {buffer}{_span(span)}" for buffer, access, *span in record["accesses"]]
    if most is not None and len(touched) > most:
        touched[most:] = [f"… {len(touched) - most} more"]
    return f"on {record['stream']}: {', '.join(touched) or 'nothing declared'}"


def _span(span: Sequence[int]) -> str:
    return f"[{span[0]}:{span[1]}]" if span else ""


def commit_text(record: Record) -> str:
    which, epoch = record["directions"], record["epoch"]
    both = "" if len(which) == 2 else f"{which[0]} "
    return f"{record['by']} closes {both}epoch {epoch}: scales of epoch {epoch + 1} from here on"


def edge_text(record: Record) -> str:
    """An event, a wait or a settling in words."""
    if record["effect"] == "settle":
        return "the host has waited for every stream"
    if record["effect"] == "record":
        early = "" if record["buffers"] is None else f", early, for {', '.join(record['buffers'])} only"
        return f"on {record['stream']}: event {record['stream']}@{record['tick']} is recorded{early}"
    return f"on {record['stream']}: waits for event {record['source']}@{record['tick']}"


def _weight_text(record: Record, version: int) -> str:
    if record["effect"] == "bump":
        return f"written: version {version} from here on"
    return f"cached at version {version} with the scale of epoch {record['epoch']}"


# ---- one resource ------------------------------------------------------------------------------------------


def lease(rank: Rank, chunk: int, microbatch: int, layer: str | None) -> Iterator[Entry]:
    """All work on one (chunk, microbatch): launches, lease moves, transfers."""
    for record in rank.records:
        if record["effect"] in ("action", "replay", "broken"):
            if (record["chunk"], record["microbatch"]) != (chunk, microbatch):
                continue
            layers = [name for name in record["layers"] if layer in (None, name) or name.startswith(f"{layer}.")]
            if not layers:
                continue
            what = layers[0] if len(layers) == 1 else f"{len(layers)} layers"
            how = {"broken": " (the action broke off)", "replay": " (graph)"}.get(record["effect"], "")
            yield _entry(rank, record, "lease", f"{what} {lease_text(record)}{how}")
        elif record["effect"] == "launch":
            place = place_of(record["who"])
            if layer is None and place and (place[0], place[2]) == (chunk, microbatch):
                yield _entry(rank, record, "stream", launch_text(record))
        elif record["effect"] == "violation":
            where = record["place"]
            if (where.get("chunk"), where.get("microbatch")) == (chunk, microbatch):
                yield _violation(rank, record)


def slot(rank: Rank, name: str) -> Iterator[Entry]:
    """Who held one slot, and in which generation."""
    for record in rank.records:
        if record["effect"] not in ("action", "replay", "broken"):
            continue
        for place, mine in (("i_slot", "I"), ("w_slot", "W")):
            if record[place] != name:
                continue
            generation = record[f"{place[0]}_generation"]
            last = record["kind"] == mine
            text = {True: "read for the last time and free", False: "read"}[last] if record["kind"] != "F" else "taken"
            if record["kind"] == "I" and mine == "W":
                text = "written (output gradients)"
            yield _entry(rank, record, "lease", f"{name} {text}, generation {generation}")


def stream(rank: Rank, name: str) -> Iterator[Entry]:
    """Everything launched on, recorded on, or waited for by one stream."""
    for record in rank.records:
        if record["effect"] == "settle" or (record["effect"] in ("launch", "record", "wait") and record["stream"] == name):
            text = launch_text(record) if record["effect"] == "launch" else edge_text(record)
            yield _entry(rank, record, "stream", text.removeprefix(f"on {name}: "))
        elif record["effect"] == "violation" and name in (record["place"].get("stream"), record["place"].get("other_stream")):
            yield _violation(rank, record)


def buffer(rank: Rank, name: str) -> Iterator[Entry]:
    """Every access of one buffer, with what ordered it after the last conflicting one on another stream."""
    earlier: list[Touch] = []
    refused = {record["n"] - 1: record for record in rank.violations}
    for touch in rank.touches.get(name, ()):
        record = rank.records[touch.n]
        span = _span([touch.lo, touch.hi]) if touch.lo or touch.hi < 1 << 62 else ""
        text = f"{touch.access}{span} on {touch.stream}{ordered_text(rank, earlier, touch, name)}"
        yield _entry(rank, record, "stream", text)
        if touch.n in refused and (refused[touch.n]["later"] or {}).get("buffer") == name:
            yield _violation(rank, refused[touch.n])
        earlier.append(touch)


def ordered_text(rank: Rank, earlier: Sequence[Touch], touch: Touch, name: str) -> str:
    """``, after 0W3 by event …`` where the last conflicting access was on another stream."""
    for past in reversed(earlier):
        if past.conflicts(touch):
            if past.stream == touch.stream:
                return ""
            path = rank.path(past.n, touch.n, name)
            if path is None:
                return f", and nothing orders it after {past.who} (#{past.n}, {past.access} on {past.stream})"
            return f", after {past.who} (#{past.n} on {past.stream}) by {path_text(rank, path)}"
    return ""


def path_text(rank: Rank, path: Sequence[int]) -> str:
    """The edges of a path in words."""
    parts = []
    for n in path:
        record = rank.records[n]
        if record["effect"] == "wait":
            event = f"event {record['source']}@{record['tick']} (recorded #{record['event']}"
            parts.append(f"{event}, waited for #{n} by {record['stream']})")
        else:
            parts.append(f"a wait of the host for every stream (#{n})")
    return ", then ".join(parts) or "the host's order"


def _entry(rank: Rank, record: Record, kind: str, text: str) -> Entry:
    who = record["who"] if record["effect"] == "launch" else ""
    if record["effect"] in ("action", "replay", "broken"):
        who = f"{record['chunk']}{record['kind']}{record['microbatch']}"
    place = place_of(who)
    return Entry(record["n"], record["step"], kind, text, who, "", place[2] if place else None, rank.label)


def _violation(rank: Rank, record: Record) -> Entry:
    place, text = record["place"], f"{record['class']}: {record['message']}"
    return Entry(record["n"], record["step"], "violation", text, record["doing"] or "", "", place.get("microbatch"), rank.label)


# ---- choosing and telling ----------------------------------------------------------------------------------


def select(
    all_of_them: Iterable[Entry], step: int | None, microbatch: int | None, layer: str | None, kind: str | None
) -> list[Entry]:
    """The entries that fit, with what happened to the whole step in between (commits, the end); none if nothing else fits."""
    chosen, found = [], False
    for entry in all_of_them:
        if step is not None and entry.step != step:
            continue
        if kind is not None and entry.kind != kind:
            continue
        if entry.whole_step and kind is None and entry.kind not in ("step", "violation"):
            continue  # a commit is told once, not as the scale's and the step's
        told_anyway = entry.whole_step or (entry.kind == "violation" and kind is None)
        if microbatch is not None and entry.microbatch != microbatch and (entry.action or layer is None) and not told_anyway:
            continue
        if layer is not None and not entry.concerns(layer) and not told_anyway:
            continue
        found = found or not told_anyway or (layer is None and microbatch is None)
        chosen.append(entry)
    return chosen if found else []


def tell(told: Iterable[Entry], *, detailed: bool) -> str:
    """The entries as text under a heading per step (ranks one after the other): a line each, or a line per action."""
    lines: list[str] = []
    ordered = sorted(told, key=lambda e: -1 if e.step is None else e.step)  # stable: ranks stay together
    for (step, rank), of_step in groupby(ordered, key=lambda entry: (entry.step, entry.rank)):
        heading = "before the first step" if step is None else f"step {step}"
        lines.append(f"{heading}, {rank}" if rank else heading)
        if detailed:
            lines += [_line(entry) for entry in of_step]
            continue
        for action, together in groupby(of_step, key=lambda entry: entry.action):
            group = list(together)
            if action and not any(entry.kind == "violation" for entry in group):
                lines.append(f"  {group[0].number:>7}  {action:<10} {_in_short(group)}")
            else:
                lines += [_line(entry) for entry in group if entry.action or entry.whole_step]
    return "\n".join(lines)


def _line(entry: Entry) -> str:
    subject = f"{entry.subject} " if entry.subject else ""
    return f"  {entry.number:>7}  {entry.action:<10} {entry.kind:<7} {subject}{entry.text}".rstrip()


def _in_short(group: Sequence[Entry]) -> str:
    """One action in a line: how many of what, and the slot."""
    counts = Counter(entry.kind for entry in group)
    parts = [f"on {text}" for text in dict.fromkeys(e.text.partition(":")[0][3:] for e in group if e.kind == "stream")]
    parts += [f"{counts[kind]} {kind} effects" for kind in KINDS if counts[kind] and kind != "stream"]
    slots = dict.fromkeys(re.findall(r"slot \S+, generation \d+", " ".join(e.text for e in group)))
    return "; ".join([*parts, *slots])
