"""The scales of groups as one kernel: the torch reference's bits for all values that there are, whoever is idle; what it writes
into the timeline; roles of another timeline; what a capture is told; the layer."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from qeffect_lm.contract.timeline import EMPTY, ScaleTimeline
from qeffect_lm.fp8.grouped import RoleRows, Scales, group_scales, roles_of_groups
from qeffect_lm.fp8.quantise import E4M3, E5M2
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling
from qeffect_lm.kernels import scales as kernel
from qeffect_lm.layers import grouped
from tests.tiny import differing, same_bits
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401
from tests.unit.test_kernels_experts import run, same_but_nan

# NumPy tells of what the interpreter divides by zero, and of what overflows; that is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|overflow|invalid value) encountered")

SMALLEST, TINY, HUGE = 2.0**-149, 2.0**-126, float(np.finfo(np.float32).max)
OVERFLOW = [2.0**-128, *(k * 2.0**-120 for k in (1.3125, 168.0, 212.0))]  # 448 / amax does, or does not by little
SPECIAL = [EMPTY, 0.0, math.inf, math.nan, SMALLEST, 3 * SMALLEST, TINY, *OVERFLOW, 448.0, HUGE]
AMAX = st.one_of(st.sampled_from(SPECIAL), st.floats(0, width=32))
FORMATS_OF = {"input": E4M3, "grad_output": E5M2}
KINDS = pytest.mark.parametrize("kind", list(FORMATS_OF))
TENSORS = ("scale", "history", "open_amax")


class State:
    """A delayed recipe whose timeline has roles of others before, between and behind the groups', all with numbers of their
    own. ``scope`` stands for the host's account."""

    def __init__(self, count: int, history: int = 3, margin: int = 0) -> None:
        self.layers = [f"layers.0.experts.{(7 * e) % count if count % 7 else e}" for e in range(count)]  # not in their order
        self.recipe = DelayedScaling()
        names = ["a", *sorted(self.layers), "z"]
        roles = [role for name in names for role in self.recipe.roles(name)]
        self.line = ScaleTimeline(roles, history=history, margin=margin, device=DEVICE)
        self.recipe.bind(self.line)
        self.line.scale.copy_(torch.arange(len(roles)) + 3.0)
        self.said: list[tuple[str, str]] = []

    def read_scale(self, role: str) -> None:
        self.said.append(("read", role))

    def report_amax(self, role: str) -> None:
        self.said.append(("report", role))

    def rows(self, kind: str) -> RoleRows:
        return RoleRows.of(self.line, roles_of_groups(self.layers, kind))

    def put(self, kind: str, **values: list[Any]) -> None:
        """Into the groups' rows of the timeline's tensors."""
        for name, found in values.items():
            getattr(self.line, name)[self.rows(kind).table] = torch.tensor(found, dtype=torch.float32, device=DEVICE)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self.line, name).clone() for name in TENSORS}


def found(state: State, kind: str, amax: torch.Tensor, merges: bool) -> dict[str, torch.Tensor]:
    """The scales and what became of the timeline, which is put back."""
    before = state.tensors()
    scope: Any = state if merges else None
    made = group_scales(state.recipe, state.layers, kind, amax, scope, state.rows(kind))
    after = state.tensors()
    for name, tensor in before.items():
        getattr(state.line, name).copy_(tensor)
    return {"made scale": made.scale, "inverse": made.scale_inv, **after}


def check(state: State, kind: str, amax: torch.Tensor, merges: bool) -> dict[str, torch.Tensor]:
    """The reference's bits, and its account."""
    state.said.clear()
    got, said = found(state, kind, amax, merges), list(state.said)
    with reference():
        state.said.clear()
        want = found(state, kind, amax, merges)
    assert said == state.said and len(said) == (2 * len(state.layers) if merges else 0)
    for name, tensor in want.items():
        assert same_but_nan(got[name], tensor), (name, got[name], tensor)
    return got


def numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("margin", [0, 1, 16])
@KINDS
def test_current_scaling(kind: str, margin: int) -> None:
    """Special values, and many that tell 448 / amax rounded once from a reciprocal times 448."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(200, generator=generator).abs() * 2.0 ** torch.randint(-149, 120, (200,), generator=generator)
    for amax in (numbers(SPECIAL), spread.to(DEVICE), numbers([2.0])):
        with reference():
            want = group_scales(CurrentScaling(margin), ["layer"], kind, amax, None)
        got = group_scales(CurrentScaling(margin), ["layer"], kind, amax, None)
        assert same_bits(got.scale, want.scale) and same_bits(got.scale_inv, want.scale_inv)
        assert bool((got.scale != 1).any()) and not got.scale.isnan().any()
    once = (torch.tensor(FORMATS_OF[kind].max, device=DEVICE) / spread.to(DEVICE)) / 2.0**margin
    with reference():
        made = group_scales(CurrentScaling(margin), ["layer"], kind, spread.to(DEVICE), None).scale
    assert not torch.equal(once, made), "there are some"


@settings(max_examples=60)
@given(st.lists(AMAX, min_size=1, max_size=10), st.sampled_from([0, 3, 16]), st.sampled_from(list(FORMATS_OF)))
def test_current_scaling_of_any_amax(values: list[float], margin: int, kind: str) -> None:
    amax = numbers(values)
    got = group_scales(CurrentScaling(margin), ["layer"], kind, amax, None)
    with reference():
        want = group_scales(CurrentScaling(margin), ["layer"], kind, amax, None)
    assert same_bits(got.scale, want.scale) and same_bits(got.scale_inv, want.scale_inv)


GROUP = st.tuples(AMAX, AMAX, st.one_of(st.just(0.0), AMAX), st.sampled_from([1.0, 448.0, 0.37, TINY, SMALLEST, HUGE, 0.0]))


@settings(max_examples=60)
@given(st.lists(GROUP, min_size=1, max_size=10), st.sampled_from([0, 3]), st.sampled_from(list(FORMATS_OF)), st.booleans())
def test_delayed_scaling_of_any_amax(groups: list[tuple[float, ...]], margin: int, kind: str, merges: bool) -> None:
    """Any amax, open slot, history and held scale."""
    state = State(len(groups), margin=margin)
    amax, slots, past, held = zip(*groups, strict=True)
    state.put(kind, open_amax=list(slots), scale=list(held), history=[[0.0, one, 0.0] for one in past])
    check(state, kind, numbers(list(amax)), merges)


@pytest.mark.parametrize("merges", [False, True])
@KINDS
def test_every_pair_of_slot_and_amax(kind: str, merges: bool) -> None:
    """EMPTY leaves a slot, anything replaces EMPTY, a NaN wins and stays; roles of others and other kinds are not touched."""
    pairs = [(slot, amax) for slot in SPECIAL for amax in SPECIAL]
    state = State(len(pairs))
    state.put(kind, open_amax=[slot for slot, _ in pairs])
    others = [row for row in range(len(state.line.roles)) if row not in state.rows(kind).rows]
    state.line.open_amax[others] = 0.25
    got = check(state, kind, numbers([amax for _, amax in pairs]), merges)["open_amax"]
    assert bool((got[others] == 0.25).all())
    for (slot, amax), value in zip(pairs, got[state.rows(kind).table].tolist(), strict=True):
        want = slot if not merges else math.nan if math.isnan(slot + amax) else max(slot, amax)
        assert value == want or math.isnan(value) and math.isnan(want), (slot, amax, value)


@pytest.mark.parametrize("length", [1, 3, 16, 17, 256, 600])
@KINDS
def test_any_length_of_history(kind: str, length: int) -> None:
    """The held scale where any entry is above zero, the first, one in between or the last; with a NaN among them, and without
    any, the amax decides."""
    places = sorted({0, length // 2, length - 1})
    state = State(len(places) + 5, length)
    history = [[0.0] * length for _ in state.layers]
    for row, place in zip(history, places, strict=False):
        row[place] = SMALLEST
    history[-4][0], history[-3][length - 1], history[-2] = math.nan, math.nan, [math.inf] * length
    if length > 1:
        history[-3][0] = 5.0
    state.put(kind, history=history)
    got = check(state, kind, numbers([7.0] * (len(places) + 4) + [EMPTY]), True)["made scale"]
    held = state.line.scale[state.rows(kind).table]
    current = torch.full_like(held, float(1 / np.float32(7) * np.float32(FORMATS_OF[kind].max)))
    current[-1] = 1.0
    takes = torch.tensor([True] * len(places) + [False, False, False, True, False], device=DEVICE)
    assert same_bits(got, torch.where(takes, held, current))


@pytest.mark.parametrize("count", [1, 8, 9, 130])
def test_any_number_of_groups(count: int) -> None:
    """Of some the history decides; no program writes past the last group."""
    state = State(count)
    state.put("input", history=[[float(e % 3 == 0), 0.0, 0.0] for e in range(count)])
    for merges in (True, False):
        made = check(state, "input", torch.arange(count, device=DEVICE).float() + 1, merges)["made scale"]
        assert made.shape == (count,) and len(set(made.tolist())) == count


# ---- which rows ------------------------------------------------------------------------------------------------


def test_rows_of_another_timeline_are_refused() -> None:
    """Before anything is launched: rows found in a timeline with more roles, in one without these, on another device; and none.
    The tensors are always those that the timeline has now."""
    state, amax = State(3), numbers([1.0, 2.0, 4.0])
    rows = state.rows("input")
    state.put("input", history=[[1.0] * 3] * 3)
    want = group_scales(state.recipe, state.layers, "input", amax, None, rows).scale
    assert want.tolist() == state.line.scale[list(rows.rows)].tolist()

    wrong = ((State(4).rows("input"), "another timeline"), (state.rows("grad_output"), "another"), (None, "was not bound"))
    for other, match in wrong:
        before = state.tensors()
        with pytest.raises(RuntimeError, match=rf"layers.0.experts.0.input.*{match}.*bind_experts"):
            group_scales(state.recipe, state.layers, "input", amax, state, other)  # type: ignore[arg-type]
        assert differing(state.tensors(), before) == []
    elsewhere = RoleRows(rows.rows, rows.table.to("meta"))
    with pytest.raises(RuntimeError, match="rows of another timeline"):
        group_scales(state.recipe, state.layers, "input", amax, None, elsewhere)

    first, wider = state.line, [*state.line.roles, *DelayedScaling().roles("b")]
    state.recipe.bind(ScaleTimeline(wider, device=DEVICE))
    with pytest.raises(RuntimeError, match="rows of another timeline"):
        group_scales(state.recipe, state.layers, "input", amax, None, rows)
    state.recipe.bind(ScaleTimeline(DelayedScaling().roles("b"), device=DEVICE))
    with pytest.raises(RuntimeError, match="rows of another timeline"):
        group_scales(state.recipe, state.layers, "input", amax, None, rows)
    state.recipe.bind(first)
    first.scale = first.scale * 2
    assert torch.equal(group_scales(state.recipe, state.layers, "input", amax, None, rows).scale, 2 * want)


def test_a_layer_finds_its_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound to one timeline, a layer refuses to work with another one until it is bound again."""
    kept: list[Any] = []
    original = grouped.GroupedLinear.bind
    monkeypatch.setattr(grouped.GroupedLinear, "bind", lambda self: (original(self), kept.append(self)))
    run(DelayedScaling())
    layer = next(one for one in kept if one.name.endswith("down"))
    timeline = layer.recipe.timeline
    names = [*roles_of_groups(layer.names, "input"), *roles_of_groups(layer.names, "grad_output")]
    tables = [layer.input_roles_table, layer.grad_output_roles_table]
    assert torch.cat(tables).tolist() == [timeline.index[name] for name in names] and len(set(names)) == 8
    assert {"input_roles_table", "grad_output_roles_table"} <= {name for name, _ in layer.named_buffers()}, "captures know them"
    layer.recipe.bind(ScaleTimeline([*timeline.roles, *DelayedScaling().roles("a")], device=DEVICE))
    scaled = lambda: layer._scales("input", None, None, Evaluation(), numbers([2.0] * 4))  # noqa: E731
    with pytest.raises(RuntimeError, match="rows of another timeline"):
        scaled()
    layer.bind()
    assert scaled().scale.tolist() == [224.0] * 4 and layer.input_roles_table is not tables[0]


