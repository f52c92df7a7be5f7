"""Compare two checkpoints tensor by tensor, bit by bit.

    python -m tools.diff A B [--json] [--meta] [--key data.cursor]

A and B are ``step_…`` directories, or folders above them (then the one named by ``latest``). Exit code 0:
equal, 1: different, 2: one of them cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint, CheckpointError, Comparison, compare, open_checkpoint, resolve
from checkpoint.compare import has_meta
from qeffect_lm.errors import UsageError, shown
from tools.common import add_traceback, json_plain, run_tool


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = _parser().parse_args(argv)
    return run_tool(lambda: _run(args), args.traceback, args.json, os_error=2)


def _run(args: argparse.Namespace) -> int:
    try:
        a, b = (open_checkpoint(resolve(path)) for path in (args.a, args.b))
        keys = args.key if args.key and not args.meta else None if args.meta else ()
        for key in keys or ():
            if not has_meta(a, key) and not has_meta(b, key):
                raise UsageError(f"--key {key}: neither {a.path} nor {b.path} has meta data of that name")
        result = _without(compare(a, b, meta_keys=keys), tuple(args.ignore))
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    if args.ignore and not (result.equal or result.different or result.only_in_a or result.only_in_b or keys != ()):
        raise UsageError(f"--ignore {' '.join(map(repr, args.ignore))} leaves no tensor to compare")
    if args.json:
        print(json.dumps(json_plain({"a": str(a.path), "b": str(b.path), **_summary(result)}), indent=1))
    else:
        print(report(a, b, result))
    return 0 if result.same else 1


def _without(result: Comparison, prefixes: tuple[str, ...]) -> Comparison:
    """The comparison without the tensors of ignored names."""
    if not prefixes:
        return result
    return replace(
        result,
        equal=tuple(name for name in result.equal if not name.startswith(prefixes)),
        different=tuple(item for item in result.different if not item.name.startswith(prefixes)),
        only_in_a=tuple(name for name in result.only_in_a if not name.startswith(prefixes)),
        only_in_b=tuple(name for name in result.only_in_b if not name.startswith(prefixes)),
    )


def report(a: Checkpoint, b: Checkpoint, result: Comparison) -> str:
    """The comparison as text: a line of counts, the first difference by name, and a table of all of them."""
    lines = [f"A {a.path} (step {a.step})", f"B {b.path} (step {b.step})"]
    if result.same:
        return "\n".join([*lines, f"{len(result.equal)} tensors bitwise equal"])
    lines.append(
        f"{len(result.equal)} tensors bitwise equal, {len(result.different)} differ, {len(result.only_in_a)} "
        f"only in A, {len(result.only_in_b)} only in B, {len(result.meta)} meta values differ"
    )
    if result.first_name is not None:
        lines.append(f"first differing tensor: {result.first_name}")
    if result.different:
        lines += ["", *_table(_rows(result))]
    lines += [f"only in A: {name}" for name in result.only_in_a]
    lines += [f"only in B: {name}" for name in result.only_in_b]
    lines += [f"meta {shown(item.key)}: {item.a!r} and {item.b!r}" for item in result.meta]
    return "\n".join(lines)


def _rows(result: Comparison) -> list[list[str]]:
    rows = [["tensor", "role", "dtype", "shape", "first index", "A", "B", "elements", "bytes", "max |A-B|"]]
    for item in result.different:
        about = [item.name, item.role, item.dtype, str(list(item.shape))]
        if item.first is None or item.values is None:
            rows.append([*about, item.reason])
            continue
        values = [f"{value:.9g}" for value in item.values]
        rows.append(
            [
                *about,
                str(list(item.first)),
                *values,
                str(item.elements),
                str(item.nbytes),
                f"{item.max_abs:.6g}",
            ]
        )
    return rows


def _table(rows: list[list[str]]) -> list[str]:
    full = [row for row in rows if len(row) == len(rows[0])]  # a short row ends in free text
    widths = [max(len(row[i]) for row in full) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def _summary(result: Comparison) -> dict[str, Any]:
    return {"same": result.same, "first": result.first_name, **asdict(result)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.diff",
        description="Compare two checkpoints bit by bit. Exit code 0: equal, 1: different, 2: unreadable.",
    )
    parser.add_argument(
        "a", metavar="A", type=Path, help="a step_… directory, or the folder that holds `latest`"
    )
    parser.add_argument("b", metavar="B", type=Path, help="the other one")
    parser.add_argument("--json", action="store_true", help="print the whole comparison as JSON")
    parser.add_argument("--meta", action="store_true", help="compare all meta values too, the step included")
    parser.add_argument(
        "--key",
        action="append",
        metavar="KEY",
        help="compare the meta values under this dotted key (repeatable)",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PREFIX",
        help="leave out tensors whose names begin so (repeatable); `--ignore rng/` compares across layouts, whose ranks differ",
    )
    add_traceback(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
