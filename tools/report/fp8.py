"""Histories of amax and scale as matrices, tensors by steps, small enough to be drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qeffect_lm.app.run_folder import ScaleLine
from tools.report.series import number, short

KINDS = ("input", "weight", "grad_output")
CELLS = 60_000  # of one map, of all runs together
ROWS, COLUMNS = 64, 120  # of one map at most

MERGES = {"amax": np.fmax, "scale": np.fmin, "underflow": np.fmax}
QUANTITIES = (*MERGES, "windows", "saturated")

Array = npt.NDArray[np.float64]


def maps(lines: Sequence[ScaleLine], runs: int) -> dict[str, Any]:
    """For each kind its rows and, by quantity, the rows' values one after the other; None where there is none yet.

    Steps that share a column, and tensors that share a row, give the largest amax, the smallest scale, their saturated windows
    over all their windows, and the largest share that became zero.
    """
    columns = _parts(range(len(lines)), max(20, min(COLUMNS, CELLS // ROWS // max(1, runs))))
    names = sorted({role for line in lines for role in line.roles}, key=_order)
    seen = [_column(lines[part[0] : part[-1] + 1], names) for part in columns]
    made: dict[str, Any] = {"steps": [lines[part[-1]].step for part in columns], "each": max(map(len, columns)), "kinds": {}}
    for kind in KINDS:
        rows = _rows([name for name in names if name.endswith(f".{kind}")])
        if not rows:
            continue
        places = {name: n for n, name in enumerate(names)}
        inside = [[places[name] for name in members] for _, members in rows]
        found: dict[str, list[Any]] = {quantity: [] for quantity in (*MERGES, "saturated")}
        for members in inside:
            for column in seen:
                parts = {name: values[members] for name, values in column.items()}
                for quantity, merge in MERGES.items():
                    found[quantity].append(short(float(merge.reduce(parts[quantity])), 4))
                windows = np.nansum(parts["windows"])
                found["saturated"].append(short(float(np.nansum(parts["saturated"]) / windows), 3) if windows > 0 else None)
        told = {name: values for name, values in found.items() if any(value is not None for value in values)}
        made["kinds"][kind] = {"rows": [label for label, _ in rows], **told}
    return made


def _column(lines: Sequence[ScaleLine], names: Sequence[str]) -> dict[str, Array]:
    """What the lines together say of each name; NaN where they say nothing."""
    places = {name: n for n, name in enumerate(names)}
    made = {quantity: np.full(len(names), np.nan) for quantity in QUANTITIES}
    for line in lines:
        where = np.array([places[role] for role in line.roles], np.intp)
        values = {quantity: _floats(getattr(line, quantity)) for quantity in QUANTITIES if getattr(line, quantity) is not None}
        unseen = ~(values["amax"] > 0)  # no window of the tensor has been closed
        values["amax"][unseen] = values["scale"][unseen] = np.nan
        for quantity, one in values.items():
            made[quantity][where] = MERGES.get(quantity, _add)(made[quantity][where], one)
    return made


def _add(one: Array, other: Array) -> Array:
    added: Array = np.where(np.isnan(one), 0, one) + np.where(np.isnan(other), 0, other)
    return added


def _floats(values: Sequence[object]) -> Array:
    try:
        made = np.array(values, np.float64)  # None becomes NaN
        if made.ndim == 1:
            return made
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([np.nan if one is None else one for one in map(number, values)])


def _rows(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """A row per tensor; of more than fit one per layer; of more layers than fit one for some layers that follow each other."""
    rows = [(name.rpartition(".")[0].removeprefix("layers."), [name]) for name in names]
    if len(rows) <= ROWS:
        return rows
    by_layer: dict[str, list[str]] = {}
    for name in names:
        found = re.match(r"layers\.(\d+)\.", name)
        by_layer.setdefault(f"layer {found[1]}" if found else name.rpartition(".")[0], []).append(name)
    rows = list(by_layer.items())
    if len(rows) <= ROWS:
        return rows
    parts = _parts(range(len(rows)), ROWS)
    return [(f"{rows[part[0]][0]} to {rows[part[-1]][0]}", [name for n in part for name in rows[n][1]]) for part in parts]


def _parts(items: Sequence[int], most: int) -> list[list[int]]:
    """The items in at most ``most`` runs that follow each other, as equal as can be."""
    count = min(most, len(items))
    return [list(items[len(items) * n // count : len(items) * (n + 1) // count]) for n in range(count)]


def _order(role: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() and len(part) < 15 else (-1, part) for part in role.split(".")]
