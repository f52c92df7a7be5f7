"""FP8: quantisation in both layouts, scaled products, recipes and the weight cache, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qeffect_lm.contract.timeline import EMPTY, ScaleTimeline
from qeffect_lm.fp8.cache import WeightCache
from qeffect_lm.fp8.gemm import accumulate_mm, accumulate_scaled_mm, scaled_mm
from qeffect_lm.fp8.quantise import E4M3, E5M2, Format, current_scale, dequantise, quantise
from qeffect_lm.fp8.recipes import FORMATS, CurrentScaling, DelayedScaling, roles_of
from tests.unit.layer_harness import random

FMT = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
MANTISSA = {"E4M3": 3, "E5M2": 2}
LOWEST = {"E4M3": -6, "E5M2": -14}  # exponent of the smallest normal number


def reference_cast(values: np.ndarray, fmt: Format) -> np.ndarray:
    """saturate(v), then round to nearest, ties to even, on the format's grid: float64, no torch."""
    clipped = np.clip(values, -fmt.max, fmt.max)
    magnitude = np.abs(clipped)
    exponent = np.floor(np.log2(magnitude, where=magnitude > 0, out=np.full_like(magnitude, -1000.0)))
    step = 2.0 ** (np.maximum(exponent, LOWEST[fmt.name]) - MANTISSA[fmt.name])
    return np.rint(clipped / step) * step


def grid(fmt: Format) -> np.ndarray:
    """All finite non-negative values of a format, ascending."""
    codes = torch.arange(128, dtype=torch.uint8).view(fmt.dtype).double().numpy()
    return np.sort(codes[np.isfinite(codes)])


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# ---- quantise ----------------------------------------------------------------------------------------------


@FMT
def test_formats(fmt):
    """The largest finite value is the documented one, and our reference is exact on every code."""
    values = grid(fmt)
    assert values[-1] == fmt.max and values[0] == 0
    assert np.array_equal(reference_cast(values, fmt), values)


@FMT
def test_ties_to_even_and_saturation(fmt):
    """Every midpoint goes to the even neighbour, its neighbours in float32 to the nearer one; beyond the
    largest value all stay there."""
    values = grid(fmt)
    middle = (values[1:] + values[:-1]) / 2
    f32 = middle.astype(np.float32)
    assert np.array_equal(f32.astype(np.float64), middle)
    up, down = np.nextafter(f32, np.float32(np.inf)), np.nextafter(f32, np.float32(0))
    beyond = np.array([fmt.max * 1.01, fmt.max * 1.5, 1e30, 3e38, np.inf], dtype=np.float32)
    x = np.concatenate([f32, up, down, beyond])
    x = np.concatenate([x, -x])
    q = quantise(torch.from_numpy(x)[None], scalar(1.0), fmt)
    assert q.rows is not None
    assert np.array_equal(q.rows.double().numpy()[0], reference_cast(x.astype(np.float64), fmt))
    assert np.array_equal(q.rows.double().numpy()[0, len(f32) : 2 * len(f32)], values[1:])
    assert torch.isfinite(q.rows.float()).all()


