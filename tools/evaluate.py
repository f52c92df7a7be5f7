"""Perplexity of a checkpoint's model on a text or a token set: ``python -m tools.evaluate CHECKPOINT --data PREFIX``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qeffect_lm.errors import UsageError
from tools.common import add_inference, add_traceback, inference_threads, json_plain, run_tool

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from qeffect_lm.app.inference import Loaded
    from qeffect_lm.app.text import AnyTokenizer, Language
    from qeffect_lm.inference.perplexity import Score


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.evaluate", description=__doc__)
    made.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of checkpoints (the newest is taken)")
    data = made.add_mutually_exclusive_group(required=True)
    data.add_argument("--data", type=Path, metavar="PREFIX|FILE", help="token set (PREFIX.bin, .idx), else a UTF-8 text file")
    data.add_argument("--text", type=Path, metavar="FILE", help="a UTF-8 text file, whatever lies beside it")
    made.add_argument("--stride", type=int, help="tokens from one window to the next (default: the context)")
    made.add_argument("--max-tokens", type=int, help="only the first so many tokens of the data")
    made.add_argument("--batch-size", type=int, default=8, help="windows in one pass (default: %(default)s)")
    made.add_argument("--json", action="store_true", help="one JSON object")
    add_inference(made)
    add_traceback(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return run_tool(lambda: evaluate(arguments), arguments.traceback)


@dataclass(frozen=True)
class Data:
    """Tokens to be scored, and the bytes of all of them but the first; None where no tokenizer tells."""

    name: str
    tokens: npt.NDArray[np.integer]
    bytes: int | None


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the score."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    threads = inference_threads(arguments)
    apply_before_torch(os.environ, threads=threads)
    apply_to_torch(threads=threads)
    from tqdm import tqdm

    from qeffect_lm.app.inference import load_for_inference
    from qeffect_lm.inference.perplexity import score, windows_of

    if arguments.max_tokens is not None and arguments.max_tokens < 2:
        raise UsageError(f"--max-tokens is {arguments.max_tokens}; it must be at least 2")
    loaded = load_for_inference(
        arguments.checkpoint, device=arguments.device, fp8=arguments.fp8, context=arguments.context, family=arguments.family
    )
    data = read(arguments, loaded)
    context = loaded.model.context_length
    stride = context if arguments.stride is None else arguments.stride
    with tqdm(total=len(windows_of(len(data.tokens), context, stride)), unit="window", disable=None, leave=False) as bar:
        found = score(loaded.model, data.tokens, stride=stride, batch=arguments.batch_size, progress=bar.update)
    report(arguments, loaded, data, found, context, stride)
    return 0


def read(arguments: argparse.Namespace, loaded: Loaded) -> Data:
    """The data: a token set where ``--data`` names one, else a text.

    Raises:
        UsageError: neither is there, or it cannot be read.
    """
    from qeffect_lm.app.text import language_of, tokenizer_of, travelling
    from qeffect_lm.data.indexed import IndexedDataset, bin_path, idx_path

    given = arguments.text or arguments.data
    prefix = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
    if arguments.text is None and (idx_path(prefix).exists() or bin_path(prefix).exists()):
        known = arguments.tokenizer or travelling(loaded.checkpoint) or loaded.config.data.tokenizer
        tokenizer = tokenizer_of(loaded, arguments.tokenizer) if known is not None else None
        return token_set(str(prefix), IndexedDataset(prefix).tokens, tokenizer, arguments)
    if arguments.text is None and not given.exists():
        raise UsageError(f"--data {given}: there is neither a token set {given}.bin, {given}.idx nor a text file of that name")
    return text_file(given, language_of(loaded, arguments.tokenizer), arguments)


def token_set(name: str, tokens: Any, tokenizer: AnyTokenizer | None, arguments: argparse.Namespace) -> Data:
    """A token set: documents one after the other, as training reads them. Its bytes are those of the tokens' pieces."""
    import numpy as np

    if arguments.bos:
        raise UsageError("--bos is for texts: a token set is read as it is")
    tokens = tokens[: arguments.max_tokens]
    if tokenizer is None:
        return Data(name, tokens, None)
    from qeffect_lm.inference.perplexity import check_known

    check_known(tokens, tokenizer.vocab_size)
    counts = np.bincount(tokens[1:], minlength=tokenizer.vocab_size)
    lengths = [len(tokenizer.piece_bytes(token)) if counts[token] else 0 for token in range(tokenizer.vocab_size)]
    return Data(name, tokens, int(np.dot(counts, np.array(lengths, dtype=np.int64))))


def text_file(path: Path, language: Language, arguments: argparse.Namespace) -> Data:
    """A text as one document, after what its model has before texts."""
    import numpy as np

    try:
        raw = path.read_bytes()
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"text file {path} cannot be read: {error}") from error
    (ids,) = language.encode([text], arguments.bos)
    whole = np.array(ids, dtype=np.int64)
    tokens = whole[: arguments.max_tokens]
    lost = [*ids[:1], *ids[len(tokens) :]]  # what is not counted
    return Data(str(path), tokens, len(raw) - sum(len(language.tokenizer.piece_bytes(token)) for token in lost))


def report(
    arguments: argparse.Namespace, loaded: Loaded, data: Data, found: Score, context: int, stride: int
) -> None:
    """Text, or with ``--json`` one object."""
    bits = found.bits_per_byte(data.bytes) if data.bytes else None
    if arguments.json:
        made = {
            "checkpoint": str(loaded.checkpoint.path),
            "step": loaded.checkpoint.step,
            "data": data.name,
            "perplexity": found.perplexity,
            "nats_per_token": found.nats_per_token,
            "bits_per_byte": bits,
            "nats": found.nats,
            "tokens": found.tokens,
            "bytes": data.bytes,
            "windows": found.windows,
            "context": context,
            "stride": stride,
        }
        print(json.dumps(json_plain(made)))
        return
    per_byte = "no bits per byte without a tokenizer" if bits is None else f"{bits:.4f} bits per byte"
    print(f"perplexity  {found.perplexity:.4f}   ({found.nats_per_token:.6f} nats per token, {per_byte})")
    size = "" if data.bytes is None else f", {data.bytes:,} bytes"
    print(f"counted     {found.tokens:,} of {len(data.tokens):,} tokens (nothing comes before the first){size}")
    print(f"windows     {found.windows:,} of at most {context:,} tokens, {stride:,} from one to the next")


if __name__ == "__main__":
    sys.exit(main())
