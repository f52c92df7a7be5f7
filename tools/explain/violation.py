"""A violation in words: what was needed, what was found, since when, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from qeffect_lm.contract.streams import HOST
from qeffect_lm.contract.trace import buffer_name
from tools.explain.history import Rank, Record, Touch
from tools.explain.story import commit_text, launch_text, path_text

_PAST = {"read": "read", "write": "wrote", "max_merge": "max-merged into"}
_NOW = {"read": "reads", "write": "writes", "max_merge": "max-merges into"}
_ACTIONS = ("action", "replay", "broken")
_NEEDS = {
    "NotForwardedError": "forwarded (by F)",
    "WeightGradBeforeInputGradError": "input_grad_done (by I)",
    "WeightGradTwiceError": "input_grad_done, its W not yet run",
    "InputGradTwiceError": "forwarded, its I not yet run",
    "LeaseLeakError": "free (by W) at this point",
}
SOUND_PAIRS = 3  # how many orderings that were right are told for comparison
LEADING_UP = 5


@dataclass
class Explanation:
    """A violation told: ``facts`` are (label, words). For the picture: records in conflict, and the edge that is missing
    (stream, record) → (stream, record)."""

    title: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    sound: list[str] = field(default_factory=list)
    sound_title: str = "what did order such accesses before"
    before: list[str] = field(default_factory=list)
    involved: list[int] = field(default_factory=list)
    refused: int | None = None  # the launch that was refused, if it was one
    missing: tuple[str, int, str, int] | None = None

    def text(self) -> str:
        width = max(len(label) for label, _ in self.facts)
        lines = [self.title, *(f"  {label:{width}}  {words}" for label, words in self.facts)]
        if self.sound:
            lines += [f"  {self.sound_title}:", *(f"    {line}" for line in self.sound)]
        if self.before:
            lines += ["  what led up to it:", *(f"    {line}" for line in self.before)]
        return "\n".join(lines)


def explain(rank: Rank, record: Record, number: int, total: int) -> Explanation:
    """Explain violation ``number`` of ``total``."""
    told = Explanation(f"violation {number} of {total}: {record['class']}{f', {rank.label}' if rank.label else ''}")
    told.facts.append(("what", record["message"]))
    doing = f", during {record['doing']}" if record["doing"] else ""
    told.facts.append(("where", f"{rank.when(record)}{doing}; {_place(record['place'])}"))
    for name, tell in _KINDS.items():
        if record["class"] in name:
            tell(rank, record, told)
    if told.refused is None:
        told.refused = _doing(rank, record)
    told.involved += [told.refused] if told.refused is not None else []
    told.before = list(_leading_up(rank, record))
    return told


def _place(place: dict[str, Any]) -> str:
    told = ((key, value) for key, value in place.items() if not key.endswith("_tick"))  # "found" says it in words
    values = {key: buffer_name(tuple(value)) if isinstance(value, list) else value for key, value in told}
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "no place given"


def _doing(rank: Rank, record: Record) -> int | None:
    """The launch of the action under way."""
    last = next(rank.before(record["n"], "launch"), None)
    return last["n"] if last is not None and record["doing"] and last["who"] == record["doing"] else None


def _leading_up(rank: Rank, record: Record) -> Iterator[str]:
    launches = [r for r, _ in zip(rank.before(record["n"], "launch"), range(LEADING_UP), strict=False)]
    for launch in reversed(launches):
        yield f"#{launch['n']} {launch['who']} {launch_text(launch, most=4)}"


# ---- streams -----------------------------------------------------------------------------------------------


def _stream(rank: Rank, record: Record, told: Explanation) -> None:
    if record["earlier"] is None or record["later"] is None:
        return
    n, early, late = record["n"], record["earlier"], record["later"]
    source, target, name = early["stream"], late["stream"], late["buffer"]
    first = rank.site(n, early)
    last = rank.records[n - 1] if n and rank.records[n - 1].get("who") == late["who"] else None
    told.facts += [
        ("first", f"{_who(early)} {_PAST[early['access']]} {name} on stream {source}, {_at(rank, first)}"),
        ("then", f"{_who(late)} {_NOW[late['access']]} it on stream {target}, {'now' if last is None else rank.when(last)}"),
        (
            "missing",
            f"an edge from {source} to {target}: an event recorded on {source} after {_who(early)}, "
            f"which {target} waits for before {_who(late)}",
        ),
    ]
    upper = n if last is None else last["n"]
    told.refused = None if last is None else last["n"]
    if first is not None:
        told.facts.append(("found", _edges_found(rank, first, upper, target, name)))
        told.involved = [first.n]
        told.missing = (source, first.n, target, upper)
    told.facts.append(("remedy", _remedy(source, target, _who(early), _who(late))))
    told.sound = _sound_pairs(rank, name, upper, (source, target))


def _who(site: Record) -> str:
    return site["who"] or f"an unnamed {site['access']}"


def _at(rank: Rank, touch: Touch | None) -> str:
    return "before this trace or outside its launches" if touch is None else rank.when(rank.records[touch.n])


def _edges_found(rank: Rank, first: Touch, upper: int, target: str, buffer: str) -> str:
    """Which edges from the first access's stream there are instead of the missing one."""
    source = first.stream
    waits = [r for r in rank.before(upper, "wait") if r["stream"] == target and r["source"] == source and "event" in r]
    after = [r for r in rank.before(upper, "record") if r["stream"] == source and r["n"] > first.n]
    parts = []
    if waits:
        event = rank.records[waits[0]["event"]]
        early = event["buffers"] is not None and buffer not in event["buffers"]
        why = "after it" if event["n"] > first.n else "before it"
        why = f"early, for {', '.join(event['buffers'])} only" if early else why
        parts.append(f"{target} last waited for {source} at #{waits[0]['n']}, for an event recorded at #{event['n']}, {why}")
    else:
        parts.append(f"{target} never waited for {source}")
    if after:
        numbers = ", ".join(f"#{r['n']}" for r in sorted(after, key=lambda r: r["n"])[:4])
        parts.append(
            f"events were recorded on {source} after {first.who} at {numbers}, but none that vouches for {buffer} "
            f"reaches {target}"
        )
    else:
        parts.append(f"no event was recorded on {source} after {first.who}")
    return "; ".join(parts)


