"""A column-parallel linear followed by a row-parallel one on two gloo processes equals one process.

Where sums are split the order of additions changes and nothing else: in any order a float32 sum of length
k is within ``(k + 2) u sum |a||b|`` of the exact one (u = 2**-24), so two orders differ by at most twice that,
plus what the difference of an operand brings along. The FP8 data are small integers with amax 7, for which
all scales of the first products are powers of two and these products exact: both layouts then quantise the
same numbers with the same scales, bit for bit.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoint.layout import Box, tiling_fault
from models.spec import ParameterSpec
from pipeline.step_end import StepEnd
from qeffect_lm.app.holdings import local_spec
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling
from qeffect_lm.graphs.host_replay import HostReplay
from qeffect_lm.graphs.register import HiddenStateRegister
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.optim.adamw import AdamW
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec
from qeffect_lm.optim.lr import Schedule
from qeffect_lm.optim.norm import BlockOrder
from qeffect_lm.parallel.linear import ColumnParallelLinear, RowParallelLinear
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.parallel.tensor import TensorParallel
from qeffect_lm.state import LogicalTensor, Role
from tests.helpers import run_distributed
from tests.unit.layer_harness import Harness, random

INPUTS, MIDDLE, OUTPUTS, TOKENS, MICROBATCHES = 12, 16, 10, 6, 3
DTYPES = {"float64": torch.float64, "float32": torch.float32, "fp8": torch.float32}


class Pair(Layer):
    """``row(column(x))``, both with a bias."""

    def __init__(self, mesh: Mesh, kind: str) -> None:
        super().__init__("pair")
        recipe = DelayedScaling() if kind == "fp8" else None
        options: dict[str, Any] = {"bias": True, "recipe": recipe, "dtype": DTYPES[kind]}
        tp, column, row = TensorParallel.of(mesh, sequence=False), SplitLinear, SplitLinear
        if tp is not None:
            options["tp"], column, row = tp, ColumnParallelLinear, RowParallelLinear
        self.column = column("pair.column", INPUTS, MIDDLE, **options)
        self.row = row("pair.row", MIDDLE, OUTPUTS, **options)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        return self.row(self.column(x, context), context)


def values(kind: str, *shape: int, seed: int) -> torch.Tensor:
    """Normal numbers; for FP8 integers up to 7, of which one is 7."""
    normal = random(*shape, seed=seed)
    if kind == "fp8":
        normal = (normal * 3).round().clamp(-7, 7)
        normal.view(-1)[seed % normal.numel()] = 7.0
    return normal.to(DTYPES[kind])


def whole_parameters(kind: str) -> dict[str, torch.Tensor]:
    shapes = {
        "column.weight": (MIDDLE, INPUTS),
        "column.bias": (MIDDLE,),
        "row.weight": (OUTPUTS, MIDDLE),
        "row.bias": (OUTPUTS,),
    }
    made = {f"pair.{name}": values(kind, *shape, seed=i + 1) for i, (name, shape) in enumerate(shapes.items())}
    if kind == "fp8":
        made["pair.column.bias"].zero_()
    return made


def data(kind: str, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (
            values(kind, 2, TOKENS // 2, INPUTS, seed=100 * step + i),
            values(kind, 2, TOKENS // 2, OUTPUTS, seed=100 * step + 50 + i),
        )
        for i in range(MICROBATCHES)
    ]


AXES = {"column.weight": ("tp", None), "column.bias": ("tp",), "row.weight": (None, "tp"), "row.bias": (None,)}


def specs(mesh: Mesh, kind: str) -> dict[str, ParamSpec]:
    """What this rank holds of each parameter."""
    tp = TensorParallel.of(mesh, sequence=False)
    whole = [ParameterSpec(n, tuple(t.shape), None, True, AXES[n[5:]]) for n, t in whole_parameters(kind).items()]
    return {spec.name: local_spec(spec, tp) for spec in whole}


def logical(spec: ParamSpec, name: str, piece: torch.Tensor, role: Role) -> LogicalTensor:
    (made,) = FlatBuffers([replace(spec, name="p")]).logical(name, piece, role, "p")
    return made


def build(mesh: Mesh, kind: str) -> tuple[Harness, dict[str, ParamSpec]]:
    """The pair with this rank's pieces of the whole parameters."""
    pair = Pair(mesh, kind)
    harness = Harness(pair, history=1)
    cuts = specs(mesh, kind)
    with torch.no_grad():
        for name, whole in whole_parameters(kind).items():
            harness.parameters[name].copy_(cuts[name].take(whole))
    harness.refresh()
    return harness, cuts


