"""A decoder block with all its kernels: the same effects in the same order as the reference layers, and numbers as good."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from models.decoder import Decoder, DecoderBlock
from qeffect_lm.contract.ledger import Scope
from qeffect_lm.fp8.quantise import E4M3, E5M2, quantise
from qeffect_lm.fp8.recipes import CurrentScaling, DelayedScaling
from qeffect_lm.layers.base import Layer
from qeffect_lm.layers.context import LayerContext, Phase
from qeffect_lm.layers.linear import SplitLinear
from qeffect_lm.layers.norm import RMSNorm
from qeffect_lm.parallel.linear import GatheringQuantiser
from qeffect_lm.parallel.tensor import TensorParallel
from tests.decoders import llama_decoder
from tests.unit.interpreted import DEVICE, kernels_run, reference  # noqa: F401
from tests.unit.layer_harness import Harness, Microbatch, random

CALLS = ("read_scale", "report_amax", "read_weight", "retain", "input_grad_done", "take_weight_grad", "write_grad")
TOKENS, HIDDEN = 16, 32  # W sums over tokens, and a GPU's FP8 products need multiples of 16


def harness_decoder(recipe=None, *, dtype: torch.dtype = torch.bfloat16, kv_heads: int = 2) -> Decoder:
    return llama_decoder(
        vocab_size=8, hidden_size=HIDDEN, num_layers=1, num_heads=4, num_kv_heads=kv_heads, head_dim=16, ffn_size=48,
        max_positions=TOKENS, dtype=dtype, recipe=recipe,
    )  # fmt: skip


def harness_of(recipe=None, *, dtype: torch.dtype = torch.bfloat16, kv_heads: int = 2) -> Harness:
    return harness_for(harness_decoder(recipe, dtype=dtype, kv_heads=kv_heads).block(0).to(DEVICE))


def harness_for(module: torch.nn.Module) -> Harness:
    harness = Harness(module)
    if DEVICE == "cuda":
        from qeffect_lm.kernels.cublaslt import CublasLt
        from qeffect_lm.layers.linear import bind_products

        bind_products(harness.module, CublasLt(DEVICE))
    with torch.no_grad():
        for number, (name, parameter) in enumerate(harness.parameters.items()):
            scale = 1.0 if "norm" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(random(*parameter.shape, seed=number, scale=scale) + ("norm" in name))
    return harness


def batches(dtype: torch.dtype = torch.bfloat16, count: int = 2, batch: int = 2):
    shape = (batch, TOKENS // batch, HIDDEN)
    return [tuple(random(*shape, seed=50 + 2 * n + i, dtype=dtype).to(DEVICE) for i in range(2)) for n in range(count)]


def calibrate(harness: Harness, data) -> None:
    """Scales of the data's own amax, as calibration at a fresh start makes them."""
    for number, (x, dy) in enumerate(data):
        m = harness.microbatch(number, x, dy, phase=Phase.CALIBRATE)
        harness.stage.forward(m.slot, None)
        harness.stage.input_grad(m.slot, None)
    harness.commit()


def run(harness: Harness, data, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Microbatch], list[tuple]]:
    """One step; also the scope calls that the layers made."""
    calls: list[tuple] = []
    with monkeypatch.context() as patch:
        for name in CALLS:
            original = getattr(Scope, name)

            def spy(self, *arguments, _name=name, _original=original):
                calls.append((self.kind, self.microbatch, _name, *(a for a in arguments if isinstance(a, str))))
                return _original(self, *arguments)

            patch.setattr(Scope, name, spy)
        microbatches = [harness.microbatch(number, x, dy) for number, (x, dy) in enumerate(data)]
        harness.run(microbatches)
    return microbatches, calls


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def exact(data, kv_heads: int) -> tuple[Harness, list[Microbatch]]:
    """The block in float64, without FP8."""
    harness = harness_of(dtype=torch.float64, kv_heads=kv_heads)
    with torch.no_grad():
        for parameter in harness.parameters.values():
            parameter.copy_(parameter.bfloat16())
    microbatches = [harness.microbatch(number, x.double(), dy.double()) for number, (x, dy) in enumerate(data)]
    with reference():
        harness.run(microbatches)
    return harness, microbatches


