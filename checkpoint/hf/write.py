"""A Hugging Face folder as target of a conversion: shards, index and configuration as transformers writes them.

Shards are filled in the order of the state dict, each up to a limit (a larger tensor gets one of its own); inside a file
tensors lie by dtype and name, which is what the safetensors library does. A model that came from a folder of theirs and still
has its names, shapes and dtypes goes back into the very layout it had, header by header, so that without training the files
come out byte for byte.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from checkpoint.digests import PIECE
from checkpoint.fileops import FileOps, naming, write_all, write_file
from checkpoint.hf.config import config_json
from checkpoint.hf.folder import CONFIG, INDEX, SINGLE, Place, parse_header, parse_json
from checkpoint.hf.order import units
from checkpoint.hf.read import HEADER, stated_dtype
from checkpoint.hf.tensors import EMBEDDING, Group, choose_tensors, tensor_groups, to_theirs
from checkpoint.native import checked
from checkpoint.portable import Model, check_names, main_dtype
from checkpoint.shards import DTYPE_TAGS, host_bytes, torch_dtype
from qeffect_lm.errors import UsageError

SHARD_SIZE = 5_000_000_000
OPEN_FILES = 32
OURS = ("tokenizer.settings.json",)  # travels between our checkpoints only
# The safetensors library's order of dtypes in a file, the last first; narrower ones come later, so that all are aligned.
_ORDER = ["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64"]
Kinds = Mapping[str, tuple[str, tuple[int, ...]]]  # name → dtype, shape


@dataclass(frozen=True)
class Layout:
    """What is written.

    Attributes:
        heads: of each file of tensors its beginning: the header and its length.
        places: where each tensor goes.
        names: a group's tensor → the names under which it is written; mostly its own.
        files: the files beside the shards.
    """

    heads: Mapping[str, bytes]
    places: Mapping[str, Place]
    names: Mapping[str, tuple[str, ...]]
    files: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        beside = sum(map(len, self.files.values())) + sum(map(len, self.heads.values()))
        return beside + sum(place.nbytes for place in self.places.values())


def plan_hf(model: Model, shard_size: int | None = None) -> Layout:
    """Where everything goes; reads no tensor.

    Args:
        shard_size: bytes of a file; None: the layout that the model came in, or :data:`SHARD_SIZE` where it came in none.

    Raises:
        UsageError: the model is none that theirs can be; names the tensor or the key.
    """
    groups = tensor_groups(model.section, model.seq_len)
    items = {item.name: item for item in model.items}
    check_names(model.where, {name: item.shape for name, item in items.items()}, {group.ours: group.shape for group in groups})
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for group in groups:
        tensors |= {name: (items[group.ours].dtype, shape) for name, shape in group.theirs}
        tensors |= {name: ("float32", shape) for name, (shape, _) in _scales(model, group).items()}
    beside = {n: raw for n, raw in model.files.items() if n != INDEX and not n.endswith(HEADER) and n not in OURS}
    beside[CONFIG] = _config(model)
    if shard_size is None:
        kept = _kept(model, tensors)
        if kept is not None:
            index = {INDEX: model.files[INDEX]} if INDEX in model.files else {}
            return Layout(*kept, {**beside, **index})
    heads, places = _shards(tensors, shard_size or SHARD_SIZE)
    if len(heads) > 1:
        beside[INDEX] = _index(places)
    return Layout(heads, places, {name: (name,) for name in tensors}, beside)


def _config(model: Model) -> bytes:
    """The ``config.json`` that the model came with, where it still describes it; else a new one."""
    now = main_dtype(model.items)
    dtype = model.dtype if now == model.main else now
    raw = model.files.get(CONFIG)
    original = None if raw is None else parse_json(Path(CONFIG), raw)
    made = config_json(model.section, original, seq_len=model.seq_len)
    if raw is not None and made == original and not model.fp8 and stated_dtype(made) in (dtype, None):
        return raw
    stated = [key for key in ("dtype", "torch_dtype") if key in made] or ["dtype", "torch_dtype"]
    made |= dict.fromkeys(stated, dtype)
    if model.fp8:
        made["quantization_config"] = _quantization(model)
    return (json.dumps(made, indent=2, sort_keys=original is None) + "\n").encode()


def _scales(model: Model, group: Group) -> dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]:
    """Name → shape and reader of the scales beside a linear's weights; none where it is not in FP8. One tensor of ours, so all
    of theirs have the same. An expert's is a matrix of one number: loading stacks those of all experts as it does weights."""
    if group.ours not in model.fp8:
        return {}
    scales = model.fp8[group.ours]
    shape: tuple[int, ...] = (1, 1) if ".experts." in group.ours else ()
    found = {f"{name}_scale_inv": (shape, scales.weight) for name in group.names}
    if scales.input is not None and not _dynamic(model):
        found |= {f"{name.removesuffix('weight')}activation_scale": ((), scales.input) for name in group.names}
    return found


