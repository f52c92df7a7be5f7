"""``check_layer``: does a layer do what the framework relies on?

    state       nothing changes that is not declared (:mod:`qeffect_lm.testing.watch`)
    gradients   F, I and W against float64 autograd of a plain formulation, or against differences of the layer's own F
    order       results do not depend on how microbatches interleave
    replay      captured once, fed other inputs, weights and keys: the bits of eager work
    checkpoint  parameters saved and loaded into another instance are all that it takes to get the same output
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from models.spec import Part, Place
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.base import named_parameters
from qeffect_lm.testing.bits import check_order, check_replay, check_round_trip, check_state
from qeffect_lm.testing.harness import Harness, Microbatch, random
from qeffect_lm.testing.sample import COUNT, Build, Sample
from qeffect_lm.testing.watch import LayerCheckError

Reference = Callable[[Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor]

BOUND = 1e-9  # of float64 against float64 autograd, relative to the largest value: some thousand roundings of long sums
STEP, DIFFERENCE_BOUND = 1e-5, 1e-6  # central differences: STEP squared, and rounding over STEP


@dataclass(frozen=True)
class LayerReport:
    """What was checked, a line for each; ``str()`` of it is for reading."""

    layer: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.layer}:", *(f"  {line}" for line in self.lines)])


def check_layer(
    build: Build,
    shape: Sequence[int],
    reference: Reference | None = None,
    *,
    tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> LayerReport:
    """Verify a layer.

    Args:
        build: gives the layer with parameters of a dtype, a new one at every call; it is called with float64 and with
            ``dtype``, for which its linears may have an FP8 recipe (delayed scaling).
        shape: of an input, such as ``[batch, sequence, features]``.
        reference: ``(parameters by logical name, x)`` → output, in plain torch; None: the layer's own F is differentiated
            numerically, which finds a wrong I or W, but not a wrong F.
        tokens: inputs are token ids below this number, without a gradient.
        dtype: of replay, order, state and checkpoint.

    Returns:
        What was checked.

    Raises:
        LayerCheckError: the first thing that is wrong; names layer, action and tensor.
    """
    sample = Sample(build, tuple(shape), tokens, dtype)
    lines = [check_state(sample), _check_gradients(sample, reference), check_order(sample)]
    lines += [check_replay(sample), check_round_trip(sample)]
    return LayerReport(sample.name, tuple(lines))


def check_part(
    part: Part,
    hidden_size: int,
    reference: Reference | None = None,
    *,
    shape: Sequence[int] = (2, 8),
    fp8: bool = True,
    tokens: int | None = None,
    name: str = "layers.0.part",
) -> LayerReport:
    """Verify a part: its parameters are its layer's, and the layer passes :func:`check_layer`.

    Args:
        hidden_size: features of its input, a multiple of 16 with ``fp8``.
        reference, tokens: as of :func:`check_layer`; names begin with ``name``.
        shape: ``(batch, sequence)`` of an input; their product a multiple of 16 with ``fp8``.
        fp8: whether its linears run in FP8 with delayed scaling where bits are compared.

    Raises:
        LayerCheckError: as :func:`check_layer`, or where specs and parameters disagree.
    """

    def place(dtype: torch.dtype) -> Place:
        recipe = DelayedScaling() if fp8 and dtype is not torch.float64 else None
        return Place(name, hidden_size, 2, dtype, 0.02, 0, recipe)

    specs = part.parameters(place(torch.float32))
    held = [(key, tuple(parameter.shape)) for key, parameter in named_parameters(part.build(place(torch.float32)))]
    told = [(spec.name, spec.shape) for spec in specs]
    if held != told:
        odd = next((pair for pair in (*held, *told) if held.count(pair) != told.count(pair)), None)
        what = "are in another order than its layer's" if odd is None else f"and its layer's disagree about {odd[0]} {odd[1]}"
        raise LayerCheckError(f"{name}: the parameters of {type(part).__name__} {what}: layer {held}, parameters() {told}")
    for spec in specs:
        if len(spec.axes) != len(spec.shape):
            raise LayerCheckError(f"{spec.name}: {len(spec.axes)} mesh axes for {len(spec.shape)} dimensions")
    whole = tuple(shape) if tokens is not None else (*shape, hidden_size)
    report = check_layer(lambda dtype: part.build(place(dtype)), whole, reference, tokens=tokens)
    return LayerReport(name, (f"parameters: {len(specs)} specs, which are the layer's", *report.lines))


# ---- gradients -------------------------------------------------------------------------------------------------


def _check_gradients(sample: Sample, reference: Reference | None) -> str:
    harness = sample.harness(torch.float64)
    microbatches = [sample.microbatch(harness, number) for number in range(COUNT)]
    harness.run(microbatches)
    if reference is None:
        _against_differences(sample, harness, microbatches)
        return "gradients: I and W equal central differences of F in float64 (give a reference to check F too)"
    _against_autograd(sample, harness, microbatches, reference)
    return "gradients: F, I and W equal float64 autograd of the reference"


def _against_autograd(sample: Sample, harness: Harness, microbatches: Sequence[Microbatch], reference: Reference) -> None:
    wide = {name: p.detach().clone().requires_grad_(name in harness.grads) for name, p in harness.parameters.items()}
    total = torch.zeros((), dtype=torch.float64)
    for m in microbatches:
        x = m.slot.x.detach().clone()
        out = reference(wide, x.requires_grad_() if sample.tokens is None else x)
        _compare(sample, "F", f"the output of microbatch {m.number}", m.out, out.detach(), BOUND)
        loss = (out * m.slot.dy).sum()
        if sample.tokens is None:
            (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
            _compare(sample, "I", f"dx of microbatch {m.number}", m.dx, dx, BOUND)
        total = total + loss
    names = list(harness.grads)
    grads = torch.autograd.grad(total, [wide[name] for name in names], allow_unused=True) if names else ()
    for name, grad in zip(names, grads, strict=True):
        want = torch.zeros_like(wide[name]) if grad is None else grad
        _compare(sample, "I or W", f"the gradient of {name}", harness.grads[name], want, BOUND)


def _against_differences(sample: Sample, harness: Harness, microbatches: Sequence[Microbatch]) -> None:
    """Along a random direction each: of x per microbatch, of every parameter over all of them."""

    def loss(which: Sequence[Microbatch]) -> float:
        total = 0.0
        harness.ledger.begin_step(-1)
        for m in which:
            total += float((harness.forward(m) * m.slot.dy).sum())
        harness.ledger.abandon_step()
        return total

    def slope(tensor: torch.Tensor, direction: torch.Tensor, which: Sequence[Microbatch]) -> float:
        values, kept = [], tensor.detach().clone()
        for step in (STEP, -STEP):
            with torch.no_grad():
                tensor.copy_(kept + step * direction)
            values.append(loss(which))
        with torch.no_grad():
            tensor.copy_(kept)
        return (values[0] - values[1]) / (2 * STEP)

    def judge(what: str, tensor: torch.Tensor, grad: torch.Tensor, which: Sequence[Microbatch]) -> None:
        direction = random(*tensor.shape, seed=99)
        got, want = float((grad * direction).sum()), slope(tensor, direction, which)
        if abs(got - want) > DIFFERENCE_BOUND * max(1.0, abs(want), float(grad.norm() * direction.norm())):
            raise LayerCheckError(f"{sample.name}: {what} is {got:.9g} along a random direction, F changes by {want:.9g}")

    for m in microbatches:
        if sample.tokens is None:
            judge(f"I: dx of microbatch {m.number}", m.slot.x, m.dx.clone(), [m])
    grads = {name: grad.clone() for name, grad in harness.grads.items()}
    for name, grad in grads.items():
        judge(f"I or W: the gradient of {name}", harness.parameters[name], grad, microbatches)


def _compare(sample: Sample, action: str, what: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    if got.shape != want.shape:
        shapes = f"{list(got.shape)}, the reference's {list(want.shape)}"
        raise LayerCheckError(f"{sample.name}: {action}: {what} has the shape {shapes}")
    error, size = float((got - want).abs().max()), max(1.0, float(want.abs().max()))
    if not error <= bound * size:
        raise LayerCheckError(f"{sample.name}: {action}: {what} is {error:.3g} from the reference (largest value {size:.3g})")
