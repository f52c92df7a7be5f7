"""Two checkpoints side by side, by bits: equal NaN patterns are equal, -0.0 and 0.0 are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpoint.layout import natural_key
from checkpoint.reader import Checkpoint
from checkpoint.shards import as_integers


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in both.

    When the kinds agree: ``first`` index, ``elements`` and ``nbytes`` that differ, ``max_abs`` difference in
    float64 (0.0 when only bit patterns differ, NaN when a NaN met another value). Otherwise ``reason`` says
    which of role, shape and dtype disagree, and the numbers are None.
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    reason: str
    first: tuple[int, ...] | None = None
    values: tuple[float, float] | None = None
    elements: int | None = None
    nbytes: int | None = None
    max_abs: float | None = None


@dataclass(frozen=True)
class MetaDifference:
    """A meta value, by its dotted path, that is not the same in both; ``"<absent>"`` where one lacks it."""

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found; names are in natural order, the first difference first."""

    equal: tuple[str, ...]
    different: tuple[Difference, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    meta: tuple[MetaDifference, ...] = ()

    @property
    def same(self) -> bool:
        """True when nothing that was compared differs."""
        return not (self.different or self.only_in_a or self.only_in_b or self.meta)

    @property
    def first_name(self) -> str | None:
        """The first tensor that differs or is on one side only, or None."""
        names = [difference.name for difference in self.different] + [*self.only_in_a, *self.only_in_b]
        return min(names, key=natural_key, default=None)


ABSENT = "<absent>"


def compare(a: Checkpoint, b: Checkpoint, meta_keys: Sequence[str] | None = ()) -> Comparison:
    """Compare every logical tensor bit by bit, whatever the slices, and the chosen meta values.

    ``meta_keys`` are dotted prefixes (``"contract"``, ``"data.cursor"``, also ``"step"`` and ``"ranks.0"``);
    none by default, None means all. Both checkpoints are read whole. Raises :class:`CheckpointError` when one
    is damaged.
    """
    names_a, names_b = set(a.manifest.tensors), set(b.manifest.tensors)
    equal, different = [], []
    for name in sorted(names_a & names_b, key=natural_key):
        difference = _compare_tensor(name, a, b)
        if difference is None:
            equal.append(name)
        else:
            different.append(difference)
    return Comparison(
        tuple(equal),
        tuple(different),
        tuple(sorted(names_a - names_b, key=natural_key)),
        tuple(sorted(names_b - names_a, key=natural_key)),
        tuple(_compare_meta(a, b, meta_keys)),
    )


def _compare_tensor(name: str, a: Checkpoint, b: Checkpoint) -> Difference | None:
    left, right = a.entry(name), b.entry(name)
    about = (name, left.role.value, left.dtype, left.shape)
    kinds = [
        f"{what} {x} and {y}"
        for what, x, y in (
            ("role", left.role.value, right.role.value),
            ("shape", list(left.shape), list(right.shape)),
            ("dtype", left.dtype, right.dtype),
        )
        if x != y
    ]
    if kinds:
        return Difference(*about, reason="; ".join(kinds))
    x, y = a.read(name), b.read(name)
    unequal = as_integers(x) != as_integers(y)
    elements = int(unequal.sum())
    if elements == 0:
        return None
    flat = int(unequal.reshape(-1).to(torch.uint8).argmax())
    values = x.reshape(-1)[flat].to(torch.float64).item(), y.reshape(-1)[flat].to(torch.float64).item()
    return Difference(
        *about,
        reason="values",
        first=tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape)) if x.dim() else (),
        values=values,
        elements=elements,
        nbytes=_differing_bytes(x, y),
        max_abs=_max_abs(x[unequal], y[unequal]),
    )


def _differing_bytes(x: torch.Tensor, y: torch.Tensor) -> int:
    left, right = (as_integers(t).reshape(-1).view(torch.uint8) for t in (x, y))
    return int((left != right).sum())


def _max_abs(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest |x − y| in float64 over elements whose bits differ; NaN against anything gives NaN."""
    return float((x.to(torch.float64) - y.to(torch.float64)).abs().max())


def _compare_meta(a: Checkpoint, b: Checkpoint, keys: Sequence[str] | None) -> list[MetaDifference]:
    if keys is not None and not keys:
        return []
    found = []
    for path, x, y in _differing(_document(a), _document(b), ()):
        key = _joined(path)
        if keys is None or any(_under(key, k) for k in keys):
            found.append(MetaDifference(key, x, y))
            if len(found) == META_MOST:
                break
    return sorted(found, key=lambda item: natural_key(item.key))


def has_meta(checkpoint: Checkpoint, key: str) -> bool:
    """Whether the checkpoint has a meta value under this dotted key."""
    return any(_under(_joined(path), key) for path, _, _ in _differing(_document(checkpoint), ABSENT, ()))


def _under(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith((f"{prefix}.", f"{prefix}["))


META_MOST = 10_000  # differences of meta values that are told


def _document(checkpoint: Checkpoint) -> dict[str, Any]:
    ranks = {str(entry.rank): {"coords": entry.coords, **entry.meta} for entry in checkpoint.manifest.ranks}
    return {**checkpoint.meta, "step": checkpoint.step, "ranks": ranks}


Path = tuple[str | int, ...]


def _differing(x: Any, y: Any, path: Path) -> Iterator[tuple[Path, Any, Any]]:
    """Leaves that are not the same, or that one side lacks; empty containers are leaves. Paths are joined only where something
    differs: of a value of unknown origin they can be far longer than the value.
    """
    left, right = _children(x), _children(y)
    if not left and not right:
        if _canonical(x) != _canonical(y):
            yield path, x, y
        return
    for lone, at in ((x, 0), (y, 1)):  # a leaf on one side only
        if not (left, right)[at] and lone is not ABSENT:
            yield path, *((lone, ABSENT) if at == 0 else (ABSENT, lone))
    for key in [*left, *(key for key in right if key not in left)]:
        yield from _differing(left.get(key, ABSENT), right.get(key, ABSENT), (*path, key))


def _children(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, list) else {}


def _joined(path: Path) -> str:
    """``data.cursor[1]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _canonical(value: Any) -> tuple[str, str]:
    """By type and exact text: 1 and 1.0 and True differ, NaN equals NaN, -0.0 is not 0.0."""
    return type(value).__name__, repr(value)
