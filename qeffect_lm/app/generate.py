"""Sampling text from a checkpoint, on one process whatever layout it was trained on.

Generation reads scales and cached weights like evaluation does: it writes no amax and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import open_checkpoint, resolve
from checkpoint.load import load_into
from checkpoint.resume import PARAMETERS, SCALES
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import Config
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.attention import KVCache
from qeffect_lm.layers.context import LayerContext, Phase


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: ``temperature`` 0 takes the most probable one; ``top_k`` 0 and ``top_p`` 1 cut nothing."""

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UsageError(f"--temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise UsageError(f"--top-k is {self.top_k}; it must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p}; it must lie in (0, 1]")


def load_for_inference(path: Path) -> tuple[Assembly, int]:
    """Assemble the checkpoint's model on this process, with its masters and scales, and refresh the caches.

    ``path`` is a checkpoint or a folder of checkpoints (its newest). Returns the assembly and the checkpoint's step.

    Raises:
        CheckpointError, ResumeError: unreadable or incomplete.
    """
    checkpoint = open_checkpoint(resolve(path))
    saved = {section: dict(values) for section, values in checkpoint.meta["config"].items()}
    saved["parallel"] = {}
    saved["pipeline"] = {"microbatches": saved["pipeline"]["microbatches"]}  # one chunk on one process
    saved["graphs"] = {"backend": "eager"}
    saved["contract"] = {}
    if saved["run"].get("device") == "cuda" and not torch.cuda.is_available():
        saved["run"]["device"] = "cpu"  # sampling needs no GPU
    if saved["model"].get("backend") == "te":  # one token at a time fits no product of its own; the native one reads the same
        saved["model"]["backend"] = "native"
        if saved["precision"]["fp8"]["recipe"] == "block":
            saved["precision"]["fp8"] = {"recipe": "none"}
    assembly = assemble(Config.from_dict(saved))
    items = assembly.logical_tensors()
    load_into(checkpoint, [item for item in items if item.role in (*PARAMETERS, *SCALES)])
    assembly.timeline.load_state(checkpoint.meta["contract"]["timeline"])
    assembly.rebuild_caches()
    return assembly, checkpoint.step


class Generator:
    """Next-token generation with a KV cache over one assembled model (all chunks on this process)."""

    def __init__(self, assembly: Assembly) -> None:
        self._stages = [assembly.engine.stages[index] for index in sorted(assembly.engine.stages)]
        self.context_length = assembly.config.data.seq_len

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """``[batch, sequence]`` int64 → ``[batch, sequence, vocab]``; with a cache, ``tokens`` continue what it has seen."""
        context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64), cache=cache)
        x = tokens
        for stage in self._stages:
            x = stage.chunk(x, context)
        if cache is not None:
            cache.seen += tokens.shape[1]
        return x

    def stream(self, prompt: list[int], count: int, sampling: Sampling) -> Iterator[int]:
        """Yield up to ``count`` new tokens. When the context is full, it goes on with the second half of what it has seen."""
        if not prompt:
            raise UsageError("the prompt has no token: give at least one character")
        generator = torch.Generator().manual_seed(sampling.seed)
        window = prompt[-self.context_length :]
        cache = KVCache({})
        pending = window
        for _ in range(count):
            if cache.seen + len(pending) > self.context_length:
                window = window[-self.context_length // 2 :]
                cache, pending = KVCache({}), window
            last = self.logits(torch.tensor([pending]), cache)[0, -1]
            token = choose(last, sampling, generator)
            yield token
            window = [*window, token]
            pending = [token]


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token of ``[vocab]`` logits."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k).values[-1], float("-inf"))
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        outside = ordered.cumsum(0) - ordered >= sampling.top_p  # the first token beyond the mass stays
        probabilities = probabilities.index_fill(0, order[outside], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
