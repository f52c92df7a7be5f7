"""W of several microbatches as one product, in training.

The parity reference: with ``coalesce_w=n`` the main gradients are those of a plain run on one process that forms the same
groups and makes each group's gradient by one GEMM over its concatenated tokens, bit for bit. Schedules, stages and graphs do
not change a bit. Against n = 1 only the order of the float32 sums differs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from pipeline.actions import Kind
from pipeline.measure import Meter
from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.app.dry_run import describe
from qeffect_lm.config import Config
from qeffect_lm.contract.errors import LeaseError, StreamOrderError
from qeffect_lm.contract.streams import Access
from qeffect_lm.contract.trace import read_trace
from qeffect_lm.errors import UsageError
from qeffect_lm.fp8.gemm import accumulate_mm, accumulate_scaled_mm
from qeffect_lm.fp8.quantise import dequantise
from qeffect_lm.layers.joined import JoinedBuffers, place_bytes
from qeffect_lm.layers.linear import SplitLinear, WeightGradOperands
from tests.runs import CONFIG, assert_same_run, run_here, write_config
from tests.tiny import Trained, assert_moved, batch, config, differing, merged, train
from tests.unit.engine_support import tensors
from tests.unit.in_process import Ranks
from tools.explain import main as explain

M, STEPS = 5, 4
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {},
    "action": {"graphs__backend": "host_replay"},
    "step": {"graphs__backend": "host_replay", "graphs__scope": "step"},
    "body": {"graphs__backend": "host_replay", "graphs__scope": "step", "graphs__optimizer": "outside"},
}


def data(step: int):
    return batch(step, M)


def settings(n: int, graphs: str = "eager", **more: Any) -> Config:
    keys = {"pipeline__microbatches": M, "model__dropout": 0.1, "model__num_layers": 2, **GRAPHS[graphs], **more}
    return config(pipeline__coalesce_w=n, **keys)


@lru_cache
def eager(n: int) -> Trained:
    run = train(settings(n), STEPS, batches=data)
    assert_moved(run)
    return run


def assert_same(run: Trained, other: Trained) -> None:
    assert (run.losses, run.norms) == (other.losses, other.norms)
    assert all(torch.equal(a, b) for a, b in zip(run.scales, other.scales, strict=True))
    assert differing(run.tensors, other.tensors) == [] and differing(grads(run), grads(other)) == []


def grads(run: Trained) -> dict[str, torch.Tensor]:
    """The last step's main gradients."""
    flat = run.assembly.flat
    return {name: flat.grad(name) for name in flat.trainable_names}


# ---- parity --------------------------------------------------------------------------------------------------------------


def plain_groups(monkeypatch: pytest.MonkeyPatch, n: int) -> dict[str, int]:
    """Patch a run with ``coalesce_w=1`` to the reference; returns the products that it makes, per layer."""
    kept: dict[str, list[WeightGradOperands]] = {}
    products: dict[str, int] = {}

    def weight_grad(self: SplitLinear, context: Any) -> None:
        scope = context.active_scope()
        operands = scope.take_weight_grad(self.name)
        beta = scope.write_grad(self.weight_name)
        if operands.x_scale_inv is None:
            accumulate_mm(self.grad_view(), operands.dy, operands.x, beta)
            return
        mine = kept.setdefault(self.name, [])
        mine.append(operands)
        done = scope.microbatch + 1
        if done % n == 0 or done == M:
            x, dy = (torch.cat([getattr(o, part).view(torch.uint8) for o in mine], 1) for part in ("x", "dy"))
            x, dy = x.view(mine[0].x.dtype), dy.view(mine[0].dy.dtype)
            scales = mine[0].dy_scale_inv, mine[0].x_scale_inv
            assert all(torch.equal(o.dy_scale_inv, scales[0]) and torch.equal(o.x_scale_inv, scales[1]) for o in mine)
            accumulate_scaled_mm(self.grad_view(), dy, scales[0], x, scales[1], int(done > n))
            products[self.name] = products.get(self.name, 0) + 1
            mine.clear()

    monkeypatch.setattr(SplitLinear, "weight_grad", weight_grad)
    return products


