"""Names of things on disk, and the geometry of slices.

A checkpoint folder (the *root*) holds ``step_00000100/`` directories, one small file ``latest`` that names
the newest of them, and, while something is being written or removed, ``.tmp-…`` entries that nobody reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qeffect_lm.errors import QEffectError

MANIFEST = "manifest.json"
LATEST = "latest"
DOCUMENT = ".txt.gz"
TEMPORARY = ".tmp-"
DELETING = ".tmp-delete-"


class CheckpointError(QEffectError):
    """A checkpoint could not be written, or what is on disk is not what its manifest says (exit code 1)."""


def step_name(step: int) -> str:
    """``step_00000100`` for 100; wider numbers keep all their digits."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a directory name stands for, or None for names not ours (``step_7``, ``notes``)."""
    match = re.fullmatch(r"step_([0-9]{8,19})", name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def document_name(rank: int, name: str) -> str:
    """The file of a rank's document: ``rank00000.graphs.txt.gz``."""
    return f"rank{rank:05d}.{name}{DOCUMENT}"


def is_document(file: str) -> bool:
    """True for a file that holds text, and no tensors."""
    return file.endswith(DOCUMENT)


def is_companion(file: str) -> bool:
    """True for a file that travels with the model as it is: configuration, tokenizer, licence."""
    return not is_document(file) and not file.endswith(".safetensors")


def temporary_name(step: int) -> str:
    """Where a save of ``step`` is assembled before its rename."""
    return TEMPORARY + step_name(step)


def is_temporary(name: str) -> bool:
    """True for the leftovers of an interrupted save or removal, and for nothing else."""
    for prefix in (DELETING, TEMPORARY):
        if name.startswith(prefix):
            return step_of(name[len(prefix) :]) is not None
    return False


def checkpoint_dirs(root: Path) -> list[tuple[int, Path]]:
    """All ``step_…`` directories of ``root`` in numeric order, complete or not; [] when there is no such
    folder.

    Raises :class:`CheckpointError` when ``root`` is not a folder or cannot be read.
    """
    try:
        found = [(step_of(path.name), path) for path in root.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint folder {root}: {describe(error)}") from error
    return sorted((step, path) for step, path in found if step is not None)


def describe(error: BaseException) -> str:
    """A cause in words: ``No space left on device (ENOSPC)``, or the exception's type and message."""
    if isinstance(error, OSError) and error.errno is not None:
        import errno

        return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
    if isinstance(error, QEffectError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def natural_key(name: str) -> tuple[tuple[int, int, str, str], ...]:
    """Sort key under which ``layers.2`` comes before ``layers.10``."""
    parts = re.split(r"([0-9]+)", name)
    # Numbers by their length and digits, not as integers: a name may have thousands of digits, which int() refuses.
    digits = [part.lstrip("0") for part in parts]
    return tuple((1, len(digits[i]), digits[i], part) if i % 2 else (0, 0, part, "") for i, part in enumerate(parts))


@dataclass(frozen=True)
class Box:
    """An axis-parallel block of a logical tensor: first index and extent per dimension (both empty for
    0-dim).
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.start, self.shape, strict=True)) + "]"

    def fits(self, shape: Sequence[int]) -> bool:
        """True when the box lies inside a tensor of ``shape``."""
        return len(self.start) == len(self.shape) == len(shape) and all(
            a >= 0 and n >= 0 and a + n <= size
            for a, n, size in zip(self.start, self.shape, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """The common block, or None when the two share no element."""
        start = tuple(map(max, zip(self.start, other.start, strict=True)))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(end - a for a, end in zip(start, ends, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in a tensor that holds ``outer``."""
        return tuple(
            slice(a - b, a - b + n) for a, n, b in zip(self.start, self.shape, outer.start, strict=True)
        )


def tiling_fault(
    shape: Sequence[int], boxes: Sequence[Box], labels: Sequence[str] | None = None
) -> str | None:
    """None when ``boxes`` tile a tensor of ``shape`` exactly once; else what is wrong, in words.

    ``labels`` say where each box comes from. Boxes without elements are allowed anywhere inside; a tensor
    without elements needs at least one box, so that it is known at all.
    """
    names = [f"{label} {box}" for label, box in zip(labels or ["slice"] * len(boxes), boxes, strict=True)]
    for name, box in zip(names, boxes, strict=True):
        if not box.fits(shape):
            return f"{name} does not fit into the shape {list(shape)}"
    total = math.prod(shape)
    if total == 0:
        return None if boxes else "no slice holds it"
    solid = [i for i, box in enumerate(boxes) if box.volume]
    budget = [WORK + WORK_EACH * len(solid)]
    pair = _overlap(boxes, solid, 0, budget)
    if budget[0] < 0:
        return f"{len(solid)} slices are cut in such a way that comparing them takes too long"
    if pair is not None:
        first, second = sorted(pair, key=lambda i: (boxes[i].start, i))
        return f"{names[first]} and {names[second]} overlap"
    covered = sum(box.volume for box in boxes)
    if covered != total:
        return f"{total - covered} of {total} elements are in no slice"
    return None


WORK = 1_000_000  # comparisons of boxes that a tensor may take, and for each of its slices:
WORK_EACH = 256


def _overlap(boxes: Sequence[Box], some: Sequence[int], dim: int, budget: list[int]) -> tuple[int, int] | None:
    """Two of these boxes that share an element, or None: along one dimension after the other, only boxes that are there at the
    same index are compared further. Rows, columns and grids take n log n. ``budget`` (one number) is counted down; below zero
    nothing more is compared.
    """
    if len(some) < 2:
        return None
    if dim == len(boxes[some[0]].start):
        return some[0], some[1]
    marks: dict[int, tuple[list[int], list[int]]] = {}  # index → boxes that begin there, boxes that end there
    for i in some:
        begin, extent = boxes[i].start[dim], boxes[i].shape[dim]
        marks.setdefault(begin, ([], []))[0].append(i)
        marks.setdefault(begin + extent, ([], []))[1].append(i)
    active: dict[int, None] = {}
    for mark in sorted(marks):
        begun, ended = marks[mark]
        for i in ended:
            del active[i]
        active.update(dict.fromkeys(begun))
        if not begun or len(active) < 2:  # where boxes only end, those that stay were compared before
            continue
        budget[0] -= len(active)
        if budget[0] < 0:
            return None
        pair = _overlap(boxes, list(active), dim + 1, budget)
        if pair is not None:
            return pair
    return None
