"""Layers with cuDNN's attention bound (a stand-in, on CPU): as one node and as parts they run it, with the same bytes."""

from __future__ import annotations

import pytest
import torch

from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.kernels import cudnn_attention
from qeffect_lm.layers.attention import bind_attention
from tests.unit.cudnn_fake import Cudnn
from tests.unit.interpreted import INTERPRETED, kernels_run  # noqa: F401
from tests.unit.test_kernels_cudnn import gpu  # noqa: F401
from tests.unit.test_kernels_fused import Half, batches, calibrate, error, harness_for, harness_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in reads CPU memory; tests/gpu has the library itself")


def run(batch: int, kv_heads: int, fused: bool, library) -> list[torch.Tensor]:
    """Outputs, dX, amax and gradients of two microbatches through half a block."""
    harness = harness_for(Half(harness_of(DelayedScaling(), kv_heads=kv_heads).module, "attention", fused=fused))
    bind_attention(harness.module, library)
    data = batches(batch=batch)
    calibrate(harness, data[:1])
    microbatches = [harness.microbatch(n, x, dy) for n, (x, dy) in enumerate(data)]
    harness.run(microbatches)
    ends = [tensor for m in microbatches for tensor in (m.out, m.dx)]
    return [*ends, harness.timeline.open_amax, *harness.grads.values()]


@pytest.mark.parametrize(("batch", "kv_heads"), [(2, 2), (1, 4), (2, 4)], ids=["grouped", "one sequence", "all heads"])
def test_one_node_and_parts_run_it(gpu, batch, kv_heads):  # noqa: F811
    package = Cudnn()
    library = cudnn_attention.CudnnAttention("cpu:0", package)
    one = run(batch, kv_heads, True, library)
    there = len(package.launches)
    parts = run(batch, kv_heads, False, library)
    launches = 1 if kv_heads == 4 else batch  # grouped queries need one for each sequence
    assert there == len(package.launches) - there == 3 * 2 * launches, "calibration and two microbatches, there and back"
    assert all(a.abs().max() > 0 and torch.equal(a, b) for a, b in zip(one, parts, strict=True))
    without = run(batch, kv_heads, True, None)
    assert len(package.launches) == 2 * there
    for got, want in zip(one, without, strict=True):
        # A rounding of bfloat16 moves some elements to the next FP8 value: an eighth, or in E5M2 a quarter, of themselves.
        assert error(got, want.double()) < 2.0**-4
