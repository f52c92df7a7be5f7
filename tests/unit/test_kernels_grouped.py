"""Products of groups as kernels against the loop over groups: every kind of routing and dtype, both betas, the whole layer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.moe import MoEPart
from models.spec import Place
from qeffect_lm.fp8.grouped import (
    Groups,
    Matrices,
    Rows,
    Scales,
    accumulate_grouped_mm,
    addresses,
    amax_of_groups,
    grouped_mm,
    needed,
    places_of,
    quantise_groups,
    spacing_of,
)
from qeffect_lm.fp8.quantise import E4M3, E5M2, dequantise, quantise, scale_of_amax
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.moe import bind_experts
from tests.tiny import same_bits
from tests.unit.interpreted import DEVICE, INTERPRETED, kernels_run, reference  # noqa: F401
from tests.unit.layer_harness import Harness, random

N, K = 48, 80  # no multiple of a tile
SIZES = {
    "all on one": [0, 70, 0],
    "one row": [1, 0, 0],
    "none on the first": [0, 5, 40],
    "whole tiles": [64, 32, 32],
    "every group a little": [3, 1, 2],
    "enough to begin at multiples of 64": [500, 1, 270],
}


def groups_of(sizes: list[int]) -> Groups:
    counts = torch.tensor(sizes)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    return Groups(offsets.to(DEVICE), torch.arange(len(sizes)).repeat_interleave(counts).to(DEVICE))


def values(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return random(*shape, seed=seed, dtype=dtype).to(DEVICE)


def matrices(tensors: list[torch.Tensor]) -> Matrices:
    return Matrices(tuple(tensors), addresses(tensors))


def fp8(x: torch.Tensor, groups: Groups, fmt=E4M3) -> Rows:
    return quantise_groups(x, Scales.of(scale_of_amax(amax_of_groups(x, groups), fmt)), fmt, groups, columns=True)


def close(got: torch.Tensor, want: torch.Tensor, fp8: bool = False) -> None:
    """Sums in another order; bfloat16 results may be rounded the other way. Of FP8 products Hopper keeps some 14 bits until 128
    are moved into float32."""
    bound = 2.0**-7 if want.dtype is torch.bfloat16 else 2.0**-11 if fp8 and not INTERPRETED else 2.0**-19
    size = max(1.0, want.abs().max().item())
    assert got.dtype == want.dtype and (got.double() - want.double()).abs().max().item() <= bound * size


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_products(sizes: list[int], kind: str) -> None:
    """F as the weights lie, I through their transposes; each row is what it would be alone in its group."""
    groups, dtype = groups_of(sizes), torch.float32 if kind == "float32" else torch.bfloat16
    x = values(sum(sizes), K, seed=1, dtype=dtype)
    plain = [values(N, K, seed=10 + g, dtype=dtype) for g in range(len(sizes))]
    if kind == "fp8":
        cached = [quantise(w, torch.tensor(40.0 + g, device=DEVICE), E4M3) for g, w in enumerate(plain)]
        scales = matrices([q.scale_inv for q in cached])
        rows, weights = fp8(x, groups), matrices([q.rows for q in cached])
        dy = fp8(values(sum(sizes), N, seed=2, dtype=dtype), groups, E5M2)
        back = matrices([q.columns for q in cached])
    else:
        scales, rows, weights = None, Rows(x), matrices(plain)
        dy, back = Rows(values(sum(sizes), N, seed=2, dtype=dtype)), weights.t
    for operand, right, fast in ((rows, weights, True), (dy, back, False)):
        got = grouped_mm(operand, right, groups, dtype, weight_scale_inv=scales, fast_accumulation=fast)
        with reference():
            want = grouped_mm(operand, right, groups, dtype, weight_scale_inv=scales)
        close(got, want)
        assert got.abs().max() > 1


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_weight_gradients(sizes: list[int], kind: str) -> None:
    """Beta 0: what was there is gone, of idle groups too; beta 1: added, and an idle group's bits stay."""
    out = torch.bfloat16 if kind == "bfloat16" else torch.float32
    groups, dtype = groups_of(sizes), torch.float32 if kind == "float32" else torch.bfloat16
    x, dy = values(sum(sizes), K, seed=1, dtype=dtype), values(sum(sizes), N, seed=2, dtype=dtype)
    operands = (fp8(dy, groups, E5M2), fp8(x, groups)) if kind == "fp8" else (Rows(dy), Rows(x))
    made, wanted = ([torch.full((N, K), float("nan"), dtype=out, device=device) for _ in sizes] for device in (DEVICE, "cpu"))
    on_cpu = [Rows(o.whole.cpu(), None if o.scale_inv is None else o.scale_inv.cpu()) for o in operands]
    for beta in (0, 1):
        accumulate_grouped_mm(matrices(made), *operands, groups, beta)
        with reference():
            accumulate_grouped_mm(Matrices(tuple(wanted)), *on_cpu, Groups(groups.offsets.cpu(), groups.of_row.cpu()), beta)
    for size, got, want in zip(sizes, made, wanted, strict=True):
        close(got.cpu(), want, kind == "fp8")
        assert bool(got.any()) == (size > 0)
    kept = torch.full((N, K), -0.0, device=DEVICE)
    accumulate_grouped_mm(matrices([kept] * len(sizes)), *operands, groups_of([0] * (len(sizes) - 1) + [sum(sizes)]), 1)
    idle = torch.full((N, K), -0.0, device=DEVICE)
    accumulate_grouped_mm(matrices([idle, kept]), *operands, groups_of([0, sum(sizes)]), 1)
    assert same_bits(idle, torch.full((N, K), -0.0, device=DEVICE)), "not even the sign of a zero"


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_quantised_rows_are_the_references_bytes(fmt) -> None:
    groups = groups_of([3, 0, 70])
    x = values(73, K, seed=3, dtype=torch.bfloat16)
    scale = torch.tensor([2.0, 5.0, 400.0], device=DEVICE)  # the last saturates
    made = quantise_groups(x, Scales.of(scale), fmt, groups)
    with reference():
        want = quantise_groups(x, Scales.of(scale), fmt, groups)
    assert same_bits(made.rows.view(torch.uint8), want.rows.view(torch.uint8)) and same_bits(made.scale_inv, want.scale_inv)
    assert torch.equal(dequantise(made.rows[:3], made.scale_inv[0]), quantise(x[:3], scale[0], fmt).rows.float() / 2)


