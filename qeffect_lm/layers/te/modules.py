"""Transformer Engine's modules as regions: which linears they hold, and what these tell the contract.

A module is built without parameters of its own: its weights are our ``nn.Parameter`` objects, views of the flat storage, with
our main gradients as their ``main_grad``. Under delayed scaling its quantizers read scales from, and max-merge amax into, the
timeline's tensors (its kernels merge with an integer maximum of the float's bits, for which the slots' EMPTY, -1, is less than
every amax); the scale and history tensors that Transformer Engine keeps by itself stay unused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.fp8.recipes import DelayedScaling
from qeffect_lm.layers.context import LayerContext
from qeffect_lm.layers.te.library import Library
from qeffect_lm.layers.te.region import Part, run
from qeffect_lm.layers.te.weight_grad import Pending, buffers_of, take

if TYPE_CHECKING:
    from qeffect_lm.layers.linear import SplitLinear
    from qeffect_lm.layers.norm import RMSNorm


@dataclass(frozen=True)
class Setting:
    """What all modules of a rank share. ``fp8``: Transformer Engine's recipe; None: no FP8."""

    library: Library
    timeline: ScaleTimeline
    fp8: Any
    scratch_amax: torch.Tensor  # float32 [1]: where evaluation's amax goes


@dataclass
class _Product:
    """One linear of a module: our layer, and the numbers of its quantizers."""

    linear: SplitLinear
    input: int
    weight: int
    grad_output: int
    weight_name: str  # of the parameter and of the cached weight in the module


