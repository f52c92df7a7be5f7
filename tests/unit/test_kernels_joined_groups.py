"""Groups of several microbatches, *members*, side by side: where they are quantised to, and W of all of them as one product."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from models.moe import MoEPart
from models.spec import Place
from qeffect_lm.contract.leases import Joint
from qeffect_lm.fp8.grouped import (
    GroupPlace,
    Groups,
    Matrices,
    Rows,
    Scales,
    accumulate_grouped_mm,
    accumulate_joined_mm,
    amax_of_groups,
    needed,
    places_of,
    quantise_groups,
    spacing_of,
)
from qeffect_lm.fp8.quantise import E4M3, E5M2, scale_of_amax
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.base import split_layers
from qeffect_lm.layers.grouped import ExpertLinear, GroupedLinear
from qeffect_lm.layers.joined import JoinedBuffers, JoinedGroups
from qeffect_lm.layers.moe import bind_experts
from tests.tiny import same_bits
from tests.unit.interpreted import DEVICE, INTERPRETED, kernels_run, reference  # noqa: F401
from tests.unit.layer_harness import Harness
from tests.unit.test_kernels_grouped import groups_of, matrices, values

N, K, MOST = 48, 80, 100  # of so few rows groups begin at multiples of 16
ROWS = {  # of each member's groups
    "one": [[3, 0, 70]],
    "two": [[3, 0, 70], [16, 33, 0]],
    "three, one without any row": [[5, 0, 41], [0, 0, 0], [1, 0, 64]],
    "nobody": [[0, 0, 0], [0, 0, 0]],
}
MEMBERS = pytest.mark.parametrize("sizes", ROWS.values(), ids=ROWS)


@pytest.fixture(params=[MOST, 400])
def most(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places for as many rows; of 400 groups begin at multiples of 32, those of a few rows by themselves do not."""
    monkeypatch.setattr(sys.modules[__name__], "MOST", request.param)


def joined(members: int, dtype: torch.dtype = torch.bfloat16, device: str = DEVICE) -> JoinedGroups:
    """Places for as many members and one more, filled with NaN, as poison leaves them."""
    experts = [ExpertLinear(f"e.{e}", K, N, dtype=dtype) for e in range(3)]
    made = JoinedGroups(GroupedLinear("e", experts, lambda tokens: MOST), members + 1, 0, device)
    for tensor in made.tensors().values():
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return made


def rows_of(sizes: list[int], width: int, seed: int, padding: int = 0) -> tuple[torch.Tensor, Groups]:
    """Rows of groups; behind them padding of NaN, as expert parallelism has."""
    groups, m = groups_of(sizes), sum(sizes)
    of_row = torch.cat([groups.of_row, groups.of_row.new_full((padding,), len(sizes))])
    x = values(m + padding, width, seed=seed, dtype=torch.bfloat16)
    x[m:] = float("nan")
    return x, Groups(groups.offsets, of_row)


def quantised(x: torch.Tensor, groups: Groups, fmt, scale: torch.Tensor, into: GroupPlace | None = None) -> Rows:
    return quantise_groups(x, Scales.of(scale), fmt, groups, columns=True, into=into)


def fill(sizes: list[list[int]], made: JoinedGroups, *, equal: bool = False) -> list[SimpleNamespace]:
    """Every member's rows into its place; what it would be alone, and its exact values."""
    found = []
    for position, own in enumerate(sizes):
        padding = 9 * position + (sum(own) == 0)  # nothing came: a row of padding
        one = SimpleNamespace(sizes=own, values={})
        for kind, fmt, width, seed in (("input", E4M3, K, 1), ("grad_output", E5M2, N, 2)):
            x, one.groups = rows_of(own, width, seed + 10 * position, padding)
            scale = scale_of_amax(amax_of_groups(x * 2.0**-position, one.groups), fmt)
            scale = torch.full_like(scale, 20.0) if equal else scale
            rows = quantised(x, one.groups, fmt, scale, made.place(kind, position))
            setattr(one, kind, quantised(x, one.groups, fmt, scale))
            bounds, scale_inv = one.groups.offsets.tolist(), scale.reciprocal().double()
            one.values[kind] = [rows.whole[bounds[g] : bounds[g + 1]].double() * scale_inv[g] for g in range(3)]
        found.append(one)
    return found


