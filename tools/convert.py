"""Convert models between our checkpoints, Hugging Face folders and Megatron checkpoints.

    python -m tools.convert --from hf --to native SRC DST [--dtype bfloat16] [--max-shard-size 5GB] [--dry-run]
    python -m tools.convert --from native --to hf SRC DST
    python -m tools.convert --from megatron --to native SRC DST --allow-pickle [--weights-only] [--vocab-size N]
    python -m tools.convert --from native --to megatron SRC DST [--tp N --pp N]

SRC is a folder with ``config.json`` and safetensors files (hf), a checkpoint of ours (native: a ``step_…`` folder, a run's
folder, a folder that a conversion made), or Megatron's (megatron: ``torch_dist`` or ``mp_rank`` folders). DST appears whole
or not at all. Tensors are read and written one at a time.

Everything is checked before a byte is written: names, shapes, dtypes and configuration keys. docs/convert.md has the rules.

Exit code 0: converted (or, with ``--dry-run``, can be); 1: reading or writing failed; 2: the request or the model is refused.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from checkpoint.fileops import FileOps, naming
from checkpoint.hf.config import model_section
from checkpoint.hf.folder import read_json
from checkpoint.hf.read import read_hf
from checkpoint.hf.write import left_behind as fp8_left_behind
from checkpoint.hf.write import plan_hf, write_hf
from checkpoint.megatron.read import read_megatron
from checkpoint.megatron.write import Ranks, check_model, left_behind, nbytes_of, options, write_megatron
from checkpoint.native import SHARD_SIZE, read_native, saved_config, write_native
from checkpoint.portable import CASTS, Item, Model
from checkpoint.publish import check_destination, publish
from qeffect_lm.app.text import check_tokenizer
from qeffect_lm.config_yaml import read_layers
from qeffect_lm.errors import UsageError
from qeffect_lm.units import format_bytes, parse_bytes
from tools.common import add_traceback, printable, run_tool

SOURCES = ("hf", "native", "megatron")
TARGETS = ("hf", "native", "megatron")
LOAD = "--finetune --use-checkpoint-args"
OVERHEAD = 1 << 20  # bytes of a manifest, roughly: for the check of free space only


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    arguments = _parser().parse_args(argv)
    return run_tool(lambda: convert(arguments), arguments.traceback)


def convert(arguments: argparse.Namespace, ops: FileOps | None = None) -> int:
    """Read, check, tell, and write unless it is a dry run."""
    source, target, destination = arguments.source_format, arguments.target_format, arguments.dst
    shard_size = _shard_size(arguments.max_shard_size)
    model = _read(source, arguments)
    saved_config(model)  # whatever the target: a section that is none of ours is refused, by its key
    nbytes, write = _writer(target, model, shard_size, _ranks(arguments))
    check_destination(destination, nbytes, Path(model.where))
    report = describe(model, target, destination, nbytes)
    print(json.dumps(report, indent=1) if arguments.json else printable(text(report, arguments.dry_run)))
    if arguments.dry_run:
        return 0
    give_memory_back()
    with ending_cleanly(), _progress(model, arguments.quiet or arguments.json) as watched:
        publish(destination, lambda folder: write(watched, folder, ops or FileOps()), ops or FileOps())
    if not arguments.json:
        print(f"wrote {destination}")
    return 0


def _writer(
    target: str, model: Model, shard_size: int | None, ranks: Ranks | None
) -> tuple[int, Callable[[Model, Path, FileOps], None]]:
    """How many bytes the target will have, and what writes it into a folder."""
    if target == "megatron":
        check_model(model, ranks)
        if ranks is not None and shard_size is not None:
            raise UsageError("--max-shard-size has no meaning with --tp and --pp: each rank has one file")
        size, nbytes = shard_size or SHARD_SIZE, nbytes_of(model, ranks) + OVERHEAD
        return nbytes, lambda watched, folder, ops: write_megatron(watched, folder, ops, ranks, size)
    if target == "hf":
        layout = plan_hf(model, shard_size)
        return layout.nbytes, lambda watched, folder, ops: write_hf(watched, layout, folder, ops)
    nbytes = model.nbytes + sum(map(len, model.files.values())) + OVERHEAD
    return nbytes, lambda watched, folder, ops: write_native(watched, folder, ops, shard_size or SHARD_SIZE)


def _read(source: str, arguments: argparse.Namespace) -> Model:
    path, dtype = arguments.src, arguments.dtype
    with naming("look at", path):
        if not path.exists():
            raise UsageError(f"{path} does not exist")
    if arguments.fp8 and (source, arguments.target_format) != ("native", "hf"):
        raise UsageError("--fp8 is for --from native --to hf: leave it out")
    if source != "megatron":
        for name in ("allow_pickle", "weights_only", "model", "vocab_size"):
            if getattr(arguments, name):
                raise UsageError(f"--{name.replace('_', '-')} is for --from megatron: leave it out")
    if source == "megatron":
        return read_megatron(
            path,
            allow_pickle=arguments.allow_pickle,
            weights_only=arguments.weights_only or arguments.target_format != "native",
            section=None if arguments.model is None else _section(arguments.model),
            vocab_size=arguments.vocab_size,
            dtype=dtype,
        )
    if source == "hf":
        return read_hf(path, dtype)
    model = read_native(path, wide=dtype == "float32", fp8=arguments.fp8)
    return model if dtype is None else model.cast(dtype)


def _ranks(arguments: argparse.Namespace) -> Ranks | None:
    """The ranks that Megatron's own folders are written for; None: torch_dist."""
    given = arguments.tp is not None or arguments.pp is not None
    if given and arguments.target_format != "megatron":
        raise UsageError("--tp and --pp are for --to megatron: leave them out")
    tp, pp = (1 if number is None else number for number in (arguments.tp, arguments.pp))
    return Ranks(tp, pp) if given else None