@given(rows=st.integers(0, 1 << 20), groups=st.integers(1, 300), data=st.data())
def test_places(rows: int, groups: int, data) -> None:
    """What is told by the places is what they were made for; they suffice however the rows are dealt, and are not many."""
    places = places_of(rows, groups)
    spacing = spacing_of(places, groups)
    assert places == needed(rows, groups, spacing) and places % spacing == 0 and spacing in (16, 32, 64, 128)
    assert places - rows <= rows // 4 + spacing or (spacing == 16 and rows < 64 * groups)
    assert spacing == 128 or rows < 8 * spacing * groups
    fewer = data.draw(st.integers(0, rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, fewer), min_size=groups - 1, max_size=groups - 1)))
    sizes = [b - a for a, b in pairwise([0, *cuts, fewer])]
    assert sum(-(-size // spacing) * spacing for size in sizes) <= needed(fewer, groups, spacing) <= places


COLUMNS = [(16, [3, 0, 70]), (16, [16, 5, 0]), (16, [0, 0, 64]), (32, [200, 1, 190]), (64, [700, 100, 0]), (128, [0, 1500, 40])]


@pytest.mark.parametrize(("spacing", "sizes"), COLUMNS, ids=str)
def test_columns_begin_at_multiples(spacing: int, sizes: list[int]) -> None:
    """The transposed copy as torch makes it: each group's rows in their order, zeros behind them and in place of padding."""
    groups, more, m = groups_of(sizes), 9, sum(sizes)
    padded = Groups(groups.offsets, torch.cat([groups.of_row, groups.of_row.new_full((more,), len(sizes))]))
    x = values(m + more, K, seed=3, dtype=torch.bfloat16)
    x[m:] = float("nan")
    scale = torch.tensor([2.0, 5.0, 400.0], device=DEVICE)
    made = quantise_groups(x, Scales.of(scale), E4M3, padded, columns=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qeffect_lm.kernels.quantises", lambda tensor: False)  # as for float32 on a GPU
        want = quantise_groups(x, Scales.of(scale), E4M3, padded, columns=True)
    assert made.columns is not None and want.columns is not None and made.columns.shape == (K, needed(m + more, 3, spacing))
    assert same_bits(made.columns.view(torch.uint8), want.columns.view(torch.uint8))
    place = 0
    for first, size in zip(groups.offsets.tolist(), sizes, strict=False):
        assert place % spacing == 0
        columns = made.columns.view(torch.uint8)[:, place : place + -(-size // spacing) * spacing].t()
        assert torch.equal(columns[:size], made.whole.view(torch.uint8)[first : first + size]) and not columns[size:].any()
        place += len(columns)
    assert not made.columns.view(torch.uint8)[:, place:].any()


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_gradient_does_not_depend_on_where_its_rows_lie(kind: str) -> None:
    """Nor a row's product: 70 rows behind none, 3 and 21 others."""
    x, dy = values(70, K, seed=1, dtype=torch.bfloat16), values(70, N, seed=2, dtype=torch.bfloat16)
    plain = values(N, K, seed=3, dtype=torch.bfloat16)
    weight = quantise(plain, torch.tensor(40.0, device=DEVICE), E4M3)
    found = []
    for before in (0, 3, 21):
        groups = groups_of([before, 70])
        rows = [torch.cat([values(before, t.shape[1], seed=9, dtype=t.dtype), t]) for t in (x, dy)]
        operands = [fp8(rows[0], groups), fp8(rows[1], groups, E5M2)] if kind == "fp8" else [Rows(t) for t in rows]
        scales = matrices([weight.scale_inv] * 2) if kind == "fp8" else None
        both = matrices([weight.rows if kind == "fp8" else plain] * 2)
        y = grouped_mm(operands[0], both, groups, torch.bfloat16, weight_scale_inv=scales)
        grads = [torch.empty(N, K, device=DEVICE) for _ in range(2)]
        accumulate_grouped_mm(matrices(grads), operands[1], operands[0], groups, 0)
        found.append((y[before:], grads[1]))
    assert all(same_bits(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


def run_layer(recipe: bool, device: str = DEVICE) -> dict[str, torch.Tensor]:
    place = Place("layers.0.moe", 32, 1, torch.bfloat16, 0.02, 0, DelayedScaling() if recipe else None)
    layer = MoEPart(48, 4, 2, balance=0.1, z=0.01).build(place)
    harness = Harness(layer.to(device))
    with torch.no_grad():
        for number, parameter in enumerate(harness.parameters.values()):
            parameter.copy_(random(*parameter.shape, seed=number, scale=parameter.shape[1] ** -0.5))
    bind_experts(layer)
    harness.refresh()
    xs = [values(2, 16, 32, seed=20 + m, dtype=torch.bfloat16).to(device) for m in range(2)]
    microbatches = [harness.microbatch(m, x, torch.ones_like(x)) for m, x in enumerate(xs)]
    harness.run(microbatches)
    found: dict[str, Any] = {f"out {m.number}": m.out for m in microbatches} | {f"dx {m.number}": m.dx for m in microbatches}
    return found | harness.grads | {"amax": harness.timeline.open_amax}


@pytest.mark.parametrize("recipe", [pytest.param(False, marks=pytest.mark.long), True], ids=["bfloat16", "fp8"])
def test_whole_layer(recipe: bool) -> None:
    """The kernels' layer against the reference's, and it repeats bit for bit. Sums in another order round some bfloat16 values
    the other way; in E5M2 that may be a step of 1/8, and of an amax the whole matrix's scale."""
    got, again = run_layer(recipe), run_layer(recipe)
    assert all(same_bits(got[name], again[name]) for name in got)
    with reference():
        want = run_layer(recipe, "cpu")
    for name, tensor in want.items():
        if not tensor.numel():
            continue
        error = (got[name].cpu().double() - tensor.double()).norm() / tensor.double().norm()
        assert error < (0.05 if recipe else 0.005), (name, error)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_rows_behind_the_last_group_take_part_in_nothing(fmt) -> None:
    """Padding, NaN here: amax, scales, bytes, products and gradients of the rows before it are those without it."""
    sizes, more = [40, 0, 33], 70
    alone = groups_of(sizes)
    padded = Groups(alone.offsets, torch.cat([alone.of_row, alone.of_row.new_full((more,), len(sizes))]))
    x, dy = (values(sum(sizes), width, seed=3 + width, dtype=torch.bfloat16) for width in (K, N))
    nothing = [torch.full((more, width), float("nan"), dtype=torch.bfloat16, device=DEVICE) for width in (K, N)]
    plain = [values(N, K, seed=10 + g, dtype=torch.bfloat16) for g in range(3)]
    weights = [quantise(w, torch.tensor(40.0, device=DEVICE), E4M3) for w in plain]
    scales, stored = matrices([q.scale_inv for q in weights]), matrices([q.rows for q in weights])
    made: list[list[torch.Tensor]] = []
    for groups, rows in ((alone, [x, dy]), (padded, [torch.cat(both) for both in zip((x, dy), nothing, strict=True)])):
        operands = [fp8(r, groups, f) for r, f in zip(rows, (E4M3, fmt), strict=True)]
        y = grouped_mm(operands[0], stored, groups, torch.bfloat16, weight_scale_inv=scales)
        grads = [torch.full((N, K), float("nan"), device=DEVICE) for _ in sizes]
        accumulate_grouped_mm(matrices(grads), operands[1], operands[0], groups, 0)
        amax = [amax_of_groups(r, groups) for r in rows]
        kept = [operand.rows[: sum(sizes)].view(torch.uint8) for operand in operands]
        made.append([*amax, *kept, *(o.scale_inv for o in operands), y[: sum(sizes)], *grads])
    assert all(same_bits(a, b) for a, b in zip(*made, strict=True)) and bool(made[0][0].isfinite().all())
    with reference():
        assert same_bits(fp8(torch.cat([x, nothing[0]]), padded).rows[:73].view(torch.uint8), made[0][2])
