"""Run the step after a checkpoint again and compare it, bit for bit, with what the run recorded when it ran that step.

    python -m tools.replay CHECKPOINT                   on as many ranks as the checkpoint's layout needs, on this machine
    torchrun --nproc-per-node 8 -m tools.replay CHECKPOINT        as ranks that torchrun or srun started
    python -m tools.replay CHECKPOINT --runs 10         ten times from the start: fingerprints and results all equal?
    python -m tools.replay CHECKPOINT --control scale   break the restored state on purpose: has to be noticed (exit code 1)
    python -m tools.replay CHECKPOINT parallel.pp=2     the same step on another layout

Nothing of the run is written. Exit code 0: equal, 1: it differs, or the restore refuses the checkpoint; 2: nothing to compare
with, or it cannot run here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch, determinism_environment
from tools.common import ROOT, add_traceback, json_plain, launch_ranks, run_tool

if TYPE_CHECKING:  # torch reads variables when it is imported: a rank sets them first
    from checkpoint import Checkpoint
    from checkpoint.record import Part, StepRecord
    from qeffect_lm.app.replay import Replayed

RESULT = ".rank{}.json"
CONTROLS = ("scale", "history", "cache", "rng", "dropout", "cursor", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.result is not None:
        return _rank(arguments, os.environ)
    if "RANK" in os.environ or "SLURM_PROCID" in os.environ:
        return run_tool(lambda: _started_by_a_launcher(arguments), arguments.traceback, os_error=2)
    return run_tool(lambda: _run(arguments), arguments.traceback, arguments.json, os_error=2)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.runs < 1:
        raise UsageError(f"--runs {arguments.runs}: at least one")
    if not 0 < arguments.timeout < threading.TIMEOUT_MAX:  # NaN is neither
        raise UsageError(f"--timeout {arguments.timeout:g}: seconds, more than none")
    if arguments.record and (arguments.control or arguments.overrides):
        raise UsageError("--record keeps what a sound resume does: leave --control and overrides out")
    checkpoint, saved = open_both(arguments.checkpoint)
    if saved is None and not arguments.record:
        raise UsageError(missing(checkpoint))
    results = [_launched(arguments, checkpoint, number) for number in range(arguments.runs)]
    return finish(arguments, checkpoint, saved, results)


def open_both(path: Path) -> tuple[Checkpoint, StepRecord | None]:
    """The checkpoint, and the record of the step after it. Raises UsageError where the checkpoint cannot be opened."""
    from checkpoint import CheckpointError, open_checkpoint, resolve
    from checkpoint.record import read_record
    from checkpoint.saved_run import check_saved_run

    try:
        checkpoint = open_checkpoint(resolve(path))
        if "contract" in checkpoint.meta:  # of a training run; what others save has no step after it, which is said later
            check_saved_run(checkpoint)
        record = read_record(checkpoint.path)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    if record is not None and record.save_id != checkpoint.meta.get("save_id"):
        raise UsageError(
            f"the record of the step after {checkpoint.path} was made after another save of that step: remove it "
            f"({checkpoint.path.parent}/replay/{checkpoint.path.name}.json), then --record makes a new one"
        )
    return checkpoint, record


def missing(checkpoint: Checkpoint) -> str:
    """Why there may be no record, and what to do."""
    from checkpoint.layout import checkpoint_dirs
    from checkpoint.record import record_path

    recorded = [path for _, path in checkpoint_dirs(checkpoint.path.resolve().parent) if record_path(path).exists()]
    other = f". {recorded[-1].name} beside it has a record" if recorded else ""
    steps = checkpoint.within("config", "train").get("steps")
    if steps == checkpoint.step:
        end = f"{checkpoint.path} is the end of its run, which has {steps} steps"
        return f"{end}: there is no step after it to run again{other}"
    return (
        f"{checkpoint.path} has no record of step {checkpoint.step + 1}: the run ended or was killed before it had run that "
        f"step, or has checkpoint.record=false. --record makes one from a resume, to compare later ones with{other}"
    )


def _launched(arguments: argparse.Namespace, checkpoint: Checkpoint, number: int) -> dict[str, Any]:
    """Run the step in processes of its own; what rank 0 tells, or the rank that failed first."""
    from qeffect_lm.app.replay import overrides_of

    _ = overrides_of(arguments.control, checkpoint)
    threads = int(checkpoint.within("config", "train").get("threads", 1))
    environ = {**os.environ, **determinism_environment(threads)}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="qeffect-replay-") as folder:
        out = Path(folder) / "result"
        command = [sys.executable, "-P", "-m", "tools.replay", str(checkpoint.path), *arguments.overrides]
        command += ["--result", str(out), *(["--control", arguments.control] if arguments.control else [])]
        world = world_of(checkpoint, arguments.overrides)
        if arguments.runs > 1 and not arguments.json:
            print(f"run {number + 1} of {arguments.runs} ({world} rank{'s' if world > 1 else ''})", flush=True)
        code, output = launch_ranks(command, world, environ).wait(arguments.timeout)
        files = [Path(f"{out}{RESULT.format(rank)}") for rank in range(world)]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
    if code == UsageError.exit_code:
        raise UsageError(_first_error(output))
    if not found:
        raise QEffectError(f"the step could not be run again (exit code {code}):\n{output}")
    return chosen(found)


def world_of(checkpoint: Checkpoint, overrides: Sequence[str]) -> int:
    """Ranks of the layout: the saved one, or what the overrides make of it."""
    from qeffect_lm.app.replay import replay_config

    with tempfile.TemporaryDirectory(prefix="qeffect-replay-") as folder:
        parallel = replay_config(checkpoint, overrides, Path(folder)).parallel
    return parallel.world


def chosen(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several ranks' tales the one that says why: a rank that lost its peer only knows that."""
    refused = [one for one in results if one["refused"] is not None]
    causes = [one for one in refused if not one["refused"].startswith("PeerLostError")]
    cause = (causes or refused or results)[0]
    before: list[Any] = next((one["before"] for one in results if one["before"]), [])
    return {**cause, "before": before}


