"""Whole training runs for tests: a made-up corpus, a tiny configuration file, runs in this process or launched."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from checkpoint import Checkpoint, compare, open_checkpoint, resolve
from qeffect_lm.app.run import train_run
from qeffect_lm.config import load_config
from qeffect_lm.data.indexed import IndexedWriter
from qeffect_lm.runtime.launch import LaunchEnv
from qeffect_lm.runtime.metrics import StepMetrics, read_metrics

VOCAB = 64
CONFIG = """
run: {device: cpu}
model: {vocab_size: 64, hidden_size: 32, num_layers: 4, num_heads: 4, num_kv_heads: 2, ffn_size: 48, dropout: 0.1}
precision: {fp8: {recipe: delayed, history: 3}}
pipeline: {microbatches: 4, w_delay: 1}
graphs: {backend: host_replay}
data: {seq_len: 16, microbatch_size: 2}
optim: {lr: 1.0e-2, warmup_steps: 2}
train: {steps: 12}
checkpoint: {every: 3, keep: 0}
logging: {progress: 'off'}
launch: {timeout_seconds: 60}
"""


def make_corpus(prefix: Path, documents: int = 16, length: int = 512, seed: int = 1, vocab: int = VOCAB) -> None:
    """Random documents in Megatron's format."""
    generator = np.random.Generator(np.random.PCG64(seed))
    with IndexedWriter(prefix, vocab_size=vocab) as writer:
        for _ in range(documents):
            writer.add_document(generator.integers(0, vocab, length))


def write_config(folder: Path, text: str = CONFIG) -> Path:
    """A corpus and a configuration file in ``folder``."""
    make_corpus(folder / "corpus")
    make_corpus(folder / "held_out", documents=4, seed=2)
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def overrides(folder: Path, name: str, *more: str) -> list[str]:
    return [f"run.dir={folder / name}", f"data.train={folder / 'corpus'}", f"data.valid={folder / 'held_out'}", *more]


def run_here(folder: Path, name: str, *more: str) -> tuple[int, list[str]]:
    """Train in this process; returns the exit code and what was said."""
    said: list[str] = []
    config = load_config(folder / "tiny.yaml", overrides(folder, name, *more))
    return train_run(config, LaunchEnv.from_mapping({}), said.append), said


def checkpoint_of(folder: Path, name: str) -> Checkpoint:
    """The newest checkpoint of a run."""
    return open_checkpoint(resolve(folder / name / "checkpoints"))


def metrics_of(folder: Path, name: str) -> list[StepMetrics]:
    return read_metrics(folder / name / "metrics.jsonl")


def assert_same_run(folder: Path, a: str, b: str, *, same_layout: bool = True) -> int:
    """Losses, norms, rates and all of the last checkpoint equal, as bytes; returns the number of tensors compared."""
    keys = ["contract", "data", "tokens", "step"]
    if same_layout:
        keys += ["plan_fingerprint", "graph_fingerprints"]
    result = compare(checkpoint_of(folder, a), checkpoint_of(folder, b), meta_keys=keys)
    odd = [name for name in [*result.only_in_a, *result.only_in_b] if same_layout or not name.startswith("rng/")]
    assert not result.different and not result.meta and not odd, (result.first_name, result.meta, odd)
    rows = [[(m.step, m.loss, m.grad_norm, m.lr, m.scale_epoch, m.tokens) for m in metrics_of(folder, n)] for n in (a, b)]
    assert rows[0] == rows[1], [pair for pair in zip(*rows, strict=False) if pair[0] != pair[1]] or rows
    return len(result.equal)