@pytest.mark.parametrize(("batch", "kv_heads"), [(2, 2), (2, 4), (1, 2)], ids=["grouped", "all heads", "one sequence"])
def test_block_as_the_reference(batch, kv_heads, monkeypatch):
    """Same scope calls in the same order; outputs, dX and every gradient as near to float64 as the reference's (half as
    far again at most); the amax of every role equal to a few roundings."""
    data = batches(batch=batch, count=2 if (batch, kv_heads) == (2, 2) else 1)
    ours, theirs = harness_of(DelayedScaling(), kv_heads=kv_heads), harness_of(DelayedScaling(), kv_heads=kv_heads)
    calibrate(ours, data)
    got, got_calls = run(ours, data, monkeypatch)
    with reference():
        calibrate(theirs, data)
        want, want_calls = run(theirs, data, monkeypatch)
    assert got_calls == want_calls and len(got_calls) >= 35
    wide, exact_microbatches = exact(data, kv_heads)
    for g, w, e in zip(got, want, exact_microbatches, strict=True):
        assert 0 < error(g.out, e.out) <= 1.5 * error(w.out, e.out)
        assert 0 < error(g.dx, e.dx) <= 1.5 * error(w.dx, e.dx)
    for name, grad in wide.grads.items():
        assert 0 < error(ours.grads[name], grad) <= 1.5 * error(theirs.grads[name], grad) < 0.5, name
    assert torch.isfinite(ours.timeline.open_amax).all() and (ours.timeline.scale != 1).all()
    torch.testing.assert_close(ours.timeline.scale, theirs.timeline.scale, rtol=0.02, atol=0)
    torch.testing.assert_close(ours.timeline.open_amax, theirs.timeline.open_amax, rtol=0.1, atol=0)


class Half(Layer):
    """One half of a block, with its norm; attention also as parts that are nodes of their own."""

    def __init__(self, block: DecoderBlock, which: str, *, fused: bool = True, residual: bool = False) -> None:
        super().__init__("")
        self.norm, self.layer = (getattr(block, name) for name in (f"{which}_norm", which))
        self.fused, self.residual = fused, residual

    def forward(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if self.fused:
            return self.layer(x, context, self.norm, residual=self.residual)
        return self.layer._separate(x, context, self.norm)


def run_half(which: str, batch: int, kv_heads: int, **how: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list]:
    """Outputs and dX of two microbatches; amax and gradients; the data."""
    harness = harness_for(Half(harness_of(DelayedScaling(), kv_heads=kv_heads).module, which, **how))
    data = batches(batch=batch)
    calibrate(harness, data[:1])
    microbatches = [harness.microbatch(n, x, dy) for n, (x, dy) in enumerate(data)]
    harness.run(microbatches)
    left = [harness.timeline.open_amax, *harness.grads.values()]
    return [tensor for m in microbatches for tensor in (m.out, m.dx)], left, data


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 2), (1, 4), (2, 4)], ids=["one sequence", "one, all heads", "all heads"])
def test_attention_as_one_node_equals_its_parts(batch, kv_heads):
    """Bytes of outputs, dX, every gradient and every amax."""
    results = [run_half("attention", batch, kv_heads, fused=fused) for fused in (True, False)]
    for got, want in zip(*([*ends, *left] for ends, left, _ in results), strict=True):
        assert got.abs().max() > 0 and torch.equal(got, want)


class Alone(TensorParallel):
    """A rank without peers: its parts are the wholes."""

    def gather(self, x, context, who, kind="gather"):
        self._tell(context, who, kind)
        return x.clone()

    def sum_(self, x, context, who):
        return self.gather(x, context, who, "sum")

    def scatter_sum(self, x, context, who):
        return self.gather(x, context, who, "scatter")


