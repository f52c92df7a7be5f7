"""The quantising kernels against the torch reference: equal bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.timeline import EMPTY, ScaleTimeline
from qeffect_lm.fp8.cache import WeightCache
from qeffect_lm.fp8.quantise import E4M3, E5M2, Quantised, quantise
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling, roles_of
from tests.unit.interpreted import DEVICE, INTERPRETED, kernels_run, reference  # noqa: F401
from tests.unit.layer_harness import random

FMT = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=DEVICE)


def same_bytes(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert got.shape == want.shape and got.dtype == want.dtype and got.is_contiguous()
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


def same(got: Quantised, want: Quantised) -> None:
    same_bytes(got.rows, want.rows)
    same_bytes(got.columns, want.columns)
    same_bytes(got.scale_inv, want.scale_inv)


SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 448.0, -464.0, 57344.0, 61440.0, 1e-40, -1e-40, 2.0**-10, 2.0**-17, 3e38]


@FMT
@settings(max_examples=12)
@given(
    shape=st.tuples(st.integers(1, 140), st.integers(1, 140)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layouts=st.sampled_from([(True, True), (True, False), (False, True)]),
    scale=st.floats(2.0**-13, 2.0**13, width=32),
    specials=st.lists(st.sampled_from(SPECIAL), max_size=6),
    before=st.sampled_from([None, EMPTY, 0.0, 1e30, math.nan]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_reference(fmt, shape, dtype, layouts, scale, specials, before, seed):
    """Both layouts, the inverse scale and the merged amax, for any shape, with every special value."""
    x = random(*shape, seed=seed, dtype=dtype, scale=2.0 ** (seed % 20 - 10)).to(DEVICE)
    values = torch.tensor(specials, dtype=dtype, device=DEVICE)[: x.numel()]
    x.view(-1)[torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))[: len(values)]] = values
    slots = [None if before is None else scalar(before) for _ in range(2)]
    arguments = {"rows": layouts[0], "columns": layouts[1]}
    got = quantise(x, scalar(scale), fmt, amax_out=slots[0], **arguments)
    with reference():
        want = quantise(x, scalar(scale), fmt, amax_out=slots[1], **arguments)
    same(got, want)
    if slots[0] is not None and slots[1] is not None:
        assert slots[0].item() == slots[1].item() or (math.isnan(slots[0].item()) and math.isnan(slots[1].item()))


@FMT
def test_every_bfloat16(fmt):
    """All 65,536 bfloat16 values, ties and subnormal results among them."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    x = torch.where(x.isnan(), x.abs(), x).to(DEVICE)  # the sign of a NaN is the device's business
    got = quantise(x, scalar(1.0), fmt)
    with reference():
        same(got, quantise(x, scalar(1.0), fmt))


def test_amax_ignores_what_lies_beyond_the_matrix():
    """A tile's padding counts neither as a value nor as a report; an EMPTY slot takes a zero."""
    slot = scalar(EMPTY)
    quantise(torch.zeros(3, 5, device=DEVICE), scalar(1.0), E4M3, amax_out=slot)
    assert slot.item() == 0.0 and not math.copysign(1, slot.item()) < 0


def test_writes_into_given_storages():
    x = random(33, 48, seed=5, dtype=torch.bfloat16).to(DEVICE)
    rows, columns = torch.zeros(33, 48, dtype=E5M2.dtype, device=DEVICE), torch.zeros(48, 33, dtype=E5M2.dtype, device=DEVICE)
    inverse = scalar(0.0)
    outs = {"rows_out": rows, "columns_out": columns, "scale_inv_out": inverse}
    made = quantise(x, scalar(3.0), E5M2, **outs)
    assert made.rows is rows and made.columns is columns and made.scale_inv is inverse
    with reference():
        same(made, quantise(x, scalar(3.0), E5M2))
        fresh = {name: torch.zeros_like(out) for name, out in outs.items()}
        placed = quantise(x, scalar(3.0), E5M2, **fresh)
        assert placed.rows is fresh["rows_out"] and placed.scale_inv is fresh["scale_inv_out"]
        same(placed, made)
    with pytest.raises(ValueError, match=r"E5M2 \[33, 48\] needs a contiguous storage, not .* \[48, 33\]"):
        quantise(x, scalar(3.0), E5M2, rows_out=columns)


