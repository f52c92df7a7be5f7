"""Each layer's F, I and W against float64 autograd of a plain torch formulation, and what it does to contract
state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from qeffect_lm.contract.errors import LeaseError, StaleWeightError
from qeffect_lm.contract.timeline import EMPTY
from qeffect_lm.fp8.quantise import E4M3, E5M2, Format
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.embedding import Embedding
from qeffect_lm.layers.linear import SplitLinear, WeightGradOperands
from qeffect_lm.layers.loss import CrossEntropyLoss
from qeffect_lm.layers.mlp import GatedMLP
from qeffect_lm.layers.norm import RMSNorm
from tests.unit.layer_harness import SEEDED, Harness, Microbatch, check, close, pairs, random

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


# ---- the split linear --------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, bias):
    """Three microbatches; the first writer overwrites the 7.0 that was there (G1), the others add."""
    layer = SplitLinear("linear", 5, 7, bias=bias, dtype=dtype)
    harness = Harness(layer)
    harness.fill(1)
    assert set(harness.grads) == {"linear.weight", "linear.bias"} if bias else {"linear.weight"}

    def reference(p, x):
        return functional.linear(x, p["linear.weight"], p.get("linear.bias"))

    check(harness, reference, pairs(3, (2, 3, 5), (2, 3, 7), dtype))


def cast_error(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """By how much a value may move when it is cast to FP8 with ``scale`` and back: half a step of its
    grid."""
    digits, smallest = (4, 2.0**-6) if fmt is E4M3 else (3, 2.0**-14)
    assert (x.abs() * scale <= fmt.max * (1 + 2.0**-20)).all(), "the scale leaves no value beyond the edge"
    return torch.maximum(x.abs(), smallest / scale) * 2.0**-digits * (1 + 2.0**-18)


def product_bound(a: torch.Tensor, da: torch.Tensor, b: torch.Tensor, db: torch.Tensor) -> torch.Tensor:
    """Of ``a @ b``: what errors ``da`` and ``db`` of the operands do, and a float32 sum of length k."""
    wide = (a.abs() + da) @ (b.abs() + db)
    return wide - a.abs() @ b.abs() + (a.shape[-1] + 4) * 2.0**-24 * wide


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", [DelayedScaling, CurrentScaling])
def test_linear_fp8(recipe, bias):
    """Each of the three products stays within the bound that follows from half a grid step per operand (the
    weight counts as BF16), with delayed scales other than 1 after a roll; amax slots hold what was cast."""
    layer = SplitLinear("linear", 24, 16, bias=bias, recipe=recipe())
    harness = Harness(layer)
    harness.fill(2, scale=0.05)
    batches = [(x, dy * 1e-4) for x, dy in pairs(3, (2, 9, 24), (2, 9, 16), torch.float32)]
    if recipe is DelayedScaling:
        harness.run([harness.microbatch(i, *pair) for i, pair in enumerate(batches)])
        harness.commit()
        assert (harness.timeline.scale > 100).sum() >= 2
    microbatches = [harness.microbatch(i, *pair) for i, pair in enumerate(batches)]
    harness.run(microbatches, step=1)

    w = layer.weight.detach().bfloat16().double()
    shift = layer.bias.detach().double() if layer.bias is not None else torch.zeros(16, dtype=torch.float64)
    flat = [(x.flatten(0, 1).double(), dy.flatten(0, 1).double()) for x, dy in batches]

    def scale(kind: str, tensor: torch.Tensor, fmt: Format) -> torch.Tensor:
        if recipe is DelayedScaling:
            return harness.timeline.scale_of(f"linear.{kind}").double()
        return fmt.max / tensor.abs().max()

    dw_error = cast_error(w, scale("weight", w, E4M3), E4M3)
    grad = torch.zeros(16, 24, dtype=torch.float64)
    grad_bound = torch.zeros(16, 24, dtype=torch.float64)
    for m, (x, dy) in zip(microbatches, flat, strict=True):
        x_error = cast_error(x, scale("input", x, E4M3), E4M3)
        dy_error = cast_error(dy, scale("grad_output", dy, E5M2), E5M2)
        bound = product_bound(x, x_error, w.t(), dw_error.t()) + 2.0**-22 * (1 + shift.abs())
        assert ((m.out.flatten(0, 1).double() - x @ w.t() - shift).abs() <= bound).all()
        assert ((x @ w.t()).abs() > 3 * bound).any(), "the bound says something"
        bound = product_bound(dy, dy_error, w, dw_error)
        assert ((m.dx.flatten(0, 1).double() - dy @ w).abs() <= bound).all()
        assert ((dy @ w).abs() > 3 * bound).any()
        grad += dy.t() @ x
        grad_bound += product_bound(dy.t(), dy_error.t(), x, x_error)
    got = harness.grads["linear.weight"].double()
    assert ((got - grad).abs() <= grad_bound + 2.0**-22 * grad.abs()).all()
    assert (grad.abs() > 3 * grad_bound).any()
    if bias:
        close(harness.grads["linear.bias"], torch.stack([dy for _, dy in flat]).sum(dim=(0, 1)))
    if recipe is DelayedScaling:
        for kind, tensors in (
            ("input", [x for x, _ in flat]),
            ("grad_output", [dy for _, dy in flat]),
            ("weight", [w]),
        ):
            assert harness.timeline.slot_of(f"linear.{kind}").item() == max(t.abs().max().item() for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_fp8_is_the_product_of_its_casts(dtype):
    """Not only near: exactly the GEMMs of the quantised operands, each with its own role's scale (no powers of
    two), in bfloat16 rounded once; main gradients are float32."""
    layer = SplitLinear("linear", 24, 16, recipe=DelayedScaling(), dtype=dtype)
    harness = Harness(layer)
    scales = {"input": 5.3, "weight": 3.7, "grad_output": 11.9}
    for kind, value in scales.items():
        harness.timeline.scale_of(f"linear.{kind}").fill_(value)
    harness.fill(3)
    ((x, dy),) = pairs(1, (9, 24), (9, 16), dtype)
    m = harness.microbatch(0, x, dy)
    harness.run([m])

    def cast(kind: str, t: torch.Tensor, fmt: Format) -> torch.Tensor:
        scale = harness.timeline.scale_of(f"linear.{kind}")
        return (t.detach().float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype).double() / scale.double()

    weight = layer.weight.bfloat16()
    qx, qw, qdy = cast("input", x, E4M3), cast("weight", weight, E4M3), cast("grad_output", dy, E5M2)
    factor = 0.2501 if dtype is torch.bfloat16 else 0.1
    close(m.out, qx @ qw.t(), factor)
    close(m.dx, qdy @ qw, factor)
    close(harness.grads["linear.weight"], qdy.t() @ qx, 0.1)
    assert harness.grads["linear.weight"].dtype == torch.float32


@pytest.mark.parametrize("recipe", [None, DelayedScaling, CurrentScaling])
def test_weight_gradient_owns_its_operands(recipe):
    """I2: x and dY lie in border buffers that the next microbatch overwrites before W; W's result does not
    change. Nothing it retains shares a storage with them."""

    def run(overwrite: bool) -> torch.Tensor:
        layer = SplitLinear("linear", 6, 4, recipe=recipe() if recipe else None)
        harness = Harness(layer)
        harness.fill(4)
        m = harness.microbatch(0, *pairs(1, (2, 3, 6), (2, 3, 4), torch.float32)[0])
        with harness.step():
            harness.forward(m)
            harness.input_grad(m)
            (payload,) = harness.ledger.leases.payloads(0, 0).values()
            assert isinstance(payload, WeightGradOperands)
            borders = {t.untyped_storage().data_ptr() for t in m.slot.context.border}
            assert borders.isdisjoint(t.untyped_storage().data_ptr() for t in payload.tensors())
            if overwrite:
                m.slot.x.fill_(float("nan"))
                m.slot.dy.fill_(float("nan"))
                m.dx.fill_(float("nan"))
                m.out.fill_(float("nan"))
            harness.weight_grad(m)
        return harness.grads["linear.weight"]

    clean = run(False)
    assert torch.isfinite(clean).all() and clean.count_nonzero() > 0
    assert torch.equal(run(True), clean)


def test_owned_copies_border_buffers_only():
    x = torch.zeros(4, 4)
    context = LayerContext(Phase.TRAIN, key=torch.zeros((), dtype=torch.int64), border=(x, torch.zeros(2)))
    for view in (x, x[1:], x.t(), x.detach(), x.view(2, 8)):
        copy = context.owned(view)
        assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() and torch.equal(copy, view)
    other = torch.ones(3)
    assert context.owned(other) is other


def test_bias_is_finished_in_input_grad():
    """L2: the bias gradient is whole after I and may be consumed; W neither crashes nor adds to it."""
    harness = Harness(SplitLinear("linear", 4, 3, bias=True, dtype=torch.float64))
    harness.fill(5)
    ((x, dy),) = pairs(1, (5, 4), (5, 3), torch.float64)
    m = harness.microbatch(0, x, dy)
    with harness.step():
        harness.forward(m)
        harness.input_grad(m)
        close(harness.grads["linear.bias"], dy.sum(dim=0))
        assert (harness.grads["linear.weight"] == SEEDED).all(), "the weight's comes in W"
        harness.grads["linear.bias"].fill_(99.0)
        harness.weight_grad(m)
    assert (harness.grads["linear.bias"] == 99.0).all()
    close(harness.grads["linear.weight"], dy.t() @ x)


def test_weight_gradients_by_key_in_any_order():
    """W of microbatch 2, 0, 1: each takes its own operands (with different data a swap would show)."""
    harness = Harness(SplitLinear("linear", 4, 3, dtype=torch.float64))
    harness.fill(6)
    batches = pairs(3, (5, 4), (5, 3), torch.float64)
    microbatches = [harness.microbatch(i, *pair) for i, pair in enumerate(batches)]
    with harness.step():
        for m in microbatches:
            harness.forward(m)
        for m in microbatches:
            harness.input_grad(m)
        want = torch.zeros(3, 4, dtype=torch.float64)
        for number, beta in ((2, 0), (0, 1), (1, 1)):
            microbatches[number].beta = beta
            harness.weight_grad(microbatches[number])
            x, dy = batches[number]
            want += dy.t() @ x
            close(harness.grads["linear.weight"], want)


@pytest.mark.parametrize("recipe", [None, DelayedScaling])
def test_evaluation_writes_nothing(recipe):
    """S6: a forward in EVAL on inputs 50 times larger moves no slot, no gradient and no lease, and is the
    same product."""
    harness = Harness(SplitLinear("linear", 6, 4, recipe=recipe() if recipe else None))
    harness.fill(7)
    harness.timeline.open_amax.fill_(EMPTY)
    ((x, dy),) = pairs(1, (3, 6), (3, 4), torch.float32)
    context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64))
    with torch.no_grad():
        harness.module(x * 50, context)
        out = harness.module(x, context)
    assert (harness.timeline.open_amax == EMPTY).all()
    assert harness.ledger.leases.counts() == {"groups": 0, "slots": 0}
    assert all((grad == SEEDED).all() for grad in harness.grads.values())
    m = harness.microbatch(0, x, dy)
    harness.run([m])
    assert torch.equal(out, m.out)


def test_calibration_observes_and_leaves_nothing():
    """High precision F and I; the three amax are recorded, and no gradient, no lease, no cache is touched."""
    layer = SplitLinear("linear", 6, 4, recipe=DelayedScaling())
    harness = Harness(layer)
    harness.fill(8)
    layer.cached = None
    harness.timeline.open_amax.fill_(EMPTY)
    ((x, dy),) = pairs(1, (3, 6), (3, 4), torch.float32)
    m = harness.microbatch(0, x, dy, phase=Phase.CALIBRATE)
    harness.stage.forward(m.slot, None)
    harness.stage.input_grad(m.slot, None)
    weight = layer.weight.detach()
    close(m.out, x @ weight.t())
    close(m.dx, dy @ weight)
    for kind, amax in (("input", x), ("weight", weight.bfloat16()), ("grad_output", dy)):
        assert harness.timeline.slot_of(f"linear.{kind}").item() == amax.abs().max().item()
    assert harness.ledger.leases.counts() == {"groups": 0, "slots": 0}
    assert (harness.grads["linear.weight"] == SEEDED).all()


def test_stale_cache_is_refused():
    """V1: the weight was written and said so; F with the old cache is an error that names the weight."""
    harness = Harness(SplitLinear("linear", 6, 4, recipe=DelayedScaling()))
    harness.fill(9)
    harness.ledger.versions.bump(["linear.weight"])
    m = harness.microbatch(0, *pairs(1, (3, 6), (3, 4), torch.float32)[0])
    with pytest.raises(StaleWeightError, match="linear.weight"), harness.step():
        harness.forward(m)


def test_unbound_layers_say_so():
    layer = SplitLinear("linear", 6, 4, recipe=CurrentScaling())
    context = LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64))
    with pytest.raises(RuntimeError, match="linear: no weight cache"):
        layer(torch.zeros(2, 6), context)
    with pytest.raises(RuntimeError, match="linear: no main gradient"):
        layer.grad_view()


# ---- norm, MLP, loss, embedding ----------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm(dtype, eps):
    harness = Harness(RMSNorm("norm", 6, eps, dtype))
    harness.fill(10)

    def reference(p, x):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * p["norm.weight"]

    check(harness, reference, pairs(2, (2, 3, 6), (2, 3, 6), dtype))


class Activation(Layer):
    """SwiGLU's activation between the identity and the identity."""

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        eye = _Identity("identity")
        return GatedMLP("mlp", eye, eye)(x, context)  # type: ignore[arg-type]