def _section(path: Path) -> dict[str, Any]:
    """A model section: of a configuration, or of a ``config.json``."""
    if path.suffix == ".json":
        return model_section(read_json(path)).section
    section = read_layers(path).data.get("model")
    if not isinstance(section, dict):
        raise UsageError(f"--model {path} has no section `model`")
    return section


def describe(model: Model, target: str, destination: Path, nbytes: int) -> dict[str, Any]:
    """What is about to happen, as plain data."""
    dtypes: dict[str, int] = {}
    for item in model.items:
        dtypes[item.dtype] = dtypes.get(item.dtype, 0) + 1
    tokenizer = check_tokenizer(model.files, model.section["vocab_size"], Path(model.where))
    return {
        "source": model.where,
        "destination": str(destination),
        "format": target,
        "family": model.section["family"],
        "parameters": model.parameters,
        "tensors": len(model.items),
        "dtypes": dtypes,
        "bytes": nbytes,
        "largest_tensor_bytes": max((item.nbytes for item in model.items), default=0),
        "step": model.progress.step,
        "state": len(model.state),
        "left_behind": [*model.dropped, *(left_behind(model) if target == "megatron" else fp8_left_behind(model))],
        "tokenizer": tokenizer.file,
        "tokenizer_ids": tokenizer.ids,
        "vocab_size": model.section["vocab_size"],
        "warnings": list(tokenizer.warnings),
        "load_with": f"--load {destination} {LOAD} {options(model)}" if target == "megatron" else None,
    }


