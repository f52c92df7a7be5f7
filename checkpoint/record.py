"""The record of the step after a checkpoint: what a resume from that checkpoint has to repeat, bit for bit.

A run writes ``replay/step_00000100.json`` beside its checkpoints once it has run step 101, and ``tools.replay`` compares.
Tensors are told by sums over their logical places (:mod:`checkpoint.sums`), so a record says nothing about the layout that made
it but where it does so by name: fingerprints and generators, which belong to ranks.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from checkpoint.fileops import FileOps, write_file
from checkpoint.layout import CheckpointError, checkpoint_dirs, describe, step_name, step_of
from checkpoint.manifest import library_versions
from qeffect_lm.errors import shown
from qeffect_lm.state import Role

FORMAT = 1
FOLDER = "replay"
SHOWN = 5  # names of a part that are told


@dataclass(frozen=True)
class StepRecord:
    """One step. Floats are the 16 hexadecimal digits of their float64; tensors are told by sums, batches by SHA-256.

    Attributes:
        step: the step, counted from 1; the checkpoint is of the one before.
        save_id: of the save that it follows.
        before: scales, histories, open slots, counters and generators at that save: what is small of the state.
        layout: axis → size of the mesh.
        plan, graphs: fingerprint of the plan, and of each rank's plan and graphs.
        numbers: loss, grad_norm, lr, skipped, reason, tokens.
        data: inputs, targets, loss mask and random key of each microbatch, by its place over all replicas.
        gradients: main gradients as the step left them.
        state: all logical tensors after the step. ``generators``: those of each rank.
        contract: epochs and versions after the step. ``cursor``: of the data after the step.
        made_by: ``run``, or ``replay`` for a record that a resume made.
    """

    step: int
    save_id: str
    before: dict[str, str]
    layout: dict[str, int]
    plan: str
    graphs: list[str]
    numbers: dict[str, Any]
    data: dict[str, str]
    gradients: dict[str, str]
    state: dict[str, str]
    generators: dict[str, str]
    contract: dict[str, Any]
    cursor: dict[str, Any]
    versions: dict[str, str]
    made_by: str = "run"

    def loss(self) -> float:
        return float_of(self.numbers["loss"])


def bits(value: float) -> str:
    """The float64's 16 hexadecimal digits: NaN payloads and signed zeros included."""
    return struct.pack(">d", value).hex()


def float_of(text: str) -> float:
    """The inverse of :func:`bits`."""
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


# ---- on disk ---------------------------------------------------------------------------------------------------------


def record_path(checkpoint: Path) -> Path:
    """Where the record of the step after ``checkpoint`` lies: beside the ``step_…`` folder, which may be named by a link or as
    the folder one is in."""
    if step_of(checkpoint.name) is None:
        checkpoint = checkpoint.resolve()
    return checkpoint.parent / FOLDER / f"{checkpoint.name}.json"


def write_record(root: Path, record: StepRecord) -> Path:
    """Write a record beside the checkpoints in ``root``, whole or not at all; records whose checkpoint is gone go too.

    Raises:
        CheckpointError: it cannot be written; names path and cause.
    """
    path = record_path(root / step_name(record.step - 1))
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(FileOps(), temporary, (json.dumps({"format": FORMAT, **asdict(record)}, indent=1) + "\n").encode())
        os.replace(temporary, path)
        kept = {directory.name for _, directory in checkpoint_dirs(root)} | {path.stem}
        for other in path.parent.glob("step_*.json"):
            if step_of(other.stem) is not None and other.stem not in kept:
                other.unlink()
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {describe(error)}") from error
    return path


def read_record(checkpoint: Path) -> StepRecord | None:
    """The record of the step after ``checkpoint``; None where there is none.

    Raises:
        CheckpointError: it cannot be read, or is of a newer format.
    """
    path = record_path(checkpoint)
    try:
        body = json.loads(path.read_text())
        if body.pop("format") != FORMAT:
            raise CheckpointError(f"{path} is of another format than {FORMAT}, the one that this version of qeffect-lm reads")
        return TypeAdapter(StepRecord).validate_python(body)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {describe(error)}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"it is no record of a step ({shown(describe(error))})"
        raise CheckpointError(f"{path} is damaged, {why}: remove it, and a resume makes a new one") from error


# ---- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What was compared under one heading: how many values, and the names of those that differ, in natural order."""

    name: str
    compared: int
    different: tuple[str, ...]
    why_not: str | None = None  # compared is 0 then

    @property
    def equal(self) -> bool:
        return not self.different

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"not compared: {self.why_not}"
        if self.equal:
            return f"{self.compared} equal"
        more = f" and {len(self.different) - SHOWN} more" if len(self.different) > SHOWN else ""
        return f"{len(self.different)} of {self.compared} DIFFER: {', '.join(self.different[:SHOWN])}{more}"


def compare_records(saved: StepRecord, now: StepRecord, changed: Sequence[str] = ()) -> list[Part]:
    """Part by part, causes before effects.

    ``changed``: configuration keys that were changed on purpose; plan and graphs are then not compared, nor, on another layout,
    what belongs to ranks.
    """
    same_layout = saved.layout == now.layout
    on_purpose = f"{', '.join(changed)} changed" if changed else None
    ranks = None if same_layout else "belongs to ranks, and the layout is another"

    def part(name: str, a: Mapping[str, Any], b: Mapping[str, Any], why_not: str | None = None) -> Part:
        return Part(name, 0, (), why_not) if why_not else Part(name, len(a.keys() | b.keys()), differing(a, b))

    def graphs(record: StepRecord) -> dict[str, str]:
        return {f"rank {rank}": text for rank, text in enumerate(record.graphs)}

    return [
        part("plan", {"plan": saved.plan}, {"plan": now.plan}, on_purpose or ranks),
        part("graphs", graphs(saved), graphs(now), on_purpose or ranks),
        part("state at the save", shared(saved.before, same_layout), shared(now.before, same_layout)),
        part("data", saved.data, now.data),
        part("numbers", saved.numbers, now.numbers),
        part("gradients", saved.gradients, now.gradients),
        part("state", saved.state, now.state),
        part("generators", saved.generators, now.generators, ranks),
        part("counters", flatten(saved.contract), flatten(now.contract)),
        part("cursor", saved.cursor, now.cursor),
    ]


def shared(told: Mapping[str, str], all_of_it: bool) -> dict[str, str]:
    """What does not belong to ranks."""
    return {name: text for name, text in told.items() if all_of_it or not name.startswith(f"{Role.RNG.value}/")}


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """Names whose values are not the same, or that one side lacks; in the order of ``a``."""
    absent = object()
    return tuple(name for name in {**a, **b} if a.get(name, absent) != b.get(name, absent))


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of nested mappings by path (``weights/versions/NAME``; names hold dots)."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flatten(item, f"{prefix}{key}/") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return found


def library_changes(saved: StepRecord) -> list[str]:
    """``torch 2.11 -> 2.13`` for each library that is another now than when the record was made."""
    now, then = library_versions(), saved.versions
    return [f"{name} {then.get(name)} -> {now[name]}" for name in now if now[name] != then.get(name)]
