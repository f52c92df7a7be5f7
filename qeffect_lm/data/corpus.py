"""From files to a corpus: shards on worker processes, a work folder to go on from, and one move into place at the end.

While the output PREFIX is made, the folder ``PREFIX.work`` lies beside it: ``manifest.json`` with the settings and the files
(sizes, times), one token file per finished shard and part, and the trained tokenizer. After an interruption the same call goes
on with the shards that are missing. Other settings or other files are refused, unless told to begin anew. Where a file has
another time than before, its finished shards are read again and compared by SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from qeffect_lm.data.chat import TEMPLATES
from qeffect_lm.data.encoding import Settings, ShardEncoder, ShardJob, ShardResult, TextTokenizer, good, open_tokenizer
from qeffect_lm.data.files import write_atomic
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.inputs import FORMATS, Bad, Shard, cut, printable, shard_size
from qeffect_lm.data.manifest import check_free, write_manifest
from qeffect_lm.data.pairs import PartReport, check_fractions, joined, named, publish, stage_of, working
from qeffect_lm.data.pool import run_jobs
from qeffect_lm.data.stats import entropy, token_counts
from qeffect_lm.data.tokenizer import Tokenizer, is_settings, train_sentencepiece
from qeffect_lm.errors import UsageError

FORMAT = 1
_NAMED_SKIPS = 20


@dataclass(frozen=True)
class TokenizerTraining:
    """A tokenizer to be trained from the training part (:func:`~qeffect_lm.data.tokenizer.train_sentencepiece`)."""

    vocab_size: int = 4096
    model_type: str = "bpe"


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
    _check_target(target, files, tokenizer)
    settings = replace(settings, shard_bytes=settings.shard_bytes or shard_size(files))
    shards = cut(files, settings.format, settings.shard_bytes)
    if settings.template is not None and (texts := [shard.files[0] for shard in shards if shard.format == "text"]):
        raise UsageError(f"{texts[0]} is read as one text: conversations are JSON lines or rows of Parquet (--format says so)")
    with _work_folder(target, settings, files, tokenizer, end, anew) as (work, stamps):
        model_path, read = _tokenizer(tokenizer, shards, settings, work, target.name, progress)
        encoder = ShardEncoder(model_path, end, settings)
        model = encoder.tokenizer
        if settings.append_eos and settings.template is None and not model.end_ids:
            raise UsageError(
                f"tokenizer {model_path} has no end of sequence: use --no-append-eos, name one with --eos, or use another one"
            )
        jobs = [ShardJob(i, shard, str(work)) for i, shard in enumerate(shards)]
        results, resumed = _encode(ShardEncoder(model_path, end, settings), jobs, workers, progress, stamps, read)
        try:
            _check_parts(jobs, results, settings)
        except UsageError:
            _clear(work)  # the same request would end here again
            raise
        stage = stage_of(work, target)
        parts = {part: _assemble(jobs, results, encoder, part, stage, target) for part in settings.parts}
        if isinstance(tokenizer, TokenizerTraining):
            for path in model_path.parent.iterdir():
                write_atomic(stage.parent / path.name, path.read_bytes())
        publish(stage, target, named())
        _clear(work)
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
    check_fractions(settings)
    for name, value, known in (("bad", settings.bad, ("refuse", "skip")), ("format", settings.format, FORMATS)):
        if value not in known:
            raise UsageError(f"{name} is {value!r}: there are {', '.join(known)}")
    if settings.template is not None and settings.template not in TEMPLATES:
        raise UsageError(f"no template {settings.template!r}: there are {', '.join(TEMPLATES)}")
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")


def _check_target(target: Path, files: Sequence[Path], tokenizer: Path | str | TokenizerTraining) -> None:
    """Nothing of the user's is overwritten: neither an input, nor a file that is there and was not made by this."""
    for name in named():
        check_free(f"{target}{name}")
    written = [Path(f"{target}{part}{end}") for part in named() for end in (".json", ".bin", ".idx", ".mask.bin", ".mask.idx")]
    if isinstance(tokenizer, TokenizerTraining):
        model, settings = Path(f"{target}.model"), Path(f"{target}.json")
        theirs = settings if settings.exists() and not is_settings(settings) else None
        if model.exists() and not settings.exists() and not target.with_name(f"{target.name}.work").exists():
            theirs = model
        if theirs is not None:
            raise UsageError(f"{theirs} is there and was not made by this: it is not overwritten; choose another output")
        written += [model, settings]
    replaced = {path.resolve() for path in written}
    read = [*files] if isinstance(tokenizer, TokenizerTraining) else [*files, Path(tokenizer)]
    for path in read:
        if path.resolve() in replaced:
            raise UsageError(f"{path} would be read and replaced: choose another output than {target}")


