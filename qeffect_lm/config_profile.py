"""``train.profile``: which steps are traced, and where to."""

from __future__ import annotations

import re
from typing import Any

from pydantic import field_validator

from qeffect_lm.config_base import Section, key

LONGEST = 100  # steps of one trace, which is held in memory until it is written
_PART = re.compile(r"([0-9]{1,8})(?:-([0-9]{1,8}))?", re.ASCII)


class ProfileConfig(Section):
    """a trace of chosen steps and a table of where their time goes (docs/profile.md)"""

    steps: str | None = key(
        None,
        "Steps to profile, from 1 as logged: a list of numbers ([3, 7]) or 'A-B' ('3-5'), also '3-5,9'; null: none. Steps that "
        "follow each other come into one trace.",
        on_resume="free",
        unit="optimizer steps",
    )
    dir: str | None = key(
        None, "Folder of the traces and tables; null: profile in run.dir.", on_resume="free", unit="path", min_length=1
    )

    @field_validator("steps", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Numbers and lists as text, which is then one spelling for one choice."""
        if value is None:
            return None
        given = value if isinstance(value, list | tuple) else [value]
        parts = [str(part) for part in given if type(part) in (int, str)]
        text = ",".join(parts).replace(" ", "").removeprefix("[").removesuffix("]")
        found = [_PART.fullmatch(part) for part in text.split(",")]
        wanted = "a list of step numbers ([3, 7]) or 'A-B' ('3-5') is expected, steps counted from 1"
        if len(parts) < len(given) or not all(found):
            raise ValueError(f"train.profile.steps: {value!r} given, {wanted}")
        spans = [(int(part[1]), int(part[2] or part[1])) for part in found if part is not None]
        for first, last in spans:
            if not 1 <= first <= last:
                raise ValueError(f"train.profile.steps: {value!r} given, where {first}-{last} is no range; {wanted}")
        joined = _joined(spans)
        for first, last in joined:
            if last - first >= LONGEST:
                raise ValueError(
                    f"train.profile.steps: {value!r} given, a trace of {last - first + 1:,} steps: at most {LONGEST} in one"
                )
        return ",".join(range_text(*span) for span in joined)

    def ranges(self) -> list[tuple[int, int]]:
        """(first, last) of each trace, in order; none where nothing is profiled."""
        if self.steps is None:
            return []
        return [(int(part.split("-")[0]), int(part.split("-")[-1])) for part in self.steps.split(",")]


def range_text(first: int, last: int) -> str:
    """``3-5``, or ``3`` of one step."""
    return str(first) if first == last else f"{first}-{last}"


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that overlap or follow each other as one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return joined