def _remedy(source: str, target: str, first: str, then: str) -> str:
    if source == HOST:
        return f"launch {then} after the host has done {first}, or let the host record an event and {target} wait for it"
    wait = "ledger.synchronize(event)" if target == HOST else f"ledger.wait({target!r}, event)"
    return f"event = ledger.record({source!r}) after {first} is launched, and {wait} before {then}, each with the real one"


def _sound_pairs(rank: Rank, buffer: str, upper: int, streams: tuple[str, str]) -> list[str]:
    """The last pairs of conflicting accesses that were ordered, those between the same two streams first."""
    touches = [touch for touch in rank.touches.get(buffer, ()) if touch.n < upper]
    pairs: list[tuple[Touch, Touch]] = []
    for place, touch in enumerate(touches):
        past = next((other for other in reversed(touches[:place]) if other.conflicts(touch)), None)
        if past is not None and past.stream != touch.stream:
            pairs.append((past, touch))
    pairs.sort(key=lambda pair: ((pair[0].stream, pair[1].stream) == streams, pair[1].n), reverse=True)
    told = []
    for past, touch in pairs[:SOUND_PAIRS]:
        path = rank.path(past.n, touch.n, buffer)
        if path is not None:
            told.append(
                f"step {rank.records[touch.n]['step']}: {past.who} (#{past.n}, {past.access} on {past.stream}) before "
                f"{touch.who} (#{touch.n}, {touch.access} on {touch.stream}) by {path_text(rank, path)}"
            )
    return told


