"""A run on text: a tokenizer, a corpus and a short training, for tests of the tools that read text."""

from __future__ import annotations

from pathlib import Path

from qeffect_lm.data.indexed import IndexedWriter
from qeffect_lm.data.tokenizer import Tokenizer, train_sentencepiece
from tests.runs import run_here, write_config

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    pass\n\n  # naïve ▁ text\n" * 20]
VOCAB = 300
CONFIG = f"""
run: {{device: cpu}}
model: {{vocab_size: {VOCAB}, hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_size: 48}}
precision: {{fp8: {{recipe: delayed, history: 3}}}}
pipeline: {{microbatches: 2}}
data: {{seq_len: 32, microbatch_size: 2}}
optim: {{lr: 1.0e-2, warmup_steps: 2}}
train: {{steps: 8}}
logging: {{progress: 'off'}}
"""


def text_run(folder: Path, *more: str) -> tuple[Path, Tokenizer]:
    """Train in ``folder``; returns the checkpoints' folder and the tokenizer. The corpus is ``folder / "text"``."""
    tokenizer = Tokenizer(train_sentencepiece(TEXTS, folder / "text", vocab_size=VOCAB))
    write_config(folder, CONFIG)
    with IndexedWriter(folder / "text", vocab_size=VOCAB) as writer:
        for text in TEXTS * 3:
            writer.add_document([*tokenizer.encode(text), tokenizer.eos_id])
    options = [f"data.tokenizer={folder / 'text.model'}", *more]
    assert run_here(folder, "run", *options, f"data.train={folder / 'text'}")[0] == 0
    return folder / "run" / "checkpoints", tokenizer
