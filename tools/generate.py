"""Sample text from a checkpoint: ``python -m tools.generate CHECKPOINT --prompt "def "``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from qeffect_lm.errors import UsageError
from tools.common import add_traceback, run_tool


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.generate", description=__doc__)
    made.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of checkpoints (the newest is taken)")
    made.add_argument("--prompt", default="def ", help="text to continue (default: %(default)r)")
    made.add_argument("--tokens", type=int, default=100, help="how many tokens to generate (default: %(default)s)")
    made.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default: %(default)s)")
    made.add_argument("--top-k", type=int, default=50, help="sample among the k most probable; 0: all (default: %(default)s)")
    made.add_argument("--top-p", type=float, default=1.0, help="sample within this probability mass (default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    made.add_argument("--tokenizer", type=Path, help="sentencepiece model (default: the one the run was configured with)")
    add_traceback(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return run_tool(lambda: generate(arguments), arguments.traceback)


def generate(arguments: argparse.Namespace) -> int:
    """Print prompt and continuation as they come."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    from qeffect_lm.app.generate import Generator, Sampling, load_for_inference
    from qeffect_lm.data.tokenizer import Tokenizer

    if arguments.tokens < 1:
        raise UsageError(f"--tokens is {arguments.tokens}; it must be at least 1")
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    assembly, _ = load_for_inference(arguments.checkpoint)
    path = arguments.tokenizer or assembly.config.data.tokenizer
    if path is None:
        raise UsageError("the run was configured without data.tokenizer: give one with --tokenizer")
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode(arguments.prompt)
    shown = arguments.prompt
    sys.stdout.write(shown)
    for token in Generator(assembly).stream(tokens, arguments.tokens, sampling):
        if token == tokenizer.eos_id:
            break
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # a character of several byte tokens, not complete yet
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
