"""Backend native in FP8 against the same model in float64: one step's loss and every main gradient, within stated bounds.

The reference is the engine in float64 on the CPU, whose own numbers the tests compare with an independent model. Same weights,
data and dropout; what differs is the arithmetic.

Where the bounds come from: E4M3 has 3 mantissa bits and E5M2 has 2, so a rounded value is off by at most 2**-4 or 2**-3 of
itself, and, as roundings fall anywhere in that range, by a root mean square of at most 2**-4 / sqrt(3) or 2**-3 / sqrt(3). A
product of two rounded matrices is off by the two in quadrature. On the way from the loss to a weight there are the input
gradients of all linears behind it, and beneath each its forward operands: with independent errors, D products in a row are off
by sqrt(D) times one of them. Layers have four linears, so D is 4 for each layer, and W adds one.

That counts roundings, not what a model makes of them: with weights of one size at every width, wide layers enlarge what goes
through them, errors too, in any precision (at 4096 a BF16 run is off by 2.6 times what it is at 256). So weights shrink with
the root of the width here, and signals have one size.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from qeffect_lm.app.assemble import Assembly, assemble
from qeffect_lm.config import Config
from tools.proofs.cells import Cell

E4M3_RMS, E5M2_RMS = 2.0**-4 / math.sqrt(3), 2.0**-3 / math.sqrt(3)
ONE_PRODUCT = math.hypot(E4M3_RMS, E5M2_RMS)  # of an input or weight gradient
LOSS_BOUND = 0.01  # relative; the loss of fresh weights is near log(vocabulary), whatever the roundings


def gradient_bound(layers: int) -> float:
    """Relative error, in the Euclidean norm, of any main gradient of a model of so many layers."""
    return ONE_PRODUCT * math.sqrt(4 * layers + 1)


def initial_std(hidden: int) -> float:
    """Standard deviation of the weights: the default at a width of 256."""
    return 0.02 * math.sqrt(256 / hidden)


def _config(cell: Cell, device: str, **more: Any) -> Config:
    return cell.config("eager", device, model={"init_std": initial_std(cell.hidden)}, **more)


def check(cell: Cell, device: str, threads: int) -> dict[str, Any]:
    """Losses and gradients of one step; ``threads`` is the CPU threads of the reference, whose sums need no fixed order."""
    began = time.perf_counter()
    fp8 = assemble(_config(cell, device))
    masters = {name: fp8.flat.master(name).cpu().double() for name in fp8.flat.names}
    fp8_loss, fp8_grads = _step(fp8, cell)
    fixed = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide = {"dtype": "float64", "fp8": {"recipe": "none"}}
        loss, grads = _step(_with(masters, assemble(_config(cell, "cpu", precision=wide))), cell)
    finally:
        torch.set_num_threads(fixed)
    narrow = {"dtype": "bfloat16", "fp8": {"recipe": "none"}}
    bf16_loss, bf16_grads = _step(_with(masters, assemble(_config(cell, device, precision=narrow))), cell)
    errors = {name: _relative(fp8_grads[name], grads[name]) for name in grads}
    plain = {name: _relative(bf16_grads[name], grads[name]) for name in grads}
    worst = max(errors, key=lambda name: errors[name])
    loss_error = abs(fp8_loss - loss) / abs(loss)
    bound, control = gradient_bound(cell.layers), _relative(2 * fp8_grads[worst], grads[worst])
    return {
        "cell": f"float64, hidden {cell.hidden}x{cell.layers} dropout {cell.dropout:g}",
        "ok": loss_error <= LOSS_BOUND and errors[worst] <= bound < control and all(bool(g.any()) for g in grads.values()),
        "gradients": len(errors),
        "loss_relative_error": loss_error,
        "loss_bound": LOSS_BOUND,
        "worst_gradient": worst,
        "worst_relative_error": errors[worst],
        "bound": bound,
        "median_relative_error": sorted(errors.values())[len(errors) // 2],
        "median_relative_error_bf16": sorted(plain.values())[len(plain) // 2],
        "loss_relative_error_bf16": abs(bf16_loss - loss) / abs(loss),
        "control_relative_error": control,  # a gradient counted twice
        "seconds": round(time.perf_counter() - began, 1),
    }


def _with(masters: dict[str, torch.Tensor], assembly: Assembly) -> Assembly:
    """The same weights, as each dtype holds them."""
    with torch.no_grad():
        for name, master in masters.items():
            assembly.flat.master(name).copy_(master)
        assembly.flat.gather()
    return assembly


def _step(assembly: Assembly, cell: Cell) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and main gradients of step 0, on the CPU in float64."""
    assembly.prepare(cell.batch(0))
    loss = float(assembly.engine.step(0, cell.batch(0)).loss)
    flat = assembly.flat
    return loss, {name: flat.grad(name).cpu().double() for name in flat.trainable_names}


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
