"""The whole model against an independent one: plain torch in float64, written from the papers, differentiated by autograd."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as functional

from tests.tiny import batch, config, local_plan, train

HEADS, KV, HEAD, LAYERS = 4, 2, 8, 4


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Complex rotation of the pairs (i, i + half), position by position."""
    sequence, half = x.shape[-2], HEAD // 2
    out = torch.empty_like(x)
    for position in range(sequence):
        for i in range(half):
            angle = position * 10000.0 ** (-2 * i / HEAD)
            a, b = x[..., position, i], x[..., position, i + half]
            out[..., position, i] = a * math.cos(angle) - b * math.sin(angle)
            out[..., position, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Explicit softmax attention; rows of ``qkv`` per KV head: its query heads, k, v."""
    y = x @ qkv.T
    group = HEADS // KV
    heads = []
    mask = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype).triu(1)
    for kv in range(KV):
        base = kv * (group + 2) * HEAD
        k = rotate(y[..., base + group * HEAD : base + (group + 1) * HEAD])
        v = y[..., base + (group + 1) * HEAD : base + (group + 2) * HEAD]
        for g in range(group):
            q = rotate(y[..., base + g * HEAD : base + (g + 1) * HEAD])
            heads.append(torch.softmax(q @ k.transpose(1, 2) / math.sqrt(HEAD) + mask, -1) @ v)
    return torch.cat(heads, -1) @ out.T


def loss_of(p: dict[str, torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all tokens of ``[rows, sequence]``."""
    x = p["embedding.weight"][inputs]
    for i in range(LAYERS):
        at = f"layers.{i}"
        normed = rms(x, p[f"{at}.attention_norm.weight"])
        x = x + attention(normed, p[f"{at}.attention.qkv.weight"], p[f"{at}.attention.out.weight"])
        gate, up = (rms(x, p[f"{at}.mlp_norm.weight"]) @ p[f"{at}.mlp.gate_up.weight"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ p[f"{at}.mlp.down.weight"].T
    logits = rms(x, p["final_norm.weight"]) @ p["head.weight"].T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(("stages", "backend"), [(1, "eager"), (1, "host_replay"), (3, "eager")])
def test_loss_and_every_gradient(stages, backend):
    """G2, G3: neither microbatches nor stages scale a gradient twice; bound: float64 rounding over some hundred terms."""
    double = {"precision__fp8__recipe": "none", "precision__dtype": "float64"}
    settings = config(**double, graphs__backend=backend, optim__clip_norm=None, optim__lr=1e-30)
    run = train(settings, 1, plan=local_plan(stages, 4) if stages > 1 else None)
    flat = run.assembly.flat
    parameters = {name: flat.master(name).clone().requires_grad_() for name in flat.names}
    data = batch(0)
    loss = loss_of(parameters, data.inputs.flatten(0, 1), data.targets.flatten(0, 1))
    loss.backward()
    assert run.losses[0] == pytest.approx(float(loss.detach()), rel=1e-13)
    total = 0.0
    for name, parameter in parameters.items():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
        torch.testing.assert_close(flat.grad(name), parameter.grad, rtol=1e-9, atol=1e-15, msg=name)
        total += float(parameter.grad.square().sum())
    assert run.norms[0] == pytest.approx(math.sqrt(total), rel=1e-12)


@pytest.mark.parametrize("backend", ["eager", "host_replay"])
def test_poison_changes_nothing_in_a_sound_run(backend):
    """Debug mode: released slots become NaN, and nobody reads them."""
    poisoned = train(config(contract__poison=True, graphs__backend=backend), 4)
    assert poisoned.losses == train(config(), 4).losses


def test_poison_shows_a_use_after_release():
    """W of a microbatch made to read what an earlier one retained: with poison the gradients are NaN, the step is skipped."""
    from qeffect_lm.layers.linear import SplitLinear

    settings = config(contract__poison=True, contract__mode="off", pipeline__w_delay=0)
    kept: dict[str, object] = {}
    original = SplitLinear.weight_grad

    def late(self, context) -> None:
        """Reads the operands of the microbatch before (whose slot was released), as a stale handle would."""
        leases = context.scope.ledger.leases
        handle = leases.handle(context.scope.chunk, context.scope.microbatch, self.name)
        now = handle.payload
        if self.name in kept:
            handle.payload = kept[self.name]
        kept[self.name] = now
        original(self, context)

    SplitLinear.weight_grad = late  # type: ignore[method-assign]
    try:
        run = train(settings, 1)
    finally:
        SplitLinear.weight_grad = original  # type: ignore[method-assign]
    assert run.skipped == [True]
