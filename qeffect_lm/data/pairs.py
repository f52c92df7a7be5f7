"""Finished pairs: put into place, merged, divided.

Whatever writes ``PREFIX`` holds the lock of the folder ``PREFIX.work``, makes everything in its ``stage``, and moves it into
place when all of it is on disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qeffect_lm.data.encoding import PARTS, Settings
from qeffect_lm.data.files import fsync_directory, write_errors
from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from qeffect_lm.data.manifest import check_free, manifest_path, mask_prefix, open_mask, tokenizer_of, write_manifest
from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.lock import holding


@dataclass(frozen=True)
class PartReport:
    """One written part: the prefix of its files, documents, tokens (ends of sequence included), nats per token."""

    prefix: Path
    documents: int
    tokens: int
    unigram_entropy: float


@contextmanager
def working(target: Path) -> Iterator[Path]:
    """The folder ``<target>.work``, locked; its stage is gone afterwards, and so is the folder where nothing else is in it.

    Raises:
        UsageError: another process holds it.
        QEffectError: it cannot be made.
    """
    work = target.with_name(f"{target.name}.work")
    with write_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    with holding(work, "wait for it, stop it, or choose another output"):
        try:
            yield work
        finally:
            shutil.rmtree(work / "stage", ignore_errors=True)
            if work.exists() and all(path.name == ".lock" for path in work.iterdir()):
                shutil.rmtree(work, ignore_errors=True)


def stage_of(work: Path, target: Path) -> Path:
    """A prefix in the empty folder ``<work>/stage``."""
    with write_errors(target):
        shutil.rmtree(work / "stage", ignore_errors=True)  # of a process that was killed
        (work / "stage").mkdir()
    return work / "stage" / target.name


def publish(stage: Path, target: Path, parts: Sequence[str]) -> None:
    """Replace the pairs ``<target><part>``, and their masks, by what lies beside ``stage``: the old token files go first, pairs
    before their masks, and the new indices come last, masks before their pairs.

    So a crash in between leaves a pair without an index, which a reader refuses, and never parts of two corpora.
    """
    with write_errors(target):
        for name in (*parts, *(f"{part}.mask" for part in parts)):
            old = f"{target}{name}"
            for path in (idx_path(old), bin_path(old), manifest_path(old)):
                path.unlink(missing_ok=True)
        for path in sorted(stage.parent.iterdir(), key=_last):
            os.replace(path, target.parent / path.name)
        fsync_directory(target.parent)


def _last(path: Path) -> tuple[bool, bool]:
    return path.suffix == ".idx", not path.name.endswith(".mask.idx")


def named(parts: Sequence[str] = PARTS) -> list[str]:
    """What follows the prefix in the names of parts."""
    return [f".{part}" for part in parts]


def merge(prefixes: Sequence[Path], target: Path) -> IndexedDataset:
    """One pair of all documents of ``prefixes``, in order, with its manifest; their masks are merged beside it.

    Raises:
        UsageError: a pair is missing or damaged, some have a mask and others do not, they are of different tokenizers, or one
            of them is ``target``.
    """
    _check_apart(prefixes, [target])
    tokenizer = _one_tokenizer(prefixes)
    if Path(f"{target}.model").exists():
        raise UsageError(f"{target}.json is of the tokenizer {target}.model: choose another output")
    check_free(target)
    with working(target) as work:
        stage = stage_of(work, target)
        joined(prefixes, stage, None if tokenizer is None else tokenizer["vocab_size"])
        merged = [IndexedDataset(prefix, empty=True).content_hash() for prefix in prefixes]
        write_manifest(IndexedDataset(stage), tokenizer, {"merged": merged})
        publish(stage, target, [""])
    return IndexedDataset(target)


def joined(prefixes: Sequence[Path], target: Path, vocab_size: int | None) -> None:
    """The pair ``target`` of all documents of ``prefixes``, and its mask where they have one; without a known vocabulary of the
    widest one's type."""
    sources = [IndexedDataset(prefix, empty=True) for prefix in prefixes]
    masked = [source.prefix for source in sources if open_mask(source) is not None]
    if masked and len(masked) < len(prefixes):
        other = next(prefix for prefix in prefixes if prefix not in masked)
        raise UsageError(f"{masked[0]} has a mask of what the loss counts, {other} has none: merge pairs of one kind")
    if masked:
        joined([mask_prefix(prefix) for prefix in prefixes], mask_prefix(target), vocab_size)
    if vocab_size is None:
        vocab_size = 2**31 if any(source.dtype.itemsize > 2 for source in sources) else 65536
    with IndexedWriter(target, vocab_size=vocab_size) as writer:
        for source in sources:
            writer.extend(source)


