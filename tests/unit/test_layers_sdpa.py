"""torch's GPU kernels of attention called as operators: which one is asked for, and that its own outputs reach its backward.

On CPU, where a dispatch mode stands in for the kernels; tests/gpu/test_attention_gpu.py has them for real.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers import sdpa
from tests.unit.interpreted import INTERPRETED, kernels_run  # noqa: F401
from tests.unit.layer_harness import random
from tests.unit.test_kernels_fused import Half, batches, calibrate, harness_for, harness_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in computes on CPU; tests/gpu has the kernels themselves")

BF16 = torch.bfloat16
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
NAMES = {FLASH: "_scaled_dot_product_flash_attention", CUDNN: "_scaled_dot_product_cudnn_attention"}
ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"  # what SDPA chooses here
LONGEST = 101, 102  # more than any sequence here: only what the forward gave has them


class Kernels(TorchDispatchMode):
    """FlashAttention-2's and cuDNN's operators, computed by the CPU's; ``calls`` are the names of attention's operators.

    What the forward makes besides the result is recognisable, and the backward refuses anything else in its place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith("_scaled_dot_product"):
            self.calls.append(name)
        return STAND_INS.get(name, func)(*args, **(kwargs or {}))


def as_many_heads(q, k, v):
    return (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False):
    assert (dropout_p, return_debug_mask) == (0.0, False)
    y, lse = getattr(torch.ops.aten, ON_CPU)(q, *as_many_heads(q, k, v), 0.0, is_causal)
    seed, offset = torch.tensor([7, 8], dtype=torch.uint64), torch.tensor(9, dtype=torch.uint64)
    return y, lse, None, None, *LONGEST, seed, offset, torch.empty(0)


def cudnn(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False):
    assert attn_bias is None and compute_log_sumexp
    return flash(q, k, v, dropout_p, is_causal, return_debug_mask)


def flash_backward(dy, q, k, v, y, lse, of_q, of_k, longest_q, longest_k, dropout_p, is_causal, seed, offset):
    assert (seed.tolist(), offset.item(), dropout_p) == ([7, 8], 9, 0.0)
    assert (of_q, of_k, longest_q, longest_k) == (None, None, *LONGEST)
    wide = as_many_heads(q, k, v)
    dq, dk, dv = getattr(torch.ops.aten, ON_CPU + "_backward")(dy, q, *wide, y, lse, 0.0, is_causal)
    return dq, *(grad.unflatten(1, (k.shape[1], -1)).sum(2) for grad in (dk, dv))


def cudnn_backward(dy, q, k, v, y, lse, seed, offset, attn_bias, *rest):
    assert attn_bias is None
    return flash_backward(dy, q, k, v, y, lse, *rest, seed, offset)


STAND_INS = {NAMES[FLASH]: flash, NAMES[FLASH] + "_backward": flash_backward}
STAND_INS |= {NAMES[CUDNN]: cudnn, NAMES[CUDNN] + "_backward": cudnn_backward}
SHAPES = [(1, 9, 3, 1, 8), (1, 9, 2, 3, 8), (2, 9, 3, 1, 8), (2, 9, 2, 3, 8), (2, 1, 2, 2, 8)]


@pytest.fixture
def chosen(monkeypatch):
    """Which kernel torch takes, whatever the tensors: a function that sets it."""

    def choose(kernel: SDPBackend | None) -> None:
        monkeypatch.setattr(sdpa, "_by_cudnn", lambda *heads: kernel is CUDNN)
        monkeypatch.setattr(sdpa, "_by_flash", lambda *heads: kernel is FLASH)

    return choose


