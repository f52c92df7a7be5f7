"""Resume: the one ordered restore.

    mesh → params → optimizer → scales and histories → weight versions → rebuild caches and compare → data cursor
         → capture (transaction) → generators last → compare digests with the manifest

Names, shapes, dtypes and hashes are checked before the first write. On the layout of the save everything is compared,
generators and graph fingerprints included; on another one the logical state is, rank by rank and as a whole, and each rank's
generators start from their seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from checkpoint.comm import Communicator
from checkpoint.layout import CheckpointError
from checkpoint.load import load_into
from checkpoint.manifest import library_versions
from checkpoint.reader import Checkpoint
from checkpoint.shards import as_integers
from checkpoint.sums import Summer, TensorSum, merge, of_checkpoint, state_digest
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.contract.ledger import Ledger
from qeffect_lm.graphs.document import first_difference
from qeffect_lm.graphs.register import digest
from qeffect_lm.parallel.mesh import AXES, Mesh
from qeffect_lm.runtime.rng import generator_tensors, load_generator_tensors
from qeffect_lm.state import LogicalTensor, Role

PARAMETERS = (Role.PARAM, Role.MASTER)
OPTIMIZER = (Role.MOMENT, Role.COUNTER, Role.STATISTIC)
GRAPHS = "graphs"  # the document of each rank's plan and graphs
SCALES = (Role.SCALE, Role.AMAX_HISTORY, Role.AMAX_OPEN)


class GraphsDifferError(ResumeError):
    """The checkpoint is sound, and the graphs captured now are not those that ran before the save."""


class Resumable(Protocol):
    """One rank's training, assembled and not yet captured."""

    @property
    def ledger(self) -> Ledger: ...
    def logical_tensors(self) -> list[LogicalTensor]: ...
    def rebuild_caches(self) -> None: ...
    def capture(self) -> None: ...
    def graph_document(self) -> list[str]: ...
    def graph_fingerprint(self) -> str: ...


class Cursor(Protocol):
    """What gives the data and remembers where it was."""

    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


def saved_state(target: Resumable, coords: dict[str, int]) -> list[LogicalTensor]:
    """All tensors of this rank that a checkpoint holds, generators included."""
    return [*target.logical_tensors(), *_generator_items(coords)]


def contract_meta(target: Resumable, comm: Communicator) -> dict[str, Any] | None:
    """The contract's counters of all ranks, merged by name, and each rank's graph fingerprint; on rank 0."""
    gathered = comm.gather((target.ledger.state(), target.graph_fingerprint()))
    if gathered is None:
        return None
    merged: dict[str, Any] = {"timeline": gathered[0][0]["timeline"], "weights": {}}
    for state, _ in gathered:
        for kind, values in state["weights"].items():
            merged["weights"].setdefault(kind, {}).update(values)
    return {"contract": merged, "graph_fingerprints": [fingerprint for _, fingerprint in gathered]}


def check_replicas(items: Sequence[LogicalTensor], comm: Communicator, mesh: Mesh) -> None:
    """Before a save: replicas of one tensor must hold the same bytes, since only one of them is written.

    Raises:
        ResumeError: names the tensor and the two ranks.
    """
    if mesh.world == 1:
        return
    pieces = {(item.name, tuple(item.start), tuple(item.tensor.shape)): item for item in items}
    shared = [key for key, item in pieces.items() if item.copy or any(mesh.size(axis) > 1 for axis in item.replicated)]
    # What some rank has a copy of, its owner need not know.
    alike = {key for told in comm.broadcast(comm.gather(shared)) for key in told}
    gathered = comm.gather((mesh.coords, {key: digest(item.tensor) for key, item in pieces.items() if key in alike}))
    _raise_first(None if gathered is None else _first_disagreement(gathered), comm)


_Piece = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, start, shape


def _first_disagreement(gathered: Sequence[tuple[dict[str, int], dict[_Piece, str]]]) -> str | None:
    first: dict[_Piece, tuple[int, str]] = {}
    for rank, (_, digests) in enumerate(gathered):
        for piece, value in digests.items():
            before = first.setdefault(piece, (rank, value))
            if before[1] != value:
                ranks = f"ranks {before[0]} and {rank}"
                return f"tensor {piece[0]!r} is replicated, but {ranks} hold different bytes of it; nothing is saved"
    return None