def gradients(out: torch.Tensor, sizes: list[list[int]], beta: int, made: JoinedGroups) -> list[torch.Tensor]:
    grads = [out.clone() for _ in range(3)]
    both = made.first(len(sizes))
    accumulate_joined_mm(matrices(grads), both.dy, both.x, both.members, beta)
    return grads


def apart(columns: torch.Tensor, groups: Groups, spacing: int) -> list[torch.Tensor]:
    """The bytes of each group's columns; all others are zeros."""
    found, rest, begin = [], columns.contiguous().view(torch.uint8).clone(), 0
    for size in groups.offsets.diff().tolist():
        found.append(rest[:, begin : begin + size].clone())
        rest[:, begin : begin + size] = 0
        begin += -(-size // spacing) * spacing
    assert not rest.any()
    return found


@pytest.mark.usefixtures("most")
@pytest.mark.parametrize("fused", [True, False], ids=["kernel", "torch"])  # torch: as for float32 on a GPU
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_a_place_gets_what_is_made_alone(fmt, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, with scales and splits; nothing beside it is touched, nor, by the kernel, behind its own rows' places."""
    made, kind = joined(2), "input" if fmt is E4M3 else "grad_output"
    width = K if fmt is E4M3 else N
    x, groups = rows_of([3, 0, 41], width, 1, 9)
    scale = torch.tensor([2.0, 5.0, 400.0], device=DEVICE)
    alone, before = quantised(x, groups, fmt, scale), {name: t.clone() for name, t in made.tensors().items()}
    place = made.place(kind, 1)
    if not fused:
        monkeypatch.setattr("qeffect_lm.kernels.quantises", lambda tensor: False)
    rows = quantised(x, groups, fmt, scale, place)
    assert alone.columns is not None and rows.columns is place.stored and rows.scale_inv is place.scale_inv
    filled = x.shape[0] if fused else 44  # torch leaves in padding what comes, which nobody reads
    assert same_bits(*(one.whole[:filled].view(torch.uint8) for one in (rows, alone)))
    whole = places_of(MOST, 3)
    spacing = spacing_of(whole, 3)
    assert spacing == (32 if MOST > 100 else 16) and spacing_of(alone.columns.shape[1], 3) == 16
    own = needed(x.shape[0], 3, spacing)
    assert own < whole and place.stored.shape[1] == whole
    both = apart(alone.columns, groups, 16), apart(place.stored[:, :own], groups, spacing)
    assert all(same_bits(a, b) for a, b in zip(*both, strict=True)) and [a.shape[1] for a in both[0]] == [3, 0, 41]
    assert same_bits(place.scale_inv, alone.scale_inv) and torch.equal(place.offsets, groups.offsets)
    name = {"input": "x", "grad_output": "dy"}[kind]
    for key, tensor in made.tensors().items():
        was, now = (t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in (before[key], tensor))
        if key == name:
            end = whole + (own if fused else whole)
            was[:, whole:end] = now[:, whole:end]
        elif key in (f"{name}_scale_inv", "offsets"):
            was[1] = now[1]
        assert same_bits(now, was), key


@pytest.mark.usefixtures("most")
def test_too_many_rows_for_a_place() -> None:
    x, groups = rows_of([MOST, 20, 20], K, 1)
    told = "440 rows take 544 places, and there are 512" if MOST > 100 else "140 rows take 192 places, and there are 160"
    with pytest.raises(RuntimeError, match=told):
        quantised(x, groups, E4M3, torch.ones(3, device=DEVICE), joined(2).place("input", 0))


@pytest.mark.usefixtures("most")
@MEMBERS
def test_against_float64(sizes: list[list[int]]) -> None:
    """Members with scales of their own. Interpreted: float32 sums of t rows, of values within 2⁻²⁴ each of the exact ones, with
    two roundings more of each member's scale. Compiled: Hopper keeps some 14 bits of an FP8 sum until 128 rows of it are moved
    into float32 (tests/gpu/test_kernels_gpu.py)."""
    made = joined(len(sizes))
    members = fill(sizes, made)
    for beta, before in ((0, float("nan")), (1, 0.25)):
        out = torch.full((N, K), before, device=DEVICE)
        out[0, 0] = -0.0
        grads = gradients(out, sizes, beta, made)
        for g, got in enumerate(grads):
            x, dy = (torch.cat([one.values[kind][g] for one in members]) for kind in ("input", "grad_output"))
            exact, size = dy.t() @ x, dy.abs().t() @ x.abs()
            rows = x.shape[0]
            if not rows:
                assert same_bits(got, out if beta else torch.zeros_like(out)), "zeroed, or left alone, not even a zero's sign"
                continue
            bound = (rows + 2 * len(sizes) + 4) * 2.0**-24 * size
            if not INTERPRETED:
                bound = bound + 2.0**-13 * (rows * dy.abs().amax(0)[:, None] * x.abs().amax(0) + 4 * size)
            exact = exact + (out.double() if beta else 0.0)
            assert ((got.double() - exact).abs() <= bound + 2.0**-24 * exact.abs()).all()
            assert exact.abs().max() > 1


@MEMBERS
def test_close_to_the_reference(sizes: list[list[int]]) -> None:
    """The same operands as rows, in places as a CPU has them: sums in another order."""
    made = joined(len(sizes))
    fill(sizes, made)
    with reference():
        other = joined(len(sizes), device="cpu")
        for position, own in enumerate(sizes):
            for kind, fmt, width, seed in (("input", E4M3, K, 1), ("grad_output", E5M2, N, 2)):
                x, groups = rows_of(own, width, seed + 10 * position, 2)
                groups = Groups(groups.offsets.cpu(), groups.of_row.cpu())
                scale = made.place(kind, position).scale_inv.cpu().reciprocal()
                quantised(x.cpu(), groups, fmt, scale, other.place(kind, position))
        both = other.first(len(sizes))
        assert both.x.columns is None and both.x.whole.shape == (len(sizes) * places_of(MOST, 3), K)
        want = [torch.full((N, K), 0.5) for _ in range(3)]
        accumulate_joined_mm(Matrices(tuple(want)), both.dy, both.x, both.members, 1)
    got = gradients(torch.full((N, K), 0.5, device=DEVICE), sizes, 1, made)
    for a, b in zip(got, want, strict=True):
        assert (a.cpu() - b).abs().max() <= (2.0**-18 if INTERPRETED else 2.0**-11) * max(1.0, b.abs().max().item())


def test_one_member_has_the_bits_of_a_product_alone() -> None:
    """Whatever stands beside it; also where others have no rows of the group, before it or behind."""
    alone_sizes = [5, 0, 41]
    for beta in (0, 1):
        found = []
        for sizes, mine in (([alone_sizes], 0), ([alone_sizes, [0, 0, 0]], 0), ([[0, 0, 0], alone_sizes], 1)):
            made = joined(len(sizes))
            one = fill(sizes, made)[mine]
            out = torch.full((N, K), 0.25, device=DEVICE)
            alone = [out.clone() for _ in range(3)]
            accumulate_grouped_mm(matrices(alone), one.grad_output, one.input, one.groups, beta)
            found = gradients(out, sizes, beta, made)
            assert all(same_bits(a, b) for a, b in zip(found, alone, strict=True)) and found[2].abs().max() > 1


def test_members_of_one_scale_are_one_sum() -> None:
    """Tiles of whole steps: the bits of one group that has all their rows. The control: another scale is another result."""
    sizes = [[32, 0, 64], [64, 0, 32]]
    made = joined(2)
    members = fill(sizes, made, equal=True)
    groups = groups_of([96, 0, 96])
    scale, whole = torch.full((3,), 20.0, device=DEVICE), {}
    for kind, fmt, width, seed in (("input", E4M3, K, 1), ("grad_output", E5M2, N, 2)):
        parts = [rows_of(own, width, seed + 10 * j)[0] for j, own in enumerate(sizes)]
        x = torch.cat([parts[0][:32], parts[1][:64], parts[0][32:], parts[1][64:]])
        whole[kind] = quantised(x, groups, fmt, scale)
    want = [torch.full((N, K), 0.25, device=DEVICE) for _ in range(3)]
    accumulate_grouped_mm(matrices(want), whole["grad_output"], whole["input"], groups, 1)
    out = torch.full((N, K), 0.25, device=DEVICE)
    if INTERPRETED:  # a step there is 32 rows, on a GPU 128
        assert all(same_bits(a, b) for a, b in zip(gradients(out, sizes, 1, made), want, strict=True))
    place = made.place("input", 1)
    place.scale_inv.mul_(2.0)
    doubled = gradients(torch.zeros_like(out), sizes, 0, made)
    exact = [members[0].values["grad_output"][g].t() @ members[0].values["input"][g] for g in range(3)]
    other = [members[1].values["grad_output"][g].t() @ members[1].values["input"][g] for g in range(3)]
    for got, a, b in zip(doubled, exact, other, strict=True):
        error, size = (got.double() - (a + 2 * b)).abs().max(), (a + 2 * b).abs().max()
        assert error <= (2.0**-17 if INTERPRETED else 2.0**-8) * max(1.0, size)


def test_scales_far_apart() -> None:
    """A member whose gradient is all but nothing, beside one whose is exactly zero, so that its scale is 1, and whose input is
    large: their scales are further apart than float32 reaches. Nothing overflows, and what there is arrives."""
    sizes = [[8, 0, 0], [8, 0, 0]]
    for tiny in (0, 1):
        made, values_of = joined(2), {}
        for position in range(2):
            for kind, fmt, width, factor in (("input", E4M3, K, 1.0), ("grad_output", E5M2, N, 2.0**-100)):
                x, groups = rows_of([8, 0, 0], width, 3)
                x = x * (factor if position == tiny else 2.0**15 if kind == "input" else 0.0)
                scale = scale_of_amax(amax_of_groups(x, groups), fmt)
                rows = quantised(x, groups, fmt, scale, made.place(kind, position))
                if position == tiny:
                    values_of[kind] = rows.whole.double() / scale[0].double()
        got = gradients(torch.zeros(N, K, device=DEVICE), sizes, 0, made)[0]
        exact = values_of["grad_output"].t() @ values_of["input"]
        assert got.isfinite().all() and (got.double() - exact).norm() <= 2.0**-10 * exact.norm() and exact.any()


def test_what_is_no_number_stays_visible() -> None:
    """A member's infinite amax (scale 0) spoils its group alone, whatever the other's scale; compiled, a NaN its output."""
    made, sizes = joined(2), [[8, 0, 8], [8, 0, 8]]
    fill(sizes, made)
    made.place("grad_output", 1).scale_inv[0] = float("inf")
    got = gradients(torch.zeros(N, K, device=DEVICE), sizes, 0, made)
    assert not got[0].isfinite().any() and got[2].isfinite().all()
    if INTERPRETED:  # its own widening of FP8 makes numbers of NaN
        return
    fill(sizes, made)
    made.place("grad_output", 1).stored.view(torch.uint8)[3, 0] = 0x7F
    got = gradients(torch.zeros(N, K, device=DEVICE), sizes, 0, made)
    assert got[0][3].isnan().all() and got[0][:3].isfinite().all() and got[2].isfinite().all()


def run_layer(together: bool) -> dict[str, torch.Tensor]:
    """F, I and W of two microbatches of a layer whose experts have had no amax; W apart, or of both at once."""
    place = Place("layers.0.moe", 32, 1, torch.bfloat16, 0.02, 0, DelayedScaling())
    layer = MoEPart(48, 4, 2).build(place)
    harness = Harness(layer.to(DEVICE))
    harness.fill(3, 0.2)
    bind_experts(layer)
    if together:
        harness.stage.joined = JoinedBuffers(split_layers(layer), 2, 2, 32, DEVICE)
    xs = [values(2, 16, 32, seed=20 + m, dtype=torch.bfloat16) * 3.0**m for m in range(2)]
    microbatches = [harness.microbatch(m, x, torch.ones_like(x)) for m, x in enumerate(xs)]
    ledger, stage = harness.ledger, harness.stage
    with harness.step():
        for kind, work in (("F", stage.forward), ("I", stage.input_grad), ("W", stage.weight_grad)):
            for m in microbatches:
                joint = (Joint(2, 0) if kind == "W" and m.number else Joint()) if together else None
                beta = None if kind == "F" else m.number
                with ledger.action(kind, 0, m.number, beta=beta, slots=m.slots, joint=joint) as scope:
                    work(m.slot, scope)
    found = {f"out {m.number}": m.out for m in microbatches} | {f"dx {m.number}": m.dx for m in microbatches}
    return found | harness.grads | {"amax": harness.timeline.open_amax}


def test_a_layer() -> None:
    """The kernels' layer, with scales that differ: all but experts' gradients are the bits of W apart, and those are as close
    as sums in another order."""
    apart, got = run_layer(False), run_layer(True)
    for name, tensor in apart.items():
        if ".experts." not in name:
            assert same_bits(got[name], tensor), name
            continue
        assert (got[name] - tensor).abs().max() <= (2.0**-19 if INTERPRETED else 2.0**-11) * tensor.abs().max(), name
    assert sum(bool(tensor.any()) for name, tensor in got.items() if ".experts." in name) == 8
