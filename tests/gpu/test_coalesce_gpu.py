"""W of several microbatches as one product, on a real GPU: captured equals eager, the plain reference, the distance to n = 1.

    python -m pytest -q tests/gpu/test_coalesce_gpu.py
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from qeffect_lm.config import Config
from qeffect_lm.fp8.gemm import accumulate_mm, accumulate_scaled_mm
from qeffect_lm.fp8.quantise import dequantise
from qeffect_lm.layers.linear import SplitLinear, WeightGradOperands
from tests.gpu.captures import assert_same_captures
from tests.gpu.test_engine_gpu import MICROBATCHES, SHAPE, data
from tests.tiny import Trained, assert_moved, config, differing, local_plan, train
from tests.unit.engine_support import assert_a_swapped_w_is_trapped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STEPS = 10
GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {},
    "action": {"graphs__backend": "cuda_graphs"},
    "step": {"graphs__backend": "cuda_graphs", "graphs__scope": "step"},
    "body": {"graphs__backend": "cuda_graphs", "graphs__scope": "step", "graphs__optimizer": "outside"},
}


def settings(n: int, graphs: str = "eager", dropout: float = 0.0, **more: Any) -> Config:
    """Without dropout attention and MLP are one node each, whose kernels quantise behind norm, SwiGLU and rotary."""
    return config(**{**SHAPE, "model__dropout": dropout, "pipeline__coalesce_w": n, **GRAPHS[graphs], **more})


@lru_cache
def trained(n: int, graphs: str = "eager", dropout: float = 0.0, steps: int = STEPS) -> Trained:
    return train(settings(n, graphs, dropout), steps, batches=data)


def grads(run: Trained) -> dict[str, torch.Tensor]:
    """The last step's main gradients."""
    flat = run.assembly.flat
    return {name: flat.grad(name) for name in flat.trainable_names}


def assert_same(run: Trained, other: Trained) -> None:
    assert (run.losses, run.norms) == (other.losses, other.norms)
    assert all(torch.equal(a, b) for a, b in zip(run.scales, other.scales, strict=True))
    assert differing(run.tensors, other.tensors) == [] and differing(grads(run), grads(other)) == []
    assert run.assembly.ledger.state() == other.assembly.ledger.state()


@pytest.mark.parametrize("graphs", ["action", "step", "body"])
@pytest.mark.parametrize(("n", "dropout"), [(2, 0.0), (3, 0.0), (2, 0.1), (4, 0.0)])
def test_captured_equals_eager(n, dropout, graphs):
    """Over several roll-overs of the history; with n = 3 the step's last group is smaller."""
    eager = trained(n, "eager", dropout)
    assert_moved(eager)
    captured = trained(n, graphs, dropout)
    assert captured.assembly.engine.captured is not None and eager.assembly.engine.captured is None
    assert_same(captured, eager)


@pytest.mark.parametrize("graphs", ["eager", "action"])
def test_stages_agree(graphs):
    """Three stages on one GPU, all F, all I, all W: one stage's bits with the same n."""
    from pipeline.plan import make_plan

    whole = local_plan(3, MICROBATCHES)
    compute = [[action for action in row if action.is_compute] for row in whole.actions]
    plan = make_plan("local", compute, whole.placement, MICROBATCHES, coalesce_w=3)
    three = train(settings(3, graphs), STEPS, plan=plan, batches=data)
    one = trained(3)
    assert three.losses == one.losses and differing(three.tensors, one.tensors) == []
    assert differing(grads(three), grads(one)) == []


def test_equals_the_plain_reference(monkeypatch):
    """Groups of two by one product over operands that were made apart and concatenated: the same bits.

    (Whole groups only: a smaller one is part of a wider matrix, for which the library may choose another kernel.)
    """
    kept: dict[str, list[WeightGradOperands]] = {}

    def weight_grad(self: SplitLinear, context: Any) -> None:
        scope = context.active_scope()
        operands = scope.take_weight_grad(self.name)
        beta = scope.write_grad(self.weight_name)
        if operands.x_scale_inv is None:
            accumulate_mm(self.grad_view(), operands.dy, operands.x, beta, library=self.library)
            return
        mine = kept.setdefault(self.name, [])
        mine.append(operands)
        if len(mine) == 2:
            x, dy = (torch.cat([getattr(o, part).view(torch.uint8) for o in mine], 1) for part in ("x", "dy"))
            x, dy = x.view(mine[0].x.dtype), dy.view(mine[0].dy.dtype)
            first = int(scope.microbatch > 1)
            scales = mine[0].dy_scale_inv, mine[0].x_scale_inv
            accumulate_scaled_mm(self.grad_view(), dy, scales[0], x, scales[1], first, library=self.library)
            mine.clear()

    monkeypatch.setattr(SplitLinear, "weight_grad", weight_grad)
    reference = train(settings(1), 4, batches=data)
    monkeypatch.undo()
    assert MICROBATCHES % 2 == 0
    several = trained(2, steps=4)
    assert several.losses == reference.losses and differing(several.tensors, reference.tensors) == []
    assert differing(grads(several), grads(reference)) == []


@pytest.mark.parametrize("n", [2, 3])
def test_against_each_by_itself(n, monkeypatch):
    """The first step: same operands, another order of summation.

    Each of the two is within the bound of an FP8 product on Hopper without fast accumulation (tests/gpu/test_kernels_gpu.py),
    over all the step's tokens, and of the float32 additions.
    """
    held: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    accumulate = SplitLinear._accumulate

    def watched(self: SplitLinear, operands: WeightGradOperands, beta: int) -> None:
        if operands.x_scale_inv is not None:
            x, dy = dequantise(operands.x, operands.x_scale_inv), dequantise(operands.dy, operands.dy_scale_inv)
            held.setdefault(self.weight_name, []).append((x.double().abs(), dy.double().abs()))
        accumulate(self, operands, beta)

    one = train(settings(1), 1, batches=data)
    monkeypatch.setattr(SplitLinear, "_accumulate", watched)
    several = train(settings(n), 1, batches=data)
    assert one.losses == several.losses and len(held) == 16
    moved = 0
    for name, grad in grads(one).items():
        other = grads(several)[name]
        if name not in held:
            assert torch.equal(grad, other), name
            continue
        x, dy = (torch.cat([pair[i] for pair in held[name]], dim=1) for i in (0, 1))
        tokens, size = x.shape[1], dy @ x.t()
        assert tokens == MICROBATCHES * 256
        largest = dy.amax(dim=1)[:, None] * x.amax(dim=1)
        steps = tokens / 128 + 4 + MICROBATCHES
        bound = 2 * (2.0**-13 * (tokens * largest + 4 * size) + steps * 2.0**-24 * size)
        distance = (grad.double() - other.double()).abs()
        assert (distance <= bound).all(), (name, (distance / bound).max().item())
        assert (distance.norm() / grad.double().norm()).item() < 1e-2, name
        moved += int(distance.max() > 0)
    assert moved > 8


@pytest.mark.parametrize("graphs", ["eager", "action"])
def test_poisoned_places_change_nothing(graphs):
    assert_same(train(settings(3, graphs, contract__poison=True), STEPS, batches=data), trained(3))


def test_captured_again():
    """Five captures: one fingerprint, and no memory grows."""
    assert_same_captures(train(settings(2, "action"), 1, batches=data).assembly)


def test_a_member_that_did_not_run_is_trapped():
    """The last W of a group before the first's: refused before its graph is launched, and the next step is clean."""
    assert_a_swapped_w_is_trapped(settings(2, "action", pipeline__w_delay=0), data)
