"""What stands between the products of groups, as kernels: against the torch reference in float64, or bit for bit where its
arithmetic is the same; padding, idle groups, all widths; what the layer hands on of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.moe import MoEPart
from models.spec import Place
from qeffect_lm.contract.timeline import EMPTY
from qeffect_lm.fp8.grouped import Groups, amax_of_groups
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling
from qeffect_lm.kernels import experts
from qeffect_lm.layers import grouped
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.moe import added, bind_experts, weighted, weighted_backward
from qeffect_lm.layers.recompute import recomputed
from tests.tiny import differing, same_bits
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401
from tests.unit.layer_harness import Harness, random

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
WIDTHS = pytest.mark.parametrize("f", [7, 256, 600])  # odd; one tile of columns; three, the last in part
SIZES = [0, 5, 0, 0, 17, 1, 0]  # of 16 rows that forward takes at once some have three groups, and idle ones lie between
PADDING = 14  # rows; the last tiles have nothing else


pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # its infinity makes a sigmoid of 0


def groups_of(sizes: list[int], padding: int = 0) -> Groups:
    counts = torch.tensor([*sizes, padding])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts[:-1].cumsum(0)]).to(torch.int32)
    return Groups(offsets.to(DEVICE), torch.arange(len(counts)).repeat_interleave(counts).to(DEVICE))


def inputs(f: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, row_weights and d_weighted, NaN in all rows of padding; some gates are so large that exp overflows."""
    rows = sum(SIZES) + PADDING
    hidden = random(rows, 2 * f, seed=1, dtype=dtype, scale=3.0)
    hidden[:4, 0] = torch.tensor([-200.0, 200.0, -0.0, -1.28], dtype=dtype)  # the last: near where the derivative is zero
    row_weights, d_weighted = random(rows, 1, seed=2, dtype=torch.float32), random(rows, f, seed=3, dtype=dtype)
    for tensor in (hidden, row_weights, d_weighted):
        tensor[sum(SIZES) :] = torch.nan
    return hidden.to(DEVICE), row_weights.to(DEVICE), d_weighted.to(DEVICE)


