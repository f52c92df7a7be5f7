"""Which checkpoint a run goes on from, what may have changed since, and the restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint, CheckpointError, find_resumable, open_checkpoint, resolve, scan
from checkpoint.comm import Communicator
from checkpoint.resume import GraphsDifferError, restore
from pipeline.plan import Plan
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.config import Config, config_diff_on_resume
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.data.loader import StepLoader
from qeffect_lm.errors import UsageError
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.launch import LaunchEnv


def find_checkpoint(config: Config, comm: Communicator) -> Checkpoint | None:
    """The checkpoint to resume from; rank 0 decides for all."""
    fault: Exception | None = None
    path: Path | None = None
    if comm.rank == 0:
        try:
            path = _choose(config)
        except Exception as error:  # told to all ranks, then raised on all
            fault = error
    path, fault = comm.broadcast((path, fault))
    if fault is not None:
        raise fault
    return None if path is None else open_checkpoint(path)


def _choose(config: Config) -> Path | None:
    folder = config.checkpoint_dir()
    resume = config.checkpoint.resume
    if resume not in ("auto", "never"):
        return _choose_named(config, Path(resume))
    found = find_resumable(folder)
    if resume == "never" and found is not None:
        raise UsageError(
            f"checkpoint.resume=never, but {folder} holds {found.name}: choose another run.dir, remove it, or resume"
        )
    return found


def _choose_named(config: Config, path: Path) -> Path:
    """``checkpoint.resume=PATH``; once the branch it begins has checkpoints of its own, the newest of those."""
    if not path.exists():
        raise UsageError(f"checkpoint.resume={path} does not exist: give a checkpoint's folder, or auto")
    chosen = resolve(path)
    step = open_checkpoint(chosen).step
    later = [found for found in scan(config.checkpoint_dir()) if found.step > step]
    if not later or config.train.steps <= step:
        return chosen
    newest = find_resumable(config.checkpoint_dir())
    if newest is not None and open_checkpoint(newest).meta.get("branch") == str(chosen.resolve()):
        return newest
    raise UsageError(
        f"checkpoint.resume asks for step {step}, but {config.checkpoint_dir()} holds {later[-1].path.name} already: set "
        "another run.dir (or checkpoint.dir) for the branch, or move the later checkpoints away"
    )


def branch_of(config: Config, checkpoint: Checkpoint | None) -> str | None:
    """The checkpoint that this run's line began from by ``checkpoint.resume=PATH``; kept over restarts."""
    if config.checkpoint.resume not in ("auto", "never"):
        return str(resolve(Path(config.checkpoint.resume)).resolve())
    return None if checkpoint is None else checkpoint.meta.get("branch")


def restore_run(
    checkpoint: Checkpoint,
    assembly: Assembly,
    loader: StepLoader,
    comm: Communicator,
    mesh: Mesh,
    changed: list[str],
    say: Callable[[str], None],
) -> str | None:
    """Restore; a checkpoint that cannot be read or does not fit is named together with the one before it.

    Returns: what to tell about graphs that were not compared with the saved ones, or differ and were accepted; or None.
    """
    accept = assembly.config.checkpoint.accept_new_graphs
    cursor = _Cursor(loader, assembly.config, say)
    try:
        return restore(checkpoint, assembly, cursor, comm, mesh.coords, dict(mesh.sizes), changed, accept, say)
    except GraphsDifferError:  # nothing is wrong with the checkpoint
        raise
    except (CheckpointError, ResumeError) as error:
        earlier = [found.path for found in scan(checkpoint.path.parent) if found.step < checkpoint.step and not found.fault]
        after = f"the same command then resumes from {earlier[-1].name}" if earlier else "there is no earlier one"
        error.args = (f"{error}. If it is damaged, move {checkpoint.path} away: {after}",)
        raise


@dataclass
class _Cursor:
    """The loader's cursor, with what the configuration lets change."""

    loader: StepLoader
    config: Config
    say: Callable[[str], None]

    def state(self) -> dict[str, Any]:
        return self.loader.state()

    def load_state(self, state: dict[str, Any]) -> None:
        data = self.config.data
        changed = self.loader.load_state(state, accept_blend=data.accept_blend, accept_batch=data.accept_batch)
        if self.loader.shape.dp_rank == 0:
            for what in changed:
                self.say(f"recorded in the data cursor: {what}")


def check_config(config: Config, checkpoint: Checkpoint, env: LaunchEnv, say: Callable[[str], None]) -> list[str]:
    """Print what changed since the save; refuse what may not. Returns the keys whose change may change graphs."""
    changes = config_diff_on_resume(checkpoint.meta["config"], config)
    refused = [change for change in changes if change.severity == "refuse"]
    if refused:
        lines = "\n".join(f"  {change}" for change in refused)
        raise UsageError(
            f"{checkpoint.path} belongs to another model, recipe or data order; these keys may not change on resume:\n{lines}\n"
            "set them back, or start a new run in another run.dir"
        )
    before, now = _step_samples(checkpoint.meta["config"]), _step_samples(config.to_dict())
    another = (
        f"a step takes {now} sequences now, {before} before: the same batch needs parallel.dp x "
        f"parallel.ep x pipeline.microbatches = {before // config.data.microbatch_size}"
    )
    if before != now and not config.data.accept_batch:
        raise UsageError(f"{another}, or set data.accept_batch=true to go on with another one")
    if env.rank == 0:
        for change in changes:
            say(f"changed since the checkpoint: {change}" + (" (may change results)" if change.severity == "warn" else ""))
        if before != now:
            say(f"WARNING: {another}")
    return [change.key for change in changes if change.severity == "warn"]


def _step_samples(config: Mapping[str, Any]) -> int:
    """Sequences of one optimizer step, of a configuration as plain data."""
    replicas = config["parallel"]["dp"] * config["parallel"].get("ep", 1)
    return int(replicas * config["pipeline"]["microbatches"] * config["data"]["microbatch_size"])


def plan_of(checkpoint: Checkpoint | None, mesh: Mesh, config: Config) -> Plan | None:
    """The saved plan where pipeline ranks and pipeline section are unchanged, ``auto``'s too; otherwise None."""
    if checkpoint is None or checkpoint.meta.get("layout", {}).get("pp") != mesh.size("pp"):
        return None
    changes = config_diff_on_resume(checkpoint.meta["config"], config)
    if any(change.key.startswith("pipeline.") for change in changes):
        return None
    return Plan.from_json(checkpoint.meta["plan"])