def restore(
    checkpoint: Checkpoint,
    target: Resumable,
    cursor: Cursor,
    comm: Communicator,
    coords: dict[str, int],
    layout: dict[str, int],
    changed: Sequence[str] = (),
    accept_new_graphs: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> str | None:
    """Bring ``target`` and ``cursor`` to the checkpoint's state and capture; collective over ``comm``.

    Args:
        coords: this rank's mesh coordinates.
        layout: axis → size of this run; generators and graphs are compared when it is the checkpoint's.
        changed: configuration keys that changed since the save and may change the graphs (a learning-rate table, say): then
            graphs are captured anew and not compared.
        accept_new_graphs: go on from graphs that differ from the saved ones.
        say: told on rank 0 that the logical state came to another layout whole.

    Returns: what to tell about the graphs (not compared, or accepted), or None.

    Raises:
        GraphsDifferError: plan or graphs differ; names the first node that does.
        ResumeError: state is missing, does not fit, or what was rebuilt differs from what was saved.
    """
    same_layout = layout_of(checkpoint) == layout
    items = target.logical_tensors()
    if all(entry.role is not Role.STATISTIC for entry in checkpoint.manifest.tensors.values()):
        items = [item for item in items if item.role is not Role.STATISTIC]  # a guard that was off begins now
    # One call: everything is checked before the first write, and written in this order.
    load_into(checkpoint, [i for roles in (PARAMETERS, OPTIMIZER, SCALES) for i in items if i.role in roles], comm=comm)
    _raise_first(_restore_versions(checkpoint, target.ledger), comm)
    target.rebuild_caches()
    cached = [item for item in items if item.role is Role.CACHED_WEIGHT]
    _raise_first(_compare(checkpoint, cached, "was rebuilt from its master"), comm)
    _raise_first(_compare_caches(checkpoint, target.ledger), comm)
    cursor.load_state(checkpoint.meta["data"])
    target.capture()
    if same_layout:
        _restore_generators(checkpoint, coords, comm)
        items = [*items, *_generator_items(coords)]
    _raise_first(_compare(checkpoint, items, "is in memory after the restore"), comm)
    reasons = [*changed]
    if not same_layout:
        told = prove(checkpoint, items, comm, coords)
        if comm.rank == 0:
            say(f"{told}, now on {_words(layout)}, saved on {_words(checkpoint.meta.get('layout') or {})}")
        reasons.append("parallel layout")
    if reasons:
        return f"graphs captured anew, since these changed: {', '.join(reasons)}"
    fault = _first(_compare_graphs(checkpoint, target, comm.rank), comm)
    if fault is not None and not accept_new_graphs:
        raise GraphsDifferError(f"{fault}. To go on with the new graphs, and perhaps other roundings, add --accept-new-graphs")
    return None if fault is None else f"accepted: {fault}"


def prove(checkpoint: Checkpoint, items: Sequence[LogicalTensor], comm: Communicator, coords: dict[str, int]) -> str:
    """All ranks' pieces of the logical state together against the files: the same bits in the same logical places, each once.

    The ranks share the reading. Sums are linear (:mod:`checkpoint.sums`), so nobody needs another one's bytes.

    Args:
        items: what this rank holds, without generators.

    Returns: a line with the digest of the logical state, which is the same in every layout.

    Raises:
        ResumeError: names the first tensor that is not the same.
    """
    fault: str | None = None
    on_disk: dict[str, TensorSum] = {}
    try:
        on_disk = of_checkpoint(checkpoint, comm.rank, comm.world)
    except CheckpointError as error:  # this rank's alone: told to all below
        fault = str(error)
    gathered = comm.gather((Summer().own(items, coords), on_disk))
    _raise_first(fault, comm)
    line = None
    if gathered is not None:
        live, saved = merge(rank[0] for rank in gathered), merge(rank[1] for rank in gathered)
        for name in {**live, **saved}:
            one = saved.get(name)
            if name not in live and one is not None and checkpoint.entry(name).role is Role.STATISTIC:
                del saved[name]  # of a guard that is off now
            elif live.get(name) != one:
                fault = f"tensor {name!r} of all ranks together is not what {checkpoint.path} holds of it"
                break
        line = f"logical state of {len(live)} tensors equal to the checkpoint's, digest {state_digest(live)}"
    _raise_first(fault, comm)
    return str(comm.broadcast(line))


def layout_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Axis → size of the run that saved it."""
    saved = checkpoint.meta.get("layout")
    return dict.fromkeys(AXES, 1) | saved if isinstance(saved, dict) else {}


def _words(layout: Mapping[str, int]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in layout.items() if size > 1) or "one rank"


def _restore_versions(checkpoint: Checkpoint, ledger: Ledger) -> str | None:
    contract = checkpoint.meta["contract"]
    ledger.timeline.load_state(contract["timeline"])
    versions = contract["weights"]["versions"]
    missing = sorted(set(ledger.versions.versions) - set(versions))
    if missing:
        return f"{checkpoint.path} has no weight version of {missing[0]!r}"
    for name in ledger.versions.versions:
        ledger.versions.versions[name] = int(versions[name])
    return None


def _compare_caches(checkpoint: Checkpoint, ledger: Ledger) -> str | None:
    saved = checkpoint.meta["contract"]["weights"]
    now = ledger.versions.state()
    for kind in ("cache_version", "cache_epoch"):
        for name, value in now[kind].items():
            if saved[kind].get(name) != value:
                return f"cached weight {name!r}: {kind} {saved[kind].get(name)} was saved, {value} was rebuilt"
    return None


def _compare(checkpoint: Checkpoint, items: Sequence[LogicalTensor], how: str) -> str | None:
    """The first tensor whose live bytes are not the saved ones."""
    for item in items:
        if item.name not in checkpoint.manifest.tensors:
            return f"tensor {item.name!r} ({item.role}) is not in {checkpoint.path}"
        if not is_saved(checkpoint, item):
            return f"tensor {item.name!r} ({item.role}) {how} with other bytes than {checkpoint.path} holds"
    return None


def is_saved(checkpoint: Checkpoint, item: LogicalTensor) -> bool:
    """Whether the live bytes of a piece are the saved ones: by the SHA-256 of an equal slice, else byte by byte."""
    entry = checkpoint.entry(item.name)
    box = (item.start, tuple(item.tensor.shape))
    whole = [part for part in entry.slices if (tuple(part.start), tuple(part.shape)) == box]
    if whole:
        return checkpoint.digest_of(item.tensor) == whole[0].sha256
    saved = checkpoint.read(item.name, item.start, tuple(item.tensor.shape))
    return torch.equal(as_integers(item.tensor.cpu().contiguous()), as_integers(saved))


def _compare_graphs(checkpoint: Checkpoint, target: Resumable, rank: int) -> str | None:
    """Where this rank's plan and graphs differ from the saved ones, and which libraries changed meanwhile."""
    saved, now = checkpoint.meta["graph_fingerprints"][rank], target.graph_fingerprint()
    if saved == now:
        return None
    try:
        text = checkpoint.document(rank, GRAPHS)
    except CheckpointError as error:  # this rank's alone: it is told to all, as any difference is
        return f"rank {rank}'s graphs are not those of {checkpoint.path}, and the list of its nodes cannot be read: {error}"
    if text is None:
        where = f"fingerprint {saved} was saved, {now} was captured, and {checkpoint.path} keeps no list of nodes to compare"
    else:
        where = first_difference(text.splitlines(), target.graph_document()) or "in their fingerprints alone"
    before, after = checkpoint.manifest.versions, library_versions()
    versions = [f"{name} {before.get(name)} -> {after.get(name)}" for name in before if before.get(name) != after.get(name)]
    changed = f" (changed since the save: {', '.join(versions)})" if versions else ""
    return f"rank {rank}'s graphs are not those of {checkpoint.path}, {where}{changed}"


def _generator_items(coords: dict[str, int]) -> list[LogicalTensor]:
    """This rank's generators, as they are now (copies)."""
    # Coordinate 0 of cp is not named: checkpoints older than that axis have none.
    place = ".".join(f"{axis}{coords[axis]}" for axis in sorted(coords) if axis != "cp" or coords[axis])
    return [
        LogicalTensor.whole(f"rng/{place}/{name}", tensor, Role.RNG, per_rank=True)
        for name, tensor in generator_tensors().items()
    ]


def _restore_generators(checkpoint: Checkpoint, coords: dict[str, int], comm: Communicator) -> None:
    items = _generator_items(coords)
    load_into(checkpoint, items, comm=comm)
    load_generator_tensors({item.name.rsplit("/", 1)[1]: item.tensor for item in items})


def _raise_first(fault: str | None, comm: Communicator) -> None:
    """All ranks raise the first rank's fault alike."""
    verdict = _first(fault, comm)
    if verdict is not None:
        raise ResumeError(verdict)


def _first(fault: str | None, comm: Communicator) -> str | None:
    """The first rank's fault, told to all."""
    faults = comm.gather(fault)
    verdict = None if faults is None else next((f for f in faults if f is not None), None)
    return comm.broadcast(verdict)  # type: ignore[no-any-return]
