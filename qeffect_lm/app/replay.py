"""One step again: restore a checkpoint as a resume does, run the step after it, and say what it did.

Nothing of the run is written. A *control* breaks the restored state on purpose, after all of the restore's own checks; what
compares has to notice it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from checkpoint import Checkpoint
from checkpoint.record import Part, StepRecord, differing, flatten
from checkpoint.resume import contract_meta, is_saved, layout_of, saved_state
from checkpoint.saved_run import check_saved_run
from qeffect_lm.app import recording
from qeffect_lm.app.run import Run, build, join
from qeffect_lm.app.shapes import saved_config
from qeffect_lm.config import Config, config_diff_on_resume, load_config
from qeffect_lm.config_yaml import dump_yaml
from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.errors import QEffectError, UsageError
from qeffect_lm.runtime.launch import LaunchEnv, check_world

OWN = re.compile(r"changed since the checkpoint: (run\.dir|checkpoint\.|contract\.trace_file)")  # our own doing
PLAN_OF_CONTROL = {"gpipe": "1f1b"}  # any other schedule becomes gpipe


@dataclass(frozen=True)
class Replayed:
    """What a rank knows after a replay.

    Attributes:
        changed: configuration keys that are not the saved ones.
        refused: why the restore did not let the step begin, or why the step itself ended; None where it ran.
        before: state, versions and cursor just before the step, compared with the checkpoint.
        record: of the step; None where it was refused.
        notes: what was said meanwhile.
    """

    changed: tuple[str, ...]
    refused: QEffectError | None
    before: tuple[Part, ...]
    record: StepRecord | None
    notes: tuple[str, ...]


def replay_config(checkpoint: Checkpoint, overrides: Sequence[str], scratch: Path) -> Config:
    """The saved configuration with ``overrides``; whatever a run writes would go to ``scratch``.

    Raises:
        UsageError: it is no configuration of this version, or no training run saved the checkpoint.
    """
    if not isinstance(checkpoint.meta.get("config"), dict) or "contract" not in checkpoint.meta:
        raise UsageError(f"{checkpoint.path} was not saved by a training run: there is no step after it to run")
    check_saved_run(checkpoint)
    named = [text.partition("=")[2] for text in overrides if text.startswith("model.family=")]
    saved = saved_config(checkpoint, *named[-1:])
    sections = {**saved, "contract": {**saved.get("contract", {}), "trace_file": None}}
    sections["run"] = {**saved["run"], "dir": str(scratch)}
    sections["checkpoint"] = {**saved.get("checkpoint", {}), "dir": None, "resume": "auto", "accept_new_graphs": True}
    file = scratch / "config.yaml"
    file.write_text(dump_yaml(sections))
    return load_config(file, overrides)


def replay(
    checkpoint: Checkpoint, env: LaunchEnv, overrides: Sequence[str] = (), control: str | None = None
) -> Replayed | None:
    """Run the step after ``checkpoint``; what happened on rank 0, else None, but a rank whose step ended by an error tells it.
    Collective over the ranks of ``env``, whose process group is there already.

    Raises:
        UsageError: the step cannot be run here: no such data, no such device, no step left.
    """
    with TemporaryDirectory(prefix="qeffect-replay-") as scratch:
        config = replay_config(checkpoint, [*overrides, *overrides_of(control, checkpoint)], Path(scratch))
        check_world(config.parallel, env.world)
        if checkpoint.step >= config.train.steps:
            raise UsageError(
                f"{checkpoint.path} is the end of its run, which has {config.train.steps} steps: there is no step after it"
            )
        return _step(checkpoint, config, env, control)


def _step(checkpoint: Checkpoint, config: Config, env: LaunchEnv, control: str | None) -> Replayed | None:
    said: list[str] = []
    changes = config_diff_on_resume(checkpoint.meta["config"], config)
    changed = tuple(change.key for change in changes if change.severity != "free")
    mesh, comm = join(config, env)
    before: tuple[Part, ...] = ()
    run: Run | None = None
    try:
        run = build(config, env, mesh, comm, checkpoint, lambda line: None if OWN.search(line) else said.append(line))
        if control is not None:
            CONTROLS[control](run)
        before, small = _before(run, checkpoint), recording.small_state(run.assembly, mesh, comm)
        batch = run.next_batch()
        result = run.assembly.engine.step(run.start + (control == "dropout"), batch)
        record = recording.measure(
            run.assembly,
            run.loader,
            mesh,
            comm,
            step=run.start + 1,
            tokens=run.tokens + batch.tokens,
            batch=batch,
            result=result,
            save_id=str(checkpoint.meta.get("save_id", "")),
            before=small,
            made_by="replay",
        )
    except UsageError:
        raise
    except QEffectError as error:
        return Replayed(changed, error, before, None, tuple(said))
    finally:
        if run is not None:
            run.assembly.release()
    return None if record is None else Replayed(changed, None, before, record, tuple(said))


def _before(run: Run, checkpoint: Checkpoint) -> tuple[Part, ...]:
    """What is in memory now against what was saved, of all ranks; on rank 0, elsewhere nothing."""
    same_layout = layout_of(checkpoint) == run.layout()
    items = saved_state(run.assembly, run.mesh.coords) if same_layout else run.assembly.logical_tensors()
    odd = [item.name for item in items if item.name in checkpoint.manifest.tensors and not is_saved(checkpoint, item)]
    gathered = run.comm.gather((odd, {item.name for item in items}))
    contract = contract_meta(run.assembly, run.comm)
    if gathered is None or contract is None:
        return ()
    names = set().union(*(rank[1] for rank in gathered))
    then, now = flatten(checkpoint.meta["contract"]), flatten(contract["contract"])
    cursor = checkpoint.meta["data"], run.loader.state()
    return (
        Part("restored state", len(names), tuple(sorted({name for rank in gathered for name in rank[0]}))),
        Part("restored counters", len(then.keys() | now.keys()), differing(then, now)),
        Part("restored cursor", len(cursor[0]), differing(*cursor)),
    )


# ---- controls --------------------------------------------------------------------------------------------------------


def overrides_of(control: str | None, checkpoint: Checkpoint) -> list[str]:
    """What a control changes in the configuration."""
    if control is None:
        return []
    if control not in CONTROLS:
        raise UsageError(f"--control {control}: there are {', '.join(CONTROLS)}")
    if control != "plan":
        return []
    other = PLAN_OF_CONTROL.get(checkpoint.meta["config"]["pipeline"]["schedule"], "gpipe")
    return [f"pipeline.schedule={other}", "pipeline.w_delay=0", "pipeline.chunks=null", "pipeline.stage_layers=null"]


def _scale(run: Run) -> None:
    """The first scale of every rank, one ulp up."""
    scale = _roles(run).scale[0]
    scale.copy_(torch.nextafter(scale, torch.full_like(scale, torch.inf)))


def _history(run: Run) -> None:
    """The first history of every rank in which that changes something, shifted by one window."""
    for history in _roles(run).history:
        if not torch.equal(history, history.roll(1)):
            history.copy_(history.roll(1))
            return
    raise UsageError("--control history: every history holds one amax in all its windows, so a shift would change nothing")


def _roles(run: Run) -> ScaleTimeline:
    timeline = run.assembly.timeline
    if not timeline.roles:
        raise UsageError("the checkpoint has no delayed scaling: there is no scale and no history to break")
    return timeline


def _cache(run: Run) -> None:
    """The first cached weight of every rank is one version old: its parameter moved on without it."""
    names = run.assembly.cache.names
    if not names:
        raise UsageError("the checkpoint has no cached FP8 weight to break")
    run.assembly.ledger.versions.bump(names[:1])


def _rng(run: Run) -> None:
    """torch's generator, one draw ahead."""
    torch.rand(())


def _cursor(run: Run) -> None:
    """The data, one sample ahead."""
    run.loader.next_sample += 1


def _nothing(run: Run) -> None:
    """It is done elsewhere: another plan by the configuration, another step's random keys at the step."""


CONTROLS: dict[str, Callable[[Run], None]] = {
    "scale": _scale,
    "history": _history,
    "cache": _cache,
    "rng": _rng,
    "dropout": _nothing,
    "cursor": _cursor,
    "plan": _nothing,
}
"""Name → what it does to the restored state. ``dropout``: the step draws the random keys of the next one."""