# ---- versions, epochs, leases, gradients -------------------------------------------------------------------


def _weight(rank: Rank, record: Record, told: Explanation) -> None:
    place, n = record["place"], record["n"]
    name = place.get("layer", "")
    refresh = next((r for r in rank.before(n, "refresh") if name in r["versions"]), None)
    bump = next((r for r in rank.before(n, "bump") if name in r["versions"]), None)
    if "epoch" in place:
        told.facts.append(("needed", f"{name} quantised with the scales of epoch {place['epoch']}"))
        told.facts.append(("found", f"a cache made with the scales of epoch {place['cached_epoch']}"))
        told.facts.append(("since", _since_epoch(rank, n, place["epoch"])))
    else:
        if "parameter_version" in place:
            told.facts.append(("needed", f"{name} at version {place['parameter_version']}"))
            told.facts.append(("found", f"a cache of version {place['cached_version']}"))
        if bump is not None:
            since = f"version {bump['versions'][name]} since the bump {rank.when(bump)}{_after(rank, bump)}"
            told.facts.append(("since", since))
    made = "never in this trace" if refresh is None else f"{rank.when(refresh)}, from version {refresh['versions'][name]}"
    told.facts.append(("last cast", made))
    told.facts.append(("remedy", "refresh the caches after the last bump and commit, and tell it by ledger.refreshed(...)"))
    told.involved = [r["n"] for r in (refresh, bump) if r is not None]


def _after(rank: Rank, record: Record) -> str:
    launch = next(rank.before(record["n"], "launch"), None)
    return "" if launch is None else f" (after {launch['who']}, #{launch['n']})"


def _since_epoch(rank: Rank, n: int, epoch: int) -> str:
    commit = next((r for r in rank.before(n, "commit") if r["epoch"] == epoch - 1), None)
    if commit is None:
        return f"no commit in this trace made epoch {epoch}"
    return f"epoch {epoch} since {commit['by']}, {rank.when(commit)}"


def _scale(rank: Rank, record: Record, told: Explanation) -> None:
    place, n = record["place"], record["n"]
    commits = [r for r, _ in zip(rank.before(n, "commit"), range(SOUND_PAIRS), strict=False)]
    if "current_epoch" in place:
        told.facts.append(("needed", f"epoch {place['epoch']}" + (f" of role {place['role']}" if "role" in place else "")))
        told.facts.append(("found", f"epoch {place['current_epoch']} is the current one"))
        told.facts.append(("since", _since_epoch(rank, n, place["current_epoch"])))
    elif commits:
        told.facts.append(("since", f"the last commit was {commits[0]['by']}, {rank.when(commits[0])}"))
    told.facts.append(("remedy", "exactly one commit per window, after all its readers and before any of the next window's"))
    told.sound_title = "the last commits"
    told.sound = [f"{rank.when(r)}: {commit_text(r)}" for r in commits]
    told.involved = [r["n"] for r in commits[:1]]


def _lease(rank: Rank, record: Record, told: Explanation) -> None:
    place, n = record["place"], record["n"]
    key = (place.get("chunk"), place.get("microbatch"))
    step = place.get("step", record["step"])
    if record["class"] in _NEEDS:
        told.facts.append(("needed", f"the lease of chunk {key[0]}, microbatch {key[1]} to be {_NEEDS[record['class']]}"))
    holder = place.get("holder")
    if holder is not None:
        key, step = (holder[1], holder[2]), holder[0]
        told.facts.append(("needed", f"the slot free, at generation {place['generation']}"))
    if "slot_generation" in place:
        told.facts.append(("needed", f"the slot at generation {place['generation']}, as when its handle was made"))
        told.facts.append(("found", f"generation {place['slot_generation']}"))
    moves = [r for r in rank.before(n, *_ACTIONS) if (r["chunk"], r["microbatch"]) == key and r["step"] == step]
    whole = [r for r in moves if r["effect"] != "broken"]
    if whole:
        state = {"F": "forwarded", "I": "input_grad_done", "W": "free"}[whole[0]["kind"]]
        slots = ", ".join(f"{r} generation {g}" for r, g in _slots(whole[0]))
        text = f"chunk {key[0]}, microbatch {key[1]} {state} since {_name(whole[0])}, {rank.when(whole[0])} ({slots})"
    else:
        text = f"no F, I or W of chunk {key[0]}, microbatch {key[1]} in this step"
    told.facts.append(("found", text))
    told.facts.append(("remedy", "F, I, W, once each per chunk and microbatch; a slot is taken again only after that"))
    others = [r for r in moves if r not in whole[:1]]
    told.sound_title = "what else happened to it in this step"
    told.sound = [f"{rank.when(r)}: {_name(r)}{' broke off' if r['effect'] == 'broken' else ''}" for r in others]
    told.involved = [_launch_of(rank, r) for r in whole[:1]]


