"""Tell from a trace what happened to a lease, a weight, a scale or a step, in which order, and what a violation means.

    python -m tools.explain TRACE                                   a summary; a violation first, if there is one
    python -m tools.explain TRACE --violation                       who wrote, who read, which edge or refresh was missing
    python -m tools.explain TRACE --step 3                          one step, a line per action
    python -m tools.explain TRACE --lease 0,1                       one lease: chunk 0, microbatch 1 (0,1,LAYER: one layer)
    python -m tools.explain TRACE --buffer grads_W.0                one buffer: its accesses, and what ordered them
    python -m tools.explain TRACE --layer layers.0.mlp.down --kind weight             a layer's weight
    python -m tools.explain TRACE --html trace.html                 a picture: streams as lanes, edges, the conflict in red

TRACE is the file that a run with ``contract.mode: trace`` writes (``contract.trace_file``, or ``trace.jsonl`` in the run's
folder; one per rank, several may be given). Exit code 0: something was told, 1: nothing fits the choice, 2: unreadable, or a
name that the trace does not have.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from qeffect_lm.contract.trace import buffer_name
from qeffect_lm.errors import QEffectError, UsageError
from tools.common import add_traceback, run_tool
from tools.explain import page, story
from tools.explain.history import Rank, Record, load
from tools.explain.story import KINDS, Entry
from tools.explain.violation import Explanation, explain

RESOURCES = ("lease", "buffer", "weight", "scale", "slot", "stream")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = _parser().parse_args(argv)
    return run_tool(lambda: _run(args), args.traceback)


def _run(args: argparse.Namespace) -> int:
    """Tell what was asked for. A file whose lines have the form of records and senseless values in them is no trace either."""
    try:
        return _tell(args)
    except QEffectError:
        raise
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
        files = ", ".join(map(str, args.trace))
        raise UsageError(f"{files}: a record holds what no trace holds there ({type(error).__name__}: {error})") from error


def _tell(args: argparse.Namespace) -> int:
    _refuse_ignored(args)
    ranks, remarks = load(args.trace, args.run)
    for remark in remarks:
        print(f"note: {remark}", file=sys.stderr)
    _check_names(ranks, args)
    if args.size:
        print("\n".join(_size(rank) for rank in ranks))
    elif args.html is not None:
        print(page.write(args.html, ranks, _explanation(ranks, args.violation or 1), args.step))
    elif args.violation is not None:
        found = _explanation(ranks, args.violation)
        if found is None:
            print("the trace holds no violation", file=sys.stderr)
            return 1
        print(found[2].text())
    elif _whole(args):
        print(_summary(ranks))
    else:
        return _timeline(ranks, args)
    return 0


def _refuse_ignored(args: argparse.Namespace) -> None:
    """Raises UsageError for a choice that the one made with it leaves without effect."""
    chosen = [name for name in RESOURCES if getattr(args, name) is not None]
    fits = [name for name in ("step", "microbatch", "layer", "kind") if getattr(args, name) is not None]
    if args.size:
        mode, wrong = "--size", [*fits, *(["html"] if args.html is not None else [])]
    elif args.html is not None:
        mode, wrong = "--html", [*chosen, *(name for name in fits if name != "step")]
    elif args.violation is not None:
        mode, wrong = "--violation", fits
    else:
        mode, wrong = f"--{''.join(chosen)}", [name for name in fits if name == "layer" and chosen]
    if wrong:
        raise UsageError(f"--{wrong[0]} has no effect with {mode}: leave one of them out")


def _whole(args: argparse.Namespace) -> bool:
    """Was nothing chosen?"""
    return all(getattr(args, name) is None for name in (*RESOURCES, "step", "microbatch", "layer", "kind"))


# ---- timelines ---------------------------------------------------------------------------------------------


def _timeline(ranks: Sequence[Rank], args: argparse.Namespace) -> int:
    resource = next((name for name in RESOURCES if getattr(args, name) is not None), None)
    chosen: list[Entry] = []
    for rank in ranks:
        if resource is None:
            chosen += story.select(story.entries(rank), args.step, args.microbatch, args.layer, args.kind)
        else:
            chosen += [
                entry
                for entry in _of_resource(rank, resource, getattr(args, resource))
                if args.step in (None, entry.step)
                and args.microbatch in (None, entry.microbatch)
                and args.kind in (None, entry.kind)
            ]
    if not chosen:
        print("nothing in the trace fits", file=sys.stderr)
        return 1
    print(story.tell(chosen, detailed=resource is not None or args.layer is not None or args.kind is not None))
    return 0


def _of_resource(rank: Rank, resource: str, name: str) -> Iterable[Entry]:
    if resource == "lease":
        chunk, microbatch, layer = _lease_key(name)
        return story.lease(rank, chunk, microbatch, layer)
    if resource in ("weight", "scale"):
        kinds = ("weight", "grad") if resource == "weight" else ("scale",)
        told = (entry for entry in story.entries(rank) if entry.kind in kinds)
        return [entry for entry in told if entry.subject == name or (entry.whole_step and resource == "scale")]
    return {"buffer": story.buffer, "slot": story.slot, "stream": story.stream}[resource](rank, _canonical(resource, name))


def _lease_key(text: str) -> tuple[int, int, str | None]:
    chunk, _, rest = text.partition(",")
    microbatch, _, layer = rest.partition(",")
    if not (chunk.strip().isdigit() and microbatch.strip().isdigit()):
        raise UsageError(f"--lease {text}: give chunk,microbatch or chunk,microbatch,layer, as in --lease 0,1")
    return int(chunk), int(microbatch), layer.strip() or None


def _canonical(resource: str, name: str) -> str:
    """A buffer may be given as errors spell it: ``('x', 0, 1)`` is ``x.0.1``."""
    if resource == "buffer" and name.startswith("(") and name.endswith(")"):
        return buffer_name(tuple(part.strip(" '\"") for part in name[1:-1].split(",") if part.strip()))
    return name


# ---- names -------------------------------------------------------------------------------------------------


def _check_names(ranks: Sequence[Rank], args: argparse.Namespace) -> None:
    """Refuse names that no file has, with the nearest one.

    Raises:
        UsageError: with what was perhaps meant.
    """
    known = _names(ranks)
    for resource in ("buffer", "weight", "scale", "slot", "stream"):
        name = getattr(args, resource)
        if name is not None and _canonical(resource, name) not in known[resource]:
            raise UsageError(_unknown(resource, name, known[resource]))
    if args.lease is not None:
        chunk, microbatch, layer = _lease_key(args.lease)
        if f"{chunk},{microbatch}" not in known["lease"]:
            raise UsageError(_unknown("lease", f"{chunk},{microbatch}", known["lease"]))
        if layer is not None and not _under(layer, known["layer"]):
            raise UsageError(_unknown("layer", layer, known["layer"]))
    if args.layer is not None and not _under(args.layer, {*known["layer"], *known["weight"], *known["scale"]}):
        raise UsageError(_unknown("layer", args.layer, known["layer"]))
    steps = sorted({step for rank in ranks for step in rank.steps})
    if args.step is not None and args.step not in steps:
        raise UsageError(f"no step {args.step}; " + (f"there are {steps[0]} to {steps[-1]}" if steps else "the run made none"))


def _names(ranks: Sequence[Rank]) -> dict[str, set[str]]:
    known: dict[str, set[str]] = {name: set() for name in (*RESOURCES, "layer")}
    for rank in ranks:
        known["buffer"].update(rank.touches)
        for record in rank.of("action", "replay", "broken"):
            known["layer"].update(record["layers"])
            known["scale"].update(record["roles"])
            known["weight"].update([*record["weights"], *record["grads"], *record.get("idle", ()), *record.get("joined", ())])
            known["slot"].update(slot for slot in (record["i_slot"], record["w_slot"]) if slot is not None)
            known["lease"].add(f"{record['chunk']},{record['microbatch']}")
        for record in rank.of("refresh", "bump"):
            known["weight"].update(record["versions"])
        for record in rank.of("launch", "record", "wait"):
            known["stream"].add(record["stream"])
        for record in rank.violations:
            place = record["place"]
            if "chunk" in place and "microbatch" in place:
                known["lease"].add(f"{place['chunk']},{place['microbatch']}")
    return known


def _under(layer: str, names: Iterable[str]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for name in names)


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)
    meant = f"did you mean {close[0]}?" if close else f"there are {_some(sorted(known))}"
    return f"no {what} {name!r} in the trace; {meant}"


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names) - most} more)" if len(names) > most else "") or "none"


# ---- violations, summary, size -----------------------------------------------------------------------------


def _explanation(ranks: Sequence[Rank], number: int) -> tuple[Rank, Record, Explanation] | None:
    """Violation ``number`` of all ranks in order of step, rank and time.

    Raises:
        UsageError: there are fewer.
    """
    found = [(rank, record) for rank in ranks for record in rank.violations]
    found.sort(key=lambda pair: -1 if pair[1]["step"] is None else pair[1]["step"])
    if not found:
        return None
    if not 1 <= number <= len(found):
        raise UsageError(f"--violation {number}: there are violations 1 to {len(found)}")
    rank, record = found[number - 1]
    return rank, record, explain(rank, record, number, len(found))


def _summary(ranks: Sequence[Rank]) -> str:
    lines: list[str] = []
    found = _explanation(ranks, 1)
    if found is not None:
        lines += [found[2].text(), ""]
    for rank in ranks:
        lines += _summary_of(rank)
    lines.append("more: --violation, --step S, --microbatch N, --layer NAME, --kind " + "|".join(KINDS))
    lines.append("one resource: --lease C,M  --buffer NAME  --weight NAME  --scale ROLE  --slot NAME  --stream NAME")
    return "\n".join(lines)


def _summary_of(rank: Rank) -> list[str]:
    """Counts, steps, what was abandoned and what is still open."""
    label = f" ({rank.label})" if rank.label else ""
    lines = [f"{rank.file}{label}: {rank.runs} run{'s' * (rank.runs > 1)}" + (", one of them:" if rank.runs > 1 else "")]
    steps, ended, abandoned = rank.steps, rank.of("end_step"), rank.of("abandon_step")
    span = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    counts = Counter(record["effect"] for record in rank.records)
    lines.append(f"{span}: {len(ended)} ended, {len(abandoned)} abandoned, {len(rank.records)} records")
    lines += [f"  {count:>8}  {name}" for name, count in sorted(counts.items())]
    known = _names([rank])
    lines.append(f"layers that retain ({len(known['layer'])}): {_some(sorted(known['layer']))}")
    cached = {weight for record in rank.of("refresh") for weight in record["versions"]}
    lines.append(f"cached weights: {len(cached)}; streams: {_some(sorted(known['stream']))}")
    lines.append(f"buffers ({len(known['buffer'])}): {_some(sorted(known['buffer']))}")
    lines += [f"step {record['step']} was abandoned: {record['error'] or 'no reason given'}" for record in abandoned]
    return lines + _stopped_inside(rank)


def _stopped_inside(rank: Rank) -> list[str]:
    """A killed run: which leases its last step held."""
    last = next(rank.before(len(rank.records), "begin_step", "end_step", "abandon_step"), None)
    if last is None or last["effect"] != "begin_step":
        return []
    held: dict[tuple[int, int, str], str] = {}
    for record in rank.records[last["n"] :]:
        if record["effect"] in ("action", "replay"):
            for layer in record["layers"]:
                key = (record["chunk"], record["microbatch"], layer)
                held[key] = {"F": "forwarded", "I": "input gradient done", "W": "free"}[record["kind"]]
    lines = [f"  {layer}, chunk {c}, microbatch {m}: {state}" for (c, m, layer), state in held.items() if state != "free"]
    more = [f"  … {len(lines) - 20} more"] * (len(lines) > 20)
    heading = f"step {last['step']} has no end: the run was stopped inside it, while these were retained:"
    return [heading, *(lines[:20] + more if lines else ["  none"])]


def _size(rank: Rank) -> str:
    """What the trace costs: bytes per step and per action, names apart, since they are written once."""
    ended = {record["step"] for record in rank.of("end_step")}
    acts = sum(1 for record in rank.of("action", "replay") if record["step"] in ended)
    effects = sum(size for what, size in rank.bytes.items() if what not in ("names", "header"))
    lines = [f"{rank.file}{f' ({rank.label})' if rank.label else ''}: {sum(rank.bytes.values())} bytes in this run"]
    lines += [f"  {rank.bytes[what]:>10}  {what}" for what in sorted(rank.bytes, key=lambda what: -rank.bytes[what])]
    if ended:
        lines.append(f"{effects / len(rank.steps):.0f} bytes per step without the names, which are written once")
    if acts:
        lines.append(f"{effects / acts:.0f} bytes per F, I or W, with the launches, edges and step ends around it")
    return "\n".join(lines)


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number (give the TRACE before --violation)")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, nargs="+", help="the trace of a rank; several: merged by step")
    what = parser.add_argument_group("one resource (at most one of these)").add_mutually_exclusive_group()
    what.add_argument("--lease", metavar="C,M[,LAYER]", help="work on chunk C, microbatch M")
    what.add_argument("--buffer", metavar="NAME", help="accesses of a buffer, and what ordered them")
    what.add_argument("--weight", metavar="NAME", help="a parameter's bumps, casts, reads and gradient writes")
    what.add_argument("--scale", metavar="ROLE", help="a scale's readers, reports and commits")
    what.add_argument("--slot", metavar="NAME", help="who held a slot, in which generation (I0.1: I-slot 1 of chunk 0)")
    what.add_argument("--stream", metavar="NAME", help="launches, events and waits of a stream (host is one too)")
    what.add_argument("--violation", metavar="K", nargs="?", const=1, type=_number, help="the K-th violation (the first)")
    what.add_argument("--size", action="store_true", help="bytes per step and per action")
    fit = parser.add_argument_group("only what fits")
    fit.add_argument("--step", type=int, metavar="S", help="this step (0-based)")
    fit.add_argument("--microbatch", type=int, metavar="N", help="this microbatch")
    fit.add_argument("--layer", metavar="NAME", help="this layer, with its weight and roles, or a prefix")
    fit.add_argument("--kind", choices=KINDS, help="effects on this kind of state")
    fit.add_argument("--run", type=int, metavar="K", help="the K-th run in the file (default: the last)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="draw it into one page (a --step, a --violation)")
    add_traceback(parser)
    return parser
