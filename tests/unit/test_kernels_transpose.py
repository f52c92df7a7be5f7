"""The kernel that turns FP8 rows into columns, against torch: equal bytes, whatever they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.fp8.quantise import E4M3, E5M2, transposed
from qeffect_lm.kernels import transpose
from tests.unit.interpreted import DEVICE, INTERPRETED, kernels_run  # noqa: F401

FMT = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def every_byte(m: int, k: int, fmt, seed: int = 0) -> torch.Tensor:
    """``[m, k]`` of all 256 bytes, NaN, infinities and both zeros among them, in any order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(m * k, generator=generator).argsort()
    return (order % 256).to(torch.uint8).view(m, k).view(fmt.dtype).to(DEVICE)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.fixture
def launches(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the rows that the kernel turned."""
    seen: list[tuple[int, ...]] = []
    original = transpose.transpose
    monkeypatch.setattr(transpose, "transpose", lambda rows, out: (seen.append(tuple(rows.shape)), original(rows, out))[1])
    return seen


@FMT
@settings(max_examples=25)
@given(
    pairs=st.integers(1, 140), k=st.integers(1, 140), beside=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_equals_torch(fmt, pairs, k, beside, seed):
    """Of any shape, into part of something wider, of which nothing else is touched."""
    before, after = beside
    rows = every_byte(2 * pairs, k, fmt, seed)
    wide = torch.full((k, 2 * (before + pairs + after)), 7, dtype=torch.uint8, device=DEVICE)
    part = wide[:, 2 * before : 2 * (before + pairs)].view(fmt.dtype)
    assert transpose.takes(rows, part)
    transpose.transpose(rows, part)
    assert torch.equal(bytes_of(part), bytes_of(rows).t())
    assert (wide[:, : 2 * before] == 7).all() and (wide[:, 2 * (before + pairs) :] == 7).all()


@FMT
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (256, 192), (384, 256), (16, 16), (48, 80), (144, 272)])
def test_whole_tiles(fmt, shape, launches):
    """What vectorised accesses make of them; a storage of its own where none is given."""
    rows = every_byte(*shape, fmt)
    made = transposed(rows)
    assert made.dtype is fmt.dtype and made.is_contiguous() and torch.equal(bytes_of(made), bytes_of(rows).t())
    out = torch.zeros_like(made)
    assert transposed(rows, out) is out and torch.equal(bytes_of(out), bytes_of(made))
    assert launches == [shape, shape] and len(bytes_of(made).unique()) == 256


def test_what_does_not_come_in_pairs(launches):
    """An odd number of rows, an odd place or distance, rows that lie apart: torch turns them, to the same bytes."""
    rows = every_byte(34, 20, E4M3)
    wide = torch.zeros(20, 70, dtype=torch.uint8, device=DEVICE)
    for given_rows, out in (
        (rows[:33], None),
        (rows, wide[:, 1:35].view(E4M3.dtype)),
        (rows, wide.view(-1)[: 20 * 69].view(20, 69)[:, :34].view(E4M3.dtype)),
        (every_byte(34, 40, E4M3)[:, ::2], None),
    ):
        made = transposed(given_rows, out)
        assert torch.equal(bytes_of(made), bytes_of(given_rows.contiguous()).t()) and (out is None or made is out)
    assert launches == []


@pytest.mark.skipif(INTERPRETED, reason="large; needs a CUDA GPU")
@pytest.mark.parametrize("shape", [(4096, 4096), (8192, 14336), (2048, 4100), (1000, 3000), (32768, 8192)])
def test_large_ones(shape):
    rows = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).view(E4M3.dtype)
    assert torch.equal(bytes_of(transposed(rows)), bytes_of(rows).t())
