"""Mixture of experts on a real GPU: kernels against plain loops, captured equals eager, idle experts (case S2), generation.

    python -m pytest -q tests/gpu/test_moe_gpu.py tests/unit/test_kernels_grouped.py tests/unit/test_kernels_joined_groups.py
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from qeffect_lm.app.assemble import assemble
from qeffect_lm.fp8.grouped import (
    Groups,
    Matrices,
    Rows,
    Scales,
    accumulate_grouped_mm,
    addresses,
    amax_of_groups,
    grouped_mm,
    quantise_groups,
)
from qeffect_lm.fp8.quantise import E4M3, E5M2, quantise, scale_of_amax
from tests.gpu.test_engine_gpu import SHAPE, data
from tests.tiny import Trained, assert_moved, batch, config, differing, same_bits, train
from tests.unit import test_kernels_joined_groups as joined_groups
from tests.unit.engine_support import tensors

# The same checks as on CPU, there interpreted, here compiled. Not their fixture: here the dispatch decides for itself.
from tests.unit.test_kernels_experts import (  # noqa: F401
    test_a_row_is_the_same_wherever_it_lies,
    test_added,
    test_amax,
    test_amax_from_the_kernels_changes_no_bit,
    test_backward,
    test_forward,
    test_what_is_no_number_stays_visible,
)
from tests.unit.test_kernels_routing import (  # noqa: F401
    test_a_token_that_is_no_number_stays_alone,
    test_choice,
    test_every_choice,
    test_every_sort,
    test_layer,
    test_padding_alone_has_no_losses,
    test_routing_of_tokens,
    test_rows_that_travel,
    test_sorts_of_microbatches,
    test_sums_in_runs,
    test_tokens_on_other_ranks,
    test_way_back,
    test_what_a_capture_is_told,
)
from tests.unit.test_kernels_scales import (  # noqa: F401
    test_a_capture_is_told,
    test_a_layer_finds_its_rows_again,
    test_any_length_of_history,
    test_any_number_of_groups,
    test_current_scaling,
    test_current_scaling_of_any_amax,
    test_delayed_scaling_of_any_amax,
    test_every_pair_of_slot_and_amax,
    test_rows_of_another_timeline_are_refused,
    test_the_layer,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

N, K, EXPERTS = 640, 512, 8
SIZES = {
    "even": [128] * 8,
    "one takes all": [0, 0, 1024, 0, 0, 0, 0, 0],
    "ragged": [1, 0, 17, 300, 0, 64, 641, 1],
}


def matrices(found: list[torch.Tensor]) -> Matrices:
    return Matrices(tuple(found), addresses(found))


def made(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def groups_of(sizes: list[int]) -> Groups:
    counts = torch.tensor(sizes)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(torch.int32)
    return Groups(offsets.cuda(), torch.arange(len(sizes)).repeat_interleave(counts).cuda())


def wide(rows: Rows, groups: Groups) -> torch.Tensor:
    """The values of rows, exact but for one rounding of the scale's product."""
    values = rows.whole.double()
    return values if rows.scale_inv is None else values * rows.scale_inv.double()[groups.of_row][:, None]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_products_against_float64(sizes: list[int], kind: str) -> None:
    """F, I and W of groups against float64 on the same operands; twice the same bits; an idle group's gradient."""
    groups, dtype = groups_of(sizes), torch.float32 if kind == "float32" else torch.bfloat16
    x, dy = made(sum(sizes), K, seed=1, dtype=dtype), made(sum(sizes), N, seed=2, dtype=dtype)
    plain = [made(N, K, seed=10 + e, dtype=dtype) for e in range(EXPERTS)]
    scales = None
    if kind == "fp8":
        cached = [quantise(w, torch.tensor(60.0 + e, device="cuda"), E4M3) for e, w in enumerate(plain)]
        scales = matrices([one.scale_inv for one in cached])
        weights, back = matrices([one.rows for one in cached]), matrices([one.columns for one in cached])
        operands = [
            quantise_groups(t, Scales.of(scale_of_amax(amax_of_groups(t, groups), fmt)), fmt, groups, columns=True)
            for t, fmt in ((x, E4M3), (dy, E5M2))
        ]
        values = [one.rows.double() * one.scale_inv.double() for one in cached]
    else:
        weights, operands, values = matrices(plain), [Rows(x), Rows(dy)], [w.double() for w in plain]
        back = weights.t
    # Fast accumulation of FP8 keeps about 14 bits of a running sum; results are rounded to bfloat16.
    bound = {"float32": 2.0**-18, "bfloat16": 2.0**-7, "fp8": 2.0**-6}[kind]

    def close(got: torch.Tensor, want: torch.Tensor) -> None:
        assert (got.double() - want).abs().max() <= bound * max(1.0, want.abs().max().item())

    bounds = groups.offsets.tolist()
    spans = list(zip(bounds, bounds[1:], strict=False))
    x64, dy64 = (wide(rows, groups) for rows in operands)
    for rows, right, exact, fast in (
        (operands[0], weights, [x64[a:b] @ w.t() for (a, b), w in zip(spans, values, strict=True)], True),
        (operands[1], back, [dy64[a:b] @ w for (a, b), w in zip(spans, values, strict=True)], False),
    ):
        twice = [
            grouped_mm(rows, right, groups, dtype, weight_scale_inv=scales, fast_accumulation=fast) for _ in range(2)
        ]
        close(twice[0], torch.cat(exact))
        assert same_bits(*twice)
    runs = []
    for _ in range(2):
        grads = [torch.full((N, K), float("nan"), device="cuda") for _ in sizes]
        for beta in (0, 1):
            accumulate_grouped_mm(matrices(grads), operands[1], operands[0], groups, beta)
        runs.append(grads)
    for (a, b), got, again in zip(spans, *runs, strict=True):
        close(got, 2 * dy64[a:b].t() @ x64[a:b])
        assert same_bits(got, again) and bool(got.any()) == (b > a)