def _dynamic(model: Model) -> bool:
    """Whether inputs are scaled by themselves. In a model with experts always: transformers has one choice for all linears, and
    of an expert that no token has reached there is no scale."""
    return model.section["family"] == "mixtral"


def left_behind(model: Model) -> list[str]:
    """What of the FP8 state has no place in theirs, in words."""
    inputs = sum(scales.input is not None for scales in model.fp8.values()) if _dynamic(model) else 0
    return [f"the scales of {inputs} inputs: with experts, transformers scales every input by itself"] if inputs else []


def _quantization(model: Model) -> dict[str, Any]:
    """``quantization_config`` of transformers' FP8 with one scale per tensor.

    Raises:
        UsageError: a family whose linears transformers does not have in FP8, or inputs of which only some have scales.
    """
    if model.section["family"] == "gpt2":
        raise UsageError("--fp8: transformers has no FP8 form of gpt2's linears")
    static = {scales.input is not None and not _dynamic(model) for scales in model.fp8.values()}
    if len(static) > 1:
        raise UsageError(f"{model.where}: some FP8 inputs have a scale and some have none")
    return {
        "activation_scheme": "static" if static.pop() else "dynamic",
        "modules_to_not_convert": _outside(model),
        "quant_method": "fp8",
        "weight_block_size": None,
    }


def _outside(model: Model) -> list[str]:
    """Modules that are not in FP8; a layer's experts are one.

    Raises:
        UsageError: some experts of a layer are in FP8 and some are not.
    """
    outside, stacks = ["lm_head"], dict[str, bool]()
    for group in tensor_groups(model.section, model.seq_len):
        if len(group.shape) != 2 or not group.ours.startswith("layers."):
            continue
        within = group.ours in model.fp8
        stack, found, _ = group.names[0].partition(".experts.")
        if found and stacks.setdefault(stack, within) != within:
            raise UsageError(f"--fp8: {group.ours} is {'' if within else 'not '}in FP8, unlike others of that layer's experts")
        if not within:
            outside += [f"{stack}.experts"] if found else [name.removesuffix(".weight") for name in group.names]
    return list(dict.fromkeys(outside))


def _kept(model: Model, tensors: Kinds) -> tuple[dict[str, bytes], dict[str, Place], dict[str, tuple[str, ...]]] | None:
    """Headers, places and names as they were in the folder that the model came from, if they fit what there is now."""
    heads: dict[str, bytes] = {}
    places: dict[str, Place] = {}
    for name, raw in model.files.items():
        if name.endswith(HEADER):
            file = name.removesuffix(HEADER)
            heads[file] = struct.pack("<Q", len(raw)) + raw
            places.update(parse_header(Path(file), raw))
    try:
        chosen = choose_tensors(model.section, places, model.seq_len)
    except UsageError:
        return None
    names: dict[str, tuple[str, ...]] = {name: (own,) for name, own in chosen.names.items()}
    if chosen.head is not None:
        embedding = next(group.names[0] for group in tensor_groups(model.section, model.seq_len) if group.ours == EMBEDDING)
        names[embedding] += (chosen.head,)
    wanted = {own: tensors[name] for name, written in names.items() for own in written}
    return (heads, places, names) if {n: (p.dtype, p.shape) for n, p in places.items()} == wanted else None


