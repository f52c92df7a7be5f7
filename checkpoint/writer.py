"""Saving: every rank writes one shard, rank 0 commits, and all ranks learn the same outcome.

Order of the commit: temporary directory → shards, each fsynced → all ranks report → manifest, fsync → fsync
of the directory → rename → fsync of the parent → ``latest`` → retention. A reader therefore sees a whole
checkpoint or none. Ranks talk three times (prepared? shard written? committed?), and each answer carries
success or failure, so that a rank that fails never leaves the others waiting.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from checkpoint.assembly import Report, Written, assemble, check, description_of, owns, segments_of
from checkpoint.comm import Communicator
from checkpoint.fileops import FileOps, naming, remove_tree, write_file
from checkpoint.layout import (
    LATEST,
    MANIFEST,
    CheckpointError,
    describe,
    document_name,
    is_companion,
    is_document,
    natural_key,
    step_name,
    temporary_name,
)
from checkpoint.manifest import FileEntry, Manifest, RankEntry, incomplete_because, library_versions, plain_json
from checkpoint.reader import Checkpoint
from checkpoint.retention import newest_complete, retain, sweep, write_latest
from checkpoint.shards import dtype_name, write_shard
from qeffect_lm.state import LogicalTensor

log = logging.getLogger(__name__)


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Sequence[LogicalTensor],
    meta: dict[str, Any],
    comm: Communicator,
    coords: dict[str, int],
    keep: int = 0,
    rank_meta: dict[str, Any] | None = None,
    *,
    documents: Mapping[str, str] | None = None,
    companions: Mapping[str, bytes] | None = None,
    ops: FileOps | None = None,
) -> Path:
    """Write ``root/step_<step>/`` from all ranks together and return its path; collective over ``comm``.

    ``tensors`` is everything this rank holds; it writes what it owns (coordinate 0 on each of a tensor's
    replicated axes, or ``per_rank``). ``meta`` is free JSON and taken from rank 0, ``rank_meta`` is kept per
    rank. ``documents`` (name → text) are kept per rank too, compressed, in files of their own beside the shards.
    ``companions`` (name → bytes; configuration, tokenizer and the like) are written as they are, and taken from rank 0.
    ``coords`` gives this rank's mesh coordinates (a missing axis counts as 0). ``keep`` is the number of complete
    checkpoints that stay (0: all).

    Raises :class:`CheckpointError` on every rank alike when any rank fails; the message names rank, path and
    cause and the checkpoint that survives. ``latest`` is then unchanged. A complete checkpoint of the same
    step is never overwritten; an incomplete one is moved aside.
    """
    save = _Save(Path(root), step, ops or FileOps())
    prepared = _attempt(comm.rank, lambda: save.prepare(keep)) if comm.rank == 0 else _Outcome()
    save.raise_failures(comm.broadcast(save.verdict([prepared])))

    def write_own() -> Report:
        beside = {document_name(comm.rank, name): compressed(text) for name, text in (documents or {}).items()}
        if comm.rank == 0:
            beside |= companions or {}
        return save.write_own(tensors, comm.rank, coords, rank_meta or {}, beside)

    outcome = _attempt(comm.rank, write_own)
    outcomes = comm.gather(outcome)
    verdict = None
    if outcomes is not None:
        committed = _Outcome()
        if all(other.failure is None for other in outcomes):
            committed = _attempt(0, lambda: save.commit([other.result for other in outcomes], meta))
        verdict = save.verdict([*outcomes, committed])
    save.raise_failures(comm.broadcast(verdict))
    if comm.rank == 0:
        retain(save.root, keep, save.final, save.ops)
    return save.final


def rewrite_checkpoint(
    source: Checkpoint, root: Path, replace: Mapping[str, Tensor], *, ops: FileOps | None = None
) -> Path:
    """Copy a checkpoint to ``root/step_<same>/`` as one shard, with some logical tensors given other values.

    Meta data, ranks and documents are taken over. For experiments on saved state, such as a control run with one scale
    changed. Raises :class:`CheckpointError` for names, shapes or dtypes that do not match the source, and as
    :func:`save_checkpoint` does.
    """
    unknown = sorted(set(replace) - set(source.names()))
    if unknown:
        raise CheckpointError(f"{source.path} has no tensor {unknown[0]!r} to replace")
    tensors = []
    for name in source.names():
        entry = source.manifest.tensors[name]
        value = replace[name] if name in replace else source.read(name)
        if tuple(value.shape) != entry.shape or dtype_name(value.dtype) != entry.dtype:
            raise CheckpointError(
                f"{name!r} is {entry.dtype} {list(entry.shape)}, not {value.dtype} {list(value.shape)}"
            )
        tensors.append(
            LogicalTensor(
                name, value, entry.role, entry.shape, (0,) * len(entry.shape), entry.axes, (), entry.per_rank
            )
        )
    save = _Save(Path(root), source.step, ops or FileOps())

    def body() -> None:
        save.prepare(0)
        beside = {name: source.read_file(name) for name in source.manifest.files if is_document(name) or is_companion(name)}
        report = save.write_own(tensors, 0, {}, {}, beside)
        save.commit([report], source.meta, ranks=source.manifest.ranks)

    save.raise_failures(save.verdict([_attempt(0, body)]))
    return save.final


def compressed(text: str) -> bytes:
    """A document as it is stored. Equal texts give equal files: gzip's time stamp is left out."""
    return gzip.compress(text.encode(), mtime=0)