@pytest.mark.parametrize(("sequence", "recompute"), [(True, "none"), (False, "none"), (True, "selective")])
@pytest.mark.parametrize("which", ["attention", "mlp"])
def test_cut_over_ranks_as_one_node(which, sequence, recompute, monkeypatch):
    """A rank's half layer over its tokens, the norm before they are gathered: bytes of the whole layer's outputs, dX, gradients
    and amax; with the residual the sum is rounded after the parts'. Exchanges as the linears say."""
    (plain, left, data) = run_half(which, 2, 2, residual=False)
    decoder = replace(harness_decoder(DelayedScaling()), tp=Alone(1, 0, sequence), recompute=recompute)
    for residual in (False, True):
        harness = harness_for(Half(decoder.block(0).to(DEVICE), which, fused=True, residual=residual))
        make = harness.microbatch

        def microbatch(number, x, dy, make=make, **more):
            if not sequence:
                return make(number, x, dy, **more)
            made = make(number, x.reshape(-1, HIDDEN), dy.reshape(-1, HIDDEN), **more)
            made.slot.context.grid = tuple(x.shape[:2])
            return made

        monkeypatch.setattr(harness, "microbatch", microbatch)
        calibrate(harness, data[:1])
        told: list[str] = []
        monkeypatch.setattr(Scope, "collective", lambda self, name, told=told: told.append(f"{self.kind} {name}"))
        microbatches = [microbatch(n, x, dy) for n, (x, dy) in enumerate(data)]
        harness.run(microbatches)
        linears = [m for m in harness.module.modules() if isinstance(m, SplitLinear)]
        again = {f"I {m.name}.gather" for m in linears} if recompute != "none" else set()  # tokens that F did not keep
        least = {f"{k} {name}" for m in linears for k in "FI" for name in m.collectives[k]}
        assert least <= set(told) <= least | again and (recompute == "none" or len(set(told)) > len(least))
        for got, want in zip([harness.timeline.open_amax, *harness.grads.values()], left, strict=True):
            assert got.abs().max() > 0 and torch.equal(got, want)
        for m, (out, dx), (x, dy) in zip(microbatches, (plain[:2], plain[2:]), data, strict=True):
            more = (x, dy) if residual else (torch.zeros_like(x), torch.zeros_like(dy))
            assert torch.equal(m.out.view_as(out), out + more[0])
            assert torch.equal(m.dx.view_as(dx), dx) if not residual else (m.dx.view_as(dx) - (dx + dy)).abs().max() < 0.1


class Both(TensorParallel):
    """A rank whose peer's part is made beforehand."""

    def gather(self, x, context, who):
        assert x.dtype is torch.uint8 and torch.equal(x, PARTS[self.rank])
        return torch.cat(PARTS)


PARTS: list[torch.Tensor] = []


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_quantised_by_each_rank_then_gathered(fmt, placed, normed):
    """Bytes of both layouts and of the inverse scale are those of all tokens quantised together; so is the larger amax. A norm
    in the kernel leaves its statistics of the rank's own."""
    x = random(2 * TOKENS, HIDDEN, seed=3, dtype=torch.bfloat16).to(DEVICE)
    x[3, 5], x[TOKENS + 2, 7] = 900.0, 9.0
    from qeffect_lm.layers.fused import NormQuantiser

    rms = RMSNorm("norm", HIDDEN, dtype=torch.bfloat16).to(DEVICE)
    scale = torch.tensor(30.0, device=DEVICE)

    def run(x: torch.Tensor, context: LayerContext | None, rank: int = 0, columns: bool = True) -> tuple[Any, ...]:
        amax, own = torch.tensor(-1.0, device=DEVICE), NormQuantiser(rms) if normed else quantise
        by = own if context is None else GatheringQuantiser(own, Both(2, rank), context, "linear")
        outs = {}
        if placed and columns:
            wide = torch.zeros(HIDDEN, 4 * TOKENS, device=DEVICE).to(fmt.dtype)
            outs = {"columns_out": wide[:, 2 * TOKENS :], "scale_inv_out": torch.zeros((), device=DEVICE)}
        made = by(x, scale, fmt, columns=columns, amax_out=amax, **outs)
        assert all(out is getattr(made, name.removesuffix("_out")) for name, out in outs.items())
        return made, amax, own.rstd if normed else None

    want, amax, rstd = run(x, None)
    PARTS[:] = [run(part, None, columns=False)[0].rows.view(torch.uint8) for part in x.chunk(2)]
    context, amaxes = LayerContext(Phase.EVAL, key=torch.tensor(0)), []
    for rank, part in enumerate(x.chunk(2)):
        got, mine, of_own = run(part, context, rank)
        amaxes.append(mine)
        for layout in ("rows", "columns"):
            assert torch.equal(getattr(got, layout).view(torch.uint8), getattr(want, layout).view(torch.uint8))
        assert torch.equal(got.scale_inv, want.scale_inv) and run(part, context, rank, columns=False)[0].columns is None
        assert rstd is None or torch.equal(of_own, rstd.chunk(2)[rank])
    assert torch.equal(torch.stack(amaxes).max(), amax) and not torch.equal(*amaxes), "either has an amax of its own"


@pytest.mark.parametrize("which", ["attention", "mlp"])
def test_residual_inside(which):
    """The residual changes no amax and no gradient of a weight; outputs and dX are the sums, rounded once: within half a step
    of the sum and half a step of what is not rounded before."""
    (alone, left, data), (ends, left_too, _) = (run_half(which, 2, 2, residual=residual) for residual in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(left, left_too, strict=True))
    residuals = [tensor.double() for pair in data for tensor in pair]
    for got, part, residual in zip(ends, alone, residuals, strict=True):
        want = part.double() + residual
        bound = 2.0**-8 * (want.abs() * (1 + 2.0**-8) + part.double().abs()) * (1 + 2.0**-12)
        assert ((got.double() - want).abs() <= bound).all() and part.abs().max() > 0