@pytest.mark.parametrize("n", [2, 3, M])
def test_equals_the_plain_reference(n, monkeypatch):
    """Also where the step's last group is smaller."""
    products = plain_groups(monkeypatch, n)
    reference = train(settings(1), STEPS, batches=data)
    monkeypatch.undo()
    assert set(products.values()) == {STEPS * -(-M // n)} and len(products) == 8
    assert_same(eager(n), reference)


CAPTURED = pytest.mark.parametrize(
    ("n", "graphs"), [(2, "action"), (3, "step"), (2, "body"), *(pytest.param(n, g, marks=pytest.mark.long) for n, g in
                      ((3, "action"), (2, "step"), (M, "action"), (M, "step")))]
)  # fmt: skip


@CAPTURED
def test_captured_equals_eager(n, graphs):
    assert_same(train(settings(n, graphs), STEPS, batches=data), eager(n))


@pytest.mark.parametrize("graphs", ["eager", "action"])
def test_poisoned_places_change_nothing(graphs):
    """Debug mode poisons a group's places once its product is made, and not before: no bit is another."""
    assert_same(train(settings(2, graphs, contract__poison=True), STEPS, batches=data), eager(2))


def test_poison_reaches_the_places():
    """Control: after a step all places, and their scales, are NaN."""
    run = train(settings(2, contract__poison=True), 1, batches=data)
    joined = run.assembly.engine.stages[0].joined
    assert joined is not None and len(joined.groups) == 2
    first = run.assembly.plan.slots[0].w_slots.index
    used = {group: max(w % 2 + 1 for w in first.values() if w // 2 == group) for group in range(2)}
    for group, members in used.items():
        for tensor in joined.written(2 * group, members):
            assert tensor.float().isnan().all()


LAYERS = {(2, 1): [1, 1], (3, 1): [1, 0, 1], (1, 2): [1, 1], (2, 2): [1, 0, 1, 0], (3, 2): [1, 0, 0, 0, 1, 0]}
CASES = [(name, p, n) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved-1f1b", "dualpipev")
         for p in (1, 2, 3) for n in (2, 3)]  # fmt: skip
SHORT = {("1f1b", 2, 2), ("zb-v", 2, 3), ("zb-h2", 3, 2)}


@pytest.mark.parametrize(
    ("schedule", "p", "n"), [pytest.param(*case, marks=[pytest.mark.long] * (case not in SHORT)) for case in CASES]
)
def test_schedules_and_stages_agree(schedule, p, n, monkeypatch):
    """Losses, state and the last step's main gradients: one process's with the same n."""
    chunks = 2 if schedule in ("zb-v", "interleaved-1f1b", "dualpipev") else 1
    keys = {"schedule": schedule, "microbatches": M, "coalesce_w": n, "stage_layers": LAYERS.get((p, chunks))}
    keys["w_delay"] = int(schedule == "gpipe")
    ranks = Ranks(config(parallel__pp=p, pipeline=keys, model__dropout=0.1, model__num_layers=2), monkeypatch)
    ranks.prepare(data(0))
    losses = [{float(result.loss) for result in ranks.step(step, data(step))} for step in range(STEPS)]
    one = eager(n)
    assert losses == [{loss} for loss in one.losses]
    assert differing(merged([tensors(part) for part in ranks.parts]), one.tensors) == []
    made = [{name: part.flat.grad(name) for name in part.flat.trainable_names} for part in ranks.parts]
    assert differing(merged(made), grads(one)) == []


def test_replayed_on_two_ranks(monkeypatch):
    ranks = Ranks(settings(2, "step", parallel__pp=2, pipeline__schedule="zb-h1", pipeline__w_delay=0), monkeypatch)
    ranks.prepare(data(0))
    losses = [{float(result.loss) for result in ranks.step(step, data(step))} for step in range(STEPS)]
    assert losses == [{loss} for loss in eager(2).losses]
    assert differing(merged([tensors(part) for part in ranks.parts]), eager(2).tensors) == []


def test_replicas(monkeypatch):
    """Their gradients are reduced after a chunk's last product; graphs change no bit of it."""
    states = []
    for graphs in ("eager", "step"):
        ranks = Ranks(settings(2, graphs, parallel__dp=2), monkeypatch)
        ranks.prepare(data(0))
        losses = [{float(result.loss) for result in ranks.step(step, data(step))} for step in range(2)]
        assert all(len(both) == 1 for both in losses)
        states.append([tensors(part) for part in ranks.parts])
    assert differing(states[0][0], states[0][1]) == [] and differing(states[0][0], states[1][0]) == []


@pytest.mark.parametrize(
    "more",
    [{"precision__main_grads": "bfloat16"}, {"model__tie_word_embeddings": True}],
    ids=["main gradients in bfloat16", "tied embeddings"],
)
def test_with_other_main_gradients(more, monkeypatch):
    """The plain reference and graphs, where main gradients are rounded after each product, and where a weight has two."""
    plain_groups(monkeypatch, 3)
    reference = train(settings(1, **more), 2, batches=data)
    monkeypatch.undo()
    for graphs in ("eager", "action"):
        assert_same(train(settings(3, graphs, **more), 2, batches=data), reference)


def test_against_each_by_itself(monkeypatch):
    """The first step: same operands, another order of summation. Each float32 sum over all tokens t is within
    (t + 2) · 2⁻²⁴ · Σ|dy||x| of the exact one, so two of them differ by at most twice that; some do.
    """
    sizes: dict[str, torch.Tensor] = {}
    take = SplitLinear._accumulate

    def watched(self: SplitLinear, operands: WeightGradOperands, beta: int) -> None:
        if operands.x_scale_inv is not None:
            x, dy = dequantise(operands.x, operands.x_scale_inv), dequantise(operands.dy, operands.dy_scale_inv)
            size = dy.double().abs() @ x.double().abs().t()
            sizes[self.weight_name] = sizes.get(self.weight_name, 0) + size
        take(self, operands, beta)

    one = train(settings(1), 1, batches=data)
    monkeypatch.setattr(SplitLinear, "_accumulate", watched)
    several = train(settings(3), 1, batches=data)
    assert len(sizes) == 8 and one.losses == several.losses
    tokens, moved = M * 32, 0
    for name, grad in grads(one).items():
        other = grads(several)[name]
        if name not in sizes:  # the head, norms and the embedding: each microbatch by itself, as ever
            assert torch.equal(grad, other)
            continue
        distance = (grad.double() - other.double()).abs()
        assert (distance <= 2 * (tokens + 2) * 2.0**-24 * sizes[name]).all() and grad.abs().max() > 0
        moved += int(distance.max() > 0)
    assert moved >= 6


def test_calibration_and_evaluation_do_not_know_of_it():
    """The first scales are those of n = 1; evaluation between steps changes nothing, and its loss is the weights' alone."""
    scales, found = [], []
    for n in (1, 2):
        assembly = assemble(settings(n))
        assembly.prepare(data(0))
        scales.append(assembly.timeline.scale.clone())
        found.append(assembly.evaluator.run(data(9)))
    assert torch.equal(*scales) and found[0] == found[1]
    with_evaluation = train(settings(2), STEPS, batches=data, between=lambda assembly, _: assembly.evaluator.run(data(9)))
    assert_same(with_evaluation, eager(2))


# ---- one product a group, in its place -------------------------------------------------------------------------------------


def test_one_product_a_group(monkeypatch):
    """Per step and FP8 weight: as many products as groups, the first with beta 0, over the group's tokens; the head per
    microbatch."""
    seen: dict[str, list[tuple[int, int]]] = {}
    take = SplitLinear._accumulate

    def watched(self: SplitLinear, operands: WeightGradOperands, beta: int) -> None:
        seen.setdefault(self.name, []).append((operands.x.shape[1], beta))
        take(self, operands, beta)

    monkeypatch.setattr(SplitLinear, "_accumulate", watched)
    train(settings(2), 1, batches=data)
    assert seen.pop("head") == [(32, 0), *[(32, 1)] * 4]
    assert len(seen) == 8 and all(calls == [(64, 0), (64, 1), (32, 1)] for calls in seen.values())


def test_storages_are_the_plan_s_places():
    """Two bytes per token and feature pair: what the dry run reports, what the register knows, what a step's peak counts."""
    run = train(settings(2), 1, batches=data)
    assembly = run.assembly
    stage, places = assembly.engine.stages[0], assembly.plan.slots[0].w_slots.count[0]
    features = {"qkv": 32 + 64, "out": 32 + 32, "gate_up": 32 + 96, "down": 48 + 32}
    size = 2 * 32 * sum(features.values())
    assert stage.joined is not None and places == 4
    assert sum(t.nbytes for t in stage.joined.tensors().values() if t.dim()) == places * size
    assert f"rank 0, chunk 0: 4 places of {size:,} bytes, 0.1 MiB" in describe(assembly.config)
    assert "places of" not in describe(settings(1))
    assert all(assembly.register.knows(tensor) for tensor in stage.joined.tensors().values())
    sizes = []
    for one in (assembly, eager(1).assembly):
        meter = Meter(one.engine, one.register.knows)
        watch = meter.start()
        float(one.engine.step(9, data(9)).loss)
        report = meter.report(watch)
        assert report["peak_leases"] == report["peak_leases_predicted"]
        assert report["peak_activation_bytes"] == report["peak_activation_bytes_predicted"]
        sizes.append(meter._slots)
    assert sizes[0] - sizes[1] == stage.joined.nbytes


@pytest.mark.parametrize("graphs", ["action", "step"])
def test_the_fingerprint_knows(graphs):
    """Plan text, graphs by members and beta, effects; another n is another document."""
    lines = {n: assemble_and_capture(settings(n, graphs)).graph_document() for n in (1, 2)}
    assert "coalesce_w 2" in lines[2] and not any("members=" in line or "joined=" in line for line in lines[1])
    effects = [line for line in lines[2] if line.startswith("effects") and "members=2 joint=0" in line]
    assert len(effects) == 1 and "joined=layers." in effects[0] and "grads=head.weight" in effects[0]
    assert any("idle=layers." in line and "members" not in line for line in lines[2])


def assemble_and_capture(chosen: Config) -> Assembly:
    assembly = assemble(chosen)
    assembly.prepare(data(0))
    return assembly


@pytest.mark.parametrize("graphs", ["eager", "action", "step"])
def test_a_trace_tells_of_it(graphs, tmp_path, capsys):
    """The gradients that a W leaves to a later one, and the product with its own beta; explain says so in words."""
    path = tmp_path / "trace.jsonl"
    train(settings(2, graphs, contract__mode="trace", contract__trace_file=str(path)), 2, batches=data)
    runs, _ = read_trace(path)
    acts = [r for r in runs[0].records if r["effect"] in ("action", "replay")]
    told = [(r["microbatch"], r["joint_beta"], len(r["idle"]), len(r["joined"]), r["grads"]) for r in acts if r["kind"] == "W"]
    head = ["head.weight"]
    step = [(0, None, 8, 0, head), (1, 0, 0, 8, head), (2, None, 8, 0, head), (3, 1, 0, 8, head), (4, 1, 0, 8, head)]
    assert told == 2 * step and not any("joined" in r for r in acts if r["kind"] != "W")
    assert not [r for r in runs[0].records if r["effect"] == "empty"]
    assert explain([str(path), "--layer", "layers.0.mlp.down", "--kind", "grad", "--step", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    stories = ["left to the W of a later", "overwritten (beta 0)", "left to the W of a later", "added to (beta 1)", "added to"]
    assert len(lines) == 6 and all(story in line for story, line in zip(stories, lines[1:], strict=True))


# ---- faults ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", ["eager", "action"])
@pytest.mark.parametrize(
    ("schedule", "swapped", "error", "message"),
    [
        ("1f1b", ((Kind.W, 0), (Kind.W, 1)), LeaseError, "W of microbatch 0 has not handed its leases over"),
        ("gpipe", ((Kind.I, 0), (Kind.W, 1)), LeaseError, "W before I"),
        ("1f1b", ((Kind.W, 1), (Kind.F, 4)), LeaseError, "is claimed while .* retains it"),
    ],
)
def test_an_engine_that_leaves_its_plan(graphs, schedule, swapped, error, message):
    """Actions in another order than the plan's: refused at the first, before it runs; the next step is clean."""
    keys = {"pipeline__w_delay": 0, "pipeline__schedule": schedule}
    run = train(settings(2, graphs, **keys), 1, batches=data)
    engine = run.assembly.engine
    order = engine.actions
    at = {(a.kind, a.key[1]): place for place, a in enumerate(order) if a.chunk is not None}
    first, second = (at[one] for one in swapped)
    wrong = list(order)
    wrong[first], wrong[second] = wrong[second], wrong[first]
    engine.actions = tuple(wrong)
    with pytest.raises(error, match=message):
        engine.step(1, data(1))
    engine.actions = order
    clean = train(settings(2, graphs, **keys), 2, batches=data)
    assert float(engine.step(1, data(1)).loss) == clean.losses[1]
    assert differing(tensors(run.assembly), clean.tensors) == []


def test_a_stream_that_did_not_wait():
    """W on a stream of its own, the edges after I left out: trapped at the first W, by the place that it reads."""
    run = train(settings(2), 1, batches=data)
    engine, ledger, current = run.assembly.engine, run.assembly.ledger, ["compute"]
    engine.compute_stream = lambda: current[0]
    handler = engine._handlers[Kind.W]

    def on_b(action: Any) -> None:
        current[0] = "B"
        handler(action)
        current[0] = "compute"

    engine._handlers[Kind.W] = on_b
    wait = type(ledger.streams).wait
    ledger.streams.wait = lambda target, event: None if target == "B" else wait(ledger.streams, target, event)  # type: ignore
    with pytest.raises(StreamOrderError, match=r"0W0 \(read on stream 'B'\) is not ordered after 0I0 .*retained_W"):
        engine.step(1, data(1))


def test_the_stream_clock_sees_every_place():
    """A write to the first member's place that nobody waits for: the group's last W is refused, since it reads it too."""
    run = train(settings(2), 1, batches=data)
    engine, ledger = run.assembly.engine, run.assembly.ledger
    handler = engine._handlers[Kind.W]

    def writing(action: Any) -> None:
        if action.key[1] == 1:
            ledger.wait("elsewhere", ledger.record("compute"))
            ledger.launch("elsewhere", ((("retained_W", 0, 0), Access.WRITE),), "a stray write")
        handler(action)

    engine._handlers[Kind.W] = writing
    with pytest.raises(StreamOrderError, match=r"0W1 \(read on stream 'compute'\) is not ordered after a stray write"):
        engine.step(1, data(1))


# ---- configuration, resume ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"pipeline__coalesce_w": 0}, "pipeline.coalesce_w"),
        ({"pipeline__coalesce_w": M + 1}, "pipeline.coalesce_w 6 is more than pipeline.microbatches 5"),
        ({"precision__fp8__recipe": "current"}, "with precision.fp8.recipe current each microbatch has a scale of its own"),
        ({"precision__fp8__recipe": "none"}, "with precision.fp8.recipe none no linear is in FP8"),
        ({"precision__fp8__window": "microbatch"}, "in precision.fp8.window microbatch each microbatch has a scale of its own"),
        ({"model__backend": "te", "precision__dtype": "bfloat16", "run__device": "auto"}, "model.backend te cannot place"),
        ({"pipeline__schedule": "auto", "pipeline__w_delay": 0}, "schedule auto itself places each W"),
    ],
)
def test_refused(more, reason):
    assert settings(2).pipeline.coalesce_w == 2
    with pytest.raises(UsageError, match=reason):
        settings(**{"n": 2, **{name.replace("pipeline__coalesce_w", "n"): value for name, value in more.items()}})


def test_killed_and_resumed(tmp_path):
    """A run that ends at step 3 and goes on equals one that never did; with another n it is refused."""
    write_config(tmp_path, CONFIG.replace("w_delay: 1}", "w_delay: 1, coalesce_w: 3}").replace("{steps: 12}", "{steps: 6}"))
    flat = ["optim.min_lr_ratio=1", "optim.warmup_steps=0"]
    assert run_here(tmp_path, "whole", *flat)[0] == 0
    assert run_here(tmp_path, "parts", *flat, "train.steps=3")[0] == 0
    with pytest.raises(UsageError, match="pipeline.coalesce_w"):
        run_here(tmp_path, "parts", *flat, "pipeline.coalesce_w=2")
    assert run_here(tmp_path, "parts", *flat)[0] == 0
    assert assert_same_run(tmp_path, "whole", "parts") > 50


def test_a_frozen_weight_has_no_places():
    """Nobody multiplies its operands, so none are kept: neither storages nor, in the dry run, bytes."""
    linears = [m for m in assemble(settings(2)).engine.stages[0].chunk.modules() if isinstance(m, SplitLinear) and m.recipe]
    assert len(linears) == 8
    linears[3].weight.requires_grad_(False)
    joined = JoinedBuffers(linears, 4, 2, 16, "cpu")
    assert all(set(group) == {one.name for one in linears} - {linears[3].name} for group in joined.groups)
    features = [one.in_features + one.out_features for one in linears if one is not linears[3]]
    assert place_bytes(linears, 16) == 16 * sum(features)
