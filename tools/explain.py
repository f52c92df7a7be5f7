"""Tell from a trace what happened to a lease, a weight, a scale or a step, and in which order.

    python -m tools.explain TRACE                                   a summary of the last run in the file
    python -m tools.explain TRACE --step 3                          one step, a line per action
    python -m tools.explain TRACE --step 3 --microbatch 1 --layer layers.0.mlp.down       every effect
    python -m tools.explain TRACE --layer layers.0.mlp.down --kind weight                 a weight's life

TRACE is the file that a run with ``contract.mode: trace`` writes (``contract.trace_file``, or ``trace.jsonl``
in the run's folder; one per rank). Exit code 0: something was told, 1: nothing fits the choice, 2:
unreadable.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from qeffect_lm.errors import QEffectError, UsageError

KINDS = ("lease", "weight", "scale", "grad", "stream", "step")
_ACTION = re.compile(r"(\d+)([FIW])(\d+)")
_MOVES = {"F": "forwarded", "I": "input gradient done", "W": "free"}
_BY_EFFECT = {"retain": "F", "input_grad_done": "I", "weight_grad": "W"}


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

    def concerns(self, layer: str) -> bool:
        """True for the layer itself, its weight and roles, and for everything below a prefix such as
        ``layers.0``.
        """
        return self.subject == layer or self.subject.startswith(f"{layer}.")


@dataclass
class Run:
    """One process's part of the file: its effects, and what it says about the whole."""

    entries: list[Entry] = field(default_factory=list)
    effects: Counter[str] = field(default_factory=Counter)
    steps: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    abandoned: list[tuple[int, str]] = field(default_factory=list)
    open_leases: dict[tuple[int, int, str], str] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)  # weight → version of its cache
    step: int | None = None
    inside: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        runs, notices = read_runs(args.trace)
        run = _choose(runs, args.run)
        for notice in notices:
            print(f"note: {notice}", file=sys.stderr)
        if args.step is None and args.microbatch is None and args.layer is None and args.kind is None:
            print(summary(args.trace, runs, run))
            return 0
        chosen = select(run, args)
    except QEffectError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not chosen:
        print(f"nothing in the trace fits{_nearest(run, args)}", file=sys.stderr)
        return 1
    print(tell(chosen, detailed=args.layer is not None or args.kind is not None))
    return 0


# ---- reading -----------------------------------------------------------------------------------------------


def read_runs(path: Path) -> tuple[list[Run], list[str]]:
    """The runs in a trace file (each process that appended to it numbers its effects from 0), and remarks.

    Raises:
        UsageError: no such file, nothing in it, a line that is no effect. An incomplete last line (a killed
            process) is left out with a remark.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"cannot read {path}: {reason}; a run with contract.mode=trace writes a trace") from None
    runs: list[Run] = []
    notices: list[str] = []
    for place, line in enumerate(lines, 1):
        try:
            effect = json.loads(line)
            number, name = int(effect["n"]), str(effect["effect"])
        except (ValueError, KeyError, TypeError):
            if place == len(lines) and runs:
                notices.append(f"the last line, {place}, is incomplete and left out")
                break
            raise UsageError(f"{path}, line {place}: not an effect of a trace: {line[:60]!r}") from None
        if number == 0 or not runs:
            runs.append(Run())
        try:
            _add(runs[-1], name, effect)
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(f"{path}, line {place}: a {name} effect without {error}") from None
    if not runs:
        raise UsageError(f"{path} is empty: the run wrote no effect")
    return runs, notices


def _add(run: Run, name: str, effect: dict[str, Any]) -> None:
    run.effects[name] += 1
    if name == "begin_step":
        run.step, run.inside = int(effect["step"]), True
        run.steps.append(run.step)
    elif name in ("end_step", "abandon_step"):
        run.inside = False
        run.open_leases.clear()
        if name == "end_step":
            run.ended.add(int(effect["step"]))
        else:
            run.abandoned.append((int(effect["step"]), str(effect.get("error", "no reason given"))))
    elif name == "refresh":
        run.cached.update(effect["versions"])
    for move, layer in _moves(name, effect):
        key = (int(effect["chunk"]), int(effect["microbatch"]), layer)
        if move == "W":
            run.open_leases.pop(key, None)
        else:
            run.open_leases[key] = _MOVES[move]
    run.entries += _entries(run, name, effect)


def _moves(name: str, effect: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The lease moves of an effect: (F, I or W; layer)."""
    if name in _BY_EFFECT:
        yield _BY_EFFECT[name], effect["what"]
    elif name == "replay":
        yield from ((effect["kind"], layer) for layer in effect["layers"])


