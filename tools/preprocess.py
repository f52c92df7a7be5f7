"""Turn text files into token files: train or load a tokenizer, split, encode, write `.bin`/`.idx`.

    python -m tools.preprocess --input DIR --glob '*.py' --output data/corpus --train-tokenizer

One document per file. Writes OUTPUT.train.bin/.idx and OUTPUT.valid.bin/.idx and, with --train-tokenizer,
OUTPUT.model and its settings OUTPUT.json. The same files and options give the same bytes, wherever the folder
is and however many workers there are.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from qeffect_lm.data.files import fsync_directory, write_errors
from qeffect_lm.data.indexed import IndexedDataset, IndexedWriter, bin_path, idx_path
from qeffect_lm.data.stats import entropy, token_counts
from qeffect_lm.data.tokenizer import Tokenizer, train_sentencepiece
from qeffect_lm.errors import QEffectError, UsageError

_BATCH_BYTES = 4_000_000
_NAMED_SKIPS = 20


@dataclass(frozen=True)
class SplitReport:
    """One written part: the prefix of its files, documents, tokens (ends of sequence included), nats per
    token."""

    prefix: Path
    documents: int
    tokens: int
    unigram_entropy: float


@dataclass(frozen=True)
class CorpusReport:
    """What :func:`preprocess_corpus` made.

    ``files`` and ``bytes`` count the text that was used; ``skipped`` holds (file, reason).
    ``unigram_entropy`` is that of both parts together, in nats per token.
    """

    files: int
    bytes: int
    skipped: tuple[tuple[Path, str], ...]
    tokenizer: Path
    vocab_size: int
    train: SplitReport
    valid: SplitReport | None
    unigram_entropy: float
    seconds: float

    def summary(self) -> str:
        """A few lines for a person."""
        lines = [
            f"read      {self.files} files, {self.bytes / 1e6:.1f} MB, in {self.seconds:.1f} s",
            f"tokenizer {self.tokenizer} ({self.vocab_size} ids)",
        ]
        for name, part in (("train", self.train), ("valid", self.valid)):
            if part is not None:
                lines.append(
                    f"{name:9} {part.prefix}.bin/.idx: {part.documents} documents, {part.tokens} tokens, "
                    f"unigram entropy {part.unigram_entropy:.3f} nats/token"
                )
        if self.skipped:
            lines.append(f"skipped   {len(self.skipped)} files:")
            lines += [f"  {_printable(path)}: {reason}" for path, reason in self.skipped[:_NAMED_SKIPS]]
            if len(self.skipped) > _NAMED_SKIPS:
                lines.append(f"  and {len(self.skipped) - _NAMED_SKIPS} more")
        return "\n".join(lines)


def stdlib_python_files() -> list[Path]:
    """The ``.py`` sources of the running interpreter's standard library, without installed packages, sorted.

    Raises UsageError where the library is not there as source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    packages = {"site-packages", "dist-packages"}
    files = [
        path
        for path in root.rglob("*.py")
        if path.is_file() and not packages & set(path.relative_to(root).parts)
    ]
    if not files:
        raise UsageError(
            f"{root} holds no .py files: this Python has its standard library without sources; use a usual "
            "CPython installation, or another corpus"
        )
    return sorted(files, key=lambda path: path.as_posix())


def find_files(inputs: Iterable[Path], glob: str) -> list[Path]:
    """The files of ``inputs`` in their order; a folder stands for the files below it that match ``glob``,
    sorted.

    A file named twice counts once. Raises UsageError for an input that does not exist, and where nothing is
    left.
    """
    inputs = list(inputs)
    found: dict[Path, None] = {}
    for path in inputs:
        if path.is_dir():
            below = (entry for entry in path.rglob(glob) if entry.is_file())
            found.update(dict.fromkeys(sorted(below, key=lambda entry: entry.as_posix())))
        elif path.is_file():
            found[path] = None
        else:
            raise UsageError(f"input {path} does not exist")
    if not found:
        raise UsageError(
            f"no file matches {glob!r} below {', '.join(map(str, inputs))}: check --input and --glob"
        )
    return list(found)