def step_end(mesh: Mesh, flat: FlatBuffers, harness: Harness) -> StepEnd:
    """The engine's own, of which only the reduction of amax is used here."""
    schedule = Schedule(lr=1e-3, total_steps=10)
    optimizer = AdamW(flat, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_norm=None, schedule=schedule)
    held = [[f"{name} of {peer}" for name in flat.trainable_names] for peer in range(mesh.size("tp"))]
    counted = dict(zip(held[mesh.coord("tp")], flat.trainable_names, strict=True))
    sizes = [flat.grad(name).numel() for name in flat.trainable_names]
    order = BlockOrder([pair for names in held for pair in zip(names, sizes, strict=True)], held)
    return StepEnd(
        mesh=mesh,
        flat=flat,
        optimizer=optimizer,
        timeline=harness.timeline,
        cache=harness.cache,
        order=order,
        microbatches=MICROBATCHES,
        counted=counted,
    )


def plain(item: LogicalTensor) -> dict[str, Any]:
    fields = ("name", "global_shape", "start", "axes", "replicated")
    return {
        **{f: getattr(item, f) for f in fields},
        "role": str(item.role),
        "piece": item.tensor.detach().clone(),
    }


def train(mesh: Mesh, kind: str) -> dict[str, Any]:
    """Two steps with a commit after each; everything a rank made, for comparison."""
    harness, cuts = build(mesh, kind)
    flat = FlatBuffers(list(cuts.values()))
    end = step_end(mesh, flat, harness)
    report: dict[str, Any] = {"out": [], "dx": [], "middle": [], "scale": [], "open": [], "open_local": []}
    harness.module.row.register_forward_pre_hook(lambda _, args: report["middle"].append(args[0].detach().clone()))
    for step in range(2):
        microbatches = [harness.microbatch(i, *pair) for i, pair in enumerate(data(kind, step))]
        harness.run(microbatches, step)
        report["out"] += [m.out.clone() for m in microbatches]
        report["dx"] += [m.dx.clone() for m in microbatches]
        report["open_local"].append(harness.timeline.open_amax.clone())
        end.reduce_amax_()
        report["open"].append(harness.timeline.open_amax.clone())
        harness.commit()
        report["scale"].append(harness.timeline.scale.clone())
    grads = [logical(cuts[n], f"grad/{n}", g, Role.MASTER) for n, g in harness.grads.items()]
    weights = [logical(cuts[n], f"param/{n}", p.detach(), Role.PARAM) for n, p in harness.parameters.items()]
    for name, parameter in harness.parameters.items():
        flat.master(name).copy_(parameter)
    report["tensors"] = [plain(item) for item in [*grads, *weights, *flat.logical_tensors()]]
    report["roles"] = [role.name for role in harness.timeline.roles]
    return report


