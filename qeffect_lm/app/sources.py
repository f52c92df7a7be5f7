"""Where a run's data comes from: corpora, loader, held-out samples, tokenizer, each checked against the model."""

from __future__ import annotations

from pathlib import Path

import torch

from models.decoder import DecoderBlock
from qeffect_lm.config import Config
from qeffect_lm.data.index import IndexCache
from qeffect_lm.data.indexed import IndexedDataset
from qeffect_lm.data.loader import StepBatch, StepLoader, StepShape, check_tokens, sequential_batches
from qeffect_lm.data.manifest import tokenizer_of
from qeffect_lm.data.packing import Samples
from qeffect_lm.errors import UsageError
from qeffect_lm.parallel.mesh import Mesh

GPU_WORKERS = 2


def open_dataset(prefix: str | None, key: str) -> IndexedDataset:
    """Open a corpus by its configured prefix.

    Raises:
        UsageError: not configured, missing or damaged.
    """
    if prefix is None:
        raise UsageError(f"{key} is not set: give the path of a .bin/.idx pair (python -m tools.preprocess makes one)")
    return IndexedDataset(prefix)


def samples_of(config: Config, dataset: IndexedDataset) -> Samples:
    """A corpus cut as configured."""
    data = config.data
    folder = Path(data.cache) if data.cache is not None else Path(config.run.dir) / "data-cache"
    cache = IndexCache(folder, data.cache_timeout)
    return Samples(dataset, data.seq_len, data.packing, data.documents == "reset", cache)


def make_loader(config: Config, mesh: Mesh, gpu: bool = False) -> StepLoader:
    """The loader of this rank's steps.

    Raises:
        UsageError: a corpus is not configured, missing or damaged, or a blend has no weights.
    """
    weights, prefixes = blend_of(config)
    workers = config.data.workers
    return StepLoader(
        [samples_of(config, open_dataset(prefix, "data.train")) for prefix in prefixes],
        StepShape(config.data.microbatch_size, config.pipeline.microbatches, mesh.coord("samples"), mesh.size("samples")),
        seed=config.run.seed,
        weights=weights,
        vocab_size=config.model.vocab_size,
        workers=(GPU_WORKERS if gpu else 0) if workers is None else workers,
        pinned=gpu,
    )


def check_corpora(config: Config) -> None:
    """Before a run makes its folders: that every corpus can be opened.

    Raises:
        UsageError: one is not configured, missing or damaged.
    """
    for prefix in blend_of(config)[1]:
        open_dataset(prefix, "data.train")
    if config.data.valid is not None:
        open_dataset(config.data.valid, "data.valid")


def blend_of(config: Config) -> tuple[list[str], list[str | None]]:
    """Weights and prefixes of the training corpora."""
    if config.data.blend is None:
        return ["1"], [config.data.train]
    weights: list[str] = []
    prefixes: list[str | None] = []
    for entry in config.data.blend:
        weight, _, prefix = entry.strip().partition(" ")
        try:
            float(weight)
        except ValueError:
            prefix = ""
        if not prefix.strip():
            raise UsageError(f"data.blend has {entry!r}: write each corpus as 'WEIGHT PATH', such as '0.7 data/web'")
        weights.append(weight)
        prefixes.append(prefix.strip())
    return weights, prefixes


def held_out_batch(config: Config) -> StepBatch | None:
    """The fixed evaluation samples, or None where no held-out corpus is configured."""
    if config.data.valid is None:
        return None
    samples = samples_of(config, open_dataset(config.data.valid, "data.valid"))
    batch = sequential_batches(samples, config.data.microbatch_size, config.train.eval_microbatches)
    check_tokens(batch, config.model.vocab_size)
    if not batch.tokens:
        raise UsageError(f"none of the samples of data.valid={config.data.valid} has a target that counts: hold out others")
    return batch


def check_tokenizer(config: Config) -> None:
    """The tokenizer's vocabulary is the model's, and all corpora were made with it, as far as their manifests say.

    Raises:
        UsageError: they were not.
    """
    told = {prefix: tokenizer_of(prefix) for prefix in [*blend_of(config)[1], config.data.valid] if prefix is not None}
    known = [(prefix, found["sha256"]) for prefix, found in told.items() if found is not None]
    for prefix, sha in known:
        if sha != known[0][1]:
            raise UsageError(
                f"{known[0][0]} and {prefix} were made with different tokenizers (SHA-256 {known[0][1][:12]} and {sha[:12]}): "
                "preprocess them with one"
            )
    if config.data.tokenizer is None:
        return
    from qeffect_lm.data.encoding import open_tokenizer  # needs sentencepiece, which training on token ids alone does not

    tokenizer = open_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UsageError(
            f"{config.data.tokenizer} has {tokenizer.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}: set "
            f"model.vocab_size={tokenizer.vocab_size}, or use the model's own tokenizer"
        )
    if known and known[0][1] != tokenizer.sha256:
        raise UsageError(
            f"{known[0][0]} was made with another tokenizer than {config.data.tokenizer} (SHA-256 {known[0][1][:12]} and "
            f"{tokenizer.sha256[:12]}): set data.tokenizer to that one, or preprocess the corpus again"
        )


def check_documents(chunk: torch.nn.Module) -> None:
    """Raise UsageError for a part that mixes tokens and does not know of documents."""
    for block in chunk.modules():
        if isinstance(block, DecoderBlock) and not getattr(block.attention, "documents", False):
            raise UsageError(
                f"data.documents=reset, but {block.attention.name} ({type(block.attention).__name__}) does not keep documents "
                "apart: set data.documents=joined, or have it read context.starts and say documents = True"
            )
