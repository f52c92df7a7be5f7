"""Asking the process that opens pickles, and believing none of its answers unchecked.

The child (:mod:`checkpoint.megatron.unpickle`) reads what somebody else wrote, so its answers are treated as theirs: every
name, number and span is compared with the files here before a byte is read.
"""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from checkpoint.hf.folder import read_into
from checkpoint.shards import DTYPE_TAGS, host_bytes, torch_dtype
from qeffect_lm.errors import QEffectError, UsageError

CHILD = Path(__file__).with_name("unpickle.py")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Ref:
    """A tensor's bytes in a file: ``offset`` from its beginning, ``stride`` in elements."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Elements from the first to the last, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    def rows(self, start: int, count: int) -> Ref:
        """Some rows of it."""
        offset = self.offset + start * self.stride[0] * torch_dtype(self.dtype).itemsize
        return replace(self, offset=offset, shape=(count, *self.shape[1:]))

    def read(self) -> torch.Tensor:
        """A new contiguous CPU tensor. Raises :class:`UsageError` where the file ends before."""
        itemsize = torch_dtype(self.dtype).itemsize
        raw = torch.empty(self.span * itemsize, dtype=torch.uint8)
        read_into(self.path, self.offset, host_bytes(raw), "a tensor")
        flat = raw.view(torch_dtype(self.dtype))
        return flat.reshape(self.shape) if self.contiguous else flat.as_strided(self.shape, self.stride).contiguous()


@dataclass(frozen=True)
class Record:
    """An object of a class that is not here, as its pickle described it."""

    name: str
    args: tuple[Any, ...]
    state: Any


def open_files(paths: Sequence[Path]) -> list[Any]:
    """The contents of files of ``torch.save``, tensors as :class:`Ref`.

    Raises:
        UsageError: a file holds what is refused, or is damaged; names it.
    """
    answers = _ask("torch", paths)
    return [_Decoder(path.parent).decode(answer) for path, answer in zip(paths, answers, strict=True)]


def open_torch_dist(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(key → dtype, shape and chunks; key → object) of a folder of torch.distributed.checkpoint. Raises as
    :func:`open_files`."""
    answer = _ask("torch_dist", [folder])[0]
    decoder = _Decoder(folder)
    try:
        tensors = {}
        for key, entry in answer["tensors"].items():
            dtype, shape = _dtype(entry["dtype"]), _sizes(entry["shape"])
            chunks = [(_sizes(chunk["start"]), decoder.ref({**chunk})) for chunk in entry["chunks"]]
            tensors[str(key)] = (dtype, shape, chunks)
        return tensors, {str(key): decoder.decode(value) for key, value in answer["objects"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{folder / '.metadata'} makes no sense: {type(error).__name__} {error}") from None


def _ask(kind: str, paths: Sequence[Path]) -> list[Any]:
    """What the child says of each path."""
    answers = []
    for path, line in zip(paths, ask_child(kind, paths), strict=True):
        answer = json.loads(line)
        if "refused" in answer:
            raise UsageError(f"{path} is refused: {answer['refused']}")
        answers.append(answer["content"])
    return answers


def ask_child(kind: str, paths: Sequence[Path]) -> list[str]:
    """The child's lines, one for each path. It gets no input, and has nothing but its pipes to write to."""
    command = [sys.executable, "-P", "-B", str(CHILD), kind, *map(str, paths)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != len(paths):
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise QEffectError(f"the process that opens {paths[min(len(lines), len(paths) - 1)]} ended: {last[0]}")
    return lines


class _Decoder:
    """Plain data of one answer as Python's, checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def decode(self, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        ((kind, value), *more) = item.items()
        if kind == "dict":
            return {self._key(key): self.decode(each) for key, each in value}
        if kind == "list":
            return [self.decode(each) for each in value]
        if kind == "tensor":
            return self.ref(value)
        if kind == "values":
            return _values(value)
        if kind == "object":
            rest = dict(more)
            return Record(str(value), tuple(self.decode(each) for each in rest["args"]), self.decode(rest["state"]))
        if kind == "bytes":
            return base64.b64decode(value)
        return float(value) if kind == "float" else str(value)

    @staticmethod
    def _key(key: Any) -> Any:
        return str(key) if isinstance(key, dict) else key

    def ref(self, entry: dict[str, Any]) -> Ref:
        """A place in a file, which has to lie inside it."""
        name = entry["file"]
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise UsageError(f"a tensor is said to be in {name!r}, which is not the name of a file in {self.folder}")
        path, dtype = self.folder / name, _dtype(entry["dtype"])
        ref = Ref(path, _size(entry["offset"]), dtype, _sizes(entry["shape"]), _sizes(entry["stride"]))
        if len(ref.shape) != len(ref.stride):
            raise UsageError(f"{path}: a tensor of {list(ref.shape)} with the strides {list(ref.stride)}")
        end = ref.offset + ref.span * torch_dtype(dtype).itemsize
        if not path.is_file() or end > path.stat().st_size:
            raise UsageError(f"{path} ends before byte {end}, to which a tensor reaches")
        return ref


def _values(entry: dict[str, Any]) -> torch.Tensor:
    dtype, shape = torch_dtype(_dtype(entry["dtype"])), _sizes(entry["shape"])
    data = [float(each["float"]) if isinstance(each, dict) else each for each in entry["data"]]
    if len(data) != math.prod(shape):
        raise UsageError(f"a tensor of {list(shape)} with {len(data)} values")
    return torch.tensor(data, dtype=torch.float64 if dtype.is_floating_point else torch.int64).to(dtype).reshape(shape)


def _dtype(name: Any) -> str:
    if name not in DTYPE_TAGS:
        raise UsageError(f"a tensor has the dtype {name}, which is not known")
    return str(name)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise UsageError(f"{value!r} is no size")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(_size(value) for value in values)
