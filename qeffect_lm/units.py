"""Sizes as people write them (``40GiB``, ``512MB``, ``4e10B``), and whole numbers as programs pass them."""

from __future__ import annotations

import operator
import re

from qeffect_lm.errors import UsageError

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str) -> float | None:
    """Bytes of a size written with a unit; None without one."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?\d+)?)\s*([KMGT]I?)?B\s*", text, re.IGNORECASE)
    return float(match[1]) * UNITS[(match[2] or "").upper()] if match else None


def format_bytes(size: float) -> str:
    """The same the other way round, in powers of 1024: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def whole_number(what: str, value: object) -> int:
    """``value`` as a Python int, also if it is one of numpy's or a 0-dim integer tensor.

    Raises: UsageError: it is something else; ``what`` names it.
    """
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{what} is a whole number, not {value!r}") from None