@FMT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(
    seed=st.integers(0, 2**20),
    exponent=st.integers(-24, 24),
    scale=st.one_of(st.integers(-20, 20).map(lambda e: 2.0**e), st.floats(2.0**-13, 2.0**13, width=32)),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_both_layouts_equal_float64(fmt, dtype, seed, exponent, scale, shape):
    """rows and columns hold the same bytes, those of saturate(float32(x * scale)) on the format's grid, and
    each layout alone gives them too. With a scale that is a power of two the product is exact, so this is the
    float64 answer; with any scale the value is within half a grid step of it."""
    x = random(*shape, seed=seed, dtype=dtype, scale=2.0**exponent)
    if dtype is torch.float64:
        x = x.float().double()
    q = quantise(x, scalar(scale), fmt)
    assert q.rows is not None and q.columns is not None
    assert q.rows.shape == shape and q.columns.shape == shape[::-1]
    assert q.rows.is_contiguous() and q.columns.is_contiguous()
    assert q.rows.dtype == q.columns.dtype == fmt.dtype
    assert torch.equal(bits(q.rows), bits(q.columns).view(shape[::-1]).t())

    exact = x.double().numpy() * float(scalar(scale))
    rounded = (x.float().numpy() * np.float32(scale)).astype(np.float64)
    got = q.rows.double().numpy()
    assert np.array_equal(got, reference_cast(rounded, fmt))
    if math.frexp(scale)[0] == 0.5:
        assert np.array_equal(got, reference_cast(exact, fmt))
    saturated = np.clip(exact, -fmt.max, fmt.max)
    digits, smallest = MANTISSA[fmt.name] + 1, 2.0 ** LOWEST[fmt.name]
    half_step = np.maximum(np.abs(saturated), smallest) * 2.0**-digits
    assert (np.abs(got - saturated) <= half_step * (1 + 2.0**-20)).all()

    only_rows = quantise(x, scalar(scale), fmt, columns=False)
    only_columns = quantise(x, scalar(scale), fmt, rows=False)
    assert only_rows.columns is None and only_columns.rows is None
    assert only_rows.rows is not None and only_columns.columns is not None
    assert torch.equal(bits(only_rows.rows), bits(q.rows)) and torch.equal(bits(only_columns.columns), bits(q.columns))


def test_non_contiguous_input():
    x = random(6, 10, seed=1).t()[1:, ::2]
    a, b = quantise(x, scalar(3.0), E4M3), quantise(x.contiguous(), scalar(3.0), E4M3)
    assert a.rows is not None and b.rows is not None and a.columns is not None and b.columns is not None
    assert torch.equal(bits(a.rows), bits(b.rows)) and torch.equal(bits(a.columns), bits(b.columns))


def test_input_is_not_changed():
    x = random(4, 4, seed=2, dtype=torch.float32, scale=1e4)
    before = x.clone()
    quantise(x, scalar(1.0), E4M3, amax_out=scalar(0.0))
    assert torch.equal(x, before)


@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=12), order=st.randoms())
def test_amax_max_merges(values, order):
    """The slot ends at the largest |x| of all microbatches, in any order, starting from EMPTY."""
    order.shuffle(values)
    slot = scalar(EMPTY)
    for value in values:
        quantise(torch.tensor([[value, value / 2]]), scalar(0.25), E4M3, amax_out=slot)
    assert slot.item() == max(abs(float(np.float32(value))) for value in values)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_non_finite_amax_stays_visible(bad, place):
    """S8: an infinity or a NaN in any microbatch is still in the slot after all others merged."""
    slot = scalar(EMPTY)
    for number in range(3):
        x = torch.ones(2, 3)
        if number == place:
            x[1, 1] = bad
        quantise(x, scalar(1.0), E4M3, amax_out=slot)
    assert not math.isfinite(slot.item())
    assert math.isnan(slot.item()) == math.isnan(bad)


def test_amax_is_of_the_unscaled_input():
    slot = scalar(EMPTY)
    quantise(torch.tensor([[-3.0, 2.0]]), scalar(100.0), E4M3, amax_out=slot)
    assert slot.item() == 3.0
    quantise(torch.tensor([[1.0]]), scalar(100.0), E4M3)  # no slot, no report
    assert slot.item() == 3.0


def test_scale_inv_is_a_copy():
    """S5: changing the live scale afterwards changes nothing that was quantised with it."""
    live = scalar(8.0)
    q = quantise(random(3, 3, seed=3), live, E4M3)
    assert q.rows is not None
    before = dequantise(q.rows, q.scale_inv)
    live.fill_(2.0)
    assert q.scale_inv.item() == 0.125 and q.scale_inv.dtype == torch.float32 and q.scale_inv.dim() == 0
    assert torch.equal(dequantise(q.rows, q.scale_inv), before)


