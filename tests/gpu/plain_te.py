"""The same decoder layers driven by Transformer Engine alone, as its documentation says: autocast, ``is_first_microbatch``,
``backward_dw``. It rolls its own scales; nothing of the contract takes part."""

from __future__ import annotations

from typing import Any

import torch

from qeffect_lm.layers.te import Library
from qeffect_lm.layers.te.block import TEBlock, rotated_heads
from qeffect_lm.layers.te.modules import Setting


class PlainBlock:
    """Transformer Engine's modules with weights of their own, copied from ``block``."""

    def __init__(self, library: Library, block: TEBlock) -> None:
        te, native = library.te, block.native
        attention, mlp = native.attention, native.mlp
        options = {
            "bias": False,
            "params_dtype": torch.bfloat16,
            "device": library.device,
            "delay_wgrad_compute": True,
            "fuse_wgrad_accumulation": True,
        }
        norm = {"eps": native.attention_norm.eps, "normalization": "RMSNorm"}
        h, qkv = attention.qkv.in_features, attention.qkv.out_features
        self.attention = attention  # for RoPE only
        self.qkv = te.LayerNormLinear(h, qkv, **norm, **options)
        self.core = te.DotProductAttention(
            attention.heads,
            attention.head_dim,
            num_gqa_groups=attention.kv_heads,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal",
        )
        self.out = te.Linear(attention.out.in_features, h, **options)
        self.mlp = te.LayerNormMLP(h, mlp.down.in_features, activation="swiglu", **norm, **options)
        self.weights = {
            attention.qkv.weight_name: self.qkv.weight,
            attention.out.weight_name: self.out.weight,
            mlp.gate_up.weight_name: self.mlp.fc1_weight,
            mlp.down.weight_name: self.mlp.fc2_weight,
        }
        self.norms = {
            f"{native.attention_norm.name}.weight": self.qkv.layer_norm_weight,
            f"{native.mlp_norm.name}.weight": self.mlp.layer_norm_weight,
        }
        for weight in self.weights.values():
            weight.main_grad = torch.full_like(weight, 7.0, dtype=torch.float32)  # what a first writer leaves behind shows

    def __call__(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        q, k, v = rotated_heads(self.attention, self.qkv(x, is_first_microbatch=first))
        x = x + self.out(self.core(q, k, v), is_first_microbatch=first)
        return x + self.mlp(x, is_first_microbatch=first)

    def scales(self) -> dict[str, tuple[float, list[float]]]:
        """Role → scale and history, newest first (Transformer Engine's own tensors)."""
        from transformer_engine.pytorch.constants import FP8BwdTensorIdx as Bwd
        from transformer_engine.pytorch.constants import FP8FwdTensorIdx as Fwd

        first = (Fwd.GEMM1_INPUT, Fwd.GEMM1_WEIGHT, Bwd.GRAD_OUTPUT1)
        second = (Fwd.GEMM2_INPUT, Fwd.GEMM2_WEIGHT, Bwd.GRAD_OUTPUT2)
        modules = [self.qkv, self.out, self.mlp, self.mlp]
        found = {}
        for name, module, (inp, weight, grad) in zip(self.weights, modules, [first, first, first, second], strict=True):
            layer = name.removesuffix(".weight")
            for role, direction, index in (("input", "fwd", inp), ("weight", "fwd", weight), ("grad_output", "bwd", grad)):
                state = module.fp8_meta[f"scaling_{direction}"]
                history = state.amax_history[1:, index].flip(0).tolist()
                found[f"{layer}.{role}"] = (float(state.scale[index]), history)
        return found


class PlainStack:
    """Some :class:`PlainBlock`, driven microbatch by microbatch."""

    def __init__(self, library: Library, blocks: list[TEBlock], recipe: Any) -> None:
        self.te, self.recipe = library.te, recipe
        self.blocks = [PlainBlock(library, block) for block in blocks]
        self.norm_grads: dict[str, torch.Tensor] = {}
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: weight for block in self.blocks for name, weight in block.weights.items()}

    @property
    def norms(self) -> dict[str, torch.Tensor]:
        return {name: weight for block in self.blocks for name, weight in block.norms.items()}

    @torch.no_grad()
    def load(self, parameters: dict[str, torch.Tensor]) -> None:
        for name, parameter in {**self.weights, **self.norms}.items():
            parameter.copy_(parameters[name])

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        with self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            out = leaf
            for block in self.blocks:
                out = block(out, microbatch == 0)
        self._held[microbatch] = leaf, out
        return out.detach()

    def input_grad(self, microbatch: int, dy: torch.Tensor) -> torch.Tensor:
        leaf, out = self._held.pop(microbatch)
        dx, *norms = torch.autograd.grad(out, [leaf, *self.norms.values()], dy)
        for name, grad in zip(self.norms, norms, strict=True):
            wide = grad.float()
            self.norm_grads[name] = wide if microbatch == 0 else self.norm_grads[name] + wide
        return dx

    def weight_grad(self) -> None:
        """W of the oldest microbatch: Transformer Engine's queue has no other order."""
        for block in reversed(self.blocks):
            for module in (block.mlp, block.out, block.qkv):
                module.backward_dw()

    def main_grads(self) -> dict[str, torch.Tensor]:
        return {**{name: weight.main_grad for name, weight in self.weights.items()}, **self.norm_grads}  # type: ignore[attr-defined]


def setting_of(block: TEBlock) -> Setting:
    modules = block._modules_of_te
    assert modules is not None
    return modules.qkv._setting
