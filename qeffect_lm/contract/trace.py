"""The trace of mode ``trace``: its file format, written and read.

A trace is text, one JSON array a line, appended line by line, so that a killed process leaves whole records. A run begins with
a header; every name and every recurring structure is written once, as a definition, and referred to by its number after it:

    ["qeffect-trace", 1, {...}]             header: format version; what the run says about itself (start, rank)
    ["=", id, value]                        definition: a name, or one of the structures below (an id may be defined anew)
    ["s", step] ["z"] ["x", why]            a step begins, ends, is abandoned (why: the exception, or null)
    ["l", launch, t]                        work is launched; launch = [stream, who, [[buffer, access(, lo, hi)], ...]]
    ["a", act, epoch, gi, gw, t(, names)]   an eager action has run; act = [kind, chunk, microbatch, beta, I-slot, W-slot,
                                            layers, roles, empty roles, weights, grads]; gi, gw: the slots' generations;
                                            of a W that shares a product with others' three more values: the product's
                                            beta (null: a later W makes it), grads left to a later W, grads it is written to;
                                            names: what it exchanged with tensor-parallel peers, in order
    ["i", act, epoch, gi, gw, t(, names)]   an eager action broke off after these effects
    ["r", act, epoch, gi, gw, t(, names)]   a captured graph's effects, checked before it was launched
    ["e", stream, tick(, buffers)]          an event is recorded (early: for these buffers only); stream and tick identify it
    ["w", stream, source, tick]             work on stream from here on waits for the event (source, tick)
    ["h"]                                   the host has waited for every stream
    ["c", by, epoch, directions]            scales: an epoch is closed
    ["v", [[names, version], ...]]          parameters were written: their versions from here on
    ["f", epoch, [[names, version], ...]]   weight caches were made from these versions with the scales of epoch
    ["u", name]                             a producer of a main gradient reports that it had no work
    ["g", graphs]                           graphs were captured and everything put back
    ["!", {...}]                            a violation: class, message, place, what was being done, and, between streams,
                                            the earlier and the later access

Streams, names of structures and lists of names are given by id. Accesses are r, w, m (max_merge); t is microseconds since the
step began. Records are numbered in the order of their lines, from 0, definitions and the header not counted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from qeffect_lm.errors import UsageError

MAGIC, FORMAT = "qeffect-trace", 1
NAMES_KEPT = 1 << 16  # then names are defined anew: a trace of endless new names costs file, not memory
ACCESS_LETTERS = {"read": "r", "write": "w", "max_merge": "m"}
_ACCESS_WORDS = {letter: word for word, letter in ACCESS_LETTERS.items()}
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def buffer_name(buffer: Hashable) -> str:
    """The name of a buffer in traces: ``("x", 0, 1)`` is ``x.0.1``."""
    return ".".join(map(str, buffer)) if isinstance(buffer, tuple) else str(buffer)


class TraceWriter:
    """Appends records to a file; unbuffered, a line each, so that a killed process leaves whole lines up to the last action.

    Args:
        path: the file; its folder is made. A run that is appended to another begins with a header of its own.
        about: what the header says about the run (``rank``, ...), any JSON values.
    """

    def __init__(self, path: str | Path, about: Mapping[str, object] | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _is_torn(self.path)
        self._file: FileIO | None = FileIO(self.path, "a")
        if torn:
            self._file.write(b"\n")
        self._ids: dict[Hashable, int] = {}
        header = {"started": time.strftime("%Y-%m-%d %H:%M:%S"), **(about or {})}
        self._file.write(_line(MAGIC, FORMAT, header))

    def write(self, code: str, *values: Any) -> None:
        """Append one record; nothing after :meth:`close`."""
        if self._file is not None:
            self._file.write(_line(code, *values))
        if len(self._ids) >= NAMES_KEPT:  # between two records, so that what a record refers to is defined
            self._ids.clear()

    def intern(self, value: Hashable, spell: Callable[[], Any] | None = None) -> int:
        """The id of ``value``, defined now unless it is known; ``spell`` gives what the file says for it, if not itself."""
        known = self._ids.get(value)
        if known is not None:
            return known
        spelled = value if spell is None else spell()  # may define other names
        number = self._ids[value] = len(self._ids)
        if self._file is not None:
            self._file.write(_line("=", number, spelled))
        return number

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(code: str, *values: Any) -> bytes:
    """One record; those of numbers alone, nearly all of them, without the encoder's overhead."""
    parts = [f'["{code}"']
    for value in values:
        if type(value) is int:
            parts.append(str(value))
        elif value is None:
            parts.append("null")
        else:
            return (_encode([code, *values]) + "\n").encode()
    return (",".join(parts) + "]\n").encode()


def _is_torn(path: Path) -> bool:
    """Did a killed process leave half a line at the end?"""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


# ---- reading -----------------------------------------------------------------------------------------------


@dataclass
class TracedRun:
    """One process's part of a trace: what its header says, and its records with all names put back.

    Each record is a dict with ``n`` (its number), ``effect`` (begin_step, end_step, abandon_step, launch, action, replay,
    broken, record, wait, settle, commit, bump, refresh, empty, capture, violation) and the values that the module's
    docstring lists. ``bytes`` counts the run's lines by what they are for (effects, ``names``, ``header``).
    """

    about: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)


