"""What the framework asks of a layer: names, where its gradients go, and W as a method."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from qeffect_lm.layers.context import LayerContext


class Layer(nn.Module):
    """A module called with ``(x, context)``. ``name`` is its logical name, global over stages.

    ``recompute``: as a block of a chunk, its activations are made again in I (:mod:`qeffect_lm.layers.recompute`); ``tail`` is
    then its last linear, if what follows that is sums and dropout only. ``caches``, of a layer in the slot attention: it takes
    part in ``context.cache``, so that generation may go token by token.
    """

    recompute: bool = False
    caches: bool = False

    @property
    def tail(self) -> Deferred | None:
        return None

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class DirectGradLayer(Layer):
    """A layer that writes its weight's gradient itself, straight into the main gradient.

    ``weight`` is not an autograd input: linears finish it in W, embeddings and norms in I. ``main_grad`` is the view that
    :func:`bind_main_grads` gives it, of the weight's shape.
    """

    weight: nn.Parameter
    main_grad: torch.Tensor | None = None

    @property
    def weight_name(self) -> str:
        return f"{self.name}.weight"

    def grad_view(self) -> torch.Tensor:
        if self.main_grad is None:
            raise RuntimeError(f"{self.name}: no main gradient was bound")
        return self.main_grad


class Deferred(Layer):
    """A layer with work in W: F retains, I adds dY, :meth:`weight_grad` runs W."""

    @property
    def defers(self) -> bool:
        """Whether it has any, now."""
        raise NotImplementedError

    @property
    def joins(self) -> bool:
        """Whether W of several microbatches can be one product (:mod:`qeffect_lm.layers.joined`)."""
        return False

    def weight_grad(self, context: LayerContext) -> None:
        """W: consume the lease and accumulate into ``main_grad``. Reads retained tensors only."""
        raise NotImplementedError


class SplitLayer(DirectGradLayer, Deferred):
    """A layer whose weight gradient is deferred."""

    @property
    def defers(self) -> bool:
        return self.weight.requires_grad


def split_layers(module: nn.Module) -> list[Deferred]:
    """The layers that have work in W, last first (the order in which their dY become ready)."""
    return [m for m in module.modules() if isinstance(m, Deferred) and m.defers][::-1]


def direct_layers(module: nn.Module) -> list[DirectGradLayer]:
    """All layers that write their weight's gradient themselves."""
    return [m for m in module.modules() if isinstance(m, DirectGradLayer)]


def autograd_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters that autograd differentiates (biases, a user's plain layers): finished in I.

    Names are logical: ``<layer name>.<attribute>``; inside a plain torch module, its dotted path below the layer.
    """
    direct = {id(m.weight) for m in direct_layers(module)}
    for name, parameter in named_parameters(module):
        if id(parameter) not in direct and parameter.requires_grad:
            yield name, parameter


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters by logical name."""
    seen: set[int] = set()

    def walk(current: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
        if isinstance(current, Layer) and current.name:
            prefix = f"{current.name}."
        for attribute, parameter in current._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}{attribute}", parameter
        for attribute, child in current.named_children():
            yield from walk(child, f"{prefix}{attribute}.")

    yield from walk(module, "")
