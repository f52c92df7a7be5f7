"""What a checkpoint knows about its FP8 scales: for each quantised tensor its scale, the amax history, and what is odd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

import torch

from checkpoint.layout import natural_key
from checkpoint.reader import Checkpoint
from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.fp8.recipes import FORMATS, roles_of
from qeffect_lm.state import Role

KINDS = tuple(FORMATS)  # input, weight, grad_output


@dataclass(frozen=True)
class ScaleRow:
    """One quantised tensor of one layer.

    Attributes:
        scale: what the next values are multiplied with before the cast to FP8.
        history: amax of the last windows, the newest first; 0 where none was seen.
        open_amax: of the open window; negative while nobody reported.
        expected: the scale that the history gives, or None where it gives none (nothing seen, or no finite one).
    """

    layer: str
    kind: str
    scale: float
    history: tuple[float, ...]
    open_amax: float
    expected: float | None

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.kind}"

    @property
    def seen(self) -> list[float]:
        """The amax that are not 0."""
        return [amax for amax in self.history if amax != 0]

    @property
    def zeros(self) -> int:
        """Windows without an amax: not there yet, or nothing but zeros."""
        return len(self.history) - len(self.seen)

    @property
    def latest(self) -> float | None:
        return self.history[0] if self.history and self.history[0] != 0 else None

    @property
    def middle(self) -> float | None:
        return median(self.seen) if self.seen else None

    @property
    def headroom(self) -> float | None:
        """Bits between the newest amax, scaled, and the format's largest value; negative: it saturates."""
        return None if self.latest is None else _bits(FORMATS[self.kind].max, self.latest * self.scale)

    @property
    def rise(self) -> float | None:
        """Bits by which the newest amax is above all older ones of the history; with no margin it saturated by that much."""
        older = [amax for amax in self.history[1:] if amax != 0]
        return _bits(self.latest, max(older)) if self.latest is not None and older else None

    @property
    def notes(self) -> list[str]:
        """What to look at, in words."""
        found = []
        if not self.seen:
            found.append("never seen")
        elif len(self.history) > 1 and not self.zeros and len(set(self.history)) == 1:
            found.append("stuck: one amax in all of the history")
        if self.headroom is not None and self.headroom < 0:
            found.append(f"saturates by {-self.headroom:.2g} bits")
        if self.rise is not None and self.rise >= 1:
            found.append(f"rose by {self.rise:.2g} bits")
        if self.expected is not None and self.expected != self.scale:
            found.append(f"scale is not its history's {self.expected:.6g}")
        if not math.isfinite(self.scale) or self.scale <= 0:
            found.append("scale is no positive number")
        return found

    def document(self) -> dict[str, Any]:
        """As plain data."""
        seen = self.seen
        return {
            "name": self.name,
            "layer": self.layer,
            "kind": self.kind,
            "scale": self.scale,
            "latest": self.latest,
            "min": min(seen, default=None),
            "median": self.middle,
            "max": max(seen, default=None),
            "zeros": self.zeros,
            "headroom_bits": self.headroom,
            "rise_bits": self.rise,
            "open_amax": self.open_amax if self.open_amax >= 0 else None,
            "history": list(self.history),
            "notes": self.notes,
        }


def scale_rows(checkpoint: Checkpoint, pattern: str = "*") -> list[ScaleRow]:
    """One row for each scale whose name or layer matches ``pattern`` (as a shell matches file names), layer by layer.

    Raises:
        CheckpointError: the bytes are not what the manifest says.
    """
    named = []
    for full, entry in checkpoint.manifest.tensors.items():
        layer, _, kind = full.removeprefix("scale/").rpartition(".")
        if entry.role is not Role.SCALE or kind not in KINDS or not full.startswith("scale/") or entry.shape != ():
            continue
        if fnmatchcase(f"{layer}.{kind}", pattern) or fnmatchcase(layer, pattern):
            named.append((natural_key(layer), KINDS.index(kind), layer, kind))
    places = [(layer, kind) for _, _, layer, kind in sorted(named)]
    read = [[_values(checkpoint, f"{what}/{layer}.{kind}") for what in ("scale", "amax_history", "amax_open")]
            for layer, kind in places]
    expected = _expected(checkpoint, [place[1] for place in places], [values[1] for values in read])
    return [
        ScaleRow(layer, kind, scale[0], tuple(history), amax[0] if amax else -1.0, wanted)
        for (layer, kind), (scale, history, amax), wanted in zip(places, read, expected, strict=True)
    ]


def _values(checkpoint: Checkpoint, name: str) -> list[float]:
    """A tensor as a list of numbers; empty where the checkpoint lacks it."""
    return checkpoint.read(name).reshape(-1).tolist() if name in checkpoint.manifest.tensors else []


def _expected(checkpoint: Checkpoint, kinds: Sequence[str], histories: Sequence[Sequence[float]]) -> list[float | None]:
    """The scale of each history by the saved configuration's rule; None where it gives none, or the rule is not known."""
    fp8 = checkpoint.within("config", "precision", "fp8")
    if fp8.get("recipe") != "delayed" or any(len(history) not in (0, fp8["history"]) for history in histories):
        return [None] * len(kinds)
    rule = ScaleTimeline(roles_of(""), window=fp8["window"], amax=fp8["amax"], margin=fp8["margin"], history=fp8["history"])
    found: list[float | None] = []
    for kind, history in zip(kinds, histories, strict=True):
        values = torch.tensor(history, dtype=torch.float32)
        scale = rule.scale_from(f".{kind}", values) if len(history) else torch.tensor(math.nan)
        found.append(float(scale) if math.isfinite(float(scale)) else None)
    return found


def _bits(a: float, b: float) -> float | None:
    """log2(a / b), to a millionth (a float32 scale is not exact); None where one of them is no positive finite number."""
    return round(math.log2(a) - math.log2(b), 6) + 0.0 if 0 < a < math.inf and 0 < b < math.inf else None