@pytest.mark.parametrize(("rows", "experts", "hidden"), [(2048, 8, 2048), (1000, 64, 500), (1, 3, 64)])
def test_a_routers_product(rows: int, experts: int, hidden: int) -> None:
    """BF16 operands, exact products and sums of float32: nothing is rounded to BF16, and a row's bits are its own."""
    x = made(rows, hidden, seed=1, dtype=torch.bfloat16)
    weight = matrices([made(experts, hidden, seed=2, dtype=torch.bfloat16)])

    def product(x: torch.Tensor) -> torch.Tensor:
        return grouped_mm(Rows(x), weight, Groups.one(x.shape[0], x.device), torch.float32)

    got, want = product(x), x.double() @ weight.tensors[0].double().t()
    assert (got.double() - want).abs().max() <= 2.0**-16 * want.abs().max()
    assert same_bits(got, product(x)) and same_bits(got[rows // 3 :], product(x[rows // 3 :].clone()))


def test_tiles_of_w_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly and in a graph, which has padding, another number of rows may choose other ones."""
    from qeffect_lm.kernels import grouped

    groups = groups_of(SIZES["ragged"])
    x, dy = (made(sum(SIZES["ragged"]), width, seed=width, dtype=torch.bfloat16) for width in (K, N))
    operands = [
        quantise_groups(t, Scales.of(scale_of_amax(amax_of_groups(t, groups), fmt)), fmt, groups, columns=True)
        for t, fmt in ((x, E4M3), (dy, E5M2))
    ]
    sizes = [[3, 0, 70], [16, 33, 0]]
    places, found, joined = joined_groups.joined(2), [], []
    joined_groups.fill(sizes, places)
    for longest in (1, 4096):
        monkeypatch.setattr(grouped, "_LONG", longest)
        out = torch.full((joined_groups.N, joined_groups.K), 0.5, device="cuda")
        joined.append(torch.stack(joined_groups.gradients(out, sizes, 1, places)))
        grads = [torch.full((N, K), 0.5, device="cuda") for _ in range(EXPERTS)]
        accumulate_grouped_mm(matrices(grads), operands[1], operands[0], groups, 1)
        found.append(torch.stack(grads))
    assert same_bits(*found) and bool((found[0] != 0.5).any())
    assert same_bits(*joined) and bool((joined[0] != 0.5).any()), "of two microbatches with scales of their own"


def settings(**keys: Any) -> dict[str, Any]:
    moe = {"num_experts": 6, "aux_loss_coef": 0.05, "z_loss_coef": 0.01}
    return {**SHAPE, "model__family": "mixtral", "model__moe": moe, **keys}


@lru_cache
def trained(graphs: str, recipe: str = "delayed", window: str = "step", recompute: str = "none", n: int = 1) -> Trained:
    backend, _, scope = graphs.partition(" ")
    fp8 = {"recipe": recipe, "history": 4, "window": window}
    how = {"backend": backend, **({"scope": scope} if scope else {})}
    keys = {"graphs": how, "precision__fp8": fp8, "model__recompute": recompute, "pipeline__coalesce_w": n}
    return train(config(**settings(**keys)), 6, batches=data)


def same(a: Trained, b: Trained) -> None:
    assert a.losses == b.losses and a.norms == b.norms and differing(a.tensors, b.tensors) == []
    assert torch.equal(a.assembly.engine.end.routed, b.assembly.engine.end.routed)


@pytest.mark.parametrize("graphs", ["cuda_graphs action", "cuda_graphs step"])
@pytest.mark.parametrize(
    ("recipe", "window"), [("delayed", "step"), ("delayed", "microbatch"), ("current", "step"), ("none", "step")]
)
def test_captured_equals_eager(graphs: str, recipe: str, window: str) -> None:
    """Losses, norms, routing and all logical tensors, while tokens change their experts from step to step."""
    eager = trained("eager", recipe, window)
    if recipe != "delayed":
        assert len(set(eager.losses)) == 6 and not any(eager.skipped)
    else:
        assert_moved(eager)
    same(trained(graphs, recipe, window), eager)


@pytest.mark.parametrize("graphs", ["eager", "cuda_graphs step"])
def test_recompute_gives_the_same_bits(graphs: str) -> None:
    same(trained(graphs, recompute="full"), trained("eager"))


@pytest.mark.parametrize("graphs", ["cuda_graphs action", "cuda_graphs step"])
@pytest.mark.parametrize("n", [2, 3])
def test_joined_captured_equals_eager(graphs: str, n: int) -> None:
    """pipeline.coalesce_w, with 3 also a smaller last group; recomputed, too."""
    eager = trained("eager", n=n)
    assert_moved(eager)
    same(trained(graphs, n=n), eager)
    if n == 2:
        same(trained(graphs, n=n, recompute="full"), eager)


def test_joined_against_each_by_itself() -> None:
    """The first step: same operands, sums in another order, of which Hopper keeps some 14 bits for 128 rows."""
    apart, joined = (train(config(**settings(pipeline__coalesce_w=n)), 1, batches=data) for n in (1, 3))
    assert apart.losses == joined.losses
    moved = 0
    for name in apart.assembly.flat.trainable_names:
        a, b = (run.assembly.flat.grad(name) for run in (apart, joined))
        if ".experts." not in name:
            continue
        assert (a.double() - b.double()).norm() <= 1e-2 * a.double().norm() and bool(a.any()), name
        moved += not torch.equal(a, b)
    assert moved > 8


def test_poisoned_places_change_nothing() -> None:
    keys = {"graphs": {"backend": "cuda_graphs"}, "pipeline__coalesce_w": 2, "contract__poison": True}
    fp8 = {"recipe": "delayed", "history": 4, "window": "step"}
    same(train(config(**settings(**keys, precision__fp8=fp8)), 6, batches=data), trained("eager", n=2))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("graphs", [{"backend": "cuda_graphs"}, {"backend": "cuda_graphs", "scope": "step"}], ids=str)
def test_idle_experts(graphs: dict[str, str], n: int) -> None:
    """S2: captured while two experts sleep; they work in the third step, and sleep again. Scales, histories and gradients are
    as they must be, and all bits those of eager work."""
    from tests.unit.test_moe_engine import ASLEEP, route, sleepers

    def two(step: int) -> Any:
        return batch(step, 2, 2, 128)

    results = []
    for how in ({"backend": "eager"}, graphs):
        keys = settings(graphs=how, model__num_layers=2, pipeline__microbatches=2, model__dropout=0.0, pipeline__coalesce_w=n)
        keys["model__moe"] = {"num_experts": 6, "aux_loss_coef": 0.0}
        assembly = assemble(config(**keys))
        route(assembly, ASLEEP)
        assembly.prepare(two(0))
        losses = sleepers(assembly, lambda n, part=assembly: part.engine.step(n, two(n)), checked=True)
        results.append((losses, tensors(assembly)))
    assert results[0][0] == results[1][0] and differing(results[0][1], results[1][1]) == []


def test_close_to_the_cpu() -> None:
    """The first steps of the same model on a CPU, where loops over experts make the products: losses within FP8's noise."""
    keys = {**settings(), "run__device": "cpu"}
    cpu = train(config(**keys), 2, batches=data)
    gpu = trained("eager")
    for a, b in zip(cpu.losses, gpu.losses, strict=False):
        assert abs(a / b - 1) < 5e-3
