"""Block scaling of backend ``te`` on a real GPU. A file of its own: its products run kernels of cuBLAS that no other recipe
asks for, and where one of them ends the process the other tests have been run.

    python -m pytest -q tests/gpu/test_te_block_gpu.py
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.gpu import test_te_gpu as te_gpu
from tests.tiny import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]

SHAPE: dict[str, Any] = {
    "model__hidden_size": 1024,
    "model__num_heads": 8,
    "model__num_kv_heads": 4,
    "model__ffn_size": 2048,
    "data__seq_len": 128,
}


def test_contract_equals_plain():
    te_gpu.contract_equals_plain("block", **SHAPE)


@pytest.mark.parametrize("graphs", ["action", "step"])
def test_captured_equals_eager(graphs):
    eager, captured = (
        train(te_gpu.settings("block", **SHAPE, **te_gpu.GRAPHS[name], model__dropout=0.1), 8, batches=te_gpu.data)
        for name in ("eager", graphs)
    )
    te_gpu.same_run(eager, captured)


def test_saved_state_is_typed_tensors_and_restores_bit_for_bit():
    te_gpu.saved_state_restores("block", **SHAPE)
