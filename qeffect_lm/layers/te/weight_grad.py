"""W of Transformer Engine's layers: its delayed products, taken out of their queue and owned by leases.

``delay_wgrad_compute`` makes a module's backward put ``[tensors, function]`` into a queue of that module, first in, first out
and without a tag: whoever calls ``backward_dw`` gets the oldest, of whatever microbatch. So the entry is taken out as soon as
the module's backward is over and becomes the payload of its microbatch's lease; W puts that one entry back and pops it.

The function is a closure over the keyword arguments of its product, ``accumulate`` and ``out`` among them. Transformer Engine
decides ``accumulate`` in forward (``is_first_microbatch``, ``overwrite_main_grad``); which W is the first writer of a step is
known in W, so it is set there. ``LayerNormMLP`` queues two products in one backward: the second linear's, then the first's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qeffect_lm.contract.errors import LeaseError
from qeffect_lm.layers.te.library import Library
from qeffect_lm.layers.te.region import opaque


def buffers_of(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors behind ``tensor``: itself, or data and scales of a quantised one."""
    inner = getattr(type(tensor), "_INNER_TENSORS", None)
    if inner is None:
        return [tensor]
    return [held for name, _ in inner if (held := getattr(tensor, name, None)) is not None]


@dataclass(frozen=True)
class Pending:
    """What F leaves for a microbatch's W: nothing yet. Its x stays on Transformer Engine's tape until I."""

    def tensors(self) -> list[torch.Tensor]:
        return []


@dataclass(frozen=True)
class DelayedProduct:
    """One delayed weight gradient: ``operands`` (x and dY as quantised), the product, and the store it came from."""

    library: Library
    store: Any
    operands: list[Any]
    product: Callable[..., Any]

    def tensors(self) -> list[torch.Tensor]:
        return [held for operand in self.operands for held in buffers_of(operand)]

    def run(self, name: str, out: torch.Tensor, beta: int) -> None:
        """Write (``beta`` 0) or add (1) the gradient into ``out``."""
        arguments = product_arguments(self.product)
        if arguments["out"].data_ptr() != out.data_ptr():
            raise LeaseError(f"the delayed weight gradient of {name} writes another tensor than its main gradient", layer=name)
        arguments["accumulate"] = bool(beta)
        touched = [*self.tensors(), out, self.library.cublas_workspace()]
        with opaque(self.library, f"te.{name} W beta {beta}", touched):
            self.store.put(self.operands, self.product)
            self.store.pop()


def take(library: Library, store: Any, count: int) -> list[DelayedProduct]:
    """The ``count`` entries that a module's backward has just put into its store, which is empty before and after.

    Raises:
        LeaseError: another number of entries.
    """
    found = []
    while not store.context.empty():
        operands, product = store.context.get()
        found.append(DelayedProduct(library, store, operands, product))
    if len(found) != count:
        raise LeaseError(f"a backward of Transformer Engine left {len(found)} delayed weight gradients, not {count}")
    return found


def product_arguments(product: Callable[..., Any]) -> dict[str, Any]:
    """The keyword arguments that a delayed product holds.

    Raises:
        LeaseError: it holds none such (a version of Transformer Engine that this was not made for).
    """
    for cell in product.__closure__ or ():
        held = cell.cell_contents
        if isinstance(held, dict) and "accumulate" in held and held.get("out") is not None:
            return held
    raise LeaseError(f"Transformer Engine's delayed weight gradient {product.__qualname__} holds no arguments of a product")