class _Identity(Layer):
    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        return x


@DTYPES
def test_swiglu_activation(dtype):
    """gate first, then up; far from 0 too."""
    harness = Harness(Activation(""))
    batches = [(x * 4, dy) for x, dy in pairs(2, (2, 3, 10), (2, 3, 5), dtype)]

    def reference(p, x):
        gate, up = x[..., :5], x[..., 5:]
        return gate / (1 + torch.exp(-gate)) * up

    check(harness, reference, batches, factor=2)


def test_swiglu():
    gate_up, down = (SplitLinear(f"mlp.{n}", i, o, dtype=torch.float64) for n, i, o in (("gate_up", 4, 10), ("down", 5, 4)))
    harness = Harness(GatedMLP("mlp", gate_up, down))
    harness.fill(11)

    def reference(p, x):
        gate, up = (x @ p["mlp.gate_up.weight"].t()).split(5, dim=-1)
        return (functional.silu(gate) * up) @ p["mlp.down.weight"].t()

    check(harness, reference, pairs(2, (2, 3, 4), (2, 3, 4), torch.float64))


@DTYPES
def test_cross_entropy(dtype):
    """Masked sums over one divisor; gradient 0 under the mask; float32 or wider."""
    harness = Harness(CrossEntropyLoss("loss"), last=True)
    logits = random(2, 5, 7, seed=12, dtype=dtype, scale=4.0)
    targets = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1.0, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
    harness.divisor.fill_(11.0)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    m = harness.microbatch(0, logits, torch.ones((), dtype=wide), targets=targets, mask=mask)
    harness.run([m])
    leaf = logits.double().requires_grad_()
    per_token = functional.cross_entropy(leaf.flatten(0, 1), targets.flatten(), reduction="none")
    loss = (per_token * mask.flatten().double()).sum() / 11.0
    (grad,) = torch.autograd.grad(loss, leaf)
    assert m.out.dtype == wide
    close(m.out, loss.detach())
    close(m.dx, grad)
    assert (m.dx[mask == 0] == 0).all() and (m.dx[mask == 1] != 0).any(dim=-1).all()


