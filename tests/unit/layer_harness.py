"""The harness of :mod:`qeffect_lm.testing`, and what tests of layers compare with: bounds, float64 autograd, attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from qeffect_lm.testing.harness import SEEDED, Harness, Microbatch, random

__all__ = ["BOUND", "SEEDED", "Harness", "Microbatch", "check", "close", "pairs", "plain_attention", "random"]

# Allowed error relative to the largest value: a few roundings of bfloat16, some hundred of the wide types.
BOUND = {torch.float64: 200 * 2.0**-53, torch.float32: 200 * 2.0**-24, torch.bfloat16: 4 * 2.0**-8}


def close(got: torch.Tensor, want: torch.Tensor, factor: float = 1.0, dtype: torch.dtype | None = None) -> None:
    """``got`` is within ``factor`` times the bound of its dtype (or of ``dtype``) of ``want``."""
    size = max(1.0, want.abs().max().item())
    error = (got.double() - want.double()).abs().max().item()
    assert got.shape == want.shape and error <= factor * BOUND[dtype or got.dtype] * size, (error, size)


def pairs(count: int, x_shape: Sequence[int], dy_shape: Sequence[int], dtype: torch.dtype, seed: int = 100):
    """Random (x, dy) of ``count`` microbatches."""
    return [
        (
            random(*x_shape, seed=seed + 2 * i, dtype=dtype),
            random(*dy_shape, seed=seed + 2 * i + 1, dtype=dtype),
        )
        for i in range(count)
    ]


def check(
    harness: Harness,
    reference: Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    factor: float = 1.0,
) -> None:
    """F, I and W of some microbatches equal float64 autograd of ``reference(parameters, x)``, gradients
    summed over microbatches."""
    wide = {n: p.detach().double().requires_grad_(n in harness.grads) for n, p in harness.parameters.items()}
    microbatches = [harness.microbatch(number, x, dy) for number, (x, dy) in enumerate(batches)]
    harness.run(microbatches)
    total = []
    for m, (x, dy) in zip(microbatches, batches, strict=True):
        leaf = x.double().requires_grad_()
        out = reference(wide, leaf)
        total.append((out * dy.double()).sum())
        close(m.out, out.detach(), factor)
        (dx,) = torch.autograd.grad(total[-1], leaf, retain_graph=True)
        close(m.dx, dx, factor)
    names = list(harness.grads)
    leaves = [wide[name] for name in names]
    grads = torch.autograd.grad(sum(total), leaves, allow_unused=True) if leaves else ()
    for name, grad in zip(names, grads, strict=True):
        want = torch.zeros_like(wide[name]) if grad is None else grad
        close(harness.grads[name], want, factor, harness.parameters[name].dtype)


def plain_attention(
    x: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    rows: tuple[Sequence[int], Sequence[int], Sequence[int]],
    head_dim: int,
    theta: float,
) -> torch.Tensor:
    """Causal attention with RoPE, one head at a time, with softmax and rotation written out.

    ``rows`` says, per query head, which group of ``head_dim`` rows of ``qkv`` is its q, its k and its v.
    """
    sequence = x.shape[1]
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turn = torch.exp(1j * torch.arange(sequence, dtype=torch.float64)[:, None] * frequency)
    future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)

    def project(row: int) -> torch.Tensor:
        return x @ qkv[row * head_dim : (row + 1) * head_dim].t()

    def rope(y: torch.Tensor) -> torch.Tensor:
        z = torch.complex(*y.chunk(2, dim=-1)) * turn
        return torch.cat([z.real, z.imag], dim=-1)

    heads = []
    for q_row, k_row, v_row in zip(*rows, strict=True):
        q, k, v = rope(project(q_row)), rope(project(k_row)), project(v_row)
        scores = (q @ k.transpose(1, 2)) / math.sqrt(head_dim)
        heads.append(torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v)
    return torch.cat(heads, dim=-1) @ out.t()
