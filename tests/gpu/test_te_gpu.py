"""Backend ``te`` on a real GPU: plain Transformer Engine and contracted agree bit for bit, and so do eager and captured.

    python -m pytest -q tests/gpu/test_te_gpu.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.contract.leases import Slot
from qeffect_lm.contract.timeline import Direction
from qeffect_lm.parallel.mesh import Mesh
from tests.gpu.captures import assert_same_captures
from tests.helpers import run_distributed
from tests.tiny import Batch, Trained, assert_moved, batch, config, differing, local_plan, merged, same_bits, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DEVICE, MICROBATCHES, STEPS = "cuda", 4, 7
ORDER = "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3".split()  # last in, first out it is not
SHAPE: dict[str, Any] = {
    "run__device": "cuda",
    "model__backend": "te",
    "model__hidden_size": 256,
    "model__num_heads": 4,
    "model__num_kv_heads": 2,
    "model__ffn_size": 512,
    "model__num_layers": 4,
    "precision__dtype": "bfloat16",
    "data__seq_len": 128,
}


GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {},
    "action": {"graphs__backend": "cuda_graphs"},
    "step": {"graphs__backend": "cuda_graphs", "graphs__scope": "step"},
}


def settings(recipe: str, window: str = "step", **more: Any) -> Any:
    return config(**{**SHAPE, "precision__fp8": {"recipe": recipe, "history": 4, "window": window}, **more})


def data(step: int) -> Batch:
    return batch(step, MICROBATCHES, 2, 128)


# ---- promise 2: plain equals contracted ---------------------------------------------------------------------------------


@dataclass
class Seen:
    """Everything of some steps that two drivers can be compared by."""

    outs: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: list[dict[str, tuple[float, list[float]]]] = field(default_factory=list)


def activations(step: int, microbatch: int, which: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Changing data: another seed and another size each time, so that scales move."""
    generator = torch.Generator(DEVICE).manual_seed(1000 * step + 10 * microbatch + which)
    size = (1.0 + 0.35 * ((5 * step + 3 * microbatch) % 7)) * (1.0 if which == 0 else 1e-3)
    return (torch.randn(shape, generator=generator, device=DEVICE) * size).bfloat16()


@torch.no_grad()
def new_weights(assembly: Assembly, step: int) -> None:
    """An outside writer instead of an optimizer: the same bytes for everybody."""
    generator = torch.Generator(DEVICE).manual_seed(77 + step)
    for name in assembly.flat.names:
        parameter = assembly.flat.param(name)
        noise = torch.randn(parameter.shape, generator=generator, device=DEVICE) * 0.02
        parameter.copy_((noise * (1 + 0.3 * (step % 3)) + (1.0 if "norm" in name else 0.0)).bfloat16())
    assembly.ledger.versions.bump()
    assembly.rebuild_caches()


