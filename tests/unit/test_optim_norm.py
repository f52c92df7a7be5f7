"""The global gradient norm: right, and the same bits however the parameters are spread."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.optim.flat import FlatBuffers, ParamSpec
from qeffect_lm.optim.norm import BLOCK, ROWS, BlockOrder, BlockSums, TotalNorm

SIZES = {
    "embedding": BLOCK * 11 + 17,
    "tiny": 3,
    "exact": BLOCK * 8,
    "scalar": 1,
    "below": BLOCK - 1,
    "above": BLOCK + 1,
    "rows": BLOCK * 2,
    "empty": 0,
}


def _gradients(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator) * 10.0 ** (index % 4 - 2)
        for index, (name, size) in enumerate(SIZES.items())
    }


def _total(gradients: dict[str, torch.Tensor], stages: list[list[str]]) -> TotalNorm:
    """The reduction as the ranks of a pipeline with these stages run it."""
    order = BlockOrder([(name, grad.numel()) for name, grad in gradients.items()], stages)
    total = TotalNorm(order)
    for stage, names in enumerate(stages):
        specs = [
            ParamSpec(name, (gradients[name].numel(),), decay=index % 2 == 0)
            for index, name in enumerate(names)
        ]
        flat = FlatBuffers(specs)
        for name in names:
            flat.grad(name).copy_(gradients[name])
        total.gathered[stage].copy_(BlockSums(flat, order, stage).compute_())
    total.reduce_()
    return total


def _norm(gradients: dict[str, torch.Tensor], stages: list[list[str]]) -> torch.Tensor:
    return _total(gradients, stages).norm


def _assert_same(a: TotalNorm, b: TotalNorm) -> None:
    """Equal norms, and equal sums in equal order (two orders of the same sums may round to one norm)."""
    assert torch.equal(a.ordered, b.ordered)
    assert torch.equal(a.norm, b.norm)


def test_value() -> None:
    """Equals the exactly rounded norm within a few units of float64."""
    gradients = _gradients()
    exact = math.sqrt(math.fsum(x * x for grad in gradients.values() for x in grad.tolist()))
    norm = _norm(gradients, [list(SIZES)])
    assert norm.dtype == torch.float64 and norm.shape == ()
    assert abs(norm.item() - exact) <= 1e-14 * exact


@pytest.mark.parametrize("stages", [2, 3])
def test_same_bits_on_any_number_of_stages(stages: int) -> None:
    """Parameters spread over 1, 2 and 3 stages, in several ways, give bitwise the same norm."""
    gradients = _gradients(1)
    names = list(SIZES)
    reference = _total(gradients, [names])
    for cut in itertools.islice(itertools.combinations(range(len(names) + 1), stages - 1), 0, None, 4):
        bounds = [0, *cut, len(names)]
        split = [names[a:b] for a, b in itertools.pairwise(bounds)]
        _assert_same(_total(gradients, split), reference)
    scattered = [names[stage::stages] for stage in range(stages)]
    _assert_same(_total(gradients, scattered), reference)


@settings(max_examples=15, deadline=None)
@given(st.permutations(list(SIZES)), st.lists(st.integers(0, 3), min_size=len(SIZES), max_size=len(SIZES)))
def test_same_bits_for_any_placement(order: list[str], owners: list[int]) -> None:
    """Any owner for any parameter, and any order inside a stage's buffers, gives the same bits."""
    gradients = _gradients(2)
    split = [[name for name in order if owners[list(SIZES).index(name)] == stage] for stage in range(4)]
    _assert_same(_total(gradients, split), _total(gradients, [list(SIZES)]))


def test_order_of_parameters_is_part_of_the_definition() -> None:
    """Control for the tests above: the same sums in other orders do give other bits."""
    total = TotalNorm(BlockOrder([(str(i), 1) for i in range(64)], [[str(i) for i in range(64)]]))
    generator = torch.Generator().manual_seed(3)
    sums = torch.rand(64, generator=generator, dtype=torch.float64) ** 8
    norms = set()
    for _ in range(30):
        total.gathered[0].copy_(sums[torch.randperm(64, generator=generator)])
        norms.add(total.reduce_().item())
    assert len(norms) > 1


def test_threads_do_not_matter() -> None:
    """The same bits with one and two CPU threads."""
    gradients = _gradients(3)
    before = torch.get_num_threads()
    try:
        totals = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            totals.append(_total(gradients, [list(SIZES)]))
    finally:
        torch.set_num_threads(before)
    _assert_same(*totals)


def test_sums_are_rewritten_in_place_and_padding_is_zero() -> None:
    """Recomputing follows the gradients (no stale scratch), in the same storage; the tail stays 0."""
    sizes = {"a": BLOCK * (ROWS - 1) + 5, "b": 7}
    order = BlockOrder([*sizes.items(), ("other", BLOCK * 40)], [["a", "b"], ["other"]])
    flat = FlatBuffers([ParamSpec(name, (size,), True) for name, size in sizes.items()])
    sums = BlockSums(flat, order, 0)
    for value in (3.0, 2.0):
        flat.grad_buffer.fill_(float("nan"))  # also between parameters: padding must not be read
        for name in sizes:
            flat.grad(name).fill_(value)
        address = sums.sums.data_ptr()
        result = sums.compute_()
        assert result.data_ptr() == address and result.shape == (40,)
        expected = [BLOCK * value**2] * (ROWS - 1) + [5 * value**2, 7 * value**2]
        assert result.tolist() == expected + [0.0] * (40 - ROWS - 1)


def test_float32_gradients_do_not_overflow() -> None:
    """Squares are formed in float64: a gradient of 1e30 has the norm 1e30 and not infinity."""
    norm = _norm({"w": torch.full((4,), 1e30)}, [["w"]])
    assert abs(norm.item() / 2e30 - 1) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite(bad: float) -> None:
    """S8: one bad element anywhere makes the norm non-finite, which is what the step's vote reads; a clean set does not."""
    for name in ("embedding", "scalar", "above"):
        gradients = _gradients()
        gradients[name][-1] = bad
        norm = _norm(gradients, [list(SIZES)[:3], list(SIZES)[3:]])
        assert not torch.isfinite(norm)
    assert torch.isfinite(_norm(_gradients(), [list(SIZES)]))


def test_errors() -> None:
    """A placement that is not a partition, or buffers of another stage, are refused by name."""
    params = [("a", 4), ("b", 5)]
    with pytest.raises(ValueError, match="no stage holds b"):
        BlockOrder(params, [["a"]])
    with pytest.raises(ValueError, match="'a' is on stages 0 and 1"):
        BlockOrder(params, [["a", "b"], ["a"]])
    with pytest.raises(ValueError, match="'c', which the global order does not list"):
        BlockOrder(params, [["a", "b", "c"]])
    order = BlockOrder(params, [["a"], ["b"]])
    with pytest.raises(ValueError, match="disagree about a, b"):
        BlockSums(FlatBuffers([ParamSpec("b", (5,), True)]), order, 0)
    with pytest.raises(ValueError, match="a: 3 elements here, 4"):
        BlockSums(FlatBuffers([ParamSpec("a", (3,), True)]), order, 0)


def test_stage_without_parameters() -> None:
    """G6: an empty stage contributes zeros."""
    gradients = _gradients()
    _assert_same(_total(gradients, [[], list(SIZES)]), _total(gradients, [list(SIZES), []]))