def _shards(tensors: Kinds, limit: int) -> tuple[dict[str, bytes], dict[str, Place]]:
    """Fill files in the order of the state dict."""
    groups: list[list[str]] = []
    held = 0
    for unit in units(tensors):
        size = sum(Place("", *tensors[name], 0).nbytes for name in unit)
        if size > limit:  # a file of its own, and the one being filled goes on behind it
            groups.insert(len(groups) - bool(groups and held), unit)
            continue
        if not held or held + size > limit:
            groups.append([])
            held = 0
        groups[-1] += unit
        held += size
    heads: dict[str, bytes] = {}
    places: dict[str, Place] = {}
    for number, names in enumerate(groups, 1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        heads[file], found = _head(file, {name: tensors[name] for name in names})
        places |= found
    return heads, places


def _head(file: str, tensors: Kinds) -> tuple[bytes, dict[str, Place]]:
    """The beginning of a file as the safetensors library writes it, and where its tensors lie."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, at = {}, 0
    for name in sorted(tensors, key=lambda name: (-_ORDER.index(DTYPE_TAGS[tensors[name][0]]), name)):
        dtype, shape = tensors[name]
        places[name] = Place(file, dtype, shape, at)
        end = at + places[name].nbytes
        entries[name] = {"dtype": DTYPE_TAGS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    data = 8 + len(raw)
    placed = {name: Place(file, place.dtype, place.shape, data + place.offset) for name, place in places.items()}
    return struct.pack("<Q", len(raw)) + raw, placed


def _index(places: Mapping[str, Place]) -> bytes:
    size = sum(place.nbytes for place in places.values())
    count = sum(place.nbytes // torch_dtype(place.dtype).itemsize for place in places.values())
    body = {
        "metadata": {"total_parameters": count, "total_size": size},
        "weight_map": {name: place.file for name, place in places.items()},
    }
    return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()


def write_hf(model: Model, layout: Layout, folder: Path, ops: FileOps) -> None:
    """Write into ``folder``, each file synced; one tensor of ours in memory at a time.

    Raises:
        CheckpointError: a file system operation failed.
    """
    groups = {group.ours: group for group in tensor_groups(model.section, model.seq_len)}
    shards = _Shards(layout, folder, ops)
    try:
        for item in model.items:
            for theirs, tensor in to_theirs(groups[item.name], checked(item)).items():
                data = host_bytes(tensor)
                for name in layout.names[theirs]:
                    shards.put(name, data)
            for name, (shape, scale) in _scales(model, groups[item.name]).items():
                shards.put(name, host_bytes(scale().reshape(shape)))
    except BaseException:
        shards.abandon()
        raise
    shards.close()
    for name, raw in layout.files.items():
        write_file(ops, folder / name, raw)


class _Shards:
    """The files being written, the ones used last open. Tensors go to their places in whatever order they come."""

    def __init__(self, layout: Layout, folder: Path, ops: FileOps) -> None:
        self.layout, self.folder, self.ops = layout, folder, ops
        self._open: OrderedDict[str, BinaryIO] = OrderedDict()
        self._begun: set[str] = set()

    def put(self, name: str, data: memoryview) -> None:
        """The bytes of a tensor, to where they belong."""
        place = self.layout.places[name]
        file = self._file(place.file)
        with naming("write", self.folder / place.file):
            file.seek(place.offset)
            for at in range(0, len(data), PIECE):
                write_all(self.ops, file, data[at : at + PIECE])

    def _file(self, name: str) -> BinaryIO:
        path = self.folder / name
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        with naming("write", path):
            if len(self._open) == OPEN_FILES:
                self._finish(next(iter(self._open)))
            file = self.ops.reopen(path) if name in self._begun else self.ops.create(path)
            self._open[name] = file
            if name not in self._begun:
                self._begun.add(name)
                write_all(self.ops, file, memoryview(self.layout.heads[name]))
        return file

    def _finish(self, name: str) -> None:
        file = self._open.pop(name)
        try:
            self.ops.fsync(file)
        finally:
            file.close()

    def close(self) -> None:
        """Sync and close all files."""
        for name in list(self._open):
            with naming("sync", self.folder / name):
                self._finish(name)

    def abandon(self) -> None:
        """Close what is open, unsynced: the whole folder is thrown away."""
        while self._open:
            self._open.popitem()[1].close()