def contracted(recipe: str, steps: int = STEPS, between: Any = None, **more: Any) -> tuple[Seen, Assembly]:
    """The middle chunk of three, driven action by action under its ledger."""
    plan = local_plan(3, MICROBATCHES, "microbatch")
    assembly = assemble(settings(recipe, "microbatch", model__num_layers=6, **more), plan=plan)
    stage, ledger, end = assembly.engine.stages[1], assembly.ledger, assembly.engine.end
    slots = [stage.make_slot() for _ in range(MICROBATCHES)]
    seen, shape = Seen(), stage.shape.activation
    assembly.flat.grad_buffer.fill_(7.0)
    for step in range(steps):
        new_weights(assembly, step)
        ledger.begin_step(step)
        for action in ORDER:
            kind, m = action[0], int(action[1:])
            places = (Slot("I", 1, m), Slot("W", 1, m))
            beta = None if kind == "F" else int(m > 0)
            if kind == "F":
                slots[m].x.copy_(activations(step, m, 0, shape))
            elif kind == "I":
                slots[m].dy.copy_(activations(step, m, 1, shape))
            with ledger.action(kind, 1, m, beta=beta, slots=places) as scope:
                {"F": stage.forward, "I": stage.input_grad, "W": stage.weight_grad}[kind](slots[m], scope)
            if kind in "FI":
                direction = Direction.FORWARD if kind == "F" else Direction.BACKWARD
                ledger.commit(assembly.timeline.epochs[direction], (direction,))
                end.commit_direction_(direction)
            if kind == "F":
                seen.outs[f"{step} out {m}"] = slots[m].out.clone()
            elif kind == "I":
                assert slots[m].dx is not None
                seen.outs[f"{step} dx {m}"] = slots[m].dx.clone()  # type: ignore[union-attr]
        ledger.leases.end_step()
        ledger.abandon_step()
        for block in stage.chunk.blocks:
            for name in assembly.flat.trainable_names:
                if name.startswith(f"{block.name}."):
                    seen.outs[f"{step} grad {name}"] = assembly.flat.grad(name).clone()
        timeline = assembly.timeline
        rows = {role.name: i for i, role in enumerate(timeline.roles)}
        seen.scales.append({n: (float(timeline.scale[i]), timeline.history[i].tolist()) for n, i in rows.items()})
        if between is not None:
            between(assembly, step)
    return seen, assembly


def plain(recipe: str, twin: Assembly, steps: int = STEPS) -> Seen:
    """The same layers, data and weights; Transformer Engine alone rolls the scales and owns the queue."""
    from qeffect_lm.layers.te import load
    from qeffect_lm.layers.te.block import TEBlock
    from qeffect_lm.layers.te.recipe import library_recipe
    from tests.gpu.plain_te import PlainStack

    library = load(torch.device("cuda", torch.cuda.current_device()), recipe)
    stage = twin.engine.stages[1]
    blocks = [block for block in stage.chunk.blocks if isinstance(block, TEBlock)]
    ours = blocks[0].native.attention.qkv.recipe
    stack = PlainStack(library, blocks, None if ours is None else library_recipe(library, ours, twin.timeline))
    seen, shape = Seen(), stage.shape.activation
    for step in range(steps):
        new_weights(twin, step)
        stack.load({name: twin.flat.param(name) for name in twin.flat.names})
        for action in ORDER:
            kind, m = action[0], int(action[1:])
            if kind == "F":
                seen.outs[f"{step} out {m}"] = stack.forward(m, activations(step, m, 0, shape)).clone()
            elif kind == "I":
                seen.outs[f"{step} dx {m}"] = stack.input_grad(m, activations(step, m, 1, shape)).clone()
            else:
                stack.weight_grad()
        seen.outs.update({f"{step} grad {name}": grad.clone() for name, grad in stack.main_grads().items()})
        if recipe == "delayed":
            seen.scales.append({name: s for block in stack.blocks for name, s in block.scales().items()})
    return seen


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
@pytest.mark.parametrize("fp8", [{}, {"amax": "most_recent", "margin": 1}], ids=["", "recent"])
def test_contract_equals_plain(recipe, fp8):
    if fp8 and recipe != "delayed":
        pytest.skip("keys of delayed scaling")
    more = {f"precision__fp8__{key}": value for key, value in fp8.items()}
    contract_equals_plain(recipe, **more)


def contract_equals_plain(recipe: str, **more: Any) -> None:
    """Outputs, input gradients, main gradients of all microbatches and steps; scales and histories after every step."""
    ours, assembly = contracted(recipe, **more)
    theirs = plain(recipe, assembly)
    assert differing(ours.outs, theirs.outs) == []
    assert all(bool(t.isfinite().all()) and float(t.abs().max()) > 0 for t in ours.outs.values())
    if recipe == "delayed":
        for step, (mine, other) in enumerate(zip(ours.scales, theirs.scales, strict=True)):
            for role, (scale, history) in other.items():
                assert mine[role][0] == scale, (step, role)
                assert mine[role][1][: len(history)] == history, (step, role)
                assert step == 0 or scale != 1.0
        for role in theirs.scales[0]:
            assert len({step[role][0] for step in ours.scales}) > 2, role
    other, _ = contracted(recipe, 2, **more)
    assert differing(other.outs, {k: v for k, v in ours.outs.items() if int(k.split()[0]) < 2}) == []  # and it repeats