def _entries(run: Run, name: str, effect: dict[str, Any]) -> Iterator[Entry]:
    """What an effect says about each thing it touches."""
    number, step = int(effect["n"]), None if run.step is None else effect.get("step", run.step)
    microbatch = effect.get("microbatch")
    action = f"{effect['chunk']}{effect['kind']}{microbatch}" if microbatch is not None else ""

    def entry(kind: str, text: str, subject: str = "") -> Entry:
        return Entry(number, step, kind, text, action, subject, microbatch)

    if name == "launch":
        who = _ACTION.fullmatch(effect["who"])
        touched = ", ".join(f"{access} {buffer}" for buffer, access in effect["accesses"])
        yield Entry(
            number,
            run.step,
            "stream",
            f"on {effect['stream']}: {touched}",
            effect["who"],
            microbatch=int(who[3]) if who else None,
        )
        return
    if name in ("begin_step", "end_step", "abandon_step", "commit", "refresh", "capture"):
        yield from _step_entries(entry, name, effect)
        return
    if name == "replay":
        yield from _replay_entries(entry, run, effect)
        return
    what = str(effect["what"])
    texts = {
        "read_scale": ("scale", lambda: f"reads the scale of epoch {effect['epoch']}"),
        "report_amax": ("scale", lambda: f"reports its amax to the window of epoch {effect['epoch']}"),
        "read_weight": ("weight", lambda: f"read as {effect['layout']}, version {effect['version']}"),
        "retain": ("lease", lambda: f"forwarded: retained in {_slot(effect)}"),
        "input_grad_done": ("lease", lambda: "input gradient done"),
        "weight_grad": ("lease", lambda: f"free: consumed from {_slot(effect)}"),
        "write_grad": ("grad", lambda: _beta(effect["beta"])),
    }
    kind, text = texts.get(name, ("step", lambda: name))
    yield entry(kind, text(), what)


def _step_entries(entry: Any, name: str, effect: dict[str, Any]) -> Iterator[Entry]:
    if name == "commit":
        which = effect["directions"]
        both = "" if len(which) == 2 else f"{which[0]} "
        epoch = int(effect["epoch"])
        text = f"{effect['what']} closes {both}epoch {epoch}: scales of epoch {epoch + 1} from here on"
        yield entry("scale", text)
        yield entry("step", text)
    elif name == "refresh":
        versions = effect["versions"]
        for weight, version in versions.items():
            text = f"cached at version {version} with the scale of epoch {effect['epoch']}"
            yield entry("weight", text, weight)
        yield entry("step", f"refresh: {len(versions)} weights cached with the scales of epoch {effect['epoch']}")
    else:
        texts = {
            "begin_step": "begins",
            "end_step": "ends: no lease is left",
            "abandon_step": f"abandoned: {effect.get('error', 'no reason given')}",
            "capture": f"{effect.get('what', '')} captured, everything put back",
        }
        yield entry("step", texts[name])


def _replay_entries(entry: Any, run: Run, effect: dict[str, Any]) -> Iterator[Entry]:
    """A graph's effects, which its summary told before it was launched."""
    epoch = f"epoch {effect['epoch']}"
    for role in effect["roles"]:
        yield entry("scale", f"reads the scale of {epoch} and reports its amax (graph)", role)
    for weight in effect["weights"]:
        yield entry("weight", f"read, version {run.cached.get(weight, 'unknown')} (graph)", weight)
    texts = {"F": "forwarded: retained in {}", "I": "input gradient done", "W": "free: consumed from {}"}
    for layer in effect["layers"]:
        yield entry("lease", f"{texts[effect['kind']].format(_slot(effect))} (graph)", layer)
    for name in effect["grads"]:
        yield entry("grad", f"{_beta(effect['beta'])} (graph)", name)


def _slot(effect: dict[str, Any]) -> str:
    return f"slot {effect['slot']}, generation {effect['generation']}"


def _beta(beta: int) -> str:
    return f"main gradient {'overwritten (beta 0)' if beta == 0 else f'added to (beta {beta})'}"


# ---- choosing and telling ----------------------------------------------------------------------------------