def _first_error(output: str) -> str:
    lines = output.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith("error: ")), None)
    return "\n".join(lines if begin is None else lines[begin:]).removeprefix("error: ")


# ---- a rank ----------------------------------------------------------------------------------------------------------


def _rank(arguments: argparse.Namespace, environ: MutableMapping[str, str]) -> int:
    """One rank, started by :func:`_launched`; it tells by a file."""
    rank = int(environ.get("RANK", 0))

    def body() -> int:
        mine = _replayed(arguments, environ)
        if mine is not None:
            Path(f"{arguments.result}{RESULT.format(rank)}").write_text(json.dumps(mine))
        return 1 if mine is not None and mine["refused"] is not None else 0

    code = run_tool(body, arguments.traceback, os_error=2)
    if code:  # background threads of a broken group must not keep the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _started_by_a_launcher(arguments: argparse.Namespace) -> int:
    """A rank that torchrun or srun started: all compare nothing but rank 0, and all end with its exit code."""
    if arguments.runs != 1 or arguments.record:
        raise UsageError("--runs and --record start ranks of their own: run `python -m tools.replay` without torchrun or srun")
    mine = _replayed(arguments, os.environ)
    code, leads = 0, int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == 0
    if mine is not None and leads:
        checkpoint, saved = open_both(arguments.checkpoint)
        if saved is None:
            raise UsageError(missing(checkpoint))
        code = finish(arguments, checkpoint, saved, [mine])
    return 1 if mine is not None and mine["refused"] is not None else code