def assembled(reports: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Logical tensors from the pieces of all ranks: they tile the whole exactly once, and replicas are
    equal."""
    result = {}
    for parts in zip(*(report["tensors"] for report in reports), strict=True):
        first = parts[0]
        for part in parts:
            assert all(part[key] == first[key] for key in ("name", "role", "global_shape", "axes", "replicated"))
        if "tp" in first["replicated"]:
            assert all(torch.equal(part["piece"], first["piece"]) for part in parts), first["name"]
            assert first["axes"] == (None,) * len(first["axes"])
            parts = parts[:1]
        boxes = [Box(part["start"], tuple(part["piece"].shape)) for part in parts]
        assert tiling_fault(first["global_shape"], boxes) is None, first["name"]
        whole = torch.full(first["global_shape"], torch.nan, dtype=first["piece"].dtype)
        for part, box in zip(parts, boxes, strict=True):
            whole[box.within(Box((0,) * whole.dim(), tuple(whole.shape)))] = part["piece"]
        result[first["name"]] = whole
    return result


def bounds(kind: str) -> dict[str, Any]:
    """How far two orders of summation may be apart: per microbatch for ``out`` and ``dx``, summed for
    gradients."""
    unit = 2.0**-53 if kind == "float64" else 2.0**-24
    exact = kind == "fp8"  # the first product of F and of I
    grow = 1.3 if exact else 1.0  # operands are the casts: each at most 2**-4 (E5M2: 2**-3) larger than used here
    p = {name: tensor.double().abs() for name, tensor in whole_parameters(kind).items()}
    w1, b1, w2, b2 = (p[f"pair.{n}"] for n in ("column.weight", "column.bias", "row.weight", "row.bias"))
    result: dict[str, Any] = {"out": [], "dx": []}
    for step in range(2):
        column, row = torch.zeros_like(w1), torch.zeros_like(w2)
        for x, dy in data(kind, step):
            x, dy = x.double().abs().flatten(0, 1), dy.double().abs().flatten(0, 1)
            middle, d_middle = x @ w1.t() + b1, dy @ w2
            e_middle = 0 * middle if exact else (INPUTS + 3) * unit * middle
            e_d_middle = 0 * d_middle if exact else (OUTPUTS + 2) * unit * d_middle
            out = (MIDDLE + 4) * unit * (middle @ w2.t() + b2) + e_middle @ w2.t()
            dx = (MIDDLE + 3) * unit * d_middle @ w1 + e_d_middle @ w1
            result["out"].append(2 * grow * out.view(2, -1, OUTPUTS))
            result["dx"].append(2 * grow * dx.view(2, -1, INPUTS))
            terms = TOKENS + 2 + MICROBATCHES
            column += 2 * grow * (terms * unit * d_middle.t() @ x + e_d_middle.t() @ x)
            row += 2 * grow * (terms * unit * dy.t() @ middle + dy.t() @ e_middle)
        result["pair.column.weight"], result["pair.row.weight"] = column, row  # of the last step
    return result


def capture_and_replay(mesh: Mesh, kind: str) -> dict[str, Any]:
    """F, I and W as tapes, all-reduces included, against a twin that runs the same data eagerly."""
    (harness, _), (twin, _) = build(mesh, kind), build(mesh, kind)
    m = harness.microbatch(0, *data(kind, 0)[0])
    known = HiddenStateRegister()
    known.add_object("timeline", harness.timeline)
    slot = {f"slot/{n}": t for n, t in m.slot.tensors().items()}
    grads = {f"grad/{n}": t for n, t in harness.grads.items()}
    caches = {f"{n}/{part}": t for n, c in harness.cache.cached.items() for part, t in vars(c).items()}
    for name, tensor in {**harness.parameters, **slot, **grads, **caches}.items():
        known.add(name, tensor, owner="test")
    digests, graphs = [], []
    for _ in range(2):
        graphs = []
        with harness.recording():
            for name, work in (("F", harness.forward), ("I", harness.input_grad), ("W", harness.weight_grad)):
                graph = HostReplay().capture(name, lambda work=work: (work(m), None)[1], register=known, shares=list(graphs))
                graphs.append(graph)
        digests.append([graph.digest for graph in graphs])
    twin.timeline.open_amax.copy_(harness.timeline.open_amax)
    same = []
    for step, (x, dy) in enumerate(data(kind, 1)):
        m.slot.x.copy_(x)
        m.slot.dy.copy_(dy)
        time.sleep(0.05 * mesh.rank)  # a replay that does not wait for its all-reduce would run ahead
        for graph in graphs:
            graph.replay()
        eager = twin.microbatch(step, x, dy)
        twin.run([eager], step)
        pairs = [(m.out, eager.out), (m.dx, eager.dx), (harness.timeline.open_amax, twin.timeline.open_amax)]
        pairs += [(harness.grads[name], twin.grads[name]) for name in twin.grads]
        same.append(all(torch.equal(a, b) for a, b in pairs) and bool(eager.out.count_nonzero()))
    return {"same": same, "digests": digests}


def refusals(mesh: Mesh) -> list[str]:
    """What cannot be cut says so."""
    tp, messages = TensorParallel.of(mesh, sequence=False), []
    assert tp is not None
    for make in (
        lambda: ColumnParallelLinear("a.up", 4, 5, tp=tp),
        lambda: RowParallelLinear("a.down", 5, 4, tp=tp),
        lambda: ColumnParallelLinear("a.up", 4, 4, tp=tp, recipe=CurrentScaling()),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        messages.append(str(caught.value))
    return messages


def everything(rank: int, world: int) -> dict[str, Any]:
    mesh = Mesh({"tp": world}, rank)
    mesh.create_groups()
    report: dict[str, Any] = {kind: train(mesh, kind) for kind in DTYPES}
    report["replay"] = {kind: capture_and_replay(mesh, kind) for kind in DTYPES}
    report["refusals"] = refusals(mesh) if world > 1 else []
    return report


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_distributed(everything, 2, timeout=90)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return everything(0, 1)


@pytest.mark.parametrize("kind", DTYPES)
def test_pair_equals_one_process(kind, ranks, alone):
    """Outputs, input gradients and the assembled weight gradients are within the bound of the order of
    summation, both ranks hold the same bytes of what is replicated, and the pieces of each tensor tile it
    exactly once."""
    one, two, limit = alone[kind], [r[kind] for r in ranks], bounds(kind)
    for what in ("out", "dx"):
        for number, bound in enumerate(limit[what]):
            a, b = (report[what][number] for report in two)
            assert torch.equal(a, b), "an all-reduce gives every rank the same bytes"
            error = (a.double() - one[what][number].double()).abs()
            assert (error <= bound).all() and (a.double().abs() > 100 * bound).any(), (what, number)
            if kind == "float64":
                assert error.max() < 1e-12 * a.abs().max()
    whole, wanted = assembled(two), assembled([one])
    assert list(whole) == list(wanted)
    for name, tensor in whole.items():
        if name.startswith("grad/") and name.endswith("weight"):
            bound = limit[name.removeprefix("grad/")]
            error = (tensor.double() - wanted[name].double()).abs()
            assert (error <= bound).all() and (wanted[name].double().abs() > 100 * bound).any(), name
        elif name.startswith("grad/"):  # of a bias: sums over tokens, not cut by tp
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-5)
        elif name.startswith(("param/", "master/")):
            assert torch.equal(tensor, whole_parameters(kind)[name.split("/")[1]].to(tensor.dtype))


def test_middle_is_cut(ranks, alone):
    """Each rank holds half of the features between the two, and under FP8 exactly those of one process."""
    for kind in DTYPES:
        pieces = [report[kind]["middle"] for report in ranks]
        for left, right, whole in zip(*pieces, alone[kind]["middle"], strict=True):
            assert left.shape[-1] == right.shape[-1] == MIDDLE // 2
            both = torch.cat([left, right], dim=-1)
            torch.testing.assert_close(both, whole, rtol=1e-5, atol=1e-5)
            assert kind != "fp8" or torch.equal(both, whole)


def test_one_scale_per_layer(ranks, alone):
    """The pieces' amax differ; after the reduction slots and, after each commit, scales are equal on both
    ranks, bit for bit those of one process, and they move."""
    one, two = alone["fp8"], [r["fp8"] for r in ranks]
    roles = [f"pair.{layer}.{kind}" for layer in ("column", "row") for kind in ("grad_output", "input", "weight")]
    assert sorted(one["roles"]) == roles and all(report["roles"] == one["roles"] for report in two)
    for step in range(2):
        assert not torch.equal(two[0]["open_local"][step], two[1]["open_local"][step])
        for what in ("open", "scale"):
            assert torch.equal(two[0][what][step], two[1][what][step])
            assert torch.equal(two[0][what][step], one[what][step])
        assert (one["scale"][step] != 1).all()
    assert not torch.equal(one["scale"][0], one["scale"][1])
    integers = {f"pair.{n}" for n in ("column.input", "column.weight", "row.weight", "row.grad_output")}
    for name, scale in zip(one["roles"], one["scale"][0].tolist(), strict=True):
        assert (math.frexp(scale)[0] == 0.5) == (name in integers), "the data are as the module says"


@pytest.mark.parametrize("kind", DTYPES)
def test_captured_equals_eager(kind, ranks, alone):
    """All-reduces inside F and I are replayed, and complete before what reads them; digests hold no
    address."""
    for report in (*ranks, alone):
        replay = report["replay"][kind]
        assert replay["same"] == [True] * MICROBATCHES
        assert replay["digests"][0] == replay["digests"][1] and len(set(replay["digests"][0])) == 3


def test_names_in_logical_terms(ranks):
    """axes, start and global shape of each piece."""
    for rank, report in enumerate(ranks):
        items = {t["name"]: t for t in report["fp8"]["tensors"]}
        for kind in ("grad", "param", "master"):
            wanted = {
                "pair.column.weight": (("tp", None), (MIDDLE, INPUTS), (8 * rank, 0), (8, INPUTS)),
                "pair.column.bias": (("tp",), (MIDDLE,), (8 * rank,), (8,)),
                "pair.row.weight": ((None, "tp"), (OUTPUTS, MIDDLE), (0, 8 * rank), (OUTPUTS, 8)),
                "pair.row.bias": ((None,), (OUTPUTS,), (0,), (OUTPUTS,)),
            }
            for name, want in wanted.items():
                item = items[f"{kind}/{name}"]
                got = (item["axes"], item["global_shape"], item["start"], tuple(item["piece"].shape))
                assert got == want and ("tp" in item["replicated"]) == ("tp" not in want[0])


def test_refusals(ranks):
    wanted = ("a.up: 5 features cannot be cut into 2 equal pieces", "a.down: 5 features cannot be cut into 2 equal pieces")
    for report in ranks:
        assert all(m.startswith(w) for m, w in zip(report["refusals"], wanted, strict=False))
        assert "a.up: recipe current would" in report["refusals"][2] and "use delayed scaling" in report["refusals"][2]
