"""From files to a corpus: shards on worker processes, a work folder to go on from, and one move into place at the end.

While the output PREFIX is made, the folder ``PREFIX.work`` lies beside it: ``manifest.json`` with the settings and the files
(sizes, times), one token file per finished shard and part, and the trained tokenizer. After an interruption the same call goes
on with the shards that are missing. Other settings or other files are refused, unless told to begin anew. Where a file has
another time than before, its finished shards are read again and compared by SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from qeffect_lm.data.chat import TEMPLATES
from qeffect_lm.data.encoding import PARTS, Settings, ShardEncoder, ShardJob, ShardResult, TextTokenizer, open_tokenizer
from qeffect_lm.data.files import fsync_directory, sha256_of_files, write_atomic, write_errors
from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from qeffect_lm.data.inputs import Bad, Shard, cut, shard_size
from qeffect_lm.data.pool import run_jobs
from qeffect_lm.data.stats import entropy, token_counts
from qeffect_lm.data.tokenizer import Tokenizer, train_sentencepiece
from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.lock import holding

FORMAT = 1
_NAMED_SKIPS = 20


@dataclass(frozen=True)
class TokenizerTraining:
    """A tokenizer to be trained from the training part (:func:`~qeffect_lm.data.tokenizer.train_sentencepiece`)."""

    vocab_size: int = 4096
    model_type: str = "bpe"


@dataclass(frozen=True)
class PartReport:
    """One written part: the prefix of its files, documents, tokens (ends of sequence included), nats per token."""

    prefix: Path
    documents: int
    tokens: int
    unigram_entropy: float


@dataclass(frozen=True)
class CorpusReport:
    """What :func:`make_corpus` made.

    ``documents`` and ``bytes`` count the text that was used, ``bad_count`` what was skipped, of which ``bad`` names the first
    ones. ``unigram_entropy`` is that of all parts together, in nats per token.
    """

    documents: int
    bytes: int
    bad_count: int
    bad: tuple[Bad, ...]
    tokenizer: Path
    vocab_size: int
    parts: dict[str, PartReport]
    unigram_entropy: float
    seconds: float
    resumed: int = 0

    def summary(self) -> str:
        """A few lines for a person."""
        lines = [
            f"read      {self.documents} documents, {self.bytes / 1e6:.1f} MB, in {self.seconds:.1f} s",
            f"tokenizer {self.tokenizer} ({self.vocab_size} ids)",
        ]
        if self.resumed:
            lines.insert(0, f"went on   {self.resumed} shards were finished before")
        for name, part in self.parts.items():
            lines.append(
                f"{name:9} {part.prefix}.bin/.idx: {part.documents} documents, {part.tokens} tokens, "
                f"unigram entropy {part.unigram_entropy:.3f} nats/token"
            )
        if self.bad_count:
            lines.append(f"skipped   {self.bad_count} lines or files:")
            lines += [f"  {one}" for one in self.bad[:_NAMED_SKIPS]]
            if self.bad_count > min(len(self.bad), _NAMED_SKIPS):
                lines.append(f"  and {self.bad_count - min(len(self.bad), _NAMED_SKIPS)} more")
        return "\n".join(lines)


def make_corpus(
    files: Sequence[Path],
    prefix: Path | str,
    settings: Settings | None = None,
    *,
    tokenizer: Path | str | TokenizerTraining,
    end: str | None = None,
    workers: int = 1,
    anew: bool = False,
    progress: bool = False,
) -> CorpusReport:
    """Write the token files of ``files``, ``<prefix>.<part>.bin/.idx`` with a manifest ``.json`` each, and report.

    The bytes depend on the files' content and order, the settings and the tokenizer, on nothing else. An earlier corpus of this
    prefix is replaced, after the new one is complete.

    Args:
        tokenizer: its file, or what to train as ``<prefix>.model`` from the training part.
        end: the piece that ends a document, where the tokenizer does not say.
        workers: processes that encode; 1: this one.
        anew: throw away what an interrupted run left, instead of going on from it.
        progress: a bar on stderr.

    Raises:
        UsageError: bad arguments, a line that holds no document (where those are refused), no text, an empty part, a tokenizer
            that cannot be used, or a work folder of another request.
        QEffectError: the output cannot be written, or a worker died.
    """
    started, target = time.monotonic(), Path(prefix)
    settings = settings or Settings()
    _check(files, settings, workers)
    if settings.template is not None and isinstance(tokenizer, TokenizerTraining):
        raise UsageError("conversations need a tokenizer that has the template's pieces: give one with --tokenizer")
    settings = replace(settings, shard_bytes=settings.shard_bytes or shard_size(files))
    shards = cut(files, settings.format, settings.shard_bytes)
    with _work_folder(target, settings, files, tokenizer, end, anew) as work:
        model_path = _tokenizer(tokenizer, shards, settings, work / "tokenizer" / target.name, progress)
        encoder = ShardEncoder(model_path, end, settings)
        model = encoder.tokenizer
        if settings.append_eos and settings.template is None and not model.end_ids:
            raise UsageError(
                f"tokenizer {model_path} has no end of sequence: use --no-append-eos, name one with --eos, or use another one"
            )
        jobs = [ShardJob(i, shard, str(work)) for i, shard in enumerate(shards)]
        results, resumed = _encode(ShardEncoder(model_path, end, settings), jobs, workers, progress)
        _check_parts(jobs, results, settings, progress)
        with _staging(target) as stage:
            parts = {part: _assemble(jobs, results, encoder, part, stage, target) for part in settings.parts}
            if isinstance(tokenizer, TokenizerTraining):
                for path in model_path.parent.iterdir():
                    write_atomic(stage.parent / path.name, path.read_bytes())
            publish(stage, target)
    shutil.rmtree(work, ignore_errors=True)
    bad = [one for result in results for one in result.bad]
    return CorpusReport(
        documents=sum(result.documents for result in results),
        bytes=sum(result.text_bytes for result in results),
        bad_count=sum(result.bad_count for result in results),
        bad=tuple(bad),
        tokenizer=Path(f"{target}.model") if isinstance(tokenizer, TokenizerTraining) else Path(tokenizer),
        vocab_size=model.vocab_size,
        parts={part: report for part, (report, _) in parts.items()},
        unigram_entropy=entropy(np.sum([counts for _, counts in parts.values()], axis=0)),
        seconds=time.monotonic() - started,
        resumed=resumed,
    )


def _check(files: Sequence[Path], settings: Settings, workers: int) -> None:
    if not files:
        raise UsageError("the corpus has no files")
    for name, fraction in (("valid", settings.valid_fraction), ("test", settings.test_fraction)):
        if not 0 <= fraction < 1:
            raise UsageError(f"{name} fraction {fraction} is not in [0, 1)")
    if settings.valid_fraction + settings.test_fraction >= 1:
        raise UsageError("the fractions of valid and test leave nothing to train on")
    if settings.template is not None and settings.template not in TEMPLATES:
        raise UsageError(f"no template {settings.template!r}: there are {', '.join(TEMPLATES)}")
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")


# ---- the work folder ------------------------------------------------------------------------------------------------


@contextmanager
def _work_folder(
    target: Path,
    settings: Settings,
    files: Sequence[Path],
    tokenizer: Path | str | TokenizerTraining,
    end: str | None,
    anew: bool,
) -> Iterator[Path]:
    """The folder, locked, with the manifest of this request; without a finished shard nothing of it stays after an error."""
    work = target.with_name(f"{target.name}.work")
    with write_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    with holding(work, "wait for it, stop it, or choose another output"):
        try:
            if anew:
                _clear(work)
            _claim(work, settings, files, tokenizer, end)
            yield work
        except BaseException:
            if not any(work.glob("shard-*.json")):
                shutil.rmtree(work, ignore_errors=True)
            raise


def _claim(
    work: Path, settings: Settings, files: Sequence[Path], tokenizer: Path | str | TokenizerTraining, end: str | None
) -> None:
    """Compare with the request that the folder is of, and write down this one."""
    if isinstance(tokenizer, TokenizerTraining):
        model: dict[str, Any] = {**asdict(tokenizer), "sha256": None}
    else:
        model = {"sha256": open_tokenizer(tokenizer).sha256}
    wanted = {
        "format": FORMAT,
        "settings": asdict(settings),
        "tokenizer": {**model, "end": end},
        "files": [[str(path), *_stamp(path)] for path in files],
    }
    manifest = work / "manifest.json"
    if manifest.exists():
        _compare(json.loads(manifest.read_bytes()), wanted, work)
    write_atomic(manifest, json.dumps(wanted).encode())


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _clear(work: Path) -> None:
    for path in work.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _compare(before: dict[str, Any], now: dict[str, Any], work: Path) -> None:
    """Whether the work folder is of this request; shards of files with another time are kept where the content is the same."""
    changed = [
        f"{name} was {before.get(part, {}).get(name)!r}, is {value!r}"
        for part in ("settings", "tokenizer")
        for name, value in now[part].items()
        if before.get(part, {}).get(name) != value
    ]
    sizes = [[[path, size] for path, size, _ in one["files"]] for one in (before, now)]
    if sizes[0] != sizes[1]:
        changed.append("the files are others, or have other sizes")
    if before.get("format") == now["format"] and not changed:
        times = [{path: when for path, _, when in one["files"]} for one in (before, now)]
        moved = {path for path in times[1] if times[0][path] != times[1][path]}
        if not moved or _same_content(work, now["settings"], [Path(path) for path, *_ in now["files"]], moved):
            return
        changed.append("a file that was read already has another content")
    raise UsageError(
        f"{work} holds unfinished work of another request ({'; '.join(changed)}): repeat that one to go on with it, or "
        "begin anew with --anew"
    )


def _same_content(work: Path, settings: dict[str, Any], files: list[Path], moved: set[str]) -> bool:
    wanted = Settings(**settings)
    for number, shard in enumerate(cut(files, wanted.format, wanted.shard_bytes)):
        record = work / f"shard-{number:06d}.json"
        if moved.intersection(shard.files) and record.exists():
            reading = wanted.reading(shard)
            for _ in reading:
                pass
            if reading.digest.hexdigest() != ShardResult.from_json(record.read_bytes()).sha256:
                return False
    return True


# ---- tokenizer and shards -------------------------------------------------------------------------------------------


def _tokenizer(
    wanted: Path | str | TokenizerTraining, shards: Sequence[Shard], settings: Settings, place: Path, progress: bool
) -> Path:
    """The tokenizer's file; a trained one lies in the work folder until the corpus is complete."""
    if not isinstance(wanted, TokenizerTraining):
        return Path(wanted)
    made = place.with_name(f"{place.name}.model")
    if made.exists() and made.with_suffix(".json").exists():
        return made
    place.parent.mkdir(exist_ok=True)

    def texts() -> Iterator[str]:
        with _bar("tokenizer", shards, progress) as bar:
            for shard in shards:
                for one in settings.reading(shard, bar.update):
                    if not isinstance(one, Bad) and settings.part_of(one) == "train":
                        yield one.text

    kind: Any = wanted.model_type
    return train_sentencepiece(texts(), place, vocab_size=wanted.vocab_size, model_type=kind)