def test_nan_stays_nan():
    for fmt in (E4M3, E5M2):
        q = quantise(torch.tensor([[float("nan"), 1.0]]), scalar(1.0), fmt)
        assert q.rows is not None and torch.isnan(q.rows.float()[0, 0]) and q.rows.float()[0, 1] == 1


@FMT
@pytest.mark.parametrize("margin", [0, 1, 3])
def test_current_scale(fmt, margin):
    """max |x| lands on the format's edge divided by 2**margin; no amax gives 1; non-finite input is never
    hidden."""
    x = random(5, 7, seed=4, dtype=torch.float32)
    amax = np.float32(x.abs().max())
    assert current_scale(x, fmt, margin).item() == np.float32(np.float32(fmt.max) / amax) / 2.0**margin
    assert current_scale(torch.zeros(2, 2), fmt).item() == 1.0
    assert current_scale(torch.full((2, 2), 1e-39), fmt).item() == 1.0
    assert current_scale(x.bfloat16(), fmt).dtype == torch.float32
    for bad in (float("inf"), float("nan")):
        y = x.clone()
        y[0, 0] = bad
        q = quantise(y, current_scale(y, fmt), fmt)
        assert q.rows is not None
        assert torch.isnan(dequantise(q.rows, q.scale_inv)[0, 0])


# ---- products ----------------------------------------------------------------------------------------------


def operands(seed: int, m: int, n: int, k: int, a_fmt: Format = E4M3, b_fmt: Format = E4M3):
    a = quantise(random(m, k, seed=seed, scale=3.0), scalar(7.3), a_fmt)
    b = quantise(random(n, k, seed=seed + 1, scale=0.2), scalar(113.0), b_fmt)
    assert a.rows is not None and b.rows is not None
    return a.rows, a.scale_inv, b.rows, b.scale_inv


