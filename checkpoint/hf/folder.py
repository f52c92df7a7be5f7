"""A Hugging Face folder of safetensors files, read by byte ranges, with nothing in it trusted.

Every name, length and offset is compared with the files before the first tensor is read: an index that names a file
elsewhere, a tensor twice or one that no file holds, a header that is longer than its file or whose tensors overlap, is refused
by name. Pickled weights (``*.bin``, ``*.pt``, ``*.pth``) are never opened.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoint.digests import fill
from checkpoint.layout import MANIFEST, describe
from checkpoint.shards import DTYPE_TAGS, host_bytes, torch_dtype
from qeffect_lm.errors import UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
HEADER_LIMIT = 100_000_000  # bytes, the safetensors format's own limit
SMALL_FILE_LIMIT = 256 << 20  # bytes of a JSON or tokenizer file
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_TAGS = {tag: name for name, tag in DTYPE_TAGS.items()}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: ``offset`` from the file's beginning, in bytes."""

    file: str
    dtype: str  # torch's name
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Folder:
    """An opened folder: its configuration, and where each tensor is.

    Attributes:
        config: ``config.json``.
        index: the index's bytes, or None where there is one file without an index.
        headers: for each file of tensors its header, as it stands there.
        tensors: name → place.
    """

    path: Path
    config: dict[str, Any]
    index: bytes | None
    headers: Mapping[str, bytes]
    tensors: Mapping[str, Place]

    def read(self, name: str) -> torch.Tensor:
        """A tensor as a new CPU tensor. Raises :class:`UsageError` where the file became shorter or cannot be read."""
        place = self.tensors[name]
        raw = torch.empty(place.nbytes, dtype=torch.uint8)
        read_into(self.path / place.file, place.offset, host_bytes(raw), name)
        return raw.view(torch_dtype(place.dtype)).reshape(place.shape)


def read_into(path: Path, offset: int, view: memoryview, what: str) -> None:
    """Fill ``view`` from a file, which may be a link (as in the hub's cache). Raises :class:`UsageError` if it ends early."""
    try:
        with open(path, "rb", buffering=0) as file:
            got = fill(file.fileno(), offset, view)
    except OSError as error:
        raise UsageError(f"cannot read {what} in {path}: {describe(error)}") from error
    if got != len(view):
        raise UsageError(f"{path} ends inside {what}")


def open_folder(path: Path) -> Folder:
    """Open a folder with ``config.json`` and ``model.safetensors`` or an index and its shards.

    Raises:
        UsageError: something is missing, contradicts something else, or is not what it claims to be; names the file.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give the folder of a Hugging Face model, with its {CONFIG}")
    config = read_json(path / CONFIG)
    index = None
    if (path / INDEX).exists():
        if (path / SINGLE).exists():
            raise UsageError(f"{path} has both {SINGLE} and {INDEX}: which one is the model? Remove the other")
        index = read_small(path / INDEX)
        expected = _weight_map(path / INDEX, index)
        files = sorted(set(expected.values()))
    elif (path / SINGLE).is_file():
        expected, files = None, [SINGLE]
    else:
        raise UsageError(_nothing(path))
    headers: dict[str, bytes] = {}
    tensors: dict[str, Place] = {}
    for file in files:
        headers[file], places = read_header(path / file)
        for name, place in places.items():
            if name in tensors:
                raise UsageError(f"{path}: the tensor {name} is in {tensors[name].file} and in {file}")
            tensors[name] = place
    if expected is not None:
        _compare(path / INDEX, expected, tensors)
    return Folder(path, config, index, headers, tensors)


def _compare(where: Path, expected: Mapping[str, str], tensors: Mapping[str, Place]) -> None:
    for name, file in sorted(expected.items()):
        if name not in tensors:
            raise UsageError(f"{where} says that {name} is in {file}, which has no such tensor")
        if tensors[name].file != file:
            raise UsageError(f"{where} says that {name} is in {file}, but it is in {tensors[name].file}")
    for name in sorted(tensors):
        if name not in expected:
            raise UsageError(f"{where} does not name the tensor {name}, which {tensors[name].file} holds")


def _nothing(path: Path) -> str:
    """Why a folder without safetensors files is refused."""
    pickled = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        return (
            f"{path} holds its weights as pickles only ({pickled[0]}), which are not opened, since opening one can run code: "
            "save the model again with safetensors (transformers' save_pretrained does)"
        )
    return f"{path} has neither {SINGLE} nor {INDEX}"


def _weight_map(where: Path, raw: bytes) -> dict[str, str]:
    body = parse_json(where, raw)
    found = body.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UsageError(f"{where} has no weight_map")
    unknown = sorted(set(body) - {"metadata", "weight_map"})
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]}")
    for name, file in found.items():
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file):
            raise UsageError(f"{where}: {name} is said to be in {file!r}, which is not the name of a safetensors file here")
        if not (where.parent / file).is_file():
            raise UsageError(f"{where} names {file}, which is not there: copy the missing file too")
    return found


def read_header(path: Path) -> tuple[bytes, dict[str, Place]]:
    """The header of a safetensors file, as it stands there, and what it says.

    Raises:
        UsageError: the file is cut off, or its header is not sound.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 0 < length <= min(HEADER_LIMIT, size - 8):
                raise UsageError(f"{path} is no safetensors file, or is cut off: {size} bytes, a header of {length}")
            raw = file.read(length)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {describe(error)}") from error
    places = parse_header(path, raw)
    end = max((place.offset + place.nbytes for place in places.values()), default=8 + length)
    if end != size:
        what = "is cut off" if size < end else "has bytes that belong to no tensor"
        raise UsageError(f"{path} {what}: {size} bytes, its tensors end at {end}")
    return raw, places