class Products(Part):
    """A module of one or two products with a norm before them or not: LayerNormLinear, Linear, LayerNormMLP."""

    def __init__(self, setting: Setting, name: str, module: Any, products: list[_Product], norm: RMSNorm | None) -> None:
        super().__init__(name, setting.library)
        self._setting = setting
        self._module, self._products, self.norm = module, products, norm
        self._in_fp8 = setting.fp8 is not None and products[0].linear.recipe is not None
        for product in products:
            module._parameters[product.weight_name] = product.linear.weight
            if product.linear.weight.requires_grad:
                product.linear.weight.main_grad = product.linear.grad_view()  # type: ignore[attr-defined]
        if norm is not None:
            module._parameters["layer_norm_weight"] = norm.weight
        if self._in_fp8:
            with setting.library.te.autocast(enabled=True, recipe=setting.fp8, _graph=True):
                module.init_fp8_metadata(num_gemms=len(products))
            if isinstance(products[0].linear.recipe, DelayedScaling):
                self._share_scales()

    def __call__(self, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
        if context.training:
            return run(self, context, x)
        with self._discarding_amax():
            return run(self, context, x)

    # ---- scales -------------------------------------------------------------------------------------------------

    def _share_scales(self) -> None:
        timeline = self._setting.timeline
        for product in self._products:
            name = product.linear.name
            for role, quantizer in self._quantizers(product).items():
                row = timeline.index[f"{name}.{role}"]
                quantizer.scale, quantizer.amax = timeline.scale[row], timeline.open_amax[row : row + 1]

    def _quantizers(self, product: _Product) -> dict[str, Any]:
        forward, backward = self._module.quantizers["scaling_fwd"], self._module.quantizers["scaling_bwd"]
        return {
            "input": forward[product.input],
            "weight": forward[product.weight],
            "grad_output": backward[product.grad_output],
        }

    @contextmanager
    def _discarding_amax(self) -> Iterator[None]:
        """Evaluation reads scales and writes no amax: its quantizers write into a scratch."""
        delayed = self._in_fp8 and isinstance(self._products[0].linear.recipe, DelayedScaling)
        quantizers = [self._quantizers(product)["input"] for product in self._products] if delayed else []
        slots = [quantizer.amax for quantizer in quantizers]
        for quantizer in quantizers:
            quantizer.amax = self._setting.scratch_amax
        try:
            yield
        finally:
            for quantizer, slot in zip(quantizers, slots, strict=True):
                quantizer.amax = slot

    # ---- cached weights -----------------------------------------------------------------------------------------

    def weight_quantizers(self) -> dict[str, Any]:
        """Parameter name → the quantizer of its weight; none without FP8."""
        if not self._in_fp8:
            return {}
        return {product.linear.weight_name: self._quantizers(product)["weight"] for product in self._products}

    def bind_cached(self, cached: dict[str, Any]) -> None:
        """Give the module its cached weights (by parameter name), which it reads and never writes."""
        if self._in_fp8:
            for product in self._products:
                self._module._fp8_workspaces[product.weight_name] = cached[product.linear.weight_name]

    # ---- region -------------------------------------------------------------------------------------------------

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        # Not the first microbatch: cached weights are read, never made here; weight gradients accumulate unless W says so.
        out: torch.Tensor = self._module(*inputs, is_first_microbatch=False)
        return out

    def autocast(self) -> AbstractContextManager[Any]:
        if not self._in_fp8:
            return nullcontext()
        return self.library.te.autocast(enabled=True, recipe=self._setting.fp8, _graph=True)

    def touches(self) -> list[torch.Tensor]:
        timeline = self._setting.timeline
        found = [self.library.cublas_workspace(), timeline.scale, timeline.open_amax]
        for product in self._products:
            found.append(product.linear.weight)
            if self._in_fp8:
                found += buffers_of(self._module._fp8_workspaces[product.weight_name])
        return found

    def forwarding(self, context: LayerContext) -> None:
        scope = context.active_scope()
        for product in self._products:
            linear = product.linear
            self._account(context, linear, "input", "rows")
            if linear.weight.requires_grad:
                scope.retain(linear.name, Pending())

    def backwarding(self, context: LayerContext) -> None:
        for product in reversed(self._products):
            self._account(context, product.linear, "grad_output", "columns")

    def _account(self, context: LayerContext, linear: SplitLinear, kind: str, layout: str) -> None:
        if not self._in_fp8:
            return
        scope, role = context.active_scope(), f"{linear.name}.{kind}"
        if isinstance(linear.recipe, DelayedScaling):
            scope.read_scale(role)
            scope.report_amax(role)
        scope.read_weight(linear.weight_name, layout)

    def incoming(self, dy: torch.Tensor, context: LayerContext) -> torch.Tensor:
        return dy if self._in_fp8 else context.owned(dy)  # FP8 makes tensors of its own

    def backwarded(self, context: LayerContext) -> list[torch.Tensor]:
        scope = context.active_scope()
        waiting = [product.linear for product in reversed(self._products) if product.linear.weight.requires_grad]
        held = []
        for linear, delayed in zip(waiting, take(self.library, self._module.wgrad_store, len(waiting)), strict=True):
            scope.input_grad_done(linear.name)
            scope.ledger.leases.handle(scope.chunk, scope.microbatch, linear.name).payload = delayed
            held += delayed.tensors()
        return held


class CoreAttention(Part):
    """``DotProductAttention`` in bfloat16, causal, with grouped queries: ``[b, s, heads, d]`` → ``[b, s, heads * d]``."""

    def __init__(self, setting: Setting, name: str, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__(name, setting.library)
        self._offsets: torch.Tensor | None = None  # of the sequences in a microbatch: Transformer Engine keeps it for good
        self._module = setting.library.te.DotProductAttention(
            heads,
            head_dim,
            num_gqa_groups=kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal",
            name=name,
        )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: LayerContext) -> torch.Tensor:
        self._offsets = self.library.sequence_offsets(q.shape[0], q.shape[1])
        return run(self, context, q, k, v)

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._module(*inputs)
        self.library.check_attention(self.name)
        return out

    def touches(self) -> list[torch.Tensor]:
        return [] if self._offsets is None else [self._offsets]


def norm_linear(setting: Setting, norm: RMSNorm, linear: SplitLinear) -> Products:
    """``linear(norm(x))``."""
    module = setting.library.te.LayerNormLinear(
        linear.in_features, linear.out_features, eps=norm.eps, normalization="RMSNorm", **_options(linear)
    )
    return Products(setting, linear.name, module, [_first(setting, linear, "weight")], norm)


def plain_linear(setting: Setting, linear: SplitLinear) -> Products:
    """``linear(x)``."""
    module = setting.library.te.Linear(linear.in_features, linear.out_features, **_options(linear))
    return Products(setting, linear.name, module, [_first(setting, linear, "weight")], None)


def norm_mlp(setting: Setting, name: str, norm: RMSNorm, gate_up: SplitLinear, down: SplitLinear) -> Products:
    """``down(silu(gate) * up)`` of ``norm(x)``: as ours, Transformer Engine's SwiGLU takes gate's rows first, then up's."""
    module = setting.library.te.LayerNormMLP(
        gate_up.in_features,
        down.in_features,
        eps=norm.eps,
        normalization="RMSNorm",
        activation="swiglu",
        **{**_options(gate_up), "name": name},
    )
    forward, backward = setting.library.indices
    second = _Product(down, forward.GEMM2_INPUT, forward.GEMM2_WEIGHT, backward.GRAD_OUTPUT2, "fc2_weight")
    return Products(setting, name, module, [_first(setting, gate_up, "fc1_weight"), second], norm)


def _first(setting: Setting, linear: SplitLinear, weight_name: str) -> _Product:
    forward, backward = setting.library.indices
    return _Product(linear, forward.GEMM1_INPUT, forward.GEMM1_WEIGHT, backward.GRAD_OUTPUT1, weight_name)


def _options(linear: SplitLinear) -> dict[str, Any]:
    return {
        "bias": False,
        "params_dtype": linear.weight.dtype,
        "device": "meta",  # no storage: the parameters are replaced by ours
        "delay_wgrad_compute": True,
        "fuse_wgrad_accumulation": True,
        "name": linear.name,
    }
