"""Where a run's data comes from: corpora, loader, held-out windows, tokenizer, each checked against the model."""

from __future__ import annotations

import torch

from qeffect_lm.config import Config
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.loader import StepBatch, StepLoader, sequential_batches
from qeffect_lm.errors import UsageError
from qeffect_lm.parallel.mesh import Mesh


def open_dataset(prefix: str | None, key: str) -> IndexedDataset:
    """Open a corpus by its configured prefix.

    Raises:
        UsageError: not configured, missing or damaged.
    """
    if prefix is None:
        raise UsageError(f"{key} is not set: give the path of a .bin/.idx pair (python -m tools.preprocess makes one)")
    return IndexedDataset(prefix)


def make_loader(config: Config, dataset: IndexedDataset, mesh: Mesh) -> StepLoader:
    return StepLoader(
        dataset,
        seq_len=config.data.seq_len,
        microbatch_size=config.data.microbatch_size,
        microbatches=config.pipeline.microbatches,
        dp_rank=mesh.coord("dp"),
        dp_size=mesh.size("dp"),
        seed=config.run.seed,
    )


def held_out_batch(config: Config) -> StepBatch | None:
    """The fixed evaluation windows, or None where no held-out corpus is configured."""
    if config.data.valid is None:
        return None
    dataset = open_dataset(config.data.valid, "data.valid")
    batch = sequential_batches(dataset, config.data.seq_len, config.data.microbatch_size, config.train.eval_microbatches)
    check_tokens(batch, config.model.vocab_size)
    return batch


def check_tokenizer(config: Config) -> None:
    """The tokenizer's vocabulary is the model's."""
    if config.data.tokenizer is None:
        return
    from qeffect_lm.data.tokenizer import Tokenizer  # needs sentencepiece, which training on token ids alone does not

    tokenizer = Tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UsageError(
            f"{config.data.tokenizer} has {tokenizer.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}: set "
            f"model.vocab_size={tokenizer.vocab_size}, or use the model's own tokenizer"
        )


def check_tokens(batch: StepBatch, vocab_size: int) -> None:
    """Raise :class:`UsageError` when the data holds token ids that the model has no row for."""
    largest = int(torch.maximum(batch.inputs.max(), batch.targets.max()))
    if largest >= vocab_size:
        raise UsageError(
            f"the corpus holds token id {largest}, but model.vocab_size is {vocab_size}: use the tokenizer the corpus was made "
            "with, or set model.vocab_size to its vocabulary"
        )