def _replayed(arguments: argparse.Namespace, environ: MutableMapping[str, str]) -> dict[str, Any] | None:
    """Join the other ranks, run the step, and tell what it did in plain data."""
    apply_before_torch(environ, threads=int(environ.get("OMP_NUM_THREADS") or 1))
    import torch
    import torch.distributed as dist

    from checkpoint import open_checkpoint, resolve
    from qeffect_lm.app.device import device_of
    from qeffect_lm.app.replay import replay, replay_config
    from qeffect_lm.runtime.launch import LaunchEnv, init_process_group

    checkpoint = open_checkpoint(resolve(arguments.checkpoint))
    with tempfile.TemporaryDirectory(prefix="qeffect-replay-") as folder:
        config = replay_config(checkpoint, arguments.overrides, Path(folder))
    apply_before_torch(environ, threads=config.train.threads)
    apply_to_torch(threads=config.train.threads)
    env = LaunchEnv.from_mapping(environ)
    device = device_of(config, env.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if config.launch.backend == "gloo" or device.type == "cpu" else "cpu:gloo,cuda:nccl"
    joined = init_process_group(env, backend, config.launch.timeout_seconds)
    done = replay(checkpoint, env, arguments.overrides, arguments.control)
    if joined and (done is None or done.refused is None):
        dist.destroy_process_group()
    return None if done is None else told(done)


def told(done: Replayed) -> dict[str, Any]:
    """A replay as plain data, for another process."""
    from dataclasses import asdict

    return {
        "changed": list(done.changed),
        "refused": None if done.refused is None else f"{type(done.refused).__name__}: {done.refused}",
        "before": [asdict(part) for part in done.before],
        "record": None if done.record is None else asdict(done.record),
        "notes": list(done.notes),
    }


# ---- the verdict -----------------------------------------------------------------------------------------------------


def finish(
    arguments: argparse.Namespace, checkpoint: Checkpoint, saved: StepRecord | None, results: Sequence[Mapping[str, Any]]
) -> int:
    """Compare, write the record where that was asked for, print; returns the exit code."""
    from checkpoint.record import StepRecord, record_path, write_record

    made = next((StepRecord(**one["record"]) for one in results if one["record"] is not None), None)
    if saved is None and made is not None:
        write_record(checkpoint.path.parent, made)
    verdicts = [verdict(arguments, saved or made, one) for one in results]
    prints = {(one["record"]["plan"], *one["record"]["graphs"]) for one in results if one["record"] is not None}
    report = {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.step + 1,
        "recorded_by": None if saved is None else saved.made_by,
        "recorded_now": str(record_path(checkpoint.path)) if saved is None and made is not None else None,
        "control": arguments.control,
        "runs": verdicts,
        "fingerprints": sorted(map(list, prints)),
        "equal": all(one["first"] is None for one in verdicts) and len(prints) == 1,
    }
    print(json.dumps(json_plain(report), indent=1) if arguments.json else text(report, saved))
    return 0 if report["equal"] else 1


def verdict(arguments: argparse.Namespace, saved: StepRecord | None, one: Mapping[str, Any]) -> dict[str, Any]:
    """One run: all parts, and the first of them that differs, by name."""
    from checkpoint.record import Part, StepRecord, compare_records

    before = [Part(**{**part, "different": tuple(part["different"])}) for part in one["before"]]
    after: list[Part] = []
    loss = None
    if one["record"] is not None and saved is not None:
        now = StepRecord(**one["record"])
        after, loss = compare_records(saved, now, () if arguments.control else one["changed"]), now.loss()
    parts = [*before, *after]
    order = [part for name in ("plan", "graphs") for part in parts if part.name == name]
    order += [part for part in parts if part not in order]
    first = next((f"{part.name}: {part.different[0]}" for part in order if not part.equal), None)
    if first is None and one["refused"] is not None:
        first = f"refused: {one['refused']}"
    rows = [{"name": p.name, "compared": p.compared, "different": list(p.different), "why_not": p.why_not} for p in order]
    return {"first": first, "refused": one["refused"], "loss": loss, "parts": rows, "notes": one["notes"]}


def text(report: Mapping[str, Any], saved: StepRecord | None) -> str:
    """For people: the parts of the first run, or of the first that differs, and the verdict."""
    from checkpoint.record import Part, library_changes

    runs = report["runs"]
    shown = next((run for run in runs if run["first"] is not None), runs[0])
    by = "made now" if saved is None else f"recorded by {'the run' if saved.made_by == 'run' else 'a replay'}"
    lines = [f"step {report['step']:,} after {report['checkpoint']}, {by}"]
    if saved is not None:
        lines += [f"  since then: {change}" for change in library_changes(saved)]
        then = f"  loss {saved.loss():.17g}"
        lines.append(then if shown["loss"] in (None, saved.loss()) else f"{then} recorded, {shown['loss']:.17g} now")
    lines += [f"  {note}" for note in shown["notes"]]
    for row in shown["parts"]:
        part = Part(row["name"], row["compared"], tuple(row["different"]), row["why_not"])
        lines.append(f"  {part.name:17} {part}")
    if shown["refused"]:
        lines.append(f"  refused           {shown['refused']}")
    if report["recorded_now"]:
        lines.append(f"  kept as {report['recorded_now']}")
    if len(runs) > 1:
        count = len(report["fingerprints"])
        lines.append(f"{len(runs)} runs: {count} fingerprint{'s' if count != 1 else ''} of plan and graphs")
    different = sum(run["first"] is not None for run in runs)
    if report["equal"]:
        lines.append("equal, bit for bit")
    else:
        lines.append(f"DIFFERENT{f' in {different} of {len(runs)} runs' if len(runs) > 1 else ''}; first {shown['first']}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a step_… folder, the one above it, or a run's")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="run it with other settings")
    parser.add_argument("--runs", metavar="N", type=int, default=1, help="repeat in new processes (default: %(default)s)")
    parser.add_argument("--control", metavar="NAME", choices=CONTROLS, help=f"break the restore: {', '.join(CONTROLS)}")
    parser.add_argument("--record", action="store_true", help="where there is no record, keep this run's as one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=3600.0, help="per run (default: %(default)g)")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    add_traceback(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
