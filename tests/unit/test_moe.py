"""Mixture of experts: the layer against plain formulations, its losses, ties, every kind of routing; what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.moe import MoEPart
from models.spec import Place
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.moe import MoE, bind_statistics
from qeffect_lm.layers.router import Router
from qeffect_lm.testing import check_part
from tests.tiny import config, same_bits
from tests.unit.layer_harness import Harness, random

HIDDEN, FFN = 32, 48
NAME = "layers.0.part"


def routed(part: MoEPart, p: Mapping[str, torch.Tensor], x: torch.Tensor, name: str) -> tuple[torch.Tensor, ...]:
    """Every expert on every token, weighted; logits, probabilities and who was chosen."""
    logits = x @ p[f"{name}.router.weight"].t()
    probabilities = torch.softmax(logits, -1)
    best, numbers = torch.topk(probabilities, part.top_k, -1)
    if part.normalise:
        best = best / best.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for e in range(part.experts):
        gate, up = (x @ p[f"{name}.experts.{e}.gate_up.weight"].t()).chunk(2, -1)
        expert = (torch.nn.functional.silu(gate) * up) @ p[f"{name}.experts.{e}.down.weight"].t()
        y = y + (best * (numbers == e)).sum(-1, keepdim=True) * expert
    chosen = (numbers[..., None] == torch.arange(part.experts)).any(1).to(x.dtype)
    return y, logits, probabilities, chosen


@pytest.mark.parametrize(("part", "fp8"), [(MoEPart(FFN, 5, 2), True), (MoEPart(FFN, 3, 2, normalise=False), False)], ids=str)
def test_the_part(part: MoEPart, fp8: bool) -> None:
    """F, I and W against float64 autograd; order, capture with other inputs (so another routing), state, checkpoint."""

    def reference(p: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return routed(part, p, x.reshape(-1, HIDDEN), NAME)[0].view_as(x)

    assert "replay: F, I and W captured once" in str(check_part(part, HIDDEN, reference, fp8=fp8))


def built(part: MoEPart, dtype: torch.dtype = torch.float64, hidden: int = HIDDEN, seed: int = 1) -> Harness:
    harness = Harness(part.build(Place(NAME, hidden, 2, dtype, 0.02, 0)))
    harness.fill(seed, scale=0.3)
    return harness


def test_losses_and_their_gradients() -> None:
    """Of two microbatches, one mostly padding: token-weighted means over the step, as the main loss is; their gradient reaches
    the router's weight and the input, and the statistics hold their values."""
    part = MoEPart(FFN, 4, 2, balance=0.7, z=0.3)
    harness = built(part)
    statistics = torch.full((2, 6), 7.0, dtype=torch.float64)
    bind_statistics(harness.module, statistics)
    masks = [torch.ones(2, 8), torch.ones(2, 8)]
    masks[1][:, 3:] = 0
    divisor = float(sum(mask.sum() for mask in masks))
    harness.divisor.fill_(divisor)
    xs = [random(2, 8, HIDDEN, seed=m) for m in range(2)]
    dys = [random(2, 8, HIDDEN, seed=10 + m) for m in range(2)]
    microbatches = [harness.microbatch(m, xs[m], dys[m], mask=masks[m]) for m in range(2)]
    harness.run(microbatches)

    p = {name: parameter.detach().clone().requires_grad_() for name, parameter in harness.parameters.items()}
    leaves = [x.clone().requires_grad_() for x in xs]
    total, balance, z, counts = 0.0, 0.0, 0.0, torch.zeros(4, dtype=torch.float64)
    for x, dy, mask in zip(leaves, dys, masks, strict=True):
        y, logits, probabilities, chosen = routed(part, p, x.reshape(-1, HIDDEN), NAME)
        valid = mask.reshape(-1, 1).double()
        share, mean = (chosen * valid).sum(0) / valid.sum(), (probabilities * valid).sum(0) / valid.sum()
        weight = valid.sum() / divisor
        balance = balance + weight * 4 * (share * mean).sum()
        z = z + weight * (torch.logsumexp(logits, -1, keepdim=True).square() * valid).sum() / valid.sum()
        counts += (chosen * valid).sum(0)
        total = total + (y * dy.reshape(-1, HIDDEN)).sum()
    total = total + (0.7 * balance + 0.3 * z) / 2  # of two decoder layers each is the mean
    wanted = torch.autograd.grad(total, [*p.values(), *leaves])
    got = [harness.grads[name] for name in p] + [m.dx for m in microbatches]
    for have, want in zip(got, wanted, strict=True):
        assert (have - want).abs().max() <= 1e-12 * max(1.0, want.abs().max().item())
    assert torch.allclose(statistics[0, :2], torch.stack([balance, z]).detach(), rtol=1e-13, atol=0)
    assert torch.equal(statistics[0, 2:], counts) and bool((statistics[1] == 7).all()), "its own layer's row"


