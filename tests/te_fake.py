"""A stand-in for Transformer Engine on a CPU, with the habits that the backend has to live with.

Its modules compute with plain torch in the dtype of their input, and quantise by rounding to FP8 and back. What they share with
the real ones: the queue of delayed weight gradients and its closures, backwards that take apart what forward left, quantizers
that max-merge into ``amax``, cached weights read with ``is_first_microbatch=False``, and global switches.
"""

from __future__ import annotations

import queue
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional

from qeffect_lm.layers.te.library import Library

FORWARD = SimpleNamespace(GEMM1_INPUT=0, GEMM1_WEIGHT=1, GEMM2_INPUT=3, GEMM2_WEIGHT=4)
BACKWARD = SimpleNamespace(GRAD_OUTPUT1=0, GRAD_OUTPUT2=2)


class Store:
    """An untagged queue, first in, first out."""

    def __init__(self) -> None:
        self.context: queue.Queue = queue.Queue()

    def put(self, tensors: list, function: Any) -> None:
        self.context.put([tensors, function])

    def pop(self) -> Any:
        tensors, function = self.context.get()
        return function(*tensors), tensors


class Quantizer:
    def __init__(self, dtype: torch.dtype) -> None:
        self.scale, self.amax, self.dtype = torch.ones(()), torch.zeros(1), dtype
        self.internal = True

    def copy(self) -> Quantizer:
        other = Quantizer(self.dtype)
        other.scale, other.amax = self.scale, self.amax
        return other

    def set_usage(self, **usage: bool) -> None:
        pass

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        torch.maximum(self.amax, x.detach().abs().amax().float().reshape(1), out=self.amax)
        top = torch.finfo(self.dtype).max
        fp8 = (x.float() * self.scale).clamp(-top, top).to(self.dtype)
        return (fp8.float() / self.scale).to(x.dtype)


class Storage:
    """A quantised activation, as Float8TensorStorage: made with its data only, which leaves it while autograd saves it."""

    _INNER_TENSORS = (("_data", "data"),)

    def __new__(cls, *, data: torch.Tensor) -> Storage:
        made = object.__new__(cls)
        made._data = data
        return made

    def prepare_for_saving(self) -> torch.Tensor:
        data, self._data = self._data, None
        return data

    def restore_from_saved(self, data: torch.Tensor) -> torch.Tensor:
        assert self._data is None, "a second backward fills a storage that the first one's weight gradient still holds"
        self._data = data
        return data


@dataclass(slots=True)
class BackwardArguments:
    """What Linear's backward reads, and takes apart."""

    accumulate: bool
    weight: Any
    x: Any = None

    def setup_saved_tensors(self, x: Any) -> None:
        self.x = x