def read_trace(path: str | Path) -> tuple[list[TracedRun], list[str]]:
    """The runs in a trace file, in the order of their lines, and remarks about torn lines that were left out.

    Raises:
        UsageError: no such file, not a trace, a trace of another format, a line that is no record.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; a run with contract.mode=trace writes a trace") from None
    runs: list[TracedRun] = []
    remarks: list[str] = []
    names: dict[int, Any] = {}
    for place, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, list) and values[:1] == [MAGIC]:
            runs.append(TracedRun(_header(path, values)))
            names = {}
        elif not runs:
            raise UsageError(f"{path}, line {place}: {_not_a_trace(values, line)}")
        elif values is None and (place == len(lines) or lines[place].startswith(f'["{MAGIC}"'.encode())):
            remarks.append(f"{path}: line {place} is incomplete (its process was killed) and left out")
            continue
        else:
            try:
                record = _expand(values, names)
            except (LookupError, ValueError, TypeError):
                raise UsageError(f"{path}, line {place}: not a record of a trace: {_start_of(line)}") from None
            if record is not None:
                runs[-1].records.append({"n": len(runs[-1].records), **record})
        what = "header" if values[0] == MAGIC else "names" if values[0] == "=" else runs[-1].records[-1]["effect"]
        runs[-1].bytes[what] = runs[-1].bytes.get(what, 0) + len(line) + 1
    if not runs:
        raise UsageError(f"{path} is empty: not a trace")
    return runs, remarks


def _header(path: Path, values: list[Any]) -> dict[str, Any]:
    if len(values) != 3 or not isinstance(values[1], int) or not isinstance(values[2], dict):
        raise UsageError(f"{path}: not the header of a trace: {_encode(values)[:60]}")
    if values[1] != FORMAT:
        raise UsageError(
            f"{path} is a trace of format {values[1]}, and this version reads format {FORMAT}: "
            "read it with the version that wrote it"
        )
    return values[2]


def _not_a_trace(values: Any, line: bytes) -> str:
    if isinstance(values, dict) and "effect" in values:
        return "a trace of an older version of QEffect LM, with one JSON object a line: record it again"
    return f"not a trace: {_start_of(line)}"


def _start_of(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace"))


def _expand(values: list[Any], names: dict[int, Any]) -> dict[str, Any] | None:
    """One record with its names put back; None for a definition, which enters ``names``."""
    code, *rest = values
    if code == "=":
        number, value = rest
        names[int(number)] = value
        return None
    return {"effect": _EFFECTS[code], **dict(_VALUES[code](names, *rest))}


_EFFECTS = {
    **{"s": "begin_step", "z": "end_step", "x": "abandon_step", "l": "launch", "a": "action", "i": "broken", "r": "replay"},
    **{"e": "record", "w": "wait", "h": "settle", "c": "commit", "v": "bump", "f": "refresh", "u": "empty", "g": "capture"},
    "!": "violation",
}
_ACT = ("kind", "chunk", "microbatch", "beta", "i_slot", "w_slot", "layers", "roles", "empty", "weights", "grads")
_JOINT = ("joint_beta", "idle", "joined")
Pairs = Iterable[tuple[str, Any]]


def _launch(names: dict[int, Any], launch: int, t: int) -> Pairs:
    stream, who, accesses = names[launch]
    spelled = [[buffer, _ACCESS_WORDS[access], *span] for buffer, access, *span in accesses]
    return {"stream": names[stream], "who": who, "accesses": spelled, "t": t}.items()


def _act(
    names: dict[int, Any], act: int, epoch: int, gi: int | None, gw: int | None, t: int, exchanged: int | None = None
) -> Iterator[tuple[str, Any]]:
    values = names[act]
    for key, value in zip(_ACT, values[: len(_ACT)], strict=True):
        yield key, names[value] if key in _ACT[6:] else value
    for key, value in zip(_JOINT, values[len(_ACT) :], strict=False):
        yield key, value if key == "joint_beta" else names[value]
    yield from (("epoch", epoch), ("i_generation", gi), ("w_generation", gw), ("t", t))
    if exchanged is not None:
        yield "collectives", names[exchanged]


def _event(names: dict[int, Any], stream: int, tick: int, buffers: list[str] | None = None) -> Pairs:
    return {"stream": names[stream], "tick": tick, "buffers": buffers}.items()


def _versions(names: dict[int, Any], groups: list[tuple[int, int]]) -> dict[str, int]:
    return {name: version for ids, version in groups for name in names[ids]}


_VALUES: dict[str, Any] = {
    "s": lambda _, step: {"step": int(step)},
    "z": lambda _: {},
    "x": lambda _, why: {"error": why},
    "l": _launch,
    "a": _act,
    "i": _act,
    "r": _act,
    "e": _event,
    "w": lambda names, stream, source, tick: {"stream": names[stream], "source": names[source], "tick": tick},
    "h": lambda _: {},
    "c": lambda _, by, epoch, directions: {"by": by, "epoch": epoch, "directions": directions},
    "v": lambda names, groups: {"versions": _versions(names, groups)},
    "f": lambda names, epoch, groups: {"epoch": epoch, "versions": _versions(names, groups)},
    "u": lambda _, name: {"name": name},
    "g": lambda _, graphs: {"graphs": graphs},
    "!": lambda _, told: {key: told[key] for key in ("class", "message", "place", "doing", "earlier", "later", "t")},
}
