"""The part of ``tools.plan`` that checks plans: ``--check``, ``--plan``, ``--effects`` and ``--mutants``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pipeline.effects import program
from pipeline.mutate import Score, score
from pipeline.plan import Plan
from pipeline.program import Program
from pipeline.prove import STEPS, prove
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError


def load(path: Path) -> Plan | Program:
    """A stored plan, a plan with its effects, or the plan of a checkpoint: its manifest, or a folder that holds checkpoints.

    Raises:
        UsageError: no such file, or none of these.
        PlanError: a stored plan that breaks a rule; names rank, position and action.
    """
    folder = path.is_dir()
    if folder:
        path = _checkpoint(path) / "manifest.json"
    try:
        text = _manifest(path) if folder else path.read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not a text'}") from None
    except (ValueError, RecursionError) as error:  # JSON's own, a number of thousands of digits, thousands of brackets
        raise UsageError(f"{path} is no plan: not JSON ({error})") from None
    meta = document.get("meta") if isinstance(document, dict) else None
    if isinstance(meta, dict) and isinstance(meta.get("plan"), str):
        text, document = meta["plan"], {}
    try:
        return Program.from_json(text) if isinstance(document, dict) and "effects" in document else Plan.from_json(text)
    except PlanError as error:
        if "action" in error.place:
            raise
        raise UsageError(f"{path} is no plan: {error}") from None


def _checkpoint(folder: Path) -> Path:
    """The folder itself, or like the other tools the newest checkpoint of a run or of a folder of checkpoints."""
    if (folder / "manifest.json").exists():
        return folder
    from checkpoint import CheckpointError, resolve  # imports torch, which nothing else here needs

    try:
        return resolve(folder)
    except CheckpointError as error:
        raise UsageError(str(error)) from None


def _manifest(path: Path) -> str:
    """A checkpoint may come from anywhere: no link out of its folder is followed, and a pipe in it is not waited for."""
    from checkpoint.digests import read_whole
    from checkpoint.manifest import MANIFEST_MOST

    return read_whole(path, MANIFEST_MOST).decode()


def check(subject: Plan | Program, *, as_json: bool, mutants: int | None, effects: Path | None) -> int:
    """Prove a plan, print what was proved, and if asked test the check itself on ``mutants`` (0: all) broken ones.

    Returns: 0, or 1 where the plan is rejected or a mutant shows that the check missed something.
    """
    begin = time.perf_counter()
    try:
        if effects is not None:
            _write(effects, program(subject) if isinstance(subject, Plan) else subject)
        proof = prove(subject)
    except PlanError as error:
        return rejected(error, as_json)
    seconds = time.perf_counter() - begin
    tested = None if mutants is None else score(subject, mutants or None)
    missed = tested is not None and bool(tested.wrong_survivors or tested.unplaced)
    if as_json:
        report: dict[str, Any] = {
            **_about(subject),
            "valid": True,
            "operations": proof.operations,
            "seconds": round(seconds, 3),
            "proved": {name: count for name, count, _ in proof.properties},
        }
        if tested is not None:
            report["mutants"] = _counts(tested)
        print(json.dumps(report))
        return int(missed)
    print(f"{title(subject)}: proved for every interleaving, {proof.operations} operations in {STEPS} steps, {seconds:.2f} s")
    print("\n".join(f"  {line}" for line in proof.lines()))
    if tested is not None:
        print("\n".join(["", *tested.lines()]))
        for line in tested.wrong_survivors + tested.unplaced:
            print(f"MISSED {line}")
    return int(missed)


def rejected(error: PlanError, as_json: bool) -> int:
    """Say where and why a plan is rejected; returns exit code 1."""
    place = {name: error.place[name] for name in ("rank", "position", "action") if name in error.place}
    reason = str(error).rpartition(" [rank=")[0] or str(error)
    if as_json:
        print(json.dumps({"valid": False, **place, "reason": reason}))
    else:
        where = ", ".join(f"{name} {value}" for name, value in place.items())
        print(f"rejected at {where}: {reason}" if where else f"rejected: {reason}")
    return 1


def title(subject: Plan | Program) -> str:
    about = _about(subject)
    own = " with effects of its own" if isinstance(subject, Program) else ""
    joined = f", coalesce_w {subject.coalesce_w}" if subject.coalesce_w > 1 else ""
    size = f"{about['stages']} stages, {about['microbatches']} microbatches"
    return f"{about['schedule']}{own}: {size}, window {about['window']}{joined}"


def _about(subject: Plan | Program) -> dict[str, Any]:
    return {
        "schedule": subject.schedule,
        "stages": subject.placement.num_ranks,
        "microbatches": subject.microbatches,
        "window": subject.window,
        **({"coalesce_w": subject.coalesce_w} if subject.coalesce_w > 1 else {}),
    }


def _counts(tested: Score) -> dict[str, Any]:
    return {
        "total": tested.total,
        "rejected": tested.rejected,
        "rejected_wrong": tested.wrong.total(),
        "rejected_by_rule": tested.policy.total(),
        "rejected_without_program": tested.unexpressed.total(),
        "rejected_unknown": tested.unknown.total(),
        "survivors_equal": tested.equal.total(),
        "survivors_wrong": tested.wrong_survivors,
        "rejected_without_place": tested.unplaced,
    }


def _write(path: Path, subject: Program) -> None:
    try:
        path.write_text(subject.to_json(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