def _encode(encoder: ShardEncoder, jobs: Sequence[ShardJob], workers: int, progress: bool) -> tuple[list[ShardResult], int]:
    """The shards' results, and how many there were before."""
    results: dict[int, ShardResult] = {
        job.number: ShardResult.from_json(job.record.read_bytes()) for job in jobs if job.record.exists()
    }
    resumed, missing = len(results), [job for job in jobs if job.number not in results]
    with _bar("encode", [job.shard for job in jobs], progress) as bar:
        bar.update(sum(jobs[number].shard.bytes for number in results))
        for place, result in run_jobs(encoder, missing, workers, bar.update):
            results[missing[place].number] = result
    return [results[job.number] for job in jobs], resumed


def _bar(label: str, shards: Sequence[Shard], progress: bool) -> Any:
    total = sum(shard.bytes for shard in shards)
    return tqdm(desc=label, total=total, unit="B", unit_scale=True, disable=not progress, file=sys.stderr)


# ---- the corpus -----------------------------------------------------------------------------------------------------


def _check_parts(jobs: Sequence[ShardJob], results: Sequence[ShardResult], settings: Settings, progress: bool) -> None:
    """Every part has text (an end of sequence alone is none)."""
    for part in settings.parts:
        tokens = documents = 0
        for job in jobs:
            dataset = IndexedDataset(f"{job.prefix}.{part}", empty=True)
            ends = settings.append_eos and settings.template is None
            tokens += dataset.num_tokens - ends * dataset.num_documents
            documents += dataset.num_documents
        if tokens <= 0:
            total, bad = sum(result.documents for result in results), sum(result.bad_count for result in results)
            raise UsageError(
                f"the {part} part has no text: {documents} of {total} documents, {bad} lines or files skipped, valid "
                f"fraction {settings.valid_fraction}, test fraction {settings.test_fraction}; give more text or other "
                "fractions (0 writes no such part)"
            )