def _slots(record: Record) -> list[tuple[str, int]]:
    both = ((record["i_slot"], record["i_generation"]), (record["w_slot"], record["w_generation"]))
    return [(slot, generation) for slot, generation in both if slot is not None]


def _name(record: Record) -> str:
    return f"{record['chunk']}{record['kind']}{record['microbatch']}"


def _launch_of(rank: Rank, action: Record) -> int:
    """The launch that an action's effects belong to, or the action itself (a ledger without streams)."""
    launch = next((r for r in rank.before(action["n"], "launch") if r["who"] == _name(action)), None)
    return action["n"] if launch is None or launch["step"] != action["step"] else launch["n"]


def _grad(rank: Rank, record: Record, told: Explanation) -> None:
    place, n = record["place"], record["n"]
    name = place.get("layer", "")
    acts = [r for r in rank.before(n, *_ACTIONS) if r["step"] == record["step"]]
    writers = [r for r in acts if name in [*r["grads"], *r.get("joined", ())]]
    others = writers[:1]
    remedy = "the step's first writer overwrites (beta 0), later ones add (beta 1), one per microbatch"
    if "expected" in place:
        others = _without_weight_grad(rank, record)
        missing = ", ".join(f"{_name(r)} (#{r['n']})" for r in others) or "none: every F of the step had its W"
        told.facts.append(("needed", f"{place['expected']} contributions to {name} in this step, one per microbatch"))
        told.facts.append(("without W", missing))
        remedy = "run I and W of every microbatch once, each with its write_grad, before the optimizer"
    elif "beta" in place:
        needed = int(place["writers"] > 0)
        told.facts.append(("needed", f"beta {needed} after {place['writers']} writers of {name} in this step"))
        told.facts.append(("found", f"beta {place['beta']}"))
    betas = [r["beta"] if name in r["grads"] else r["joint_beta"] for r in writers]
    names = [f"{_name(r)} (#{r['n']}, beta {beta})" for r, beta in zip(reversed(writers), reversed(betas), strict=True)]
    told.facts.append(("writers", ", ".join(names) or "none"))
    told.facts.append(("remedy", remedy))
    told.involved = [_launch_of(rank, r) for r in others]


def _without_weight_grad(rank: Rank, record: Record) -> list[Record]:
    """Each F of the step whose W has not run."""
    acts = [r for r in rank.before(record["n"], "action", "replay") if r["step"] == record["step"]]
    done = {(r["chunk"], r["microbatch"]) for r in acts if r["kind"] == "W"}
    return [r for r in reversed(acts) if r["kind"] == "F" and (r["chunk"], r["microbatch"]) not in done]


_KINDS: dict[tuple[str, ...], Callable[[Rank, Record, Explanation], None]] = {
    ("StreamOrderError",): _stream,
    ("StaleWeightError",): _weight,
    ("ScaleOrderError",): _scale,
    ("GradSlotError",): _grad,
    (*_NEEDS, "LeaseError", "LeaseRetainedError", "StaleHandleError"): _lease,
}