class CachedWeight:
    """As Float8Tensor: views of storages that are given."""

    _INNER_TENSORS = (("_data", "data"), ("_transpose", "data_transpose"), ("_scale_inv", "fp8_scale_inv"))

    def __init__(self, **given: Any) -> None:
        self._data, self._transpose = given["data"], given["data_transpose"]
        self._scale_inv, self._quantizer = given["fp8_scale_inv"], given["quantizer"]

    def quantize_(self, weight: torch.Tensor) -> None:
        q = self._quantizer
        torch.maximum(q.amax, weight.detach().abs().amax().float().reshape(1), out=q.amax)
        fp8 = (weight.float() * q.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        self._data.copy_(fp8.view(torch.uint8))
        self._transpose.copy_(fp8.t().contiguous().view(torch.uint8))
        self._scale_inv.fill_(1.0).div_(q.scale)

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        return (self._data.view(torch.float8_e4m3fn).float() * self._scale_inv).to(dtype)


def delayed_product(store: Store, x: Any, dy: torch.Tensor, weight: torch.nn.Parameter, accumulate: bool) -> None:
    kwargs = {"accumulate": accumulate, "out": weight.main_grad}

    def product(x: Any, dy: torch.Tensor) -> torch.Tensor:
        x = x._data if isinstance(x, Storage) else x
        gradient = dy.float().t() @ x.float()
        out = kwargs["out"]
        return out.add_(gradient) if kwargs["accumulate"] else out.copy_(gradient)

    store.put([x, dy], product)


class _Products(torch.autograd.Function):
    """One or two products behind a norm or not; saved through attributes that backward forgets."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Any, module: Any, *weights: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rstd = None
        inputs = flat
        if norm is not None:
            rstd = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + module.eps)
            inputs = (flat.float() * rstd * norm).to(x.dtype)
        inputs = module.quantise("scaling_fwd", FORWARD.GEMM1_INPUT, inputs)
        w = [module.weight(name) for name in module.names]
        hidden = inputs @ w[0].t()
        act = None
        y = hidden
        if len(w) == 2:
            gate, up = hidden.chunk(2, -1)
            act = module.quantise("scaling_fwd", FORWARD.GEMM2_INPUT, functional.silu(gate) * up)
            y = act @ w[1].t()
        storage = Storage(data=inputs)
        ctx.save_for_backward(flat, rstd, storage.prepare_for_saving(), hidden, act)
        ctx.tensor_objects = [None, storage]
        ctx.held, ctx.backward_objects = (w, weights, norm), BackwardArguments(True, weakref.ref(weights[0]))
        ctx.module, ctx.shape = module, x.shape
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        assert ctx.tensor_objects is not None, "ctx must have .tensor_objects to restore saved tensors"
        flat, rstd, inputs, hidden, act = ctx.saved_tensors
        (_, storage), ctx.tensor_objects = ctx.tensor_objects, None
        bag, ctx.backward_objects = ctx.backward_objects, None
        storage.restore_from_saved(inputs)
        bag.setup_saved_tensors(storage)
        first, bag.weight = bag.weight, None
        w, weights, norm = ctx.held
        module = ctx.module
        dy = dy.reshape(-1, dy.shape[-1])
        if len(w) == 2:
            dy = module.quantise("scaling_bwd", BACKWARD.GRAD_OUTPUT2, dy)
            delayed_product(module.wgrad_store, act, dy, weights[1], bag.accumulate)
            d_act = (dy @ w[1]).float()
            gate, up = hidden.float().chunk(2, -1)
            s = torch.sigmoid(gate)
            dy = torch.cat([d_act * up * (s + gate * s * (1 - s)), d_act * gate * s], -1).to(flat.dtype)
            hidden.data = torch.empty(0, dtype=hidden.dtype)  # clear_tensor_data
        dy = module.quantise("scaling_bwd", BACKWARD.GRAD_OUTPUT1, dy)
        delayed_product(module.wgrad_store, bag.x, dy, first(), bag.accumulate)
        dx = dy @ w[0]
        dnorm = None
        if rstd is not None:
            wide, normed = dx.float(), flat.float() * rstd
            dnorm = (wide * normed).sum(0).to(flat.dtype)
            scaled = wide * norm.float()
            dx = ((scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd).to(flat.dtype)
            rstd.data = torch.empty(0)
        return dx.view(ctx.shape), dnorm, None, *(None for _ in weights)


class _Module(torch.nn.Module):
    names = ("weight",)
    normed = False
    eps = 1e-5

    def __init__(self, switch: dict, **options: Any) -> None:
        super().__init__()
        assert options["delay_wgrad_compute"] and options["fuse_wgrad_accumulation"] and not options["bias"]
        self.eps = options.get("eps", 1e-5)
        self.switch, self.wgrad_store, self._fp8_workspaces, self.quantizers = switch, Store(), {}, {}

    def init_fp8_metadata(self, num_gemms: int) -> None:
        assert self.switch["fp8"] and num_gemms == len(self.names)
        self.quantizers = {
            "scaling_fwd": [Quantizer(torch.float8_e4m3fn) for _ in range(3 * num_gemms)],
            "scaling_bwd": [Quantizer(torch.float8_e5m2) for _ in range(2 * num_gemms)],
        }

    def quantise(self, direction: str, index: int, x: torch.Tensor) -> torch.Tensor:
        return self.quantizers[direction][index](x) if self.quantizers else x

    def weight(self, name: str) -> torch.Tensor:
        if self.quantizers:
            return self._fp8_workspaces[name].value(self._parameters[name].dtype)
        return self._parameters[name].detach()

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        assert is_first_microbatch is False
        assert bool(self.quantizers) == self.switch["fp8"], "forward outside of its autocast"
        norm = self._parameters["layer_norm_weight"] if self.normed else None
        return _Products.apply(x, norm, self, *(self._parameters[name] for name in self.names))


def fake_library(device: str = "cpu") -> Library:
    """A :class:`Library` whose modules are the ones of this file."""
    switch: dict[str, Any] = {"fp8": False, "capturing": False}

    class Autocast:
        def __init__(self, enabled: bool, recipe: Any, _graph: bool) -> None:
            assert enabled and _graph and recipe is not None

        def __enter__(self) -> None:
            switch["fp8"] = True

        def __exit__(self, *_: object) -> None:
            switch["fp8"] = False

    class Linear(_Module):
        def __init__(self, *_: int, **options: Any) -> None:
            super().__init__(switch, **options)

    class LayerNormLinear(Linear):
        normed = True

    class LayerNormMLP(Linear):
        names, normed = ("fc1_weight", "fc2_weight"), True

    class Attention:
        def __init__(self, heads: int, head_dim: int, *, num_gqa_groups: int, **_: Any) -> None:
            self.group = heads // num_gqa_groups

        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            assert not switch["fp8"]
            k, v = (t.repeat_interleave(self.group, dim=2) for t in (k, v))
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    workspace, offsets = torch.zeros(8, dtype=torch.uint8), torch.zeros(3, dtype=torch.int32)
    recipe = lambda **given: SimpleNamespace(**given)  # noqa: E731
    modules = {
        "pytorch": SimpleNamespace(
            Linear=Linear,
            LayerNormLinear=LayerNormLinear,
            LayerNormMLP=LayerNormMLP,
            DotProductAttention=Attention,
            autocast=Autocast,
            Float8Tensor=CachedWeight,
        ),
        "common.recipe": SimpleNamespace(
            DelayedScaling=recipe, Float8CurrentScaling=recipe, Float8BlockScaling=recipe, Format=SimpleNamespace(HYBRID=0)
        ),
        "pytorch.constants": SimpleNamespace(FP8FwdTensorIdx=FORWARD, FP8BwdTensorIdx=BACKWARD),
        "pytorch.graph": SimpleNamespace(
            set_capture_start=lambda: switch.update(capturing=True),
            set_capture_end=lambda: switch.update(capturing=False),
            is_graph_capturing=lambda: switch["capturing"],
        ),
        "pytorch.quantization": SimpleNamespace(
            FP8GlobalStateManager=SimpleNamespace(quantization_state=SimpleNamespace(skip_fp8_weight_update_tensor=None))
        ),
        "pytorch.cpp_extensions.gemm": SimpleNamespace(get_cublas_workspace=lambda *_: workspace),
        "pytorch.attention.dot_product_attention": SimpleNamespace(_attention_backends={"use_unfused_attention": False}),
        "pytorch.attention.dot_product_attention.utils": SimpleNamespace(get_full_cu_seqlens=lambda *_: offsets),
    }
    return Library("2.20.2", modules, torch.device(device))