def reference_amax(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    with reference():
        return amax_of_groups(x, groups)


def same_but_nan(got: torch.Tensor, want: torch.Tensor) -> bool:
    """The same bits; of NaN any."""
    return torch.equal(got.isnan(), want.isnan()) and same_bits(got.nan_to_num(3.0), want.nan_to_num(3.0))


def check(got: torch.Tensor, want: torch.Tensor, slack: torch.Tensor, gate: torch.Tensor) -> None:
    """Within one rounding to ``got``'s dtype and those of float32 on the way: the exponent of a sigmoid, 2 |gate| units, and
    16 units for all other operations, each of at most the sum of magnitudes ``slack``. Padding is zeros."""
    dtype = torch.finfo(got.dtype)
    bound = dtype.eps / 2 * want.abs() + (2 * gate.abs() + 16) * 2.0**-24 * slack + dtype.smallest_normal * dtype.eps
    real = sum(SIZES)
    assert ((got.double() - want).abs() <= bound)[:real].all() and not got[real:].any() and want[:real].abs().max() > 1


@DTYPES
@WIDTHS
def test_forward(dtype: torch.dtype, f: int) -> None:
    groups = groups_of(SIZES, PADDING)
    hidden, row_weights, _ = inputs(f, dtype)
    got, amax = weighted(hidden, row_weights, groups, amax=True)
    want, none = weighted(hidden.double(), row_weights.double(), groups, amax=True)
    assert got.dtype is dtype and amax is not None and none is None
    check(got, want, want.abs(), hidden[:, :f].double())
    assert same_bits(amax, reference_amax(got, groups)) and amax[0] == EMPTY and amax[1] > 0
    again, none = weighted(hidden, row_weights, groups, amax=False)
    assert same_bits(again, got) and none is None


@DTYPES
@WIDTHS
def test_backward(dtype: torch.dtype, f: int) -> None:
    """Also against autograd of the forward's reference."""
    groups, real = groups_of(SIZES, PADDING), sum(SIZES)
    hidden, row_weights, d_weighted = inputs(f, dtype)
    got, of_rows, amax = weighted_backward(hidden, row_weights, d_weighted, groups, amax=True)
    wide = [tensor.double() for tensor in (hidden, row_weights, d_weighted)]
    want, wanted_of_rows, none = weighted_backward(*wide, groups, amax=True)
    assert got.dtype is dtype and of_rows.dtype is torch.float32 and amax is not None and none is None

    gate, up = wide[0].chunk(2, dim=1)
    sigmoid, d_activation = torch.sigmoid(gate), wide[2] * wide[1]
    of_gate = (d_activation * up).abs() * sigmoid * (1 + gate.abs() * (1 - sigmoid))
    check(got[:, :f], want[:, :f], of_gate, gate)
    check(got[:, f:], want[:, f:], want[:, f:].abs(), gate)
    terms = (wide[2] * gate * sigmoid * up).abs() * (2 * gate.abs() + 16 + f)  # a term takes part in at most f sums
    assert ((of_rows.double() - wanted_of_rows).abs() <= 2.0**-24 * terms.sum(dim=1))[:real].all() and not of_rows[real:].any()
    assert same_bits(amax, reference_amax(got, groups)) and amax[0] == EMPTY and amax[1] > 0

    leaves = [tensor[:real].clone().requires_grad_() for tensor in wide[:2]]
    grads = torch.autograd.grad(weighted(*leaves, groups, amax=False)[0], leaves, wide[2][:real])
    for mine, exact in zip((want[:real], wanted_of_rows[:real, None]), grads, strict=True):
        assert (mine - exact).abs().max() <= 1e-12 * exact.abs().max()

    again = weighted_backward(hidden, row_weights, d_weighted, groups, amax=False)
    assert same_bits(again[0], got) and same_bits(again[1], of_rows) and again[2] is None


def test_a_row_is_the_same_wherever_it_lies() -> None:
    """Bit for bit: alone in its group, or behind others."""
    hidden, row_weights, d_weighted = inputs(600, torch.bfloat16)
    alone, one = slice(9, 10), groups_of([1])
    for amax in (False, True):
        whole = weighted_backward(hidden, row_weights, d_weighted, groups_of(SIZES, PADDING), amax=amax)
        part = weighted_backward(hidden[alone], row_weights[alone], d_weighted[alone], one, amax=amax)
        assert all(same_bits(a[alone], b) for a, b in zip(whole[:2], part[:2], strict=True)) and part[1].any()


def test_what_is_no_number_stays_visible() -> None:
    """Infinities and NaN in a row make its group's amax what the reference says, and no other's."""
    groups = groups_of([3, 3, 3, 3])
    hidden, row_weights = torch.ones(12, 80, device=DEVICE), torch.ones(12, 1, device=DEVICE)
    hidden[1, 3], hidden[4, 50], row_weights[7] = torch.nan, -torch.inf, torch.nan
    made, amax = weighted(hidden, row_weights, groups, amax=True)
    assert amax is not None and amax.isnan().tolist() == [True, False, True, False] and amax[1] == torch.inf
    assert same_but_nan(amax, reference_amax(made, groups))
    d_hidden, of_rows, amax = weighted_backward(hidden, row_weights, torch.ones(12, 40, device=DEVICE), groups, amax=True)
    assert amax is not None and same_but_nan(amax, reference_amax(d_hidden, groups)) and not amax[3].isnan()
    assert of_rows.isfinite().tolist() == [True, False, True, True, False] + [True] * 7, "a row's weight is not in its gradient"


@pytest.mark.parametrize("sizes", [SIZES, [0, 0], [40], [1] * 20], ids=str)
@pytest.mark.parametrize("k", [1, 24, 1100])
@DTYPES
def test_amax(sizes: list[int], k: int, dtype: torch.dtype) -> None:
    """The reference's, bit for bit; zeros alone are no EMPTY; with NaN and infinities in some groups."""
    x = random(sum(sizes) + PADDING, k, seed=4, dtype=dtype, scale=50.0)
    x[sum(sizes) :] = torch.nan
    groups, special = groups_of(sizes, PADDING), x.clone()
    if len(sizes) > 2:
        special[0], special[2, -1] = 0.0, torch.nan  # of SIZES, the NaN is in the second group
        special[sum(sizes) - 1] = -torch.inf if k > 1 else 0.0
    for rows in (x.to(DEVICE), special.to(DEVICE)):
        got, want = amax_of_groups(rows, groups), reference_amax(rows, groups)
        assert got.dtype is torch.float32 and same_but_nan(got, want)
        assert [value == EMPTY for value in got.tolist()] == [size == 0 for size in sizes]
        assert got.isnan().any().item() == (len(sizes) > 2 and rows[2].isnan().any().item())


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("k", [24, 600])
@DTYPES
def test_added(parts: int, k: int, dtype: torch.dtype) -> None:
    """In the router's order, bit for bit: small values that large ones swallow tell it from another. Zeros keep their sign."""
    tokens = 9
    rows = random(tokens * parts, k, seed=5, dtype=dtype, scale=8.0)
    places = torch.randperm(tokens * parts, generator=torch.Generator().manual_seed(6)).view(tokens, parts)
    rows[:, 0] = -0.0
    rows[places, 1] = torch.tensor([2.0**15, 2.0**-12, -(2.0**15), 2.0**-12], dtype=dtype)[:parts]
    rows, places = rows.to(DEVICE), places.to(DEVICE)
    got = added(rows, places)
    with reference():
        want, other = added(rows, places), added(rows, places.flip(1))
    assert same_bits(got, want) and same_bits(got[:, 0], torch.full_like(got[:, 0], -0.0))
    assert same_bits(got, other) == (parts < 3)


# ---- the layer -------------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """The layer, with full recompute if so."""

    def __init__(self, recipe: DelayedScaling | CurrentScaling | None, again: bool) -> None:
        super().__init__()
        self.moe = MoEPart(48, 4, 2, balance=0.1).build(Place("layers.0.moe", 32, 1, torch.bfloat16, 0.02, 0, recipe))
        self.again = again

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if not self.again:
            return self.moe(x, context)
        return recomputed(self.moe, x, context, [self.moe], self.moe.tail)


def run(recipe: DelayedScaling | CurrentScaling | None, again: bool = False) -> dict[str, torch.Tensor]:
    """Calibration, evaluation and two microbatches of a step."""
    harness = Harness(Whole(recipe, again).to(DEVICE))
    with torch.no_grad():
        for number, parameter in enumerate(harness.parameters.values()):
            parameter.copy_(random(*parameter.shape, seed=number, scale=parameter.shape[1] ** -0.5))
    bind_experts(harness.module)
    harness.refresh()
    xs = [random(2, 8, 32, seed=20 + m, dtype=torch.bfloat16).to(DEVICE) for m in range(2)]
    found = {}
    m = harness.microbatch(0, xs[0], torch.ones_like(xs[0]), phase=Phase.CALIBRATE)
    harness.stage.forward(m.slot, None)
    harness.stage.input_grad(m.slot, None)
    found |= {"calibrated": harness.timeline.open_amax.clone(), "calibrated dx": m.dx}
    harness.commit()
    m = harness.microbatch(0, xs[1], torch.ones_like(xs[0]), phase=Phase.EVAL)
    harness.stage.forward(m.slot, None)
    found["evaluated"] = m.out
    microbatches = [harness.microbatch(n, x, torch.ones_like(x)) for n, x in enumerate(xs)]
    harness.run(microbatches)
    found |= {f"out {m.number}": m.out for m in microbatches} | {f"dx {m.number}": m.dx for m in microbatches}
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
    return found | harness.grads | {"amax": harness.timeline.open_amax}


@pytest.mark.parametrize("recipe", [DelayedScaling, CurrentScaling, None])
def test_amax_from_the_kernels_changes_no_bit(
    recipe: type[DelayedScaling] | type[CurrentScaling] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the amax of down's input and of gate_up's gradient from the kernels that make them, their rows are not read for it;
    the bits are those of reading them, and so they are with full recompute."""
    widths: list[int] = []

    def asking(x: torch.Tensor, groups: Groups) -> torch.Tensor:
        widths.append(x.shape[1])
        return amax_of_groups(x, groups)

    def asked() -> list[int]:
        found = sorted(widths)
        widths.clear()
        return found

    monkeypatch.setattr(grouped, "amax_of_groups", asking)
    passes = 7 if recipe else 0  # two of calibration, one of evaluation, two of each microbatch
    want = run(recipe and recipe())
    assert asked() == [32] * passes, "of the rows that tokens were spread to"
    assert differing(run(recipe and recipe(), again=True), want) == [] and asked() == [32] * passes
    for name in ("forward", "backward"):
        kernel = getattr(experts, name)
        monkeypatch.setattr(experts, name, lambda *arguments, amax, kernel=kernel: kernel(*arguments, amax=False))
    assert differing(run(recipe and recipe()), want) == []
    assert len(asked()) == 2 * passes
