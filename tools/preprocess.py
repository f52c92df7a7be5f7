"""Turn texts into token files: train or load a tokenizer, split, encode, write `.bin`/`.idx`; merge, split, inspect them.

    python -m tools.preprocess --input DIR --glob '*.py' --output data/corpus --train-tokenizer
    python -m tools.preprocess --input a.jsonl b.jsonl.zst c.parquet --output data/web --tokenizer tokenizer.json --eos '</s>'
    python -m tools.preprocess --input chat.jsonl --output data/chat --tokenizer tokenizer.json --chat llama3
    python -m tools.preprocess merge A B --output C
    python -m tools.preprocess split A --output B --valid-fraction 0.01
    python -m tools.preprocess inspect A [--verify] [--document N --tokenizer MODEL]

A document is a line of JSON lines (.jsonl, .gz, .zst), a row of Parquet, or any other file as a whole. Writes OUTPUT.train.bin
and .idx, with held-out parts OUTPUT.valid and OUTPUT.test, each with a manifest .json; with --train-tokenizer, OUTPUT.model and
its settings OUTPUT.json. The same files and options give the same bytes, wherever the folder is and however many workers there
are. Interrupted, the same command goes on with what is missing (OUTPUT.work).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from qeffect_lm.data.chat import TEMPLATES
from qeffect_lm.data.corpus import TokenizerTraining, make_corpus
from qeffect_lm.data.encoding import Settings, open_tokenizer
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.inputs import FORMATS
from qeffect_lm.data.manifest import open_mask, tokenizer_of, verify
from qeffect_lm.data.pairs import merge, split
from qeffect_lm.errors import UsageError
from qeffect_lm.units import format_bytes
from tools.common import add_traceback, run_tool


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


def subset(files: Sequence[Path], max_bytes: int, seed: int) -> list[Path]:
    """Files of at most ``max_bytes`` together, taken in a seeded order and returned in the order of ``files``."""
    if max_bytes < 1:
        raise UsageError(f"max bytes must be at least 1, not {max_bytes}")
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


# ---- the commands ---------------------------------------------------------------------------------------------------


def _make(arguments: argparse.Namespace) -> int:
    files = find_files(arguments.input, arguments.glob)
    if arguments.max_bytes is not None:
        files = subset(files, arguments.max_bytes, arguments.seed)
    training = TokenizerTraining(arguments.vocab_size, arguments.model_type)
    report = make_corpus(
        files,
        arguments.output,
        Settings(
            key=arguments.key or ("text" if arguments.chat is None else "messages"),
            template=arguments.chat,
            format=arguments.format,
            append_eos=arguments.append_eos,
            valid_fraction=arguments.valid_fraction,
            test_fraction=arguments.test_fraction,
            seed=arguments.seed,
            bad=arguments.bad,
        ),
        tokenizer=training if arguments.train_tokenizer else arguments.tokenizer,
        end=arguments.eos,
        workers=arguments.workers,
        anew=arguments.anew,
        progress=True,
    )
    print(report.summary())
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    made = merge(arguments.prefix, arguments.output)
    print(f"{arguments.output}.bin/.idx: {made.num_documents} documents, {made.num_tokens} tokens")
    return 0


def _split(arguments: argparse.Namespace) -> int:
    settings = Settings(
        valid_fraction=arguments.valid_fraction, test_fraction=arguments.test_fraction, seed=arguments.seed
    )
    total = IndexedDataset(arguments.prefix).num_documents
    with tqdm(desc="split", total=total, unit="doc", file=sys.stderr) as bar:
        reports = split(arguments.prefix, arguments.output, settings, bar.update)
    for name, part in reports.items():
        print(f"{name:9} {part.prefix}.bin/.idx: {part.documents} documents, {part.tokens} tokens")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    dataset = IndexedDataset(arguments.prefix)
    lengths = dataset.document_starts()
    lengths = lengths[1:] - lengths[:-1]
    print(f"{dataset.prefix}: {dataset.num_documents} documents of {lengths.min()} to {lengths.max()} tokens")
    size = sum(path.stat().st_size for path in dataset.files)
    print(f"{dataset.num_tokens} tokens, {dataset.dtype.name}, {dataset.num_sequences} sequences, {format_bytes(size)}")
    if (tokenizer := tokenizer_of(arguments.prefix)) is not None:
        print(f"tokenizer {tokenizer['sha256']} ({tokenizer['vocab_size']} ids)")
    mask = open_mask(dataset)
    if mask is not None:
        print(f"mask: {int(np.count_nonzero(mask.tokens))} tokens count as targets")
    if arguments.document is not None:
        if not 0 <= arguments.document < dataset.num_documents:
            raise UsageError(f"document {arguments.document} is not one of the {dataset.num_documents}, counted from 0")
        counted = None if mask is None else mask.document(arguments.document)
        print(_shown(arguments, dataset.document(arguments.document), counted))
    if arguments.verify:
        print(verify(arguments.prefix))
    return 0


def _shown(arguments: argparse.Namespace, tokens: np.ndarray, counted: np.ndarray | None) -> str:
    """Token ids, or their text; what a mask counts in brackets of its own."""
    runs = [(tokens, False)]
    if counted is not None and len(tokens):
        edges = np.flatnonzero(np.diff(counted != 0)) + 1
        runs = [(part, bool(mask[0])) for part, mask in zip(np.split(tokens, edges), np.split(counted, edges), strict=True)]
    text = (lambda ids: " ".join(map(str, ids))) if arguments.tokenizer is None else _text_of(arguments)
    return "".join(f"⟦{text(ids.tolist())}⟧" if counts else text(ids.tolist()) for ids, counts in runs)


def _text_of(arguments: argparse.Namespace) -> Callable[[list[int]], str]:
    """Ids to text; pieces without a text of their own by name."""
    model: Any = open_tokenizer(arguments.tokenizer)
    told = tokenizer_of(arguments.prefix)
    if told is not None and told["sha256"] != model.sha256:
        raise UsageError(f"{arguments.tokenizer} is not the tokenizer of {arguments.prefix}: its SHA-256 is {model.sha256}")

    def text(ids: list[int]) -> str:
        made = b"".join(model.piece_bytes(token) or model.piece_name(token).encode() for token in ids)
        return made.decode(errors="replace")

    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    command = given.pop(0) if given and given[0] in COMMANDS else "make"
    arguments = COMMANDS[command][0]().parse_args(given)
    return run_tool(lambda: COMMANDS[command][1](arguments), arguments.traceback)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.preprocess", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", type=Path, required=True, metavar="PATH", help="files, or folders to search")
    add("--glob", default="*.txt", help="which files of a folder to take (default: %(default)s)")
    add("--output", type=Path, required=True, metavar="PREFIX", help="prefix of the files to write")
    add("--format", choices=FORMATS, default="auto", help="of the input (default: by each name's ending)")
    add("--key", help="field or column of the text (default: text), with --chat of the messages (default: messages)")
    help = "documents are conversations, rendered as this family does; PREFIX.mask says which tokens the loss counts"
    add("--chat", choices=sorted(TEMPLATES), help=help)
    source = parser.add_mutually_exclusive_group(required=True)
    help = "sentencepiece's .model or Hugging Face's tokenizer.json"
    source.add_argument("--tokenizer", type=Path, metavar="FILE", help=help)
    help = "make PREFIX.model from the training part"
    source.add_argument("--train-tokenizer", action="store_true", help=help)
    help = "ids of a trained tokenizer (default: %(default)s)"
    add("--vocab-size", type=int, default=4096, metavar="N", help=help)
    help = "kind of a trained tokenizer (default: %(default)s)"
    add("--model-type", choices=["bpe", "unigram"], default="bpe", help=help)
    _add_fractions(parser, 0.02)
    help = "end each document with the end-of-sequence token (default: yes)"
    add("--append-eos", action=argparse.BooleanOptionalAction, default=True, help=help)
    add("--eos", metavar="PIECE", help="the piece that ends a document (default: the tokenizer's; a tokenizer.json names none)")
    help = "lines, rows and files that hold no document: stop at the first, or leave them out and report (default: %(default)s)"
    add("--bad", choices=["refuse", "skip"], default="refuse", help=help)
    help = "take a subset of the files of at most N bytes (default: all)"
    add("--max-bytes", type=int, metavar="N", help=help)
    help = "encoding processes (default: one per core, %(default)s)"
    add("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help=help)
    add("--anew", action="store_true", help="throw away what an interrupted run left in PREFIX.work")
    add_traceback(parser)
    return parser


def _add_fractions(parser: argparse.ArgumentParser, valid: float) -> None:
    add = parser.add_argument
    help = "share of the documents held out for validation, 0 to 1 (default: %(default)s)"
    add("--valid-fraction", type=float, default=valid, metavar="F", help=help)
    help = "share of the documents held out for tests (default: %(default)s)"
    add("--test-fraction", type=float, default=0.0, metavar="F", help=help)
    add("--seed", type=int, default=1234, help="chooses the held-out documents and the subset (default: %(default)s)")


def _merge_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.preprocess merge", description="One pair of several, in order.")
    parser.add_argument("prefix", nargs="+", type=Path, help="prefixes of the pairs")
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX")
    add_traceback(parser)
    return parser


def _split_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.preprocess split", description="Hold documents out, by a hash of the seed and their tokens."
    )
    parser.add_argument("prefix", type=Path, help="prefix of the pair")
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX")
    _add_fractions(parser, 0.02)
    add_traceback(parser)
    return parser


def _inspect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.preprocess inspect", description="What is in a pair.")
    parser.add_argument("prefix", type=Path, help="prefix of the pair")
    parser.add_argument("--verify", action="store_true", help="read both files and compare them with the manifest")
    parser.add_argument("--document", type=int, metavar="N", help="show document N, counted from 0")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="show it as text")
    add_traceback(parser)
    return parser


COMMANDS = {
    "make": (_parser, _make),
    "merge": (_merge_parser, _merge),
    "split": (_split_parser, _split),
    "inspect": (_inspect_parser, _inspect),
}


if __name__ == "__main__":
    sys.exit(main())