def test_activation_for_w_is_made_in_i(monkeypatch):
    """Between F and I no transposed activation is kept; what I makes is what F would have kept, so every gradient has the same
    bits, also where scales rolled in between."""

    def gradients(roll: bool, early: bool) -> list[torch.Tensor]:
        harness, data = harness_of(DelayedScaling()), batches(count=2)
        calibrate(harness, data[:1])
        down = harness.module.mlp.down
        with monkeypatch.context() as patch:
            if early:
                product = SplitLinear.product
                patch.setattr(SplitLinear, "product", lambda *a, columns_in_i=False, **k: product(*a, **k))
            with harness.step():
                first, second = (harness.microbatch(n, x, dy) for n, (x, dy) in enumerate(data))
                for m in (first, second):
                    harness.forward(m)
                    payload = harness.ledger.leases.payloads(0, m.number)[down.name]
                    assert (payload.x is None) is not early and payload.dy is None and payload.x_scale_inv is not None
                if roll:
                    harness.timeline.scale_of(f"{down.name}.input").mul_(0.5)
                for m in (first, second):
                    harness.input_grad(m)
                    payload = harness.ledger.leases.payloads(0, m.number)[down.name]
                    assert payload.x.shape == (48, TOKENS) and payload.dy is not None
                for m in (first, second):
                    harness.weight_grad(m)
        return list(harness.grads.values())

    for roll in (False, True):
        for got, want in zip(gradients(roll, False), gradients(roll, True), strict=True):
            assert got.abs().max() > 0 and torch.equal(got, want)


@pytest.mark.parametrize("frozen", ["gate_up", "down"])
def test_frozen_half_of_an_mlp(frozen):
    """G6: the other half's gradient is what it was; of a frozen ``down`` no transposed activation is made."""
    results = []
    for weights in ((), (frozen,)):
        block = harness_of(DelayedScaling()).module
        for name in weights:
            getattr(block.mlp, name).weight.requires_grad_(False)
        harness, data = harness_for(block), batches(count=1)
        calibrate(harness, data)
        with harness.step():
            m = harness.microbatch(0, *data[0])
            harness.forward(m)
            harness.input_grad(m)
            kept = harness.ledger.leases.payloads(0, 0)
            harness.weight_grad(m)
        results.append((harness.grads, {name for name in kept if ".mlp." in name}))
    (grads, kept), (fewer, left) = results
    other = block.mlp.down if frozen == "gate_up" else block.mlp.gate_up
    assert len(kept) == 2 and left == {other.name} and len(fewer) == len(grads) - 1
    assert all(torch.equal(grad, grads[name]) for name, grad in fewer.items())


def test_fp8_operands_alone_leave_the_fused_layers(monkeypatch):
    """Under delayed scaling no bfloat16 copy of a norm's or an activation's output is made; under current scaling it must be,
    and the numbers are those of the separate layers."""
    from qeffect_lm.layers import fused, norm

    made = []
    for name, node in (("attention", fused.FusedAttention), ("mlp", fused.FusedMLP)):
        monkeypatch.setattr(node, "forward", staticmethod(_noting(made, name, node.forward)))
    monkeypatch.setattr(norm._RMSNormKernels, "forward", staticmethod(_noting(made, "norm", norm._RMSNormKernels.forward)))
    two = ["norm", "norm"]
    for recipe, want in ((DelayedScaling(), ["attention", "mlp"]), (CurrentScaling(), two), (None, two)):
        made.clear()
        harness = harness_of(recipe)
        harness.refresh()
        harness.run([harness.microbatch(0, *batches(count=1)[0])])
        assert made == want


def _noting(made, what, original):
    def forward(ctx, *arguments):
        made.append(what)
        return original(ctx, *arguments)

    return forward


def test_evaluation_reads_and_leaves_nothing():
    """S6: the fused layers write no amax and retain nothing in evaluation."""
    harness, data = harness_of(DelayedScaling()), batches(count=1)
    calibrate(harness, data)
    before = harness.timeline.open_amax.clone()
    m = harness.microbatch(0, data[0][0] * 50, data[0][1], phase=Phase.EVAL)
    harness.stage.evaluate(m.slot)
    assert m.out.abs().sum() > 0 and torch.equal(harness.timeline.open_amax, before)
    assert isinstance(harness.module, DecoderBlock)
