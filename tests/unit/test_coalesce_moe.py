"""W of several microbatches as one product, of experts: as tests/unit/test_coalesce.py, and what routing adds to it.

The parity reference: the main gradient of an expert is that of a run with ``coalesce_w=1`` that forms the same groups and makes
each by one product over the expert's rows of all of them, one microbatch after the other, each with the scales it was quantised
with; bit for bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from pipeline.measure import Meter
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.app.ceilings import ceilings
from qeffect_lm.app.clock import Clock
from qeffect_lm.app.dry_run import describe
from qeffect_lm.app.layout import Layout
from qeffect_lm.config import Config, load_config
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.gemm import accumulate_mm
from qeffect_lm.fp8.grouped import Rows
from qeffect_lm.fp8.quantise import dequantise
from qeffect_lm.layers import grouped
from qeffect_lm.layers.grouped import GroupedLinear, GroupOperands
from qeffect_lm.layers.joined import JoinedBuffers, JoinedGroups, place_bytes
from qeffect_lm.layers.moe import MoE, mixtures
from qeffect_lm.parallel.expert import ExpertParallel
from qeffect_lm.parallel.tensor import TensorParallel
from tests.helpers import ROOT
from tests.runs import CONFIG, assert_same_run, run_here, write_config
from tests.tiny import Trained, assert_moved, batch, config, differing, merged, train
from tests.unit.engine_support import assert_a_swapped_w_is_trapped, tensors
from tests.unit.in_process import Ranks
from tests.unit.test_coalesce import CAPTURED, GRAPHS, M, assert_same, data, grads, plain_groups
from tests.unit.test_moe_engine import ASLEEP, route, sleepers

STEPS, EXPERTS = 4, 8
ROWS = M * 32 * 2  # of a step and layer


def settings(n: int, graphs: str = "eager", **more: Any) -> Config:
    moe = {"num_experts": EXPERTS, "aux_loss_coef": 0.05}
    model = {"model__family": "mixtral", "model__moe": moe, "model__num_layers": 2}
    return config(**{**model, "pipeline__microbatches": M, "pipeline__coalesce_w": n, **GRAPHS[graphs], **more})


@lru_cache
def eager(n: int) -> Trained:
    run = train(settings(n), STEPS, batches=data)
    assert_moved(run)
    return run


# ---- parity --------------------------------------------------------------------------------------------------------------


def parts(operands: GroupOperands, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's rows of one microbatch, dY and x, as numbers."""
    assert operands.groups is not None and operands.dy is not None and operands.x is not None
    first, last = operands.groups.offsets[expert : expert + 2].tolist()

    def wide(rows: Rows) -> torch.Tensor:
        assert rows.scale_inv is not None
        return dequantise(rows.whole[first:last], rows.scale_inv[expert])

    return wide(operands.dy), wide(operands.x)


def plain_experts(monkeypatch: pytest.MonkeyPatch, n: int, m: int = M) -> dict[str, int]:
    """Patch a run with ``coalesce_w=1`` to the reference, its other linears too; returns how often several microbatches' scales
    of an expert differed, and how often one of them had no rows."""
    kept: dict[str, list[GroupOperands]] = {}
    seen = {"scales": 0, "idle": 0}

    def weight_grad(self: GroupedLinear, context: Any) -> None:
        scope = context.active_scope()
        mine = kept.setdefault(self.name, [])
        mine.append(scope.take_weight_grad(self.name))
        for expert in self.experts:
            scope.write_grad(expert.weight_name)
        done = scope.microbatch + 1
        if done % n and done != m:
            return
        for number, expert in enumerate(self.experts):
            found = [parts(one, number) for one in mine]
            seen["scales"] += len({float(one.x.scale_inv[number]) for one in mine}) > 1
            seen["idle"] += any(not len(dy) for dy, _ in found) and any(len(dy) for dy, _ in found)
            dy, x = (torch.cat(of) for of in zip(*found, strict=True))
            if len(dy):
                accumulate_mm(expert.grad_view(), dy.t(), x.t(), int(done > n))
            elif done <= n:
                expert.grad_view().zero_()
        mine.clear()

    plain_groups(monkeypatch, n)
    monkeypatch.setattr(GroupedLinear, "weight_grad", weight_grad)
    return seen


