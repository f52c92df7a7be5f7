"""The optimizer's kernels (interpreted on CPU, compiled on a GPU) against the torch operations."""

from __future__ import annotations

import math

import pytest
import torch

from qeffect_lm.optim.adamw import AdamW
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec, Shard
from qeffect_lm.optim.lr import Schedule
from qeffect_lm.optim.norm import BLOCK, BlockOrder, BlockSums
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401

SHAPES = {"a": (33, 7), "b": (129,), "c": (5, 5, 5), "d": (1,)}
ON, OFF = (torch.tensor(flag, dtype=torch.bool, device=DEVICE) for flag in (True, False))


def make(
    clip: float | None = 1.0,
    decay: float = 0.1,
    dtype: torch.dtype = torch.bfloat16,
    grad: torch.dtype = torch.float32,
) -> tuple[FlatBuffers, AdamW]:
    specs = [ParamSpec(name, shape, name in "ac") for name, shape in SHAPES.items()]
    flat = FlatBuffers(specs, param_dtype=dtype, grad_dtype=grad, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        flat.master(name).copy_(torch.randn(shape, generator=generator))
    flat.gather()
    made = AdamW(
        flat, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, clip_norm=clip, schedule=Schedule(1e-2, 30, "cosine", 5)
    )
    return flat, made


def fill(flat: FlatBuffers, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    for name, shape in SHAPES.items():
        flat.grad(name).copy_(10.0 ** (step % 5 - 2) * torch.randn(shape, generator=generator))
    return torch.linalg.vector_norm(flat.grad_buffer.double())


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
def test_adamw_is_the_elementwise_operations(clip, decay, dtype, grad):
    """12 steps on both sides of the clip limit: within a few roundings (multiplications and additions may be fused); parameters
    are exactly the masters' casts. Gradients of either type."""
    flat, fused = make(clip, decay, dtype, grad)
    with reference():
        other, plain = make(clip, decay, dtype, grad)
    assert fused._fused and not plain._fused
    for step in range(12):
        fused.step_(fill(flat, step), ON)
        plain.step_(fill(other, step), ON)
    for name in SHAPES:
        for mine, wanted in ((flat.master, other.master), (flat.moment1, other.moment1), (flat.moment2, other.moment2)):
            torch.testing.assert_close(mine(name), wanted(name), rtol=2e-6, atol=1e-8)
        assert torch.equal(flat.param(name), flat.master(name).to(dtype))
    assert int(fused.step) == 12 and not torch.equal(flat.master("a"), make()[0].master("a"))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_skipped_step_changes_no_byte(poison):
    flat, fused = make()
    fused.step_(fill(flat, 0), ON)
    before = [t.clone() for t in (flat.master_buffer, flat.param_buffer, flat.moment1_buffer, flat.moment2_buffer)]
    flat.grad_buffer.fill_(poison)
    fused.step_(torch.tensor(poison, dtype=torch.float64, device=DEVICE), OFF)
    after = (flat.master_buffer, flat.param_buffer, flat.moment1_buffer, flat.moment2_buffer)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True))
    assert int(fused.step) == 1 and bool(fused.skipped)


def sums_of(
    values: dict[str, torch.Tensor], order: list[str], shard: Shard | None = None
) -> tuple[FlatBuffers, torch.Tensor]:
    flat = FlatBuffers([ParamSpec(name, values[name].shape, True) for name in order], device=DEVICE, shard=shard)
    for name, value in values.items():
        flat.grad(name).copy_(value)
    sums = BlockSums(flat, BlockOrder([(name, values[name].numel()) for name in sorted(values)], [list(values)]), 0)
    assert sums._fused
    return flat, sums.compute_().clone()


def test_block_sums_are_exact_sums_and_the_same_wherever_a_parameter_lies():
    """Against exact sums of the float64 squares within (number of additions) roundings; bitwise for another order of the
    buffer, where blocks start elsewhere."""
    generator = torch.Generator().manual_seed(3)
    values = {"x": torch.randn(BLOCK + 77, generator=generator), "y": torch.randn(5, generator=generator)}
    values["z"] = 1e18 * torch.randn(300, generator=generator)
    _, forward = sums_of(values, ["x", "y", "z"])
    flat, backward = sums_of(values, ["z", "y", "x"])
    assert flat.entry("x").offset > 0 and torch.equal(forward, backward)
    blocks = [values["x"][:BLOCK], values["x"][BLOCK:], values["y"], values["z"]]
    exact = [math.fsum(float(v) ** 2 for v in block) for block in blocks]
    assert forward.tolist() == pytest.approx(exact, rel=BLOCK / 2048 * 2**-52 + 16 * 2**-52)


def test_replicas_sum_the_blocks_that_they_own():
    """The sums of two shards add up to those of the whole, bit for bit: each block comes from one of them."""
    values = {"x": torch.full((2 * BLOCK + 77,), 0.3), "y": torch.full((5,), 0.7)}
    _, whole = sums_of(values, ["y", "x"])
    parts = [sums_of(values, ["y", "x"], Shard(2, rank, 1 << 20))[1] for rank in range(2)]
    assert torch.equal(parts[0] + parts[1], whole) and all(0 < int((part != 0).sum()) < 4 for part in parts)


def test_block_sums_show_what_is_not_finite():
    values = {"x": torch.ones(10), "y": torch.ones(3)}
    values["y"][1] = math.inf
    _, sums = sums_of(values, ["x", "y"])
    assert sums.tolist() == [10.0, math.inf]
