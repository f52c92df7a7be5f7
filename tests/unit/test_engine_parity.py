"""One answer for all schedules, stages and execution modes, bit for bit (one process; with messages: tests/dist)."""

from __future__ import annotations

import pytest
import torch

from pipeline.plan import build_plan
from qeffect_lm.app.assemble import assemble
from tests.tiny import Batch, assert_moved, batch, config, differing, local_plan, train

FP8 = {"precision__fp8__recipe": "delayed"}
FLOAT64 = {"precision__fp8__recipe": "none", "precision__dtype": "float64"}
VARIANTS = {
    "fp8": FP8,
    "fp8, dropout 0.1": {**FP8, "model__dropout": 0.1},
    "float64": FLOAT64,
    "bfloat16": {"precision__dtype": "bfloat16"},
    "current scaling": {"precision__fp8__recipe": "current"},
    "ends in high precision": {"precision__fp8__high_precision_first": 1, "precision__fp8__high_precision_last": 1},
}


@pytest.fixture(scope="module")
def reference():
    """The eager run of each variant, made once."""
    runs = {}

    def get(variant: str):
        if variant not in runs:
            runs[variant] = train(config(**VARIANTS[variant]))
            assert_moved(runs[variant])
        return runs[variant]

    return get


def assert_same(run, other) -> None:
    assert run.losses == other.losses and run.norms == other.norms
    assert differing(run.tensors, other.tensors) == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_captured_equals_eager(variant, reference):
    """Six steps with a history of three: the scales roll over more than once past the history's length."""
    assert_same(train(config(**VARIANTS[variant], graphs__backend="host_replay")), reference(variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_equal_one_process(variant, stages, reference):
    assert_same(train(config(**VARIANTS[variant]), plan=local_plan(stages, 4)), reference(variant))


@pytest.mark.parametrize("variant", ["fp8", "fp8, dropout 0.1", "float64"])
@pytest.mark.parametrize(("schedule", "w_delay"), [("gpipe", 0), ("1f1b", 0), ("1f1b", 3), ("gpipe", 2)])
def test_schedules_agree(variant, schedule, w_delay, reference):
    settings = config(**VARIANTS[variant], pipeline__schedule=schedule, pipeline__w_delay=w_delay)
    assert_same(train(settings), reference(variant))


def test_window_microbatch_captured_equals_eager():
    """As Transformer Engine rolls: after each forward and each backward, from scale 1."""
    settings = {"precision__fp8__window": "microbatch", "precision__fp8__history": 2}
    eager = train(config(**settings))
    assert_moved(eager)
    assert_same(train(config(**settings, graphs__backend="host_replay")), eager)


def test_windows_differ():
    """Control: the two windows are not the same arithmetic."""
    assert train(config(precision__fp8__window="microbatch")).losses != train(config()).losses


def test_control_other_seed_or_data_differs(reference):
    """The comparison can fail: another seed, other data, another dropout key give other bits."""
    run = reference("fp8")
    assert train(config(run__seed=7)).losses != run.losses
    assert train(config(), batches=lambda i: batch(100 + i)).losses != run.losses
    assert train(config(model__dropout=0.1)).losses != run.losses


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_few_and_indivisible_microbatches(stages, microbatches):
    """P1: m = 1, m below the number of stages, m not divisible by it."""

    def data(i: int) -> Batch:
        return batch(i, microbatches)

    settings = config(pipeline__microbatches=microbatches)
    one = train(settings, 3, batches=data)
    assert_same(train(settings, 3, batches=data, plan=local_plan(stages, microbatches)), one)


def test_uneven_layers_and_a_stage_without_layers():
    """G6: layers split 3, 0, 1: the middle stage has no parameters and passes through."""
    settings = config()
    plan = local_plan(3, 4)
    uneven = config(parallel__pp=3, pipeline__stage_layers=[3, 0, 1])
    from qeffect_lm.parallel.mesh import Mesh

    one = train(settings)
    assert_same(train(uneven, plan=plan, mesh=Mesh({})), one)


def test_uneven_token_counts_equal_one_big_batch():
    """G4: different numbers of valid tokens per microbatch: the loss and gradients are those of one big microbatch."""
    double = {**FLOAT64, "optim__clip_norm": None}
    masked = batch(1, 4)
    for m in range(4):
        masked.loss_mask[m, :, : 4 * m] = 0
    masked.tokens = int(masked.loss_mask.sum())
    flat = Batch(
        masked.inputs.reshape(1, 8, 16), masked.targets.reshape(1, 8, 16), masked.loss_mask.reshape(1, 8, 16), masked.tokens
    )
    split = train(config(**double), 1, batches=lambda i: masked)
    whole = train(config(**double, pipeline__microbatches=1, data__microbatch_size=8), 1, batches=lambda i: flat)
    assert split.losses[0] == pytest.approx(whole.losses[0], rel=1e-14)
    # The order of summation differs (4 sums of 2 rows against 1 of 8), so the bound is float64's, not bitwise.
    for name in split.assembly.flat.trainable_names:
        torch.testing.assert_close(
            split.assembly.flat.grad(name), whole.assembly.flat.grad(name), rtol=1e-11, atol=1e-14, msg=name
        )


def test_loss_falls_on_a_repeated_batch():
    """The gradients mean something: a repeated batch is learnt."""
    run = train(config(train__steps=30), 30, batches=lambda i: batch(0))
    assert run.losses[-1] < run.losses[0] - 2.0


def test_plan_is_what_runs():
    """The engine runs the plan's actions and no others: the plan of the configuration is the engine's."""
    settings = config()
    plan = build_plan("1f1b", 1, 4, 1)
    assert train(settings, 1).assembly.plan.text() == plan.text()


def test_dropout_masks_change_with_step_and_microbatch():
    """The same data and (almost) the same weights: only the masks differ, between steps and between microbatches."""
    still = {"precision__fp8__recipe": "none", "optim__lr": 1e-30, "model__dropout": 0.1, "pipeline__microbatches": 2}

    def repeated(step: int) -> Batch:
        data = batch(0, 2)
        data.inputs[1], data.targets[1] = data.inputs[0], data.targets[0]
        return data

    run = train(config(**still), 3, batches=repeated)
    assert len(set(run.losses)) == 3
    per_microbatch = run.assembly.engine.end.losses
    assert float(per_microbatch[0]) != float(per_microbatch[1])


def test_calibration_uses_the_step_s_divisor():
    """Twice the tokens halve every gradient, so the gradients' first scales double exactly; the others stay."""
    scales = []
    for factor in (1, 2):
        assembly = assemble(config())
        data = batch(0)
        data.tokens *= factor
        assembly.prepare(data)
        scales.append({role.name: float(assembly.timeline.scale_of(role.name)) for role in assembly.timeline.roles})
    for name, scale in scales[0].items():
        assert scales[1][name] == scale * (2 if name.endswith("grad_output") else 1), name


def test_evaluation_puts_generators_back():
    """A layer that draws in evaluation (as fused attention may, even without dropout) does not move training's generators."""
    run = train(config(), 1)
    chunk = run.assembly.engine.stages[0].chunk
    chunk.register_forward_pre_hook(lambda *_: (torch.rand(3), None)[1])
    before = torch.get_rng_state()
    first = run.assembly.evaluator.run(batch(9))
    assert torch.equal(torch.get_rng_state(), before) and run.assembly.evaluator.run(batch(9)) == first


def test_calibration_keeps_borders_only(monkeypatch):
    """It runs in high precision: each block's forward once more in backward, the same scales as with everything kept."""
    from torch.utils.checkpoint import checkpoint

    blocks = []

    def recording(block, x, context, **options):
        blocks.append(block.name)
        return checkpoint(block, x, context, **options)

    monkeypatch.setattr("models.spec.checkpoint", recording)
    lean = train(config(model__dropout=0.1), 1)
    names = [block.name for block in lean.assembly.engine.stages[0].chunk.blocks]
    assert blocks == names  # calibration asks for it, no training step does
    monkeypatch.setattr("models.spec.checkpoint", lambda block, x, context, **options: block(x, context))
    full = train(config(model__dropout=0.1), 1)
    assert torch.equal(lean.scales[0], full.scales[0]) and differing(lean.tensors, full.tensors) == []