def preprocess_corpus(
    files: Sequence[Path],
    out_prefix: Path | str,
    *,
    tokenizer: Path | str | None = None,
    train_tokenizer: bool = False,
    vocab_size: int = 4096,
    model_type: Literal["bpe", "unigram"] = "bpe",
    valid_fraction: float = 0.02,
    append_eos: bool = True,
    seed: int = 1234,
    workers: int = 2,
    max_bytes: int | None = None,
    progress: bool = False,
) -> CorpusReport:
    """Writes the token files of ``files`` (UTF-8, one document each, in this order) and reports what it did.

    Either ``tokenizer`` is a model to use, or ``train_tokenizer`` makes ``out_prefix.model`` of
    ``vocab_size`` and ``model_type`` from the training part. A document goes to the validation part when a
    hash of (seed, file name, content) falls below ``valid_fraction``, so equal files are never on both sides;
    0 writes no validation part. ``append_eos`` ends each document with the tokenizer's end-of-sequence token.
    ``workers`` threads encode. ``max_bytes`` takes a subset of at most that many bytes, chosen by the seed.
    ``progress`` shows bars on stderr. Files that cannot be read or decoded are skipped and reported. An
    earlier corpus of this prefix is replaced, after the new one is complete.

    Raises UsageError for bad arguments, no usable text, an empty part, or a tokenizer that cannot be used;
    QEffectError when the output cannot be written.
    """
    started = time.monotonic()
    if (tokenizer is None) == (not train_tokenizer):
        raise UsageError("give a tokenizer or train one: exactly one of --tokenizer and --train-tokenizer")
    _check_arguments(files, valid_fraction, workers, max_bytes)
    if max_bytes is not None:
        files = _subset(files, max_bytes, seed)
    corpus = _Corpus(files, valid_fraction, seed, progress)
    target = Path(out_prefix)
    with _staging(target) as stage:
        if tokenizer is None:
            texts = (document.text for document in corpus.read("tokenizer") if not document.valid)
            model = Tokenizer(train_sentencepiece(texts, stage, vocab_size=vocab_size, model_type=model_type))
        else:
            model = Tokenizer(tokenizer)
        if append_eos and model.eos_id < 0:
            raise UsageError(
                f"tokenizer {model.path} has no end of sequence: use --no-append-eos or another one"
            )
        read_bytes = _write(corpus, model, stage, append_eos, workers)
        _publish(stage, target)
    parts = [_part(Path(f"{target}.{name}"), model.vocab_size) for name in corpus.parts]
    return CorpusReport(
        files=sum(report.documents for report, _ in parts),
        bytes=read_bytes,
        skipped=tuple(corpus.skipped.items()),
        tokenizer=Path(tokenizer) if tokenizer is not None else Path(f"{target}.model"),
        vocab_size=model.vocab_size,
        train=parts[0][0],
        valid=parts[1][0] if len(parts) > 1 else None,
        unigram_entropy=entropy(np.sum([counts for _, counts in parts], axis=0)),
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class _Document:
    text: str
    bytes: int
    valid: bool


@dataclass
class _Corpus:
    """The documents of ``files``, readable more than once; ``skipped`` collects what could not be used."""

    files: Sequence[Path]
    valid_fraction: float
    seed: int
    progress: bool
    skipped: dict[Path, str] = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        return ["train", "valid"] if self.valid_fraction else ["train"]

    def read(self, label: str) -> Iterator[_Document]:
        for path in tqdm(self.files, desc=label, unit="file", disable=not self.progress, file=sys.stderr):
            try:
                content = path.read_bytes()
                text = content.decode()
            except OSError as error:
                self.skipped[path] = error.strerror or str(error)
            except UnicodeDecodeError as error:
                self.skipped[path] = f"not UTF-8 (byte {error.start})"
            else:
                yield _Document(text, len(content), self._is_valid(path.name, content))

    def _is_valid(self, name: str, content: bytes) -> bool:
        # Of the path only the last part counts: a corpus keeps its split where it is moved, and copies of a
        # file (empty __init__.py, vendored modules) stay on one side.
        digest = hashlib.sha256(f"{self.seed}\0{name}\0".encode(errors="surrogateescape") + content).digest()
        return int.from_bytes(digest[:8], "big") < self.valid_fraction * 2**64


def _check_arguments(
    files: Sequence[Path], valid_fraction: float, workers: int, max_bytes: int | None
) -> None:
    if not files:
        raise UsageError("the corpus has no files")
    if not 0 <= valid_fraction < 1:
        raise UsageError(f"valid fraction {valid_fraction} is not in [0, 1)")
    if workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}")
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"max bytes must be at least 1, not {max_bytes}")


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A prefix in a hidden folder beside ``target``, gone afterwards with all that was not published from
    it."""
    with write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        yield Path(folder) / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(stage: Path, target: Path) -> None:
    """Replaces the corpus at ``target``: its old token files go first and the new indices come last.

    So a crash in between leaves a corpus without an index, which a reader refuses, and never parts of two.
    """
    with write_errors(target):
        for name in ("train", "valid"):
            idx_path(f"{target}.{name}").unlink(missing_ok=True)
            bin_path(f"{target}.{name}").unlink(missing_ok=True)
        for path in sorted(stage.parent.iterdir(), key=lambda path: path.suffix == ".idx"):
            os.replace(path, target.parent / path.name)
        fsync_directory(target.parent)


def _subset(files: Sequence[Path], max_bytes: int, seed: int) -> list[Path]:
    """Files of at most ``max_bytes`` together, taken in a seeded order and returned in the order of
    ``files``."""
    order = sorted(range(len(files)), key=lambda i: hashlib.sha256(f"{seed}/{i}".encode()).digest())
    taken: list[int] = []
    total = 0
    for i in order:
        try:
            size = files[i].stat().st_size
        except OSError:
            size = 0  # kept, so that reading it reports why it cannot be read
        if total + size <= max_bytes:
            taken.append(i)
            total += size
    if not taken:
        raise UsageError(f"each of the {len(files)} files is larger than max bytes {max_bytes}")
    return [files[i] for i in sorted(taken)]


def _batches(documents: Iterable[_Document]) -> Iterator[list[_Document]]:
    batch: list[_Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write(corpus: _Corpus, model: Tokenizer, stage: Path, append_eos: bool, workers: int) -> int:
    """Writes the parts at ``stage``; returns the bytes of text that went into them."""
    end = [model.eos_id] if append_eos else []
    read_bytes = 0
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(f"{stage}.{name}", vocab_size=model.vocab_size))
            for name in corpus.parts
        ]
        tokens = [0] * len(writers)
        for batch in _batches(corpus.read("encode")):
            encoded = model.encode_batch([document.text for document in batch], workers)
            for document, ids in zip(batch, encoded, strict=True):
                writers[document.valid].add_document(ids + end)
                tokens[document.valid] += len(ids)
                read_bytes += document.bytes
        for name, count in zip(corpus.parts, tokens, strict=True):
            if not count:
                raise UsageError(
                    f"the {name} part has no text: {sum(w.num_documents for w in writers)} documents were "
                    f"read, {len(corpus.skipped)} files skipped, valid fraction {corpus.valid_fraction}; "
                    "give more files or another fraction (0 writes no validation part)"
                )
    return read_bytes


def _part(prefix: Path, vocab_size: int) -> tuple[SplitReport, npt.NDArray[np.int64]]:
    """The report of a written part, and its token counts."""
    dataset = IndexedDataset(prefix)
    counts = token_counts(dataset, vocab_size)
    return SplitReport(prefix, dataset.num_documents, dataset.num_tokens, entropy(counts)), counts


def _printable(path: Path) -> str:
    """``path`` with what is no Unicode spelled out, so that printing it cannot fail."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        report = preprocess_corpus(
            find_files(arguments.input, arguments.glob),
            arguments.output,
            tokenizer=arguments.tokenizer,
            train_tokenizer=arguments.train_tokenizer,
            vocab_size=arguments.vocab_size,
            model_type=arguments.model_type,
            valid_fraction=arguments.valid_fraction,
            append_eos=arguments.append_eos,
            seed=arguments.seed,
            workers=arguments.workers,
            max_bytes=arguments.max_bytes,
            progress=True,
        )
    except QEffectError as error:
        if arguments.traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(report.summary())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.preprocess", description=(__doc__ or "").split("\n\n")[0]
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="text files, or folders to search",
    )
    add("--glob", default="*.txt", help="which files of a folder to take (default: %(default)s)")
    add("--output", type=Path, required=True, metavar="PREFIX", help="prefix of the files to write")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokenizer", type=Path, metavar="MODEL", help="sentencepiece model to use")
    help = "make PREFIX.model from the training part"
    source.add_argument("--train-tokenizer", action="store_true", help=help)
    help = "ids of a trained tokenizer (default: %(default)s)"
    add("--vocab-size", type=int, default=4096, metavar="N", help=help)
    help = "kind of a trained tokenizer (default: %(default)s)"
    add("--model-type", choices=["bpe", "unigram"], default="bpe", help=help)
    help = "share of the documents held out, 0 to 1 (default: %(default)s)"
    add("--valid-fraction", type=float, default=0.02, metavar="F", help=help)
    help = "end each document with the end-of-sequence token (default: yes)"
    add("--append-eos", action=argparse.BooleanOptionalAction, default=True, help=help)
    help = "take a subset of the files of at most N bytes (default: all)"
    add("--max-bytes", type=int, metavar="N", help=help)
    help = "chooses the held-out documents and the subset (default: %(default)s)"
    add("--seed", type=int, default=1234, help=help)
    help = "encoding threads (default: one per core, %(default)s)"
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help=help)
    add("--traceback", action="store_true", help="show where an error came from")
    return parser


if __name__ == "__main__":
    sys.exit(main())