def test_a_microbatch_of_padding_alone() -> None:
    """No loss of its own, and nothing that is no number."""
    harness = built(MoEPart(FFN, 4, 2, balance=0.7, z=0.3))
    x = random(1, 4, HIDDEN, seed=3)
    m = harness.microbatch(0, x, torch.zeros_like(x), mask=torch.zeros(1, 4))
    harness.run([m])
    assert not m.dx.any() and not any(grad.any() for grad in harness.grads.values())


def test_equal_experts_go_by_number() -> None:
    """Ties: the lowest numbers, in every dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        router = Router("router", 8, 6, 3, dtype=dtype)
        with torch.no_grad():
            router.weight[1] = router.weight[4] = 1.0
        context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64))
        weights, numbers = router(torch.ones(5, 8, dtype=dtype), context)
        assert numbers.tolist() == [[1, 4, 0]] * 5 and bool((weights[:, 0] == weights[:, 1]).all())
        assert weights.dtype is (torch.float64 if dtype is torch.float64 else torch.float32), "not rounded to bfloat16"


def test_experts_whose_probability_is_zero_go_by_their_logits() -> None:
    """exp(-150) is 0 in float32: ranked by probabilities, expert 0 with a logit of 0 would come before one with 50."""
    router = Router("router", 4, 6, 2)
    with torch.no_grad():
        router.weight[3], router.weight[4], router.weight[5] = 12.5, 50.0, -50.0
    weights, numbers = router(torch.ones(5, 4), LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64)))
    assert numbers.tolist() == [[4, 3]] * 5 and weights.tolist() == [[1.0, 0.0]] * 5


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_routing(data: st.DataObject) -> None:
    """All tokens on one expert, idle experts, one token, k = E: dropless, and F, I and W equal the plain formulation."""
    experts = data.draw(st.integers(1, 5))
    part = MoEPart(6, experts, data.draw(st.integers(1, experts)), normalise=data.draw(st.booleans()), balance=0.5)
    tokens, skew = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([0.0, 1.0, 50.0]))
    harness = built(part, hidden=4, seed=data.draw(st.integers(0, 99)))
    with torch.no_grad():  # a large first feature: the router sees little else
        harness.parameters[f"{NAME}.router.weight"][:, 0] *= skew
    x, dy = random(1, tokens, 4, seed=7), random(1, tokens, 4, seed=8)
    x[..., 0] = x[..., 0].abs() + 1 if skew > 1 else x[..., 0]
    m = harness.microbatch(0, x, dy)
    harness.run([m])
    p = {name: parameter.detach().clone().requires_grad_() for name, parameter in harness.parameters.items()}
    leaf = x.clone().requires_grad_()
    y, _, probabilities, chosen = routed(part, p, leaf.reshape(-1, 4), NAME)
    loss = (y * dy.reshape(-1, 4)).sum() + 0.5 / 2 * experts * ((chosen.sum(0) / tokens) * probabilities.sum(0)).sum()
    wanted = torch.autograd.grad(loss, [*p.values(), leaf])
    assert torch.allclose(m.out.reshape(-1, 4), y, rtol=1e-12, atol=1e-12)
    for have, want in zip([*(harness.grads[name] for name in p), m.dx], wanted, strict=True):
        assert (have - want).abs().max() <= 1e-11 * max(1.0, want.abs().max().item())
    for e in range(experts):
        if not chosen[:, e].any():
            assert not harness.grads[f"{NAME}.experts.{e}.down.weight"].any(), "zeroed: the harness seeds it with 7"


def test_an_expert_without_rows_leaves_no_trace_of_its_weights() -> None:
    """Not even an infinity or a NaN in them reaches anybody."""
    harness = built(MoEPart(FFN, 3, 1), torch.float32)
    with torch.no_grad():  # of two opposite logits one is positive: the third is never the largest
        router = harness.parameters[f"{NAME}.router.weight"]
        router[1], router[2] = -router[0], 0.0
        harness.parameters[f"{NAME}.experts.2.gate_up.weight"].fill_(float("nan"))
    x = random(2, 8, HIDDEN, seed=3, dtype=torch.float32)
    m = harness.microbatch(0, x, torch.ones_like(x))
    harness.run([m])
    assert bool(m.out.isfinite().all()) and bool(m.dx.isfinite().all())
    assert same_bits(harness.grads[f"{NAME}.experts.2.gate_up.weight"], torch.zeros(2 * FFN, HIDDEN))


def test_experts_are_frozen_together() -> None:
    layer = MoEPart(FFN, 3, 2).build(Place(NAME, HIDDEN, 2, torch.float32, 0.02, 0))
    assert isinstance(layer, MoE)
    for expert in layer.experts:
        expert.down.weight.requires_grad_(False)
    assert not layer.down.defers and layer.gate_up.defers
    layer.experts[1].gate_up.weight.requires_grad_(False)
    with pytest.raises(UsageError, match=r"experts.1.gate_up.weight is frozen and other experts' are not"):
        _ = layer.gate_up.defers


def test_more_experts_than_there_are() -> None:
    with pytest.raises(UsageError, match="model.moe.top_k 3 is more than model.moe.num_experts 2: lower it"):
        config(model__family="mixtral", model__moe={"num_experts": 2, "top_k": 3})
