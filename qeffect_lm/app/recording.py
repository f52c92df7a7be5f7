"""What a step did, told by digests: for the record after each save (:mod:`checkpoint.record`) and for its replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint.comm import Communicator
from checkpoint.layout import CheckpointError, step_name
from checkpoint.manifest import library_versions
from checkpoint.record import StepRecord, bits, compare_records, read_record, write_record
from checkpoint.resume import contract_meta, saved_state
from checkpoint.sums import Summer, merge
from qeffect_lm.app.assemble import Assembly
from qeffect_lm.config import Config
from qeffect_lm.data.loader import StepBatch, StepLoader
from qeffect_lm.graphs.register import digest
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.runtime.loop import Result
from qeffect_lm.state import Role

SMALL = (Role.SCALE, Role.AMAX_HISTORY, Role.AMAX_OPEN, Role.COUNTER, Role.STATISTIC, Role.RNG)


def small_state(assembly: Assembly, mesh: Mesh, comm: Communicator) -> dict[str, str]:
    """What is small of the state, told on rank 0 (elsewhere nothing); collective."""
    items = [item for item in saved_state(assembly, mesh.coords) if item.role in SMALL]
    gathered = comm.gather(Summer().own(items, mesh.coords))
    return {} if gathered is None else {name: one.text for name, one in merge(gathered).items()}


def measure(
    assembly: Assembly,
    loader: StepLoader,
    mesh: Mesh,
    comm: Communicator,
    *,
    step: int,
    tokens: int,
    batch: StepBatch,
    result: Result,
    save_id: str,
    before: dict[str, str],
    made_by: str = "run",
) -> StepRecord | None:
    """The record of step ``step`` (from 1), which has just run, on rank 0; collective. It reads and changes nothing."""
    summer, data = Summer(), data_of(assembly, mesh, batch)
    gradients = summer.own(assembly.flat.gradient_tensors(), mesh.coords)
    state = summer.own(saved_state(assembly, mesh.coords), mesh.coords)
    generators = {name for name in state if name.startswith(f"{Role.RNG.value}/")}
    contract = contract_meta(assembly, comm)
    gathered = comm.gather((data, gradients, state, generators))
    if gathered is None or contract is None:
        return None
    told = {name: one.text for name, one in merge(rank[2] for rank in gathered).items()}
    belonging = set().union(*(rank[3] for rank in gathered))
    floats = {name: bits(float(getattr(result, name))) for name in ("loss", "grad_norm", "lr")}
    return StepRecord(
        step=step,
        save_id=save_id,
        before=before,
        layout=dict(mesh.sizes),
        plan=assembly.plan.fingerprint(),
        graphs=contract["graph_fingerprints"],
        numbers={**floats, "skipped": bool(result.skipped), "reason": int(result.reason), "tokens": tokens},
        data={name: text for rank in gathered for name, text in rank[0].items()},
        gradients={name: one.text for name, one in merge(rank[1] for rank in gathered).items()},
        state={name: text for name, text in told.items() if name not in belonging},
        generators={name: text for name, text in told.items() if name in belonging},
        contract=contract["contract"],
        cursor=loader.state(),
        versions=library_versions(),
        made_by=made_by,
    )


def data_of(assembly: Assembly, mesh: Mesh, batch: StepBatch) -> dict[str, str]:
    """SHA-256 of this replica's microbatches, each by its place in the step over all replicas, as keys and samples go by it."""
    told: dict[str, str] = {}
    for microbatch, key in enumerate(assembly.engine.inputs.keys.tolist()):
        place = f"microbatch {microbatch * mesh.size('samples') + mesh.coord('samples')}"
        names = ["inputs", "targets", "loss_mask", *["starts"] * (batch.starts is not None)]
        told |= {f"{place} {name}": digest(getattr(batch, name)[microbatch]) for name in names}
        told[f"{place} random key"] = str(key)
    return told


class Recorder:
    """Keeps the record of the step after each save of a run, and compares where an earlier life of it kept one."""

    def __init__(
        self,
        assembly: Assembly,
        loader: StepLoader,
        mesh: Mesh,
        comm: Communicator,
        config: Config,
        say: Callable[[str], None],
    ) -> None:
        self._parts = assembly, loader, mesh, comm
        self._root, self._wanted = config.checkpoint_dir(), config.checkpoint.record
        self.say = say
        self.save_id = ""  # of the save that the next step follows
        self._before: dict[str, str] | None = None  # the small state at that save (rank 0); None: the step is not recorded

    def expect(self, save_id: str) -> None:
        """The next step follows the save ``save_id``; collective."""
        assembly, _, mesh, comm = self._parts
        self.save_id = save_id
        self._before = small_state(assembly, mesh, comm) if self._wanted else None

    def record(self, step: int, tokens: int, batch: StepBatch, result: Result) -> None:
        """A step has run; collective where it follows a save, nothing else."""
        if self._before is None:
            return
        about: dict[str, Any] = {"step": step, "tokens": tokens, "batch": batch, "result": result}
        made = measure(*self._parts, **about, save_id=self.save_id, before=self._before)
        self._before = None
        if made is not None:
            keep(made, self._root, self.say)


def keep(record: StepRecord, root: Path, say: Callable[[str], None]) -> None:
    """Rank 0: write the record; where an earlier life of the run made one after the same save, compare with that one.

    A record that cannot be written is told and does not end the run.
    """
    try:
        before = read_record(root / step_name(record.step - 1))
        if before is None or before.save_id != record.save_id:
            write_record(root, record)
            return
    except CheckpointError as error:
        say(f"step {record.step} goes on without its record for tools.replay: {error}")
        return
    odd = [part for part in compare_records(before, record) if not part.equal]
    if odd:
        say(f"WARNING: step {record.step} is not the one that ran before the restart; first in {odd[0].name}: {odd[0]}")
    else:
        say(f"step {record.step} repeated the one that ran before the restart, bit for bit")
