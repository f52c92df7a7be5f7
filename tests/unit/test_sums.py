"""Sums of logical tensors by their bits: the same for all ways to cut them, another one for any change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import open_checkpoint, sums
from checkpoint.shards import as_integers
from checkpoint.sums import Summer, merge, of_checkpoint, state_digest
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import GOLDEN_DTYPES, golden_state, whole, write_golden


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit patterns, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@st.composite
def cut(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[tuple[int, int]]]]:
    """A tensor and per dimension the pieces of it: (start, size), in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    pieces = []
    for size in shape:
        edges = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
        bounds = [0, *edges, size]
        pieces.append(draw(st.permutations([(a, b - a) for a, b in zip(bounds, bounds[1:], strict=False)])))
    dtype = getattr(torch, draw(st.sampled_from(GOLDEN_DTYPES)))
    return random_bits(shape, dtype, draw(st.integers(0, 99))), pieces


def boxes(pieces: list[list[tuple[int, int]]]) -> list[tuple[tuple[int, int], ...]]:
    found: list[tuple[tuple[int, int], ...]] = [()]
    for along in pieces:
        found = [(*box, part) for box in found for part in along]
    return found


@given(cut(), st.booleans())
def test_any_cut_gives_the_same_sum(given_, small):
    """Pieces on ranks of their own, by numpy or by torch: they add up to the whole's, which is the formula's."""
    tensor, pieces = given_
    with pytest.MonkeyPatch.context() as patch:
        if not small:
            patch.setattr(sums, "SMALL", -1)
            patch.setattr(sums, "ON_HOST", 5)
        shape = tuple(tensor.shape)
        ranks = []
        for box in boxes(pieces):
            part = tensor[tuple(slice(a, a + n) for a, n in box)]
            item = LogicalTensor("x", part, Role.PARAM, shape, tuple(a for a, _ in box), (None,) * len(shape))
            ranks.append(Summer().own([item], {}))
            assert Summer().own([item], {"dp": 1}) == {}  # replicated: not this rank's to tell
        total = merge(ranks)["x"]
    assert total == Summer().of(tensor, shape, (0,) * len(shape))
    assert total.lanes == tuple(by_the_formula(tensor, lane) for lane in range(sums.LANES))


def by_the_formula(tensor: torch.Tensor, lane: int) -> int:
    bits = as_integers(tensor)
    weights = [sums._odd_numbers((lane << 60) + (d << 52), n).tolist() for d, n in enumerate(bits.shape or (1,))]
    total = 0
    for flat, value in enumerate(bits.reshape(-1).tolist()):
        index = torch.unravel_index(torch.tensor(flat), bits.shape or (1,))
        for along, i in zip(weights, index, strict=True):
            value *= along[int(i)]
        total += value
    return total % 2**64


@given(cut(), st.data())
def test_any_bit_that_flips_shows(given_, data):
    tensor, _ = given_
    shape, zeros = tuple(tensor.shape), (0,) * tensor.dim()
    before = Summer().of(tensor, shape, zeros)
    changed = tensor.clone().reshape(-1).view(torch.uint8)
    place = data.draw(st.integers(0, changed.numel() - 1))
    changed[place] ^= 1 if tensor.dtype is torch.bool else 1 << data.draw(st.integers(0, 7))
    after = Summer().of(changed.view(tensor.dtype).reshape(shape), shape, zeros)
    assert all(a != b for a, b in zip(before.lanes, after.lanes, strict=True)) and before.text != after.text


def test_a_transposed_a_moved_and_a_renamed_tensor_show():
    x = torch.arange(9.0).reshape(3, 3)
    texts = {Summer().of(value, (3, 3), (0, 0)).text for value in (x, x.T, x.roll(1, 0), x.roll(1, 1), x.flip(0))}
    assert len(texts) == 5
    assert len({state_digest({name: Summer().of(x, (3, 3), (0, 0))}) for name in "ab"}) == 2
    with pytest.raises(ValueError, match="of two tensors"):
        _ = Summer().of(x, (3, 3), (0, 0)) + Summer().of(x[:2], (2, 3), (0, 0))


def test_of_a_checkpoint(tmp_path):
    """What two ranks hold, and what lies on disk, read by any number of readers: one digest; generators are left out."""
    write_golden(tmp_path)
    checkpoint = open_checkpoint(tmp_path / "step_00000003")
    live: list[Any] = [Summer().own([i for i in golden_state(rank) if i.role is not Role.RNG], {"tp": rank}) for rank in (0, 1)]
    wanted = state_digest(merge(live))
    for readers in (1, 2, 5):
        assert state_digest(merge(of_checkpoint(checkpoint, share, readers) for share in range(readers))) == wanted
    assert whole("x", torch.zeros(0, 3)).tensor.numel() == 0 and "history/empty" in merge(live)


@pytest.mark.parametrize("elements", [sums.SMALL, sums.SMALL + 1])
def test_sums_of_host_memory_wait_for_no_device(elements):
    """A rank on a GPU has generators in host memory beside its tensors there: those alone are read from the device together."""
    lanes = Summer()._lanes(torch.arange(elements, dtype=torch.uint8), (0,))
    assert len(lanes) == sums.LANES and all(type(lane) is int for lane in lanes)
