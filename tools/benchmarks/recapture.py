"""Seconds to capture a large stage, as a restart does: assembled, warm-up and transaction included.

The stage is 32 layers of 4096 by default, on one GPU, with its optimizer (moments in bfloat16, so that it fits).
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch

from qeffect_lm.app.assemble import assemble
from qeffect_lm.config import Config
from qeffect_lm.data.loader import StepBatch
from tools.benchmarks.weights import drawn_on_device

MICROBATCHES = 4


@dataclass(frozen=True)
class StageSize:
    """A stage's sizes; ``tokens`` are one sequence, a microbatch."""

    hidden: int = 4096
    layers: int = 32
    tokens: int = 1024

    def config(self, scope: str) -> Config:
        return Config.from_dict(
            {
                "run": {"name": "recapture", "device": "cuda"},
                "model": {
                    "vocab_size": 1024,
                    "hidden_size": self.hidden,
                    "num_layers": self.layers,
                    "num_heads": self.hidden // 128,
                    "num_kv_heads": self.hidden // 128,
                    "ffn_size": self.hidden * 11 // 4,
                },
                "precision": {"dtype": "bfloat16", "fp8": {"recipe": "delayed", "history": 16}},
                "pipeline": {"schedule": "1f1b", "microbatches": MICROBATCHES},
                "graphs": {"backend": "cuda_graphs", "scope": scope},
                "optim": {"moments": "bfloat16"},
                "data": {"seq_len": self.tokens, "microbatch_size": 1},
                "train": {"steps": 1},
            }
        )


def batch(size: StageSize) -> StepBatch:
    """Made-up tokens of one step."""
    shape = (MICROBATCHES, 1, size.tokens)
    tokens = torch.randint(0, 1024, (*shape[:2], shape[2] + 1), generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(shape[:2], dtype=torch.int64)
    return StepBatch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), torch.ones(shape), ids, tokens.numel())


def measure(size: StageSize, scope: str) -> dict[str, Any]:
    """Assemble, capture twice (the second one in a warm process), one step; seconds of each."""
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with drawn_on_device():
        assembly = assemble(size.config(scope))
    assembly.rebuild_caches()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"scope": scope, "assemble_s": time.perf_counter() - began}
    for name in ("first_capture_s", "second_capture_s"):
        began = time.perf_counter()
        assembly.capture()
        torch.cuda.synchronize()
        row[name] = time.perf_counter() - began
    captured = assembly.engine.captured
    assert captured is not None
    row["graphs"], row["pool_gib"] = len(captured.graphs()), captured.bytes() / 2**30
    began = time.perf_counter()
    assembly.engine.step(0, batch(size))
    torch.cuda.synchronize()
    row["first_step_s"] = time.perf_counter() - began
    row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    del captured
    assembly.release()
    del assembly
    gc.collect()
    torch.cuda.empty_cache()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'scope':8} {'assemble s':>10} {'capture s':>9} {'again s':>7} {'step s':>6}"
    lines = [head + f" {'graphs':>6} {'GiB':>6}"]
    for row in rows:
        lines.append(
            f"{row['scope']:8} {row['assemble_s']:>10.2f} {row['first_capture_s']:>9.2f} "
            f"{row['second_capture_s']:>7.2f} {row['first_step_s']:>6.2f} {row['graphs']:>6} {row['peak_gib']:>6.1f}"
        )
    return "\n".join(lines)