def text(report: dict[str, Any], dry_run: bool) -> str:
    """The report for people."""
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in report["dtypes"].items())
    lines = [
        f"{report['source']} -> {report['destination']} ({report['format']})",
        f"  {report['family']}, {report['parameters']:,} parameters in {report['tensors']} tensors ({dtypes})",
        f"  {format_bytes(report['bytes'])}; the largest tensor has {format_bytes(report['largest_tensor_bytes'])}",
    ]
    if report["state"]:
        lines.append(f"  with the training's state: {report['state']} tensors, step {report['step']}")
    if report["tokenizer"]:
        more = report["vocab_size"] - report["tokenizer_ids"]
        unused = f"; {more:,} of the model's {report['vocab_size']:,} are none of its" if more else ""
        lines.append(f"  tokenizer: {report['tokenizer']}, {report['tokenizer_ids']:,} ids{unused}")
    lines += [f"  left behind: {what}" for what in report["left_behind"]]
    lines += [f"  warning: {what}" for what in report["warnings"]]
    if report["load_with"]:
        lines.append(f"  to load it in Megatron: {report['load_with']}")
    if dry_run:
        lines.append("dry run: all of this was checked, nothing was written")
    return "\n".join(lines)


@contextmanager
def ending_cleanly():  # noqa: ANN201 (a context manager)
    """A request to end (SIGTERM) becomes an exception, so that what was begun is cleared away."""
    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: nobody sends us signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def give_memory_back() -> None:
    """Have the C library return large blocks to the system when they are freed; by default it learns to keep those of up to
    32 MB, and a conversion that passes hundreds of tensors through would hold several. No effect with another C library."""
    mmap_threshold = -3
    try:
        ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 20)
    except (OSError, AttributeError):
        pass


@contextmanager
def _progress(model: Model, quiet: bool):  # noqa: ANN202 (a context manager)
    """The model, whose tensors move a bar when they are read; on a terminal only."""
    with tqdm(total=model.nbytes, unit="B", unit_scale=True, disable=True if quiet else None, leave=False) as bar:

        def watched(item: Item) -> Item:
            def read():  # noqa: ANN202 (a tensor)
                tensor = item.read()
                bar.update(item.nbytes)
                return tensor

            return replace(item, read=read)

        yield replace(model, items=[watched(item) for item in model.items], state=[watched(item) for item in model.state])


def _shard_size(given: str | None) -> int | None:
    if given is None:
        return None
    size = parse_bytes(given)
    if size is None or size < 1:
        raise UsageError(f"--max-shard-size {given!r}: bytes with their unit, such as 5GB or 500MB, are needed")
    return int(size)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.convert",
        description="Convert models between our checkpoints (native), Hugging Face folders (hf) and Megatron's checkpoints "
        "(megatron). Exit code 0: done, 1: reading or writing failed, 2: refused.",
    )
    parser.add_argument("--from", dest="source_format", choices=SOURCES, required=True, help="what SRC is")
    parser.add_argument("--to", dest="target_format", choices=TARGETS, required=True, help="what DST becomes")
    parser.add_argument("src", metavar="SRC", type=Path, help="a model's folder, a checkpoint, or a run's folder")
    parser.add_argument("dst", metavar="DST", type=Path, help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=CASTS, help="cast all parameters (default: each keeps its own)")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="of one file, such as 5GB (default: as the source had it, else 5GB)"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="native to hf: the FP8 weights that training computed with, and their scales"
    )
    of_megatron = parser.add_argument_group("with --from megatron")
    add = of_megatron.add_argument
    add("--allow-pickle", action="store_true", help="have its pickles opened, in a process of their own (docs/convert.md)")
    add("--weights-only", action="store_true", help="leave optimizer state, step and FP8 scales behind")
    add("--model", metavar="FILE", type=Path, help="what the model is, where SRC does not say (YAML or config.json)")
    add("--vocab-size", metavar="N", type=int, help="the number of tokens, where SRC does not say")
    to_megatron = parser.add_argument_group("with --to megatron (which is torch_dist without these)")
    to_megatron.add_argument("--tp", metavar="N", type=int, help="mp_rank folders for N tensor-parallel ranks")
    to_megatron.add_argument("--pp", metavar="N", type=int, help="mp_rank folders for N pipeline ranks")
    parser.add_argument("--dry-run", action="store_true", help="check everything, say what would be written, write nothing")
    parser.add_argument("--json", action="store_true", help="print what is done as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_traceback(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