def write_companion(ops: FileOps, path: Path, content: bytes) -> tuple[str, int, str, int]:
    """Write and sync a file beside the shards; returns what a report says of it."""
    write_file(ops, path, content)
    return path.name, len(content), hashlib.sha256(content).hexdigest(), len(content)


@dataclass(frozen=True)
class _Outcome:
    """The result of a piece of work, or why it failed."""

    result: Any = None
    failure: str | None = None


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 tells everybody: the failures of all ranks, and what that leaves on disk."""

    failures: list[str] = field(default_factory=list)
    aftermath: str = ""


def _attempt(rank: int, work: Callable[[], Any]) -> _Outcome:
    """Run ``work``; every exception becomes a failure to report, because a rank that left would hang the
    others.
    """
    try:
        return _Outcome(result=work())
    except Exception as error:
        log.debug("rank %d failed while saving", rank, exc_info=True)
        return _Outcome(failure=f"rank {rank}: {describe(error)}")


class _Save:
    """One save: its paths and its three pieces of work."""

    def __init__(self, root: Path, step: int, ops: FileOps) -> None:
        self.root = root
        self.step = step
        self.ops = ops
        self.temporary = root / temporary_name(step)
        self.final = root / step_name(step)
        self._renamed = False

    def prepare(self, keep: int) -> None:
        """Rank 0: make the temporary directory, after clearing what dead saves left behind."""
        if self.step < 0 or keep < 0:
            raise CheckpointError(f"step {self.step} and keep {keep} must not be negative")
        self._make_root()
        if self.final.exists() and incomplete_because(self.final) is None:
            raise CheckpointError(
                f"{self.final} exists already and is complete; a checkpoint is never overwritten. "
                "Move it away or save to another folder"
            )
        sweep(self.root, self.ops)
        with naming("create", self.temporary):
            self.ops.mkdir(self.temporary)

    def _make_root(self) -> None:
        """The folder, and before its first commit the durable name of every folder above it, whoever made them."""
        if not self.root.is_dir():
            with naming("create", self.root):
                for path in reversed([self.root, *self.root.parents]):
                    if not path.is_dir():
                        self.ops.mkdir(path, parents=True)
        if (self.root / LATEST).exists():
            return
        for path in self.root.resolve().parents:
            try:
                self.ops.fsync_dir(path)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):  # then the name in it is not a run's
                    raise CheckpointError(f"cannot sync {path}: {describe(error)}") from error

    def write_own(
        self,
        tensors: Sequence[LogicalTensor],
        rank: int,
        coords: dict[str, int],
        meta: dict[str, Any],
        beside: Mapping[str, bytes],
    ) -> Report:
        """Every rank: write this rank's shard (none when it owns nothing) and what lies beside it, and say what is in them."""
        meta = plain_json(meta, "rank_meta")
        own, held = [], {}
        for item in tensors:
            check(item)
            if owns(item, coords):
                own.append(item)
            else:
                held[item.name] = description_of(item)
        own.sort(key=lambda item: (-item.tensor.element_size(), natural_key(item.name), item.start))
        file_name = f"rank{rank:05d}.safetensors"
        segments = segments_of(own)
        files = [write_companion(self.ops, self.temporary / name, content) for name, content in beside.items()]
        if not own:
            return Report(rank, dict(coords), meta, files, [], held)
        data = [item.tensor for item in own]
        shard = write_shard(self.ops, self.temporary / file_name, segments, data)
        written = []
        for item, segment, digest in zip(own, segments, shard.digests, strict=True):
            part = {
                "file": file_name,
                "key": segment.key,
                "start": tuple(item.start),
                "shape": segment.shape,
                "offset": shard.header + segment.begin,
                "sha256": digest,
            }
            written.append(Written(item.name, description_of(item), part))
        files.insert(0, (file_name, shard.size, shard.header_sha256, shard.header))
        return Report(rank, dict(coords), meta, files, written, held)

    def commit(
        self, reports: list[Report], meta: dict[str, Any], ranks: tuple[RankEntry, ...] | None = None
    ) -> None:
        """Rank 0: check that the slices are the whole state, seal them with the manifest, publish the
        directory.
        """
        files = {}
        for report in reports:
            for name, size, sha256, hashed in report.files:
                self._check_visible(report.rank, name, size)
                files[name] = FileEntry(size=size, sha256=sha256, hashed=hashed)
        manifest = Manifest(
            step=self.step,
            meta=plain_json(meta, "meta"),
            ranks=ranks or tuple(RankEntry(rank=r.rank, coords=r.coords, meta=r.meta) for r in reports),
            versions=library_versions(),
            files=files,
            tensors=assemble(reports),
        )
        write_file(self.ops, self.temporary / MANIFEST, manifest.to_bytes())
        with naming("sync", self.temporary):
            self.ops.fsync_dir(self.temporary)
        self._move_aside()
        with naming("rename into place", self.temporary):
            self.ops.rename(self.temporary, self.final)
        self._renamed = True
        with naming("sync", self.root):
            self.ops.fsync_dir(self.root)
        write_latest(self.root, self.final.name, self.ops)

    def verdict(self, outcomes: Sequence[_Outcome]) -> _Verdict:
        """Rank 0: collect the failures; clear the temporary directory and look what survives."""
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if not failures:
            return _Verdict()
        if self._renamed:
            return _Verdict(failures, f"{self.final} itself is complete, but `latest` may name an older one")
        if self.temporary.is_dir():
            try:
                remove_tree(self.ops, self.temporary)
            except OSError as error:
                log.warning("cannot remove %s, remove it by hand: %s", self.temporary, describe(error))
        if not self.root.is_dir():
            return _Verdict(failures, f"{self.root} itself is not there: has its file system gone?")
        try:
            previous = newest_complete(self.root)
        except CheckpointError:  # an unreadable folder is the failure itself, nothing was changed in it
            return _Verdict(failures, f"Nothing in {self.root} was changed")
        if previous is None:
            return _Verdict(failures, f"There is no earlier checkpoint in {self.root}")
        return _Verdict(failures, f"The previous checkpoint {previous} survives and `latest` is unchanged")

    def raise_failures(self, verdict: _Verdict) -> None:
        """Every rank: raise the common error, if there is one."""
        if verdict.failures:
            causes = "; ".join(verdict.failures)
            raise CheckpointError(
                f"the checkpoint of step {self.step} was not saved: {causes}. {verdict.aftermath}"
            )

    def _check_visible(self, rank: int, name: str, size: int) -> None:
        path = self.temporary / name
        seen = os.stat(path).st_size if path.exists() else None
        if seen != size:
            raise CheckpointError(
                f"{path}, written by rank {rank} with {size} bytes, is "
                f"{'missing' if seen is None else f'{seen} bytes long'} as rank 0 sees it: "
                "all ranks must share one checkpoint folder"
            )

    def _move_aside(self) -> None:
        if not self.final.exists():
            return
        number = 1
        while (aside := self.final.with_name(f"{self.final.name}.partial-{number}")).exists():
            number += 1
        log.warning("moving the incomplete checkpoint %s aside to %s", self.final, aside.name)
        with naming("move aside", self.final):
            self.ops.rename(self.final, aside)