def parse_header(path: Path, raw: bytes) -> dict[str, Place]:
    """What a header says; its tensors have to lie one behind the other. Raises :class:`UsageError` where it is not sound."""
    entries = parse_json(path, raw)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise UsageError(f"{path}: its __metadata__ is no object")
    data = end = 8 + len(raw)
    places = {name: _place(path, name, entry, data) for name, entry in entries.items()}
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if place.offset != end:
            raise UsageError(f"{path}: the tensor {name} begins at byte {place.offset}, where {end} was due")
        end += place.nbytes
    return places


def _place(path: Path, name: str, entry: Any, data: int) -> Place:
    try:
        tag, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, end]
        if not isinstance(tag, str) or not all(type(n) is int and 0 <= n < 2**63 for n in sizes) or set(entry) != _ENTRY:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise UsageError(f"{path}: the header's entry of {name} is not sound: {str(entry)[:100]}") from None
    if tag not in _TAGS:
        raise UsageError(f"{path}: the tensor {name} has the dtype {tag}, which is not known")
    place = Place(path.name, _TAGS[tag], tuple(shape), data + begin)
    if place.nbytes != end - begin:
        raise UsageError(f"{path}: {name}, {tag} {list(shape)}, needs {place.nbytes} bytes and is given {end - begin}")
    return place


_ENTRY = {"dtype", "shape", "data_offsets"}


def read_small(path: Path) -> bytes:
    """A JSON or tokenizer file. Raises :class:`UsageError` where it is missing, unreadable or far too large."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is no regular file")
        size = path.stat().st_size
        if size > SMALL_FILE_LIMIT:
            raise UsageError(f"{path} has {size:,} bytes, more than the {SMALL_FILE_LIMIT:,} such a file may have")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {describe(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises :class:`UsageError` as :func:`read_small`, and for what is no JSON object or has a key twice."""
    return parse_json(path, read_small(path))


def parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``, which ``path`` holds. Raises :class:`UsageError` for anything else."""
    try:
        body = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not sound JSON: {error}") from None
    if not isinstance(body, dict):
        raise UsageError(f"{path} is no JSON object")
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def travelling(path: Path) -> tuple[list[str], list[str]]:
    """Names of the files beside the weights that go along (configuration, index, tokenizer, licence), and of the others."""
    go: list[str] = []
    stay: list[str] = []
    for entry in sorted(_files(path)):
        if entry.suffix == ".safetensors":
            continue
        goes = TRAVELS.fullmatch(entry.name) and entry.name != MANIFEST and entry.is_file()
        (go if goes else stay).append(entry.name)
    return go, stay


TRAVELS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|jinja|model|txt)|LICENSE|NOTICE")


def _files(path: Path) -> Iterator[Path]:
    try:
        yield from path.iterdir()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {describe(error)}") from error