def test_columns_side_by_side():
    """The transposed copy goes into part of a wider matrix, and nowhere else."""
    x = random(32, 48, seed=6, dtype=torch.bfloat16).to(DEVICE)
    for position in range(3):
        wide = torch.full((48, 96), 7.0, device=DEVICE).to(E5M2.dtype)
        part = wide[:, 32 * position : 32 * (position + 1)]
        made = quantise(x, scalar(3.0), E5M2, columns_out=part)
        want = quantise(x, scalar(3.0), E5M2)
        assert made.columns is part and torch.equal(part.view(torch.uint8), want.columns.view(torch.uint8))
        same_bytes(made.rows, want.rows)
        others = torch.cat([wide[:, : 32 * position], wide[:, 32 * (position + 1) :]], dim=1)
        assert (others.float() == 7.0).all()
        with reference():
            again = torch.zeros_like(wide)[:, 32 * position : 32 * (position + 1)]
            quantise(x, scalar(3.0), E5M2, columns_out=again)
            assert torch.equal(again.view(torch.uint8), part.view(torch.uint8))
    with pytest.raises(ValueError, match=r"E5M2 \[48, 32\] needs a contiguous storage"):
        quantise(x, scalar(3.0), E5M2, columns_out=torch.zeros(32, 48, dtype=E5M2.dtype, device=DEVICE).t())


SHAPES = {"a": (70, 130), "b": (16, 64), "c": (1, 3), "d": (64, 48), "e": (128, 192), "f": (192, 64)}


@pytest.mark.parametrize("names", ["abcd", "bd", "bef"], ids=["any shapes", "aligned shapes", "whole tiles"])
def test_weight_refresh(names):
    """All weights together equal one at a time: masters to BF16 to FP8, amax into the window; a second refresh replaces the
    first one's amax; a weight under another recipe is not left out."""
    recipe = DelayedScaling()
    timeline = ScaleTimeline([role for name in names for role in roles_of(name)], device=DEVICE)
    recipe.bind(timeline)
    masters = {name: random(*SHAPES[name], seed=ord(name), dtype=torch.float32).to(DEVICE) for name in names}
    current = CurrentScaling()
    sources = {f"{n}.weight": (n, recipe, lambda n=n: masters[n]) for n in names}
    sources["other.weight"] = ("other", current, lambda: masters["b"])
    cache = WeightCache(sources)
    for factor in (100.0, 1.0):
        timeline.scale.copy_(torch.linspace(0.3, 7.0, len(timeline.scale)))
        for master in masters.values():
            master.mul_(factor / 10)
        cache.refresh_()
        for name in names:
            slot = timeline.slot_of(f"{name}.weight").clone()
            with reference():
                want = recipe.weight(name, masters[name].bfloat16())
            same(cache.cached[f"{name}.weight"], want)
            assert slot.item() == timeline.slot_of(f"{name}.weight").item() == masters[name].bfloat16().abs().max().item()
            assert timeline.slot_of(f"{name}.input").item() == EMPTY
        with reference():
            same(cache.cached["other.weight"], current.weight("other", masters["b"].bfloat16()))


@pytest.mark.skipif(not INTERPRETED, reason="its tensors are a CPU's")
def test_the_tables_of_a_refresh_are_known_to_a_save():
    """A save looks whether anything moved. Eagerly nothing is captured, and the refresh makes its tables when it first runs."""
    from qeffect_lm.app.assemble import assemble
    from tests.tiny import config

    assembly = assemble(config(graphs__backend="eager", model__num_layers=1))
    assembly.prepare(None)
    assembly.rebuild_caches()
    assert assembly.cache.scratch()
    assembly.register.check_addresses()