class Evaluation:
    training = False


# ---- launches --------------------------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    """A capture's recorder: the kernels that it is told of, and the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, tuple[Any, ...]]] = []
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def foreign(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.told.append((name, arguments))


@contextmanager
def nothing_runs(monkeypatch: pytest.MonkeyPatch):
    """Launches do nothing: the interpreter's own copies are no operations of the work."""
    with monkeypatch.context() as patch:
        patch.setattr(type(kernel._scales_kernel), "__getitem__", lambda self, grid: lambda *a, **k: None)
        yield


@pytest.mark.parametrize("merges", [False, True])
def test_a_capture_is_told(merges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch, with every tensor that it reads or writes and all that it is compiled for; nothing else runs."""
    state, amax = State(3, margin=2), numbers([1.0, 2.0, 4.0])
    rows, line = state.rows("grad_output"), state.line
    scope: Any = state if merges else None
    with nothing_runs(monkeypatch), Watching() as watch:
        made = group_scales(state.recipe, state.layers, "grad_output", amax, scope, rows)
        current = group_scales(CurrentScaling(1), state.layers, "input", amax, scope)
    assert [name for name, _ in watch.told] == ["group_scales"] * 2 and set(watch.seen) == {"empty_like"}
    wanted = [amax, rows.table, line.scale, line.history, line.open_amax, made.scale, made.scale_inv]
    assert [t.data_ptr() for t in watch.told[0][1][:7]] == [t.data_ptr() for t in wanted]
    assert watch.told[0][1][7:] == ("E5M2", 2, merges)
    assert {t.data_ptr() for t in watch.told[1][1][:7]} == {t.data_ptr() for t in (amax, current.scale, current.scale_inv)}
    assert watch.told[1][1][7:] == ("E4M3", 1, False)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recipe", [DelayedScaling, CurrentScaling])
def test_the_layer(recipe: type[DelayedScaling] | type[CurrentScaling], again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration, evaluation and training have the bits of the reference's scales, recomputed or not. One launch for each
    quantisation of groups, and F's, when it runs again, makes none: it has scales and inverses."""
    with Watching() as watch:
        got = run(recipe(), again)
    launches = sum(name == "group_scales" for name, _ in watch.told)
    assert launches == 2 + 2 * 4, "evaluation's F, and F and I of two microbatches, of two linears each"
    told, delayed = [arguments[-1] for name, arguments in watch.told if name == "group_scales"], recipe is DelayedScaling
    assert told.count(True) == (8 if delayed else 0), "evaluation reports nothing"
    others = [watch.seen.count(name) for name in ("_foreach_maximum_", "reciprocal")]
    assert others == ([4, 0] if delayed else [0, 16]), "calibration's, of two linears; weights', when caches are made"

    def plain(*arguments: Any) -> Scales:
        with reference():
            return group_scales(*arguments)

    monkeypatch.setattr(grouped, "group_scales", plain)
    assert differing(got, run(recipe())) == []