def _assemble(
    jobs: Sequence[ShardJob],
    results: Sequence[ShardResult],
    encoder: ShardEncoder,
    part: str,
    stage: Path,
    target: Path,
) -> tuple[PartReport, npt.NDArray[np.int64]]:
    """A part from its shards, in the stage, with its manifest."""
    prefix, model = Path(f"{stage}.{part}"), encoder.tokenizer
    merge([Path(f"{job.prefix}.{part}") for job in jobs], prefix, model.vocab_size)
    dataset = IndexedDataset(prefix)
    counts = token_counts(dataset, model.vocab_size)
    settings = {name: value for name, value in asdict(encoder.settings).items() if name != "shard_bytes"}
    read = hashlib.sha256("".join(result.sha256 for result in results).encode()).hexdigest()
    source = {
        "settings": settings,
        "input": {"files": sum(len(job.shard.files) for job in jobs if not job.shard.start), "sha256_of_shards": read},
        "skipped": sum(result.bad_count for result in results),
    }
    write_manifest(dataset, model, {"part": part, **source})
    report = PartReport(Path(f"{target}.{part}"), dataset.num_documents, dataset.num_tokens, entropy(counts))
    return report, counts


def write_manifest(dataset: IndexedDataset, model: TextTokenizer | None, more: dict[str, Any]) -> None:
    """``PREFIX.json`` beside a pair: its counts, the SHA-256 of both files and of the tokenizer, and how it was made."""
    idx, tokens = dataset.files
    about: dict[str, Any] = {
        "format": FORMAT,
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        "dtype": dataset.dtype.name,
        "sha256": {"idx": sha256_of_files([idx]), "bin": sha256_of_files([tokens])},
    }
    if model is not None:
        about["tokenizer"] = {"sha256": model.sha256, "vocab_size": model.vocab_size, "end": list(model.end_ids[:1])}
        if isinstance(model, Tokenizer) and model.settings is not None:
            about["tokenizer"]["trained_with"] = model.settings["settings"]
    write_atomic(idx.with_suffix(".json"), (json.dumps({**about, **more}, indent=2) + "\n").encode())


