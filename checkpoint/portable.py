"""A model on its way from one format to another: its tensors under our names, one at a time, and what travels beside them.

Readers (:mod:`checkpoint.hf.read`, :mod:`checkpoint.native`, :mod:`checkpoint.megatron`) make a :class:`Model` without reading
a tensor; writers call each item's ``read`` once, in order, and keep nothing. So a conversion needs memory for one group of
tensors, whatever the model's size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from checkpoint.layout import natural_key
from checkpoint.shards import torch_dtype
from qeffect_lm.errors import UsageError
from qeffect_lm.state import Role

CASTS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Item:
    """A tensor that :attr:`read` gives, anew at each call, as a contiguous CPU tensor. ``dtype`` is torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]
    role: Role = Role.PARAM

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Quantised:
    """The scales of a linear whose weight is given as it was cached in FP8.

    Attributes:
        weight: what a cached value is multiplied with.
        input: what an input is divided by before its cast to FP8; None: each input is scaled by itself.
    """

    weight: Callable[[], torch.Tensor]
    input: Callable[[], torch.Tensor] | None


@dataclass(frozen=True)
class Progress:
    """How far the training was that a model comes from."""

    step: int = 0
    tokens: int = 0
    samples: int | None = None  # consumed; None: not known


@dataclass(frozen=True)
class Model:
    """A model somewhere on disk.

    Attributes:
        where: for messages.
        section: the model section of our configuration.
        items: the parameters, by our names without a role (``layers.0.mlp.down.weight``).
        files: name → bytes of what travels: ``config.json``, tokenizers, and what tells how the source was laid out.
        seq_len: the length of sequences that a training had; it is the context of a section that names none.
        dtype: what the source's configuration states as the parameters' dtype (which need not be true).
        main: the dtype of most elements when that was stated.
        state: what a training has beside parameters, under full names (``master/…``, ``moment1/…``); empty: nothing.
        progress: how far that training was.
        contract: the contract's part of the meta data that goes with ``state``.
        fp8: parameter → its scales, where items are given in FP8.
        dropped: what the source has and the target will not, in words.
    """

    where: str
    section: dict[str, Any]
    items: Sequence[Item]
    dtype: str
    main: str
    seq_len: int | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    state: Sequence[Item] = ()
    progress: Progress = Progress()
    contract: Mapping[str, Any] | None = None
    fp8: Mapping[str, Quantised] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in (*self.items, *self.state))

    @property
    def parameters(self) -> int:
        return sum(math.prod(item.shape) for item in self.items)

    def cast(self, dtype: str) -> Model:
        """The same with all floating parameters in ``dtype``, rounded to nearest even; what is in FP8 with its scales stays."""
        return replace(self, items=[item if item.name in self.fp8 else cast(item, dtype) for item in self.items])


def cast(item: Item, dtype: str) -> Item:
    """The item in another dtype. Raises :class:`UsageError` for FP8, whose scales a cast would lose."""
    if item.dtype == dtype:
        return item
    if item.dtype.startswith("float8"):
        raise UsageError(f"{item.name} is {item.dtype}: FP8 is not cast without its scale")
    if not item.dtype.startswith(("float", "bfloat")):
        return item
    target = torch_dtype(dtype)
    return replace(item, dtype=dtype, read=lambda: item.read().to(target))


def main_dtype(items: Sequence[Item]) -> str:
    """The dtype that holds the most elements; FP8 counts for nothing, since nothing is computed in it alone."""
    count: Counter[str] = Counter()
    for item in items:
        if not item.dtype.startswith("float8"):
            count[item.dtype] += math.prod(item.shape)
    return count.most_common(1)[0][0] if count else "float32"


def check_layers(where: str, section: Mapping[str, Any], tensors: int) -> None:
    """A model has more tensors than layers, and than experts in all of them; asked first, since all else takes time and memory
    for each.

    Raises:
        UsageError: it has not.
    """
    layers, experts = section["num_layers"], (section.get("moe") or {}).get("num_experts") or 1
    if layers * experts > tensors:
        each = f" of {experts} experts each" if experts > 1 else ""
        raise UsageError(f"{where} is said to have {layers} layers{each}, and has {tensors} tensors")


def check_names(where: str, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Exactly the wanted tensors with their shapes.

    Raises:
        UsageError: names the first one that is missing, has another shape, or belongs to nothing.
    """
    missing = sorted(set(wanted) - set(found), key=natural_key)
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UsageError(f"{where} has no tensor {missing[0]}{more}, which its configuration asks for")
    unknown = sorted(set(found) - set(wanted), key=natural_key)
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise UsageError(f"{where} has a tensor {unknown[0]}{more} that its configuration has no place for")
    for name, shape in wanted.items():
        if tuple(found[name]) != tuple(shape):
            raise UsageError(f"{where}: {name} has the shape {list(found[name])}, its configuration makes it {list(shape)}")