def exact_product(a, a_inv, b, b_inv) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64 and the stated bound of the float32 one: (k + 2) * 2**-24 * sum |a||b|."""
    wide_a, wide_b = a.double() * a_inv.double(), b.double() * b_inv.double()
    bound = (a.shape[1] + 2) * 2.0**-24 * (wide_a.abs() @ wide_b.abs().t())
    return wide_a @ wide_b.t(), bound


@pytest.mark.parametrize("a_fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize(("m", "n", "k"), [(16, 32, 64), (1, 1, 1), (3, 5, 700)])
def test_scaled_mm(a_fmt, m, n, k):
    """Within the documented bound of float64, and shaped [m, n]."""
    args = operands(10, m, n, k, a_fmt)
    exact, bound = exact_product(*args)
    got = scaled_mm(*args, torch.float32)
    assert got.shape == (m, n) and got.dtype == torch.float32
    assert ((got.double() - exact).abs() <= bound).all()
    assert (exact.abs() > 100 * bound).any(), "the bound says something"
    rounded = scaled_mm(*args, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, got.bfloat16())
    assert torch.equal(scaled_mm(*args, torch.float64), got.double())


@pytest.mark.parametrize("a_fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_scaled_mm_equals_torch(a_fmt):
    """torch's own operator, where this processor runs it, computes the same product."""
    args = operands(20, 16, 32, 64, a_fmt)
    a, a_inv, b, b_inv = args
    try:
        theirs = torch._scaled_mm(a, b.t(), scale_a=a_inv, scale_b=b_inv, out_dtype=torch.float32)
    except RuntimeError as error:
        pytest.skip(f"torch._scaled_mm does not run here: {error}")
    exact, bound = exact_product(*args)
    assert ((theirs.double() - exact).abs() <= 2 * bound).all()
    assert ((theirs - scaled_mm(*args, torch.float32)).double().abs() <= 3 * bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulate(dtype):
    """G1: beta 0 leaves nothing of what was there, NaN included; beta 1 adds; neighbours in the flat buffer
    stay."""
    m, n, k = 4, 6, 9
    a, b = random(m, k, seed=30, dtype=dtype), random(n, k, seed=31, dtype=dtype)
    flat = torch.full((m * n + 20,), float("nan"), dtype=dtype)
    out = flat[10 : 10 + m * n].view(m, n)
    accumulate_mm(out, a, b, 0)
    exact = a.double() @ b.double().t()
    bound = (k + 2) * torch.finfo(dtype).eps * (a.double().abs() @ b.double().abs().t())
    assert ((out.double() - exact).abs() <= bound).all()
    assert torch.equal(out, torch.mm(a, b.t()))
    accumulate_mm(out, a, b, 1)
    assert ((out.double() - 2 * exact).abs() <= 3 * bound).all()
    accumulate_mm(out, a, b, 0)
    assert torch.equal(out, torch.mm(a, b.t()))
    assert torch.isnan(flat[:10]).all() and torch.isnan(flat[10 + m * n :]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulate_scaled(dtype):
    """As above on FP8 operands, output gradients in E5M2; into float64 gradients too."""
    args = operands(40, 5, 7, 33, E5M2)
    exact, bound = exact_product(*args)
    out = torch.full((5, 7), float("nan"), dtype=dtype)
    accumulate_scaled_mm(out, *args, 0)
    assert ((out.double() - exact).abs() <= bound).all()
    accumulate_scaled_mm(out, *args, 1)
    assert ((out.double() - 2 * exact).abs() <= 3 * bound).all()


# ---- recipes -----------------------------------------------------------------------------------------------


class Recorder:
    """A scope that notes what a recipe declares."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.reported: list[str] = []

    def read_scale(self, role: str) -> None:
        self.read.append(role)

    def report_amax(self, role: str) -> None:
        self.reported.append(role)


@pytest.fixture
def delayed():
    recipe = DelayedScaling()
    timeline = ScaleTimeline([*roles_of("a"), *roles_of("b")], history=3)
    recipe.bind(timeline)
    with torch.no_grad():
        timeline.scale.copy_(torch.tensor([2.0, 4.0, 8.0, 16.0, 32.0, 64.0]))
    return recipe, timeline


@pytest.mark.parametrize(("kind", "fmt"), [("input", E4M3), ("grad_output", E5M2)])
def test_delayed_operand(delayed, kind, fmt):
    """The role's own scale and format, amax into its own slot, and both declared to the scope."""
    recipe, timeline = delayed
    x, scope = random(4, 6, seed=50, dtype=torch.float32), Recorder()
    q = recipe.operand("b", kind, x, scope)
    wanted = quantise(x, timeline.scale_of(f"b.{kind}"), fmt)
    assert q.rows is not None and wanted.rows is not None and q.columns is not None and wanted.columns is not None
    assert q.rows.dtype == fmt.dtype and torch.equal(bits(q.rows), bits(wanted.rows))
    assert torch.equal(bits(q.columns), bits(wanted.columns))
    assert scope.read == scope.reported == [f"b.{kind}"]
    slots = {role.name: timeline.slot_of(role.name).item() for role in timeline.roles}
    assert slots.pop(f"b.{kind}") == x.abs().max().item() and set(slots.values()) == {EMPTY}
    assert recipe.operand("b", kind, x, scope, columns=False).columns is None


def test_delayed_without_scope_writes_nothing(delayed):
    """S6: evaluation quantises with the same scales and reports no amax."""
    recipe, timeline = delayed
    q = recipe.operand("a", "input", torch.full((2, 2), 1e6), None)
    assert q.scale_inv.item() == 1 / timeline.scale_of("a.input").item()
    assert (timeline.open_amax == EMPTY).all()


def test_delayed_weight_and_observe(delayed):
    """A weight's amax enters its own slot; observing records and quantises nothing, for each kind."""
    recipe, timeline = delayed
    weight = random(3, 5, seed=51, dtype=torch.bfloat16)
    q = recipe.weight("a", weight)
    assert q.rows is not None and q.columns is not None and q.rows.dtype == E4M3.dtype
    assert q.scale_inv.item() == 1 / timeline.scale_of("a.weight").item()
    assert timeline.slot_of("a.weight").item() == weight.abs().max().item()
    for number, kind in enumerate(FORMATS):
        recipe.observe("b", kind, torch.tensor([[1.0 + number, -2.0 - number]], dtype=torch.bfloat16))
        recipe.observe("b", kind, torch.tensor([[0.5]]))
        assert timeline.slot_of(f"b.{kind}").item() == 2.0 + number


def test_roles():
    """Three roles per linear: E4M3 forward ones, the output gradient backward in E5M2; none for current
    scaling."""
    roles = {role.name: (str(role.direction), role.fp8_max) for role in DelayedScaling().roles("x")}
    assert roles == {
        "x.input": ("forward", 448.0),
        "x.weight": ("forward", 448.0),
        "x.grad_output": ("backward", 57344.0),
    }
    assert list(CurrentScaling().roles("x")) == []


@pytest.mark.parametrize("margin", [0, 2])
def test_current_scaling(margin):
    """Each tensor's own amax, in the right format, every time."""
    recipe = CurrentScaling(margin)
    for factor in (1.0, 1000.0):
        x = random(4, 6, seed=52, dtype=torch.float32, scale=factor)
        for kind, fmt in (("input", E4M3), ("grad_output", E5M2)):
            q = recipe.operand("a", kind, x, None)
            assert q.rows is not None and q.rows.dtype == fmt.dtype and q.columns is not None
            assert q.scale_inv.item() == current_scale(x, fmt, margin).reciprocal().item()
            assert recipe.operand("a", kind, x, None, columns=False).columns is None
        q = recipe.weight("a", x)
        assert q.rows is not None and q.rows.dtype == E4M3.dtype and q.columns is not None
        assert q.scale_inv.item() == current_scale(x, E4M3, margin).reciprocal().item()


# ---- the weight cache --------------------------------------------------------------------------------------


def test_weight_cache(delayed):
    """Q(BF16(master), scale) in both layouts, in storages that never move; a moving scale changes a cache at
    its refresh only (S1); the amax of the BF16 weight enters the open window."""
    recipe, timeline = delayed
    masters = {"a.weight": random(4, 6, seed=60, dtype=torch.float32), "b.weight": random(6, 2, seed=61)}
    cache = WeightCache({name: (name.removesuffix(".weight"), recipe, lambda n=name: masters[n]) for name in masters})
    assert cache.names == list(masters) and cache.layer_of("b.weight") == "b"

    def addresses() -> dict[str, tuple[int, ...]]:
        return {n: tuple(t.data_ptr() for t in (c.rows, c.columns, c.scale_inv)) for n, c in cache.cached.items()}

    start = addresses()
    for _ in range(2):
        cache.refresh_()
        for name, master in masters.items():
            scale = timeline.scale_of(name)
            wanted, cached = quantise(master.bfloat16(), scale, E4M3), cache.cached[name]
            assert cached.rows is not None and cached.columns is not None
            assert wanted.rows is not None and wanted.columns is not None
            assert torch.equal(bits(cached.rows), bits(wanted.rows))
            assert torch.equal(bits(cached.columns), bits(wanted.columns))
            assert cached.scale_inv.item() == 1 / scale.item()
            assert timeline.slot_of(name).item() >= master.bfloat16().abs().max().item()
        live = [t.view(torch.uint8) for c in cache.cached.values() for t in (c.rows, c.columns, c.scale_inv[None])]
        before = [tensor.clone() for tensor in live]
        timeline.scale.mul_(0.5)
        for master in masters.values():
            master.mul_(1.5)
        assert all(torch.equal(a, b) for a, b in zip(before, live, strict=True))
    assert addresses() == start

    listed = {item.name: item for item in cache.logical_tensors()}
    assert set(listed) == {f"cached_weight{part}/{n}" for part in ("", "_scale_inv") for n in masters}
    item = listed["cached_weight/a.weight"]
    assert item.tensor.data_ptr() == start["a.weight"][0] and item.global_shape == (4, 6)
    assert listed["cached_weight_scale_inv/b.weight"].tensor.data_ptr() == start["b.weight"][2]