def exact(qkv: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result and the gradients of q, k and v, in float64 and in the layouts of the module."""
    leaf = qkv.double().requires_grad_()
    heads = leaf.permute(0, 2, 3, 1, 4)
    scores = heads[:, :, :-2] @ heads[:, :, -2:-1].transpose(-1, -2) * qkv.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    y = (torch.softmax(scores, dim=-1) @ heads[:, :, -1:]).permute(0, 3, 1, 2, 4)
    grad = torch.autograd.grad(y, leaf, dy.double())[0].permute(0, 2, 3, 1, 4)
    return y.detach(), grad[:, :, :-2], grad[:, :, -2], grad[:, :, -1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", [FLASH, CUDNN, None], ids=["flash", "cudnn", "chosen by torch"])
def test_forward_runs_once_and_its_outputs_are_saved(chosen, kernel, shape):
    """Both ways against float64; without an operator of its own the forward is computed again."""
    batch, sequence, kv_heads, group, head_dim = shape
    qkv = random(batch, sequence, kv_heads, group + 2, head_dim, seed=1, dtype=BF16)
    dy = random(batch, sequence, kv_heads, group, head_dim, seed=2, dtype=BF16)
    chosen(kernel)
    with Kernels() as kernels:
        y, saved = sdpa.forward(qkv)
        there, kernels.calls = kernels.calls, []
        grads = sdpa.backward(dy, qkv, y, saved)
    assert saved.kernel is kernel and len(saved.tensors) == (0 if kernel is None else 5)
    if kernel is not None:
        assert there == [NAMES[kernel]] and kernels.calls == [NAMES[kernel] + "_backward"]
    elif group == 1:
        assert there == [ON_CPU] and kernels.calls == [ON_CPU, ON_CPU + "_backward"]
    for got, want in zip((y, *grads), exact(qkv, dy), strict=True):
        assert got.shape == want.shape and got.dtype == BF16
        torch.testing.assert_close(got.double(), want, rtol=2.0**-5, atol=2.0**-5)


def test_the_fused_node_saves_them(chosen):
    """As one autograd node over two microbatches, whose backwards come later: the bytes of the forward computed again."""

    def run(kernel: SDPBackend | None) -> tuple[list[torch.Tensor], list[str]]:
        chosen(kernel)
        harness = harness_for(Half(harness_of(DelayedScaling(), kv_heads=4).module, "attention"))
        data = batches(batch=2)
        calibrate(harness, data[:1])
        with Kernels() as kernels:
            microbatches = [harness.microbatch(n, x, dy) for n, (x, dy) in enumerate(data)]
            harness.run(microbatches)
        ends = [tensor for m in microbatches for tensor in (m.out, m.dx)]
        return [*ends, harness.timeline.open_amax, *harness.grads.values()], kernels.calls

    with Kernels():  # calibration too
        (got, calls), (want, again) = run(FLASH), run(None)
    assert sorted(calls) == sorted([NAMES[FLASH], NAMES[FLASH] + "_backward"] * 2)
    assert again.count(ON_CPU) == 2 * again.count(ON_CPU + "_backward") == 4
    assert all(b.abs().max() > 0 and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_when_flash_attention_is_asked_for(monkeypatch):
    """On a GPU, in 16 bits, heads that need no padding, and if torch says so: of operands that want gradients."""
    asked, answers = [], iter((True, False, True))

    def can_use(params, debug):
        asked.append(params)
        return next(answers)

    def operands(dtype=BF16, head_dim=16, sequence=4, kv_heads=2):
        return (random(2, heads, sequence, head_dim, seed=1, dtype=dtype) for heads in (4, kv_heads, kv_heads))

    monkeypatch.setattr(sdpa, "can_use_flash_attention", can_use)
    assert not sdpa._by_flash(*operands())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    assert not sdpa._by_flash(*operands(torch.float32)) and not sdpa._by_flash(*operands(head_dim=12)) and not asked
    assert sdpa._by_flash(*operands()) and not sdpa._by_flash(*operands(torch.float16, kv_heads=4))
    assert sdpa._by_flash(*operands(sequence=1))
    assert all(part.requires_grad for params in asked for part in (params.query, params.key, params.value))
    assert [(params.is_causal, params.enable_gqa) for params in asked] == [(True, True), (True, False), (False, True)]