# ---- the work folder ------------------------------------------------------------------------------------------------


Stamps = dict[str, tuple[int, int]]


@contextmanager
def _work_folder(
    target: Path,
    settings: Settings,
    files: Sequence[Path],
    tokenizer: Path | str | TokenizerTraining,
    end: str | None,
    anew: bool,
) -> Iterator[tuple[Path, Stamps]]:
    """The folder, locked, with the manifest of this request, and the files' sizes and times; without a finished shard nothing
    of it stays after an error."""
    with working(target) as work:
        try:
            begun = any(work.glob("shard-*.json")) or (work / "read.json").exists()
            if anew or not begun or not (work / "manifest.json").exists():
                _clear(work)  # without a manifest: of a removal that was interrupted
            yield work, _claim(work, settings, files, tokenizer, end)
        except BaseException:
            if not any(work.glob("shard-*.json")):
                _clear(work)
            raise


def _claim(
    work: Path, settings: Settings, files: Sequence[Path], tokenizer: Path | str | TokenizerTraining, end: str | None
) -> Stamps:
    """Compare with the request that the folder is of, and write down this one."""
    if isinstance(tokenizer, TokenizerTraining):
        model: dict[str, Any] = {**asdict(tokenizer), "sha256": None}
    else:
        model = {"sha256": open_tokenizer(tokenizer).sha256}
    stamps = {str(path): _stamp(path) for path in files}
    wanted = {
        "format": FORMAT,
        "settings": asdict(settings),
        "tokenizer": {**model, "end": end},
        "files": [[path, *stamp] for path, stamp in stamps.items()],
    }
    manifest = work / "manifest.json"
    if manifest.exists():
        try:
            before = json.loads(manifest.read_bytes())
            _compare(before, wanted, work)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError):
            raise UsageError(f"{manifest} is damaged: begin anew with --anew") from None
    write_atomic(manifest, json.dumps(wanted).encode())
    return stamps


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


def _clear(work: Path) -> None:
    """Remove all but the lock; the manifest first, so that what an interruption leaves is of no request."""
    (work / "manifest.json").unlink(missing_ok=True)
    for path in work.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _compare(before: dict[str, Any], now: dict[str, Any], work: Path) -> None:
    """Whether the work folder is of this request; shards of files with another time are kept where the content is the same."""
    if before.get("settings", {}).get("bad") == "refuse":  # what is finished has no bad lines
        before["settings"]["bad"] = now["settings"]["bad"]
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
    wanted, read = Settings(**settings), _read_before(work)
    for number, shard in enumerate(cut(files, wanted.format, wanted.shard_bytes)):
        record = work / f"shard-{number:06d}.json"
        known = ShardResult.from_json(record.read_bytes()).sha256 if record.exists() else (read or {}).get(number)
        if moved.intersection(shard.files) and known is not None:
            reading = wanted.reading(shard)
            for _ in reading:
                pass
            if reading.digest.hexdigest() != known:
                return False
    return True


def _read_before(work: Path) -> dict[int, str] | None:
    """The SHA-256 of each shard as the tokenizer's training read it; None where none was trained."""
    path = work / "read.json"
    return dict(enumerate(json.loads(path.read_bytes()))) if path.exists() else None


# ---- tokenizer and shards -------------------------------------------------------------------------------------------