def test_uneven_masks_equal_one_big_batch():
    """G4, G2: microbatches with 1, 5 and 0 valid tokens add up to the mean over all of them."""
    harness = Harness(CrossEntropyLoss("loss"), last=True)
    logits = random(3, 1, 5, 7, seed=13)
    targets = torch.randint(0, 7, (3, 1, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(3, 1, 5)
    mask[0, 0, 3], mask[1] = 1, 1
    harness.divisor.fill_(mask.sum())
    one = torch.ones((), dtype=torch.float64)
    microbatches = [harness.microbatch(i, logits[i], one, targets=targets[i], mask=mask[i]) for i in range(3)]
    harness.run(microbatches)
    leaf = logits.clone().requires_grad_()
    chosen = mask.flatten() == 1
    mean = functional.cross_entropy(leaf.flatten(0, 2)[chosen], targets.flatten()[chosen])
    close(torch.stack([m.out for m in microbatches]).sum(), mean.detach())
    close(torch.stack([m.dx for m in microbatches]), torch.autograd.grad(mean, leaf)[0])


@DTYPES
def test_embedding(dtype):
    """Repeated tokens add, in one microbatch and over several; rows of absent tokens are 0, not what was
    there."""
    harness = Harness(Embedding("embedding", 6, 3, dtype), first=True)
    harness.fill(14)
    tokens = [torch.tensor([[1, 1, 4], [1, 0, 4]]), torch.tensor([[4, 4, 4], [2, 2, 1]])]
    dys = [random(2, 3, 3, seed=15 + i, dtype=dtype) for i in range(2)]
    microbatches = [harness.microbatch(i, t, dy) for i, (t, dy) in enumerate(zip(tokens, dys, strict=True))]
    harness.run(microbatches)
    weight = harness.parameters["embedding.weight"].detach()
    wide = weight.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for m, t, dy in zip(microbatches, tokens, dys, strict=True):
        assert torch.equal(m.out, weight[t])
        total = total + (functional.embedding(t, wide) * dy.double()).sum()
    grad = torch.autograd.grad(total, wide)[0]
    close(harness.grads["embedding.weight"], grad)
    assert (harness.grads["embedding.weight"][[3, 5]] == 0).all() and (grad[[3, 5]] == 0).all()
    with torch.no_grad():
        plain = harness.module(tokens[0], LayerContext(Phase.EVAL, key=torch.zeros((), dtype=torch.int64)))
    assert torch.equal(plain, weight[tokens[0]])


# ---- frozen and unused parameters (G6) ---------------------------------------------------------------------


class Stack(Layer):
    """A user's block: a split linear with bias, a norm, a plain torch module, and parameters that take no
    part."""

    def __init__(self) -> None:
        super().__init__("stack")
        self.linear = SplitLinear("stack.linear", 4, 4, bias=True, dtype=torch.float64)
        self.norm = RMSNorm("stack.norm", 4, dtype=torch.float64)
        self.plain = nn.Linear(4, 4, dtype=torch.float64)
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        return self.plain(self.norm(self.linear(x, context), context)) + self.frozen


def stack_reference(p, x):
    y = functional.linear(x, p["stack.linear.weight"], p["stack.linear.bias"])
    y = y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * p["stack.norm.weight"]
    return functional.linear(y, p["stack.plain.weight"], p["stack.plain.bias"]) + p["stack.frozen"]


NAMES = ["frozen", "linear.bias", "linear.weight", "norm.weight", "plain.bias", "plain.weight", "unused"]


def test_unused_parameter_has_gradient_zero():
    """G6: not the 7.0 that was there; a user's plain torch module is finished in I like any cheap
    parameter."""
    harness = Harness(Stack())
    harness.fill(30)
    assert sorted(harness.parameters) == [f"stack.{name}" for name in NAMES]
    assert "stack.frozen" not in harness.grads
    check(harness, stack_reference, pairs(3, (2, 3, 4), (2, 3, 4), torch.float64), factor=10)
    assert (harness.grads["stack.unused"] == 0).all()


@pytest.mark.parametrize("frozen", [name for name in NAMES if name not in ("frozen", "unused")])
def test_frozen_parameter(frozen):
    """G6: any one of them frozen: no gradient for it, none missing elsewhere, and dx as before."""
    stack = Stack()
    dict(stack.named_parameters())[frozen].requires_grad_(False)
    harness = Harness(stack)
    harness.fill(31)
    assert f"stack.{frozen}" not in harness.grads
    check(harness, stack_reference, pairs(2, (2, 3, 4), (2, 3, 4), torch.float64), factor=10)


@pytest.mark.parametrize("recipe", [None, DelayedScaling])
def test_frozen_linear_retains_nothing(recipe):
    """G6: a frozen weight needs no operands for W: no lease, no transposed copies; dx is the same."""

    def run(trainable: bool) -> tuple[Microbatch, dict[str, object]]:
        layer = SplitLinear("linear", 6, 4, recipe=recipe() if recipe else None)
        layer.weight.requires_grad_(trainable)
        harness = Harness(layer)
        harness.fill(32)
        m = harness.microbatch(0, *pairs(1, (3, 6), (3, 4), torch.float32)[0])
        with harness.step():
            harness.forward(m)
            kept = harness.ledger.leases.payloads(0, 0)
            harness.input_grad(m)
            harness.weight_grad(m)
        return m, kept

    (frozen, nothing), (free, kept) = run(False), run(True)
    assert nothing == {} and list(kept) == ["linear"]
    assert torch.equal(frozen.out, free.out) and torch.equal(frozen.dx, free.dx)


def test_frozen_embedding():
    embedding = Embedding("embedding", 6, 3)
    embedding.weight.requires_grad_(False)
    harness = Harness(embedding, first=True)
    harness.fill(33)
    m = harness.microbatch(0, torch.tensor([[1, 2]]), torch.ones(1, 2, 3))
    harness.run([m])
    assert harness.grads == {} and m.out.count_nonzero() > 0


class Forgetful(Layer):
    """Computes a split linear and drops its result, or does not call it at all."""

    def __init__(self, call: bool) -> None:
        super().__init__("forgetful")
        self.call = call
        self.used = SplitLinear("used", 4, 4, dtype=torch.float64)
        self.lost = SplitLinear("lost", 4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if self.call:
            self.lost(x, context)
        return self.used(x, context)


@pytest.mark.parametrize("call", [True, False])
def test_unused_split_layer_is_an_error_that_names_it(call):
    """G6: its weight gradient would never be written; that is said, by name, and last step's is never
    taken."""
    harness = Harness(Forgetful(call))
    harness.fill(34)
    m = harness.microbatch(0, *pairs(1, (3, 4), (3, 4), torch.float64)[0])
    with pytest.raises(LeaseError, match="lost"):
        harness.run([m])
