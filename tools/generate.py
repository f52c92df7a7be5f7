"""Continue prompts with a checkpoint's model: ``python -m tools.generate CHECKPOINT --prompt "def "``."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qeffect_lm.errors import UsageError
from tools.common import add_inference, add_traceback, inference_threads, run_tool

if TYPE_CHECKING:
    from qeffect_lm.app.text import Language
    from qeffect_lm.inference.generator import Generator
    from qeffect_lm.inference.model import InferenceModel
    from qeffect_lm.inference.sampling import Sampling
    from tools.generation_output import Output, Result


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.generate", description=__doc__)
    made.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of checkpoints (the newest is taken)")
    prompts = made.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times")
    prompts.add_argument(
        "--prompts", metavar="FILE", help="a prompt per line; in a .jsonl file a JSON string or {\"prompt\": …}; -: stdin"
    )
    made.add_argument("--max-new-tokens", type=int, default=100, help="at most so many new tokens (default: %(default)s)")
    made.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default: %(default)s)")
    made.add_argument("--top-k", type=int, default=50, help="sample among the k most probable; 0: all (default: %(default)s)")
    made.add_argument("--top-p", type=float, default=1.0, help="sample within this probability mass (default: %(default)s)")
    made.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: tokens that are there already become rarer"
    )
    made.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    made.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; several may be given")
    made.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    made.add_argument(
        "--batch-size", type=int, help="prompts side by side (default: their number, at most 8); part of the last bits"
    )
    made.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="show text as it comes (default)"
    )
    made.add_argument("--json", action="store_true", help="one JSON object per prompt: text, tokens, why it ended")
    made.add_argument("--eager", action="store_true", help="on a GPU: launch each kernel, do not replay a CUDA graph")
    add_inference(made)
    add_traceback(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return run_tool(lambda: generate(arguments), arguments.traceback)


def generate(arguments: argparse.Namespace) -> int:
    """Print prompts and continuations as they come."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    threads = inference_threads(arguments)
    apply_before_torch(os.environ, threads=threads)
    apply_to_torch(threads=threads)
    from qeffect_lm.app.inference import check_memory, load_for_inference
    from qeffect_lm.app.text import language_of
    from qeffect_lm.inference.sampling import Sampling
    from qeffect_lm.inference.text import Continuation
    from tools.generation_output import Output, Result

    texts = arguments.prompt or read_prompts(arguments.prompts)
    sampling = Sampling(
        arguments.temperature, arguments.top_k, arguments.top_p, arguments.repetition_penalty, arguments.seed
    )
    loaded = load_for_inference(
        arguments.checkpoint, device=arguments.device, fp8=arguments.fp8, context=arguments.context, family=arguments.family
    )
    language = language_of(loaded, arguments.tokenizer)
    prompts = language.encode(texts, arguments.bos)
    results = [
        Result(text, len(ids), Continuation(language.tokenizer.decoder(), arguments.stop))
        for text, ids in zip(texts, prompts, strict=True)
    ]
    generator = make_generator(arguments, loaded.model, sampling, language, len(prompts))
    _say_what_is_cut(prompts, loaded.model.context_length)
    places = generator.rows * generator.capacity(prompts, arguments.max_new_tokens)
    check_memory(
        places * loaded.model.token_bytes, loaded.model.device, f"the KV cache of {places} tokens",
        "lower --batch-size, --max-new-tokens or --context, or ",
    )  # fmt: skip
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 is no reason to stop
    output = Output(results, stream=arguments.stream, as_json=arguments.json)
    run(generator, prompts, arguments.max_new_tokens, results, output)
    return 0


def _say_what_is_cut(prompts: Sequence[Sequence[int]], context: int) -> None:
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) > context:
            print(f"prompt {number} has {len(prompt)} tokens: the model sees the last {context}", file=sys.stderr)


def make_generator(
    arguments: argparse.Namespace, model: InferenceModel, sampling: Sampling, language: Language, prompts: int
) -> Generator:
    """On a GPU with its steps as CUDA graphs."""
    import torch

    from qeffect_lm.graphs.cuda_graphs import CudaGraphs
    from qeffect_lm.inference.generator import Generator

    graphs = None
    if model.device.type == "cuda" and not arguments.eager:
        graphs = CudaGraphs(torch.cuda.Stream(model.device))
    rows = min(prompts, 8) if arguments.batch_size is None else arguments.batch_size
    end = () if arguments.ignore_eos else language.end
    return Generator(model, sampling, rows, end=end, vocab=language.tokenizer.vocab_size, graphs=graphs)


def run(
    generator: Generator, prompts: Sequence[Sequence[int]], count: int, results: Sequence[Result], output: Output
) -> None:
    """Generate, and write as it comes; Ctrl-C writes what there is and ends."""
    try:
        for new in generator.run(prompts, count):
            result = results[new.prompt]
            result.take(new.token, new.reason, end=new.token in generator.end)
            if result.reason is not None:
                generator.stop(new.prompt)
            output.update()
    except KeyboardInterrupt:
        output.interrupt()
        raise


def read_prompts(path: str) -> list[str]:
    """The prompts of a file.

    Raises:
        UsageError: it cannot be read, holds none, or a line of a .jsonl file is neither a string nor has a prompt.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {error}") from error
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UsageError(f"--prompts {path} holds no prompt")
    if not path.endswith(".jsonl"):
        return [line.removesuffix("\r") for line in lines]
    return [_json_prompt(path, number, line) for number, line in enumerate(lines, 1)]


def _json_prompt(path: str, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{path}, line {number} is no JSON: {error}") from error
    found = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(found, str):
        raise UsageError(f"{path}, line {number}: a JSON string is needed, or an object with the key prompt")
    return found


if __name__ == "__main__":
    sys.exit(main())