def test_evaluation_in_between_does_not_move_scales():
    """Where plain Transformer Engine lets a forward without gradients change training scales."""

    def evaluate(assembly: Assembly, step: int) -> None:
        stage = assembly.engine.stages[1]
        from qeffect_lm.layers.context import Phase

        slot = stage.make_slot(Phase.EVAL)
        slot.x.copy_(activations(step, 0, 0, stage.shape.activation) * 50)
        before = assembly.timeline.open_amax.clone(), assembly.timeline.scale.clone()
        stage.evaluate(slot)
        assert torch.equal(before[0], assembly.timeline.open_amax) and torch.equal(before[1], assembly.timeline.scale)

    with_evaluation, _ = contracted("delayed", 4, evaluate)
    without, _ = contracted("delayed", 4)
    assert differing(with_evaluation.outs, without.outs) == []
    assert with_evaluation.scales == without.scales


# ---- promise 1: captured equals eager -----------------------------------------------------------------------------------


@lru_cache
def trained(graphs: str, recipe: str = "delayed", window: str = "step", plan: str = "1f1b", steps: int = 8) -> Trained:
    made = None if plan == "1f1b" else local_plan(int(plan), MICROBATCHES, window)
    return train(settings(recipe, window, **GRAPHS[graphs], model__dropout=0.1), steps, plan=made, batches=data)


@pytest.mark.parametrize("graphs", ["action", "step"])
@pytest.mark.parametrize(
    ("recipe", "window", "plan"),
    [
        ("delayed", "step", "1f1b"),
        ("delayed", "step", "2"),
        ("delayed", "microbatch", "1f1b"),
        ("delayed", "microbatch", "2"),
        ("current", "step", "1f1b"),
        ("none", "step", "1f1b"),
    ],
)
def test_captured_equals_eager(recipe, window, plan, graphs):
    eager, captured = trained("eager", recipe, window, plan), trained(graphs, recipe, window, plan)
    same_run(eager, captured)
    assert (captured.assembly.engine.captured.step is not None) == (graphs == "step")  # type: ignore[union-attr]
    other = train(settings(recipe, window, run__seed=5), 2, batches=data)
    assert differing(other.tensors, trained("eager", recipe, window, plan, 2).tensors) != []


def same_run(eager: Trained, captured: Trained) -> None:
    """Bit for bit, and neither stood still."""
    assert captured.assembly.engine.captured is not None and eager.assembly.engine.captured is None
    assert_moved(eager)
    assert captured.losses == eager.losses and captured.norms == eager.norms
    assert all(torch.equal(a, b) for a, b in zip(captured.scales, eager.scales, strict=True))
    assert differing(captured.tensors, eager.tensors) == []
    assert captured.assembly.ledger.state() == eager.assembly.ledger.state()


@pytest.mark.parametrize("graphs", ["action", "step"])
def test_captured_again_gives_the_same_graphs(graphs):
    assert_same_captures(trained(graphs).assembly)


def test_poisoned_leases_change_nothing():
    """Nobody reads a delayed product's operands after its W, eager or captured."""
    for graphs in ("eager", "action"):
        keys = GRAPHS[graphs]
        clean, poisoned = (train(settings("delayed", **keys, contract__poison=p), 4, batches=data) for p in (False, True))
        assert clean.losses == poisoned.losses and differing(clean.tensors, poisoned.tensors) == []


# ---- two GPUs -----------------------------------------------------------------------------------------------------------


