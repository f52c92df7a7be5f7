"""Attention's backward kernels against float64."""

from __future__ import annotations

import pytest
import torch

from qeffect_lm.kernels import tables
from tests.unit.interpreted import DEVICE, kernels_run  # noqa: F401
from tests.unit.layer_harness import random

SMALL = {"dq": tables.Blocks(32, 16, 4, 2), "dk_dv": tables.Blocks(16, 32, 4, 2)}


def exact(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result ``[batch, sequence, kv_heads, group, head_dim]`` and log-sum-exp of float64 ``qkv``, written out."""
    heads = qkv.permute(0, 2, 3, 1, 4)
    q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
    scores = (q @ k.transpose(-1, -2)) * qkv.shape[-1] ** -0.5
    future = torch.ones(qkv.shape[1], qkv.shape[1], dtype=torch.bool, device=qkv.device).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v).permute(0, 3, 1, 2, 4), torch.logsumexp(scores, dim=-1)


@pytest.mark.parametrize("blocks", [None, SMALL], ids=["default blocks", "small blocks"])
@pytest.mark.parametrize(
    ("batch", "sequence", "kv_heads", "group", "head_dim"),
    [(1, 70, 1, 1, 16), (2, 33, 2, 2, 16), (1, 128, 1, 3, 32), (2, 1, 1, 1, 16)],
)
def test_backward_against_float64(batch, sequence, kv_heads, group, head_dim, blocks, monkeypatch):
    """dq, dk and dv within a few roundings of bfloat16 (of the result, of probabilities, of d(scores), of the gradient itself),
    for sequences that fill no block, several sequences and grouped heads; nothing is left unwritten."""
    from qeffect_lm.kernels import attention

    if blocks is not None:
        monkeypatch.setattr(tables, "attention", lambda which, *shape: blocks[which])
    qkv = random(batch, sequence, kv_heads, group + 2, head_dim, seed=1, dtype=torch.bfloat16).to(DEVICE)
    dy = random(batch, sequence, kv_heads, group, head_dim, seed=2, dtype=torch.bfloat16).to(DEVICE)
    wide = qkv.double().requires_grad_()
    y, lse = exact(wide)
    (want,) = torch.autograd.grad(y, wide, dy.double())
    assert attention.takes(qkv)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, torch.nan))
    got = attention.backward(qkv, y.detach().bfloat16(), lse.detach().float(), dy)
    assert got.shape == qkv.shape and got.dtype == torch.bfloat16 and got.is_contiguous()
    parts = {"dq": slice(0, group), "dk": slice(group, group + 1), "dv": slice(group + 1, group + 2)}
    for name, part in parts.items():
        error, size = (got.double() - want)[:, :, :, part], want[:, :, :, part]
        largest = dy.double().abs().max() * qkv.double().abs().max()  # one query alone: dq and dk are 0 but for rounding
        assert error.norm() <= 2.0**-6 * size.norm() + 2.0**-8 * head_dim * largest * (sequence == 1), name


def test_who_is_taken():
    from qeffect_lm.kernels import attention

    def qkv(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(1, 2, 1, 3, head_dim, dtype=dtype)

    assert attention.takes(qkv(16, torch.bfloat16)) and attention.takes(qkv(128, torch.float16))
    for head_dim, dtype in ((8, torch.bfloat16), (96, torch.bfloat16), (256, torch.bfloat16), (64, torch.float32)):
        assert not attention.takes(qkv(head_dim, dtype))


def test_later_tokens_change_nothing_earlier():
    """Causality: what comes after a token has no part in its dq, and a gradient of the first token none in later keys."""
    from qeffect_lm.kernels import attention

    qkv = random(1, 80, 1, 3, 16, seed=3, dtype=torch.bfloat16).to(DEVICE)
    y, lse = exact(qkv.double())
    dy = torch.zeros(1, 80, 1, 1, 16, dtype=torch.bfloat16, device=DEVICE)
    dy[:, 5] = random(16, seed=4, dtype=torch.bfloat16).to(DEVICE)
    got = attention.backward(qkv, y.bfloat16(), lse.float(), dy)
    assert (got[:, 6:] == 0).all() and (got[:, :5, :, 0] == 0).all()
    assert (got[:, :6, :, 2] != 0).any() and (got[:, 5, :, 0] != 0).any()
