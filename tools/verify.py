"""Check checkpoints: every byte, every tensor's coverage, and the model that the saved configuration describes.

    python -m tools.verify DIR [--all] [--json] [--workers N]

DIR is a checkpoint (``step_…``), the folder that holds them, or a run's folder. Of a folder the newest complete checkpoint is
read, the one that a resume would take; ``--all`` reads every one. What an interrupted save left is listed and does no harm. A
checkpoint that ``latest`` names was complete once: when files of it are missing or have other sizes, it is damaged.

Exit code 0: sound; 1: damaged, with file and tensor; 2: no checkpoint there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from checkpoint import CheckpointError, Found, Problem, open_checkpoint, scan
from checkpoint.layout import MANIFEST, step_of
from checkpoint.manifest import read_manifest
from checkpoint.retention import ATTEMPTS, latest_name, look_at, root_of, temporaries
from checkpoint.verify import total_bytes, verify
from qeffect_lm.errors import UsageError
from tools.common import add_traceback, run_tool


@dataclass(frozen=True)
class Verdict:
    """What was found of one checkpoint."""

    path: str
    step: int
    tensors: int
    files: int
    nbytes: int
    seconds: float
    problems: tuple[Problem, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    arguments = _parser().parse_args(argv)
    return run_tool(lambda: _run(arguments), arguments.traceback, arguments.json, os_error=2)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.workers is not None and arguments.workers < 1:
        raise UsageError(f"--workers {arguments.workers}: at least one")
    folder = arguments.dir if arguments.dir.name not in ("", "..") else arguments.dir.resolve()
    for _ in range(ATTEMPTS):
        found, root = _look(folder)
        latest = None if root is None else latest_name(root)
        complete = [one for one in found if one.fault is None]
        chosen = _chosen(found, latest, arguments.all, named=root is None)
        verdicts = [verdict for one in chosen if (verdict := check(one, arguments.workers)) is not None]
        if verdicts or not chosen:
            break  # else they went while they were read: a run that goes on removes its old ones
    report = {
        "folder": str(folder),
        "newest_complete": str(complete[-1].path) if complete else None,
        "latest": latest,
        "incomplete": [{"path": str(one.path), "fault": one.fault} for one in found if one.fault is not None],
        "left_by_interrupted_saves": [] if root is None else [str(path) for path in temporaries(root)],
        "checkpoints": [asdict(verdict) for verdict in verdicts],
    }
    print(json.dumps(report, indent=1) if arguments.json else text(report, verdicts, found))
    sound = bool(verdicts) and not any(verdict.problems for verdict in verdicts)
    unknown = any(one.unreadable and one.step > verdicts[-1].step for one in found) if verdicts else False
    return 0 if sound and not unknown else 1


def _look(folder: Path) -> tuple[list[Found], Path | None]:
    """The checkpoints of a folder, and the folder that holds them (None: a checkpoint itself was named)."""
    try:
        if (folder / MANIFEST).exists() or step_of(folder.name) is not None:
            found, root = [_one(folder)], None
        else:
            root = root_of(folder)
            found = scan(root)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    if not found or (root is None and not folder.is_dir()):
        raise UsageError(f"{folder} is no checkpoint and holds none: give a step_… folder, the one above it, or a run's")
    return found, root


def _one(path: Path) -> Found:
    """A checkpoint that was named itself; its manifest may be what is damaged."""
    matching = [found for found in scan(path.parent) if found.path == path]
    if matching:
        return matching[0]
    return look_at(-1, path)


def _chosen(found: Sequence[Found], latest: str | None, everything: bool, named: bool) -> list[Found]:
    """What is read: the newest complete one or every one, and what was complete once and is not any more: ``latest`` and a
    manifest are written when all else is there."""

    def was_complete(one: Found) -> bool:
        return one.path.name == latest or ((everything or named) and _sealed(one.path))

    complete = [one for one in found if one.fault is None]
    wanted = complete if everything else complete[-1:]
    return [one for one in found if one in wanted or (one.fault is not None and not one.unreadable and was_complete(one))]


def _sealed(path: Path) -> bool:
    """Whether the folder holds a sound manifest, and that of its own step."""
    try:
        return step_of(path.name) in (None, read_manifest(path).step)
    except CheckpointError:
        return False


def check(one: Found, workers: int | None) -> Verdict | None:
    """Read everything of one checkpoint; None where it was removed meanwhile."""
    began = time.perf_counter()
    try:
        verdict = _checked(one.path, workers)
    except CheckpointError as error:  # its manifest
        seconds = time.perf_counter() - began
        verdict = Verdict(str(one.path), one.step, 0, 0, 0, seconds, (Problem(MANIFEST, None, str(error)),))
    if one.fault is not None and not verdict.problems:
        verdict = replace(verdict, problems=(Problem(MANIFEST, None, one.fault),))
    return None if verdict.problems and not one.path.is_dir() else verdict


def _checked(path: Path, workers: int | None) -> Verdict:
    from qeffect_lm.app.shapes import config_problems  # the models, which a checkpoint without a configuration does not need

    began = time.perf_counter()
    checkpoint = open_checkpoint(path)
    problems = (*verify(checkpoint, workers), *config_problems(checkpoint))
    manifest = checkpoint.manifest
    seconds = time.perf_counter() - began
    sizes = len(manifest.tensors), len(manifest.files), total_bytes([checkpoint])
    return Verdict(str(path), checkpoint.step, *sizes, seconds, problems)


def text(report: dict[str, Any], verdicts: Sequence[Verdict], found: Sequence[Found]) -> str:
    """For people: a line for each checkpoint, then what is wrong."""
    lines = []
    by_path = {verdict.path: verdict for verdict in verdicts}
    for one in found:
        verdict = by_path.get(str(one.path))
        if verdict is None and one.fault is not None:
            lines.append(f"{one.path.name}  {'UNREADABLE' if one.unreadable else 'INCOMPLETE'}: {one.fault}")
        elif verdict is None and not one.path.is_dir():
            lines.append(f"{one.path.name}  was removed meanwhile")
        elif verdict is None:
            lines.append(f"{one.path.name}  complete (not read; --all reads it)")
        else:
            lines.append(f"{one.path.name}  {'DAMAGED' if verdict.problems else 'sound'}: {_what(verdict)}")
            lines += [f"  {problem}" for problem in verdict.problems]
    left = [Path(path).name for path in report["left_by_interrupted_saves"]]
    lines += [f"{name}  left by an interrupted save or removal; no checkpoint" for name in left]
    newest, latest = report["newest_complete"], report["latest"]
    lines.append(f"newest complete: {Path(newest).name if newest else 'none'}" + (f"; latest names {latest}" if latest else ""))
    if latest and latest not in {one.path.name for one in found}:
        lines[-1] += ", which is not there"
    elif latest and any(Path(verdict.path).name == latest and verdict.problems for verdict in verdicts):
        lines[-1] += ", which is damaged"
    return "\n".join(lines)


def _what(verdict: Verdict) -> str:
    if not verdict.files:
        return "its manifest cannot be used"
    gb, seconds = verdict.nbytes / 1e9, max(verdict.seconds, 1e-9)
    what = f"step {verdict.step}, {verdict.tensors:,} tensors in {verdict.files} files"
    return f"{what}, {gb:.3f} GB read in {seconds:.1f} s ({gb / seconds:.2f} GB/s)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.verify",
        description="Check checkpoints: every byte, coverage, shapes against the saved configuration. "
        "Exit code 0: sound, 1: damaged, 2: no checkpoint.",
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="a step_… folder, the folder above it, or a run's folder")
    parser.add_argument("--all", action="store_true", help="read every checkpoint, not just the newest complete one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--workers", metavar="N", type=int, help="threads (default: one for each CPU)")
    add_traceback(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