def _train(rank: int, world: int, axis: str, graphs: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = Mesh({axis: world}, rank)
    mesh.create_groups()
    chosen = settings("delayed", **GRAPHS[graphs], **{f"parallel__{axis}": world}, pipeline__w_delay=0)
    shift = 100 * rank if axis == "dp" else 0
    run = train(chosen, 6, mesh=mesh, batches=lambda step: data(step + shift))
    state = {name: tensor.cpu() for name, tensor in run.tensors.items()}
    run.assembly.release()
    return run.losses, state


@two_gpus
@pytest.mark.parametrize("graphs", ["eager", "action", "step"])
def test_two_pipeline_stages_equal_one(graphs):
    one = train(settings("delayed"), 6, batches=data)
    results = run_distributed(_train, 2, "pp", graphs, timeout=150, init=False)
    assert [losses for losses, _ in results] == [one.losses] * 2
    assert differing(merged([state for _, state in results]), {n: t.cpu() for n, t in one.tensors.items()}) == []


@two_gpus
def test_replicas_agree_and_captured_equals_eager():
    """Data parallel: both replicas hold the same bytes after steps on different data."""
    eager, captured = (run_distributed(_train, 2, "dp", graphs, timeout=150, init=False) for graphs in ("eager", "action"))
    for losses, state in (*eager[1:], *captured):
        assert losses == eager[0][0] and len(set(losses)) == len(losses)
        assert differing(state, eager[0][1]) == []


# ---- the two backends ---------------------------------------------------------------------------------------------------


def test_both_backends_train_alike():
    """Not bit for bit (other kernels), but the same model: losses within a rounding of bfloat16 products over the steps."""
    ours = train(settings("delayed", model__backend="native"), 6, batches=data)
    theirs = train(settings("delayed"), 6, batches=data)
    assert [name for name, _ in sorted(ours.tensors.items())] == [name for name, _ in sorted(theirs.tensors.items())]
    assert all(abs(a - b) < 0.02 * abs(a) for a, b in zip(ours.losses, theirs.losses, strict=True))
    ratio = ours.scales[0] / theirs.scales[0]  # of the first step's amax; later ones follow weights that have drifted apart
    assert float(ratio.min()) > 0.8 and float(ratio.max()) < 1.25


def test_both_backends_cast_weights_alike():
    """One checkpoint, either backend: cached weights made from equal parameters and scales have equal bytes."""
    te, native = trained("eager").assembly, assemble(settings("delayed", model__backend="native"))
    with torch.no_grad():
        for mine, other in ((native.flat.master_buffer, te.flat.master_buffer), (native.timeline.scale, te.timeline.scale)):
            mine.copy_(other)
        native.flat.gather()
    native.rebuild_caches()
    te.rebuild_caches()
    for name, cached in native.cache.cached.items():
        other = te.cache.cached[name]
        assert same_bits(cached.rows.view(torch.uint8), other.rows.view(torch.uint8)), name  # type: ignore[union-attr]
        assert same_bits(cached.columns.view(torch.uint8), other.columns.view(torch.uint8)), name  # type: ignore[union-attr]
        assert same_bits(cached.scale_inv, other.scale_inv), name
    assert torch.equal(native.timeline.open_amax, te.timeline.open_amax)


def test_saved_state_is_typed_tensors_and_restores_bit_for_bit():
    saved_state_restores("delayed")


def saved_state_restores(recipe: str, **more: Any) -> None:
    """Everything comes back through logical tensors alone, caches re-derived: no pickled state of Transformer Engine."""
    run = train(settings(recipe, **more), 3, batches=data)
    saved, state = run.tensors, run.assembly.timeline.state()
    assert not any("extra_state" in name for name in saved)
    fresh = assemble(settings(recipe, run__seed=9, **more))
    with torch.no_grad():
        for item in fresh.logical_tensors():
            if not item.name.startswith("cached_weight"):
                view = item.tensor.view(torch.uint8) if item.tensor.dtype.itemsize == 1 else item.tensor
                view.copy_(saved[item.name])
    fresh.timeline.load_state(state)
    open_slots = fresh.timeline.open_amax.clone()
    fresh.rebuild_caches()
    assert differing(Trained(fresh, [], [], [], []).tensors, saved) == []
    assert torch.equal(open_slots, fresh.timeline.open_amax)