@pytest.mark.parametrize("n", [2, 3, M])
def test_equals_the_plain_reference(n, monkeypatch):
    """Also where the step's last group is smaller, and where a microbatch has no rows of an expert."""
    seen = plain_experts(monkeypatch, n)
    reference = train(settings(1), STEPS, batches=data)
    monkeypatch.undo()
    assert seen["idle"] > 0 or n == 2
    assert_same(eager(n), reference)


@CAPTURED
def test_captured_equals_eager(n, graphs):
    assert_same(train(settings(n, graphs), STEPS, batches=data), eager(n))


def four(step: int):
    return batch(step, microbatches=4)


def slept(n: int, graphs: str = "eager", **keys: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Experts 4 and 5 sleep, sleep, work, sleep, sleep: when they wake up, each microbatch has a scale of its own."""
    moe = {"num_experts": 6, "aux_loss_coef": 0.0}
    assembly = assemble(settings(n, graphs, model__moe=moe, pipeline__microbatches=4, **keys))
    route(assembly, ASLEEP)
    assembly.prepare(four(0))
    losses = sleepers(assembly, lambda number: assembly.engine.step(number, four(number)), checked=True)
    return losses, tensors(assembly)


def test_experts_that_wake_up(monkeypatch):
    """S2 with members whose scales differ, captured while they sleep: the plain reference, eagerly and in graphs."""
    monkeypatch.setattr("tests.unit.test_coalesce.M", 4)
    seen = plain_experts(monkeypatch, 2, 4)
    losses, state = slept(1)
    monkeypatch.undo()
    assert seen["scales"] > 0
    for graphs, more in (("eager", {}), ("action", {}), ("step", {}), ("action", {"model__recompute": "full"})):
        found = slept(2, graphs, **more)
        assert found[0] == losses and differing(found[1], state) == [], (graphs, more)


@pytest.mark.parametrize(
    "more",
    [{"model__recompute": "full"}, {"model__recompute": "selective"}, {"contract__poison": True},
     {"contract__poison": True, "model__recompute": "full"}],
    ids=["full", "selective", "poison", "poison, full"],
)  # fmt: skip
@pytest.mark.parametrize("graphs", ["eager", "action"])
def test_however_it_runs(graphs, more):
    """x's operand comes into its place in I where F runs again; debug mode poisons places once their product is made."""
    assert_same(train(settings(2, graphs, **more), STEPS, batches=data), eager(2))


def test_poison_reaches_the_places():
    """Control: after a step operands and scales are NaN, and the splits say that there are no rows."""
    joined = train(settings(2, contract__poison=True), 1, batches=data).assembly.engine.stages[0].joined
    assert joined is not None
    found = [one for group in joined.groups for one in group.values() if isinstance(one, JoinedGroups)]
    assert len(found) == 2 * 4
    for groups in found:
        for name, tensor in groups.tensors().items():
            assert not tensor.any() if name == "offsets" else tensor.float().isnan().all(), name


@pytest.mark.parametrize(
    ("schedule", "p", "n"), [("zb-v", 2, 3), *(pytest.param(*case, marks=pytest.mark.long) for case in
                             (("1f1b", 2, 2), ("zb-h1", 2, 2), ("zb-h2", 2, 3), ("dualpipev", 2, 2), ("gpipe", 1, 2)))]
)  # fmt: skip
def test_schedules_and_stages_agree(schedule, p, n, monkeypatch):
    """Losses, state and the last step's main gradients, captured: one process's with the same n, eagerly."""
    layers = [1, 0, 1, 0] if schedule in ("zb-v", "dualpipev") else None
    keys = {"pipeline__schedule": schedule, "pipeline__stage_layers": layers, "pipeline__w_delay": 0, "parallel__pp": p}
    ranks = Ranks(settings(n, "action", **keys), monkeypatch)
    ranks.prepare(data(0))
    losses = [{float(result.loss) for result in ranks.step(step, data(step))} for step in range(STEPS)]
    assert losses == [{loss} for loss in eager(n).losses]
    assert differing(merged([tensors(part) for part in ranks.parts]), eager(n).tensors) == []
    made = [{name: part.flat.grad(name) for name in part.flat.trainable_names} for part in ranks.parts]
    assert differing(merged(made), grads(eager(n))) == []


def test_against_each_by_itself(monkeypatch):
    """The first step: same operands, another order of summation. A float32 sum over an expert's t rows of the step is within
    (t + 2) · 2⁻²⁴ · Σ|dy||x| of the exact one, so two of them differ by at most twice that; some do."""
    sizes: dict[str, torch.Tensor] = {}
    take = GroupedLinear.weight_grad

    def watched(self: GroupedLinear, context: Any) -> None:
        scope = context.active_scope()
        operands = scope.ledger.leases.handle(scope.chunk, scope.microbatch, self.name).payload
        for number, expert in enumerate(self.experts):
            dy, x = parts(operands, number)
            sizes[expert.weight_name] = sizes.get(expert.weight_name, 0) + dy.double().abs().t() @ x.double().abs()
        take(self, context)

    with monkeypatch.context() as patch:
        patch.setattr(GroupedLinear, "weight_grad", watched)
        one = train(settings(1), 1, batches=data)
    several = train(settings(3), 1, batches=data)
    assert len(sizes) == 2 * 2 * EXPERTS and one.losses == several.losses
    moved = 0
    for name, size in sizes.items():
        distance = (grads(one)[name].double() - grads(several)[name].double()).abs()
        assert (distance <= 2 * (ROWS + 2) * 2.0**-24 * size).all() and grads(one)[name].abs().max() > 0
        moved += int(distance.max() > 0)
    assert moved >= EXPERTS
    for name in grads(one):
        if name.endswith(("router.weight", "norm.weight", "embedding.weight", "head.weight")):
            assert torch.equal(grads(one)[name], grads(several)[name]), name


# ---- one product a group, in its place -------------------------------------------------------------------------------------


def test_one_product_a_group(monkeypatch):
    """Per step and linear of a layer's experts as many products as groups, the first with beta 0, each over all members."""
    seen: list[tuple[int, int]] = []
    take = grouped.accumulate_joined_mm

    def watched(outs: Any, dy: Rows, x: Rows, members: Any, beta: int) -> None:
        seen.append((members.offsets.shape[0], beta))
        take(outs, dy, x, members, beta)

    monkeypatch.setattr(grouped, "accumulate_joined_mm", watched)
    train(settings(2), 1, batches=data)
    assert seen == [(2, 0)] * 4 + [(2, 1)] * 4 + [(1, 1)] * 4


def test_storages_are_the_plan_s_places():
    """A byte a place and feature, scales and splits: what the dry run reports, the register knows, and a step's peak counts."""
    assembly = train(settings(2), 1, batches=data).assembly
    stage, places = assembly.engine.stages[0], assembly.plan.slots[0].w_slots.count[0]
    assert stage.joined is not None and places == 4
    of_experts = (64 + 16 * EXPERTS) * (32 + 96 + 48 + 32) + 2 * 4 * (3 * EXPERTS + 1)  # gate_up and down
    size = 2 * (32 * (32 + 64 + 32 + 32) + of_experts)
    assert sum(t.nbytes for t in stage.joined.tensors().values() if t.dim()) == places * size
    assert f"rank 0, chunk 0: 4 places of {size:,} bytes, 0.3 MiB" in describe(assembly.config)
    layout = Layout(assembly.config)
    assert layout.place(layout.chunk(assembly.plan, 0)) == size == place_bytes(stage.chunk.modules(), 32)
    assert all(assembly.register.knows(tensor) for tensor in stage.joined.tensors().values())
    sizes = []
    for one in (assembly, train(settings(1), 1, batches=data).assembly):
        meter = Meter(one.engine, one.register.knows)
        watch = meter.start()
        float(one.engine.step(9, data(9)).loss)
        report = meter.report(watch)
        assert report["peak_leases"] == report["peak_leases_predicted"]
        assert report["peak_activation_bytes"] == report["peak_activation_bytes_predicted"]
        sizes.append(meter._slots)
    assert sizes[0] - sizes[1] == stage.joined.nbytes


@pytest.mark.parametrize(("ep", "tp", "cut"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 1, 2)])
def test_places_for_any_routing(ep, tp, cut):
    """As many rows as every rank's tokens could bring here together: those that a captured exchange has."""
    spread = ExpertParallel(ep * tp, 0, cut=cut * tp) if ep * tp * cut > 1 else None
    (moe,) = mixtures(assemble(settings(2, model__num_layers=1)).engine.stages[0].chunk)
    moe.router.tp = TensorParallel(tp, 0, True) if tp > 1 else None
    other = MoE("x", moe.router, list(moe.experts)[: EXPERTS // (ep * tp)], 0, spread)  # type: ignore[arg-type]
    each = EXPERTS // (ep * tp)
    assert other.gate_up.most_rows(64) == other.down.most_rows(64) == ep * tp * (64 // tp) * min(2, each)


def test_frozen_experts_have_no_places():
    """Nobody multiplies the operands of weights that are not trained; those of the other product are joined all the same."""
    (moe, _) = mixtures(assemble(settings(2)).engine.stages[0].chunk)
    before = place_bytes(moe.modules(), 32)
    for expert in moe.down.experts:
        expert.weight.requires_grad_(False)
    joined = JoinedBuffers(moe.modules(), 4, 2, 32, "cpu")
    assert [list(group) for group in joined.groups] == [[moe.gate_up.name]] * 2
    assert before - place_bytes(moe.modules(), 32) == (64 + 16 * EXPERTS) * (48 + 32) + 4 * (3 * EXPERTS + 1)


def test_a_plan_takes_the_rate_of_all_rows():
    """Seconds of a layer's products: W of experts goes by an expert's rows of the whole group, F and I by one microbatch's."""
    device, found = ceilings("h200"), []
    for n in (1, 2):
        chosen = load_config(ROOT / "models/configs/bench-moe.yaml", [f"pipeline.coalesce_w={n}", "pipeline.microbatches=4"])
        layout = Layout(chosen)
        block = next(block for block in layout.blocks if block.layer == 1)
        clock = Clock(layout, None, device, None)
        others = [param for param in clock._matrices(block) if layout.specs[param.name].expert is None]
        dense = sum(device.products["fp8"].seconds("W", layout.tokens * n, *param.shape) / n for param in others)
        f, i, w = clock._products(block, True)
        found.append((f, i, w - dense))
        rows = clock._rows() * device.expert_imbalance / 8
        flop = 2 * rows * sum(param.numel for param in clock._matrices(block) if param not in others)
        assert w - dense == pytest.approx(flop / device.experts["fp8"].at("W", rows * n))
    assert found[0][:2] == found[1][:2] and found[1][2] < found[0][2]


@pytest.mark.parametrize("graphs", ["action", "step"])
def test_the_fingerprint_knows(graphs):
    """What a W leaves to a later one and what it writes for others: every expert's weight."""

    def document(n: int) -> list[str]:
        assembly: Assembly = assemble(settings(n, graphs))
        assembly.prepare(data(0))
        return assembly.graph_document()

    effects = [line for line in document(2) if line.startswith("effects")]
    made = [line for line in effects if "members=2 joint=0" in line]
    assert len(made) == 1 and f"layers.1.moe.experts.{EXPERTS - 1}.down.weight" in made[0].split("joined=")[1]
    assert any(f"layers.0.moe.experts.{EXPERTS - 1}.gate_up.weight" in line.partition("idle=")[2] for line in effects)


def test_a_member_that_did_not_run_is_trapped():
    """The last W of a group before the first's: refused before it runs, and the next step is clean."""
    assert_a_swapped_w_is_trapped(settings(2, "action", pipeline__w_delay=0), data)


def test_killed_and_resumed(tmp_path):
    """A run that ends at step 3 and goes on equals one that never did; with another n it is refused."""
    text = CONFIG.replace("num_layers: 4", "num_layers: 2, family: mixtral, moe: {num_experts: 4, aux_loss_coef: 0.05}")
    write_config(tmp_path, text.replace("w_delay: 1}", "w_delay: 1, coalesce_w: 3}").replace("{steps: 12}", "{steps: 5}"))
    flat = ["optim.min_lr_ratio=1", "optim.warmup_steps=0"]
    assert run_here(tmp_path, "whole", *flat)[0] == 0
    assert run_here(tmp_path, "parts", *flat, "train.steps=3")[0] == 0
    with pytest.raises(UsageError, match="pipeline.coalesce_w"):
        run_here(tmp_path, "parts", *flat, "pipeline.coalesce_w=2")
    assert run_here(tmp_path, "parts", *flat)[0] == 0
    assert assert_same_run(tmp_path, "whole", "parts") > 200