def merge(prefixes: Sequence[Path], target: Path, vocab_size: int | None = None) -> None:
    """One pair of all documents of ``prefixes``, in order; the ids are of ``vocab_size``, by default the widest type's. Their
    masks are merged beside it.

    Raises:
        UsageError: a pair is missing or damaged, or some have a mask and others do not.
    """
    masked = [prefix for prefix in prefixes if idx_path(f"{prefix}.mask").exists()]
    if masked and len(masked) < len(prefixes):
        other = next(prefix for prefix in prefixes if prefix not in masked)
        raise UsageError(f"{masked[0]} has a mask of what the loss counts, {other} has none: merge pairs of one kind")
    if masked:
        merge([Path(f"{prefix}.mask") for prefix in prefixes], Path(f"{target}.mask"), vocab_size)
    if vocab_size is None:
        wide = any(IndexedDataset(prefix, empty=True).dtype.itemsize > 2 for prefix in prefixes)
        vocab_size = 2**31 if wide else 65536
    with IndexedWriter(target, vocab_size=vocab_size) as writer:
        for prefix in prefixes:
            writer.extend(IndexedDataset(prefix, empty=True))


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A prefix in a hidden folder beside ``target``, gone afterwards with all that was not published from it."""
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        yield Path(folder) / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(stage: Path, target: Path) -> None:
    """Replace the corpus at ``target``: its old token files go first and the new indices come last.

    So a crash in between leaves a corpus without an index, which a reader refuses, and never parts of two.
    """
    with write_errors(target):
        for name in (*PARTS, *(f"{part}.mask" for part in PARTS)):
            old = f"{target}.{name}"
            for path in (idx_path(old), bin_path(old), Path(f"{old}.json")):
                path.unlink(missing_ok=True)
        for path in sorted(stage.parent.iterdir(), key=lambda path: path.suffix == ".idx"):
            os.replace(path, target.parent / path.name)
        fsync_directory(target.parent)


def split(
    prefix: Path, target: Path, settings: Settings, progress: Callable[[int], object] = lambda count: None
) -> dict[str, PartReport]:
    """Divide a pair's documents into ``<target>.<part>`` by a hash of the seed and their tokens; equal ones stay together.

    Raises:
        UsageError: a fraction, or a part that gets no tokens.
    """
    _check([prefix], settings, 1)
    if idx_path(f"{prefix}.mask").exists():
        raise UsageError(f"{prefix} has a mask of what the loss counts: hold conversations out when they are preprocessed")
    dataset = IndexedDataset(prefix)
    vocab_size = 65536 if dataset.dtype.itemsize <= 2 else 2**31
    reports = {}
    with _staging(target) as stage:
        writers = {part: IndexedWriter(f"{stage}.{part}", vocab_size=vocab_size) for part in settings.parts}
        for i in range(dataset.num_documents):
            tokens = dataset.document(i)
            digest = hashlib.sha256(f"{settings.seed}\0".encode() + tokens.astype("<i8").tobytes()).digest()
            place = int.from_bytes(digest[:8], "big") / 2**64
            held = settings.valid_fraction
            part = "valid" if place < held else "test" if place < held + settings.test_fraction else "train"
            writers[part].add_document(tokens)
            progress(1)
        for part, writer in writers.items():
            writer.close()
            made = IndexedDataset(f"{stage}.{part}")
            write_manifest(made, None, {"part": part, "split_of": dataset.content_hash(), "seed": settings.seed})
            reports[part] = PartReport(Path(f"{target}.{part}"), made.num_documents, made.num_tokens, 0.0)
        publish(stage, target)
    return reports