def select(run: Run, args: argparse.Namespace) -> list[Entry]:
    """The entries that fit, with what happened to the whole step in between (commits, the end); none if
    nothing else fits.
    """
    chosen, found = [], False
    for entry in run.entries:
        if args.step is not None and entry.step != args.step:
            continue
        if args.kind is not None and entry.kind != args.kind:
            continue
        whole_step = not entry.action and not entry.subject
        if whole_step and args.kind is None and entry.kind != "step":
            continue  # a commit is told once, not as the scale's and the step's
        if (
            args.microbatch is not None
            and entry.microbatch != args.microbatch
            and (entry.action or args.layer is None)
            and not whole_step
        ):
            continue
        if args.layer is not None and not entry.concerns(args.layer) and not whole_step:
            continue
        found = found or not whole_step or (args.layer is None and args.microbatch is None)
        chosen.append(entry)
    return chosen if found else []


def tell(entries: Sequence[Entry], *, detailed: bool) -> str:
    """The entries as text under a heading per step: one line each, or one line per action."""
    lines: list[str] = []
    for step, of_step in groupby(entries, key=lambda entry: entry.step):
        lines.append("before the first step" if step is None else "capture" if step < 0 else f"step {step}")
        if detailed:
            lines += [_line(entry) for entry in of_step]
            continue
        for action, together in groupby(of_step, key=lambda entry: entry.action):
            group = list(together)
            if action:
                lines.append(f"  {group[0].number:>7}  {action:<10} {_in_short(group)}")
            else:
                lines += [_line(entry) for entry in group]
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


def summary(path: Path, runs: Sequence[Run], run: Run) -> str:
    """Counts, steps, what was abandoned and what is still open."""
    lines = [f"{path}: {len(runs)} run{'s' * (len(runs) > 1)}" + (", the last one:" if len(runs) > 1 else "")]
    steps = sorted(set(run.steps))
    span = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
    lines.append(f"{span}: {len(run.ended)} ended, {len(run.abandoned)} abandoned, {sum(run.effects.values())} effects")
    lines += [f"  {count:>8}  {name}" for name, count in sorted(run.effects.items())]
    layers = sorted({entry.subject for entry in run.entries if entry.kind == "lease"})
    weights = {entry.subject for entry in run.entries if entry.kind == "weight" and entry.subject}
    streams = sorted({entry.text[3:].partition(":")[0] for entry in run.entries if entry.kind == "stream"})
    lines.append(f"layers that retain ({len(layers)}): {_some(layers)}")
    lines.append(f"cached weights: {len(weights)}; streams: {_some(streams)}")
    lines += [f"step {step} was abandoned: {why}" for step, why in run.abandoned]
    if run.inside:
        lines.append(f"step {run.step} has no end: the run was stopped inside it, while these were retained:")
        held = [f"  {layer}, chunk {c}, microbatch {m}: {now}" for (c, m, layer), now in run.open_leases.items()]
        lines += held[:20] + [f"  … {len(held) - 20} more"] * (len(held) > 20) if held else ["  none"]
    lines.append("more: --step S, --microbatch N, --layer NAME, --kind " + "|".join(KINDS))
    return "\n".join(lines)


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names) - most} more)" if len(names) > most else "") or "none"


def _choose(runs: Sequence[Run], number: int | None) -> Run:
    if number is None:
        return runs[-1]
    if not 1 <= number <= len(runs):
        raise UsageError(f"--run {number}: the file holds runs 1 to {len(runs)}")
    return runs[number - 1]


def _nearest(run: Run, args: argparse.Namespace) -> str:
    """What was perhaps meant."""
    if args.layer is not None and not any(entry.concerns(args.layer) for entry in run.entries):
        names = sorted({entry.subject for entry in run.entries if entry.kind == "lease"})
        close = difflib.get_close_matches(args.layer, names, n=1, cutoff=0.4)
        return f": no layer {args.layer!r}" + (f"; did you mean {close[0]}?" if close else f"; there are {_some(names)}")
    steps = sorted(set(run.steps))
    if args.step is not None and args.step not in steps:
        return f": no step {args.step}; there are {steps[0]} to {steps[-1]}" if steps else ": the run made no step"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.explain",
        description="Tell from a trace (contract.mode=trace) what happened to leases, weights and scales.",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="the trace file of a rank")
    parser.add_argument("--step", type=int, metavar="S", help="only this step (0-based)")
    parser.add_argument("--microbatch", type=int, metavar="N", help="only this microbatch")
    parser.add_argument("--layer", metavar="NAME", help="only this layer, with its weight and roles, or a prefix")
    parser.add_argument("--kind", choices=KINDS, help="only effects on this kind of state")
    parser.add_argument("--run", type=int, metavar="K", help="the K-th run in the file (default: the last)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