def _check_apart(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """Stopped while it replaces a source, neither of the two would be left."""
    places = {idx_path(source).resolve() for source in sources}
    for target in targets:
        if idx_path(target).resolve() in places:
            raise UsageError(f"{target} would be read and replaced: choose another output")


def _one_tokenizer(prefixes: Sequence[Path]) -> dict[str, Any] | None:
    """The tokenizer of all pairs; None where some do not say. Raises UsageError where two say different ones."""
    told = [(prefix, tokenizer_of(prefix)) for prefix in prefixes]
    known = [(prefix, found) for prefix, found in told if found is not None]
    for prefix, found in known:
        if found["sha256"] != known[0][1]["sha256"]:
            raise UsageError(
                f"{known[0][0]} and {prefix} are of different tokenizers (SHA-256 {known[0][1]['sha256'][:12]} and "
                f"{found['sha256'][:12]}): their ids mean different pieces; preprocess one of them again"
            )
    return known[0][1] if len(known) == len(told) else None


def check_fractions(settings: Settings) -> None:
    """Raise UsageError for shares that leave nothing to train on."""
    for name, fraction in (("valid", settings.valid_fraction), ("test", settings.test_fraction)):
        if not 0 <= fraction < 1:
            raise UsageError(f"{name} fraction {fraction} is not in [0, 1)")
    if settings.valid_fraction + settings.test_fraction >= 1:
        raise UsageError("the fractions of valid and test leave nothing to train on")


def split(
    prefix: Path, target: Path, settings: Settings, progress: Callable[[int], object] = lambda count: None
) -> dict[str, PartReport]:
    """Divide a pair's documents, with their mask, into ``<target>.<part>`` by a hash of the seed and their tokens; equal ones
    stay together.

    Raises:
        UsageError: a fraction, or a part that gets no tokens.
    """
    check_fractions(settings)
    _check_apart([prefix], [Path(f"{target}{name}") for name in named()])
    dataset, tokenizer = IndexedDataset(prefix), tokenizer_of(prefix)
    mask = open_mask(dataset)
    pairs = {"": dataset} if mask is None else {"": dataset, ".mask": mask}
    for name in named():
        check_free(f"{target}{name}")
    reports = {}
    with working(target) as work:
        stage = stage_of(work, target)
        writers = {
            (part, name): IndexedWriter(f"{stage}.{part}{name}", vocab_size=65536 if pair.dtype.itemsize <= 2 else 2**31)
            for part in settings.parts
            for name, pair in pairs.items()
        }
        try:
            for i in range(dataset.num_documents):
                part = settings.part_at(f"{settings.seed}\0".encode() + dataset.document(i).astype("<i8").tobytes())
                for name, pair in pairs.items():
                    writers[part, name].add_document(pair.document(i))
                progress(1)
            for writer in writers.values():
                writer.close()
        finally:
            for writer in writers.values():
                writer.discard()
        for part in settings.parts:
            made = IndexedDataset(f"{stage}.{part}", empty=True)
            if not made.num_tokens:
                raise UsageError(
                    f"the {part} part has no tokens: {made.num_documents} of {dataset.num_documents} documents; take other "
                    "fractions (0 writes no such part) or another seed"
                )
            more = {"part": part, "split_of": dataset.content_hash(), "seed": settings.seed}
            write_manifest(made, tokenizer, more)
            reports[part] = PartReport(Path(f"{target}.{part}"), made.num_documents, made.num_tokens, 0.0)
        publish(stage, target, named())
    return reports