def _tokenizer(
    wanted: Path | str | TokenizerTraining,
    shards: Sequence[Shard],
    settings: Settings,
    work: Path,
    name: str,
    progress: bool,
) -> tuple[Path, dict[int, str]]:
    """The tokenizer's file, and the SHA-256 of the shards that its training read; a trained one lies in the work folder until
    the corpus is complete."""
    if not isinstance(wanted, TokenizerTraining):
        return Path(wanted), {}
    place, read = work / "tokenizer" / name, _read_before(work)
    made = place.with_name(f"{name}.model")
    if read is not None and made.exists() and made.with_suffix(".json").exists():
        return made, read
    place.parent.mkdir(exist_ok=True)
    digests: list[str] = []

    def texts() -> Iterator[str]:
        with _bar("tokenizer", shards, progress) as bar:
            for shard in shards:
                reading = settings.reading(shard, bar.update)
                for one in good(reading, settings.bad, ShardResult()):
                    if settings.part_of(one) == "train":
                        yield one.text
                digests.append(reading.digest.hexdigest())

    kind: Any = wanted.model_type
    train_sentencepiece(texts(), place, vocab_size=wanted.vocab_size, model_type=kind)
    write_atomic(work / "read.json", json.dumps(digests).encode())
    return made, dict(enumerate(digests))


def _encode(
    encoder: ShardEncoder,
    jobs: Sequence[ShardJob],
    workers: int,
    progress: bool,
    stamps: Stamps,
    read: Mapping[int, str],
) -> tuple[list[ShardResult], int]:
    """The shards' results, and how many there were before.

    Raises:
        UsageError: a file changed since ``stamps`` were taken, or since the tokenizer was trained.
    """
    results: dict[int, ShardResult] = {
        job.number: ShardResult.from_json(job.record.read_bytes()) for job in jobs if job.record.exists()
    }
    resumed, missing = len(results), [job for job in jobs if job.number not in results]
    done = sum(jobs[number].shard.bytes for number in results)
    with _bar("encode", [job.shard for job in jobs], progress, done) as bar:
        for place, result in run_jobs(encoder, missing, workers, bar.update):
            job = missing[place]
            changed = [path for path in job.shard.files if _stamp(Path(path)) != stamps[path]]
            if changed or read.get(job.number, result.sha256) != result.sha256:
                job.record.unlink()
                raise UsageError(
                    f"{printable((changed or job.shard.files)[0])} changed while it was read: when it stays as it is, begin "
                    "anew with --anew"
                )
            results[job.number] = result
    return [results[job.number] for job in jobs], resumed


def _bar(label: str, shards: Sequence[Shard], progress: bool, done: int = 0) -> Any:
    total = sum(shard.bytes for shard in shards)
    return tqdm(desc=label, total=total, initial=done, unit="B", unit_scale=True, disable=not progress, file=sys.stderr)


# ---- the corpus -----------------------------------------------------------------------------------------------------


def _check_parts(jobs: Sequence[ShardJob], results: Sequence[ShardResult], settings: Settings) -> None:
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
            first = next((f" (the first: {one})" for result in results for one in result.bad), "")
            raise UsageError(
                f"the {part} part has no text: {documents} of {total} documents, {bad} lines or files skipped{first}, valid "
                f"fraction {settings.valid_fraction}, test fraction {settings.test_fraction}; give more text or other "
                "fractions (--valid-fraction, --test-fraction; 0 writes no such part)"
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
    joined([Path(f"{job.prefix}.{part}") for job in jobs], prefix, model.vocab_size)
    dataset = IndexedDataset(prefix)
    counts = token_counts(dataset, model.vocab_size)
    settings = {name: value for name, value in asdict(encoder.settings).items() if name != "shard_bytes"}
    read = hashlib.sha256("".join(result.sha256 for result in results).encode()).hexdigest()
    source = {
        "settings": settings,
        "input": {"files": sum(len(job.shard.files) for job in jobs if not job.shard.start), "sha256_of_shards": read},
        "skipped": sum(result.bad_count for result in results),
    }
    write_manifest(dataset, _about(model), {"part": part, **source})
    report = PartReport(Path(f"{target}.{part}"), dataset.num_documents, dataset.num_tokens, entropy(counts))
    return report, counts


def _about(model: TextTokenizer) -> dict[str, Any]:
    """A tokenizer, for a manifest."""
    about = {"sha256": model.sha256, "vocab_size": model.vocab_size, "end": list(model.end_ids[:1])}
    if isinstance(model, Tokenizer) and model.settings is not None:
        about["trained_with"] = model.settings["settings"]
    return about
