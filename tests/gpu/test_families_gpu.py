"""Families beside Llama, and recompute, on a real GPU: captured equals eager, recompute on or off gives the same bits.

    python -m pytest -q tests/gpu/test_families_gpu.py
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.gpu.test_engine_gpu import SHAPE, data
from tests.tiny import Trained, assert_moved, config, differing, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48, "num_kv_heads": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128, "num_kv_heads": 2},
    "gpt2": {"tie_word_embeddings": True, "max_position_embeddings": 160},
}


@lru_cache
def trained(family: str, graphs: str, recompute: str = "none", window: str = "step") -> Trained:
    model = {f"model__{key}": value for key, value in FAMILIES[family].items()}
    backend, _, scope = graphs.partition(" ")
    settings: dict[str, Any] = {
        **SHAPE,
        **model,
        "model__family": family,
        "model__recompute": recompute,
        "graphs": {"backend": backend, **({"scope": scope} if scope else {})},
        "precision__fp8": {"recipe": "delayed", "history": 4, "window": window},
    }
    return train(config(**settings), 6, batches=data)


def same(a: Trained, b: Trained) -> None:
    assert a.losses == b.losses and a.norms == b.norms and differing(a.tensors, b.tensors) == []


@pytest.mark.parametrize("graphs", ["cuda_graphs action", "cuda_graphs step"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_captured_equals_eager(family, graphs):
    eager = trained(family, "eager")
    assert_moved(eager)
    same(trained(family, graphs), eager)


@pytest.mark.parametrize("graphs", ["eager", "cuda_graphs action", "cuda_graphs step"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2"])
def test_recompute_gives_the_same_bits(family, mode, graphs):
    same(trained(family, graphs, mode), trained(family, "eager"))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recompute_with_scales_that_roll_each_microbatch(mode):
    """Attention and MLP as one node each: without dropout."""
    keys = {**SHAPE, "model__dropout": 0.0, "precision__fp8": {"recipe": "delayed", "history": 4, "window": "microbatch"}}
    runs = [train(config(**keys, model__recompute=which), 4, batches=data) for which in ("none", mode)]
    assert_moved(runs[0])
    same(runs[1], runs[0])


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recompute_takes_less_memory(mode):
    """Of one forward and its backward, attention and MLP as one node each."""

    def peak(which: str) -> int:
        keys = {**SHAPE, "model__dropout": 0.0, "model__num_layers": 8, "pipeline__schedule": "gpipe"}
        run = train(config(**keys, model__recompute=which), 1, batches=data)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.assembly.engine.step(1, data(1))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(mode) < 0.95 * peak("none")
