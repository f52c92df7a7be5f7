"""Writing ``mp_rank`` folders, for one number of tensor-parallel and pipeline ranks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from checkpoint.fileops import FileOps, naming, write_all
from checkpoint.layout import CheckpointError
from checkpoint.megatron.legacy import FILE
from checkpoint.megatron.names import LINEARS, VOCABULARY, gated, split_axis, theirs
from checkpoint.native import checked
from checkpoint.portable import Item, Model
from checkpoint.shards import as_integers, host_bytes, torch_dtype


@dataclass(frozen=True)
class Ranks:
    """The layout of ``mp_rank`` folders; None stands for ``torch_dist``, which has none."""

    tp: int = 1
    pp: int = 1


def write_ranks(model: Model, folder: Path, common: dict[str, Any], ops: FileOps, ranks: Ranks) -> None:
    """Each rank's file is first written with room for its tensors, by torch; then the tensors, one after the other."""
    padded = common["args"].padded_vocab_size
    places: dict[tuple[int, int], dict[str, tuple[Path, int]]] = {}
    for t in range(ranks.tp):
        for p in range(ranks.pp):
            path = folder / (f"mp_rank_{t:02d}" if ranks.pp == 1 else f"mp_rank_{t:02d}_{p:03d}") / FILE
            with naming("create", path.parent):
                ops.mkdir(path.parent)
            places[t, p] = _with_room(path, _local_shapes(model, ranks, p, padded), common)
    for item in model.items:
        name = theirs(item.name)
        tensor = _padded(item, checked(item), padded)
        for t in range(ranks.tp):
            data = host_bytes(_part(name, tensor, t, ranks.tp))
            for p, local in _homes(name, model, ranks.pp):
                _put(ops, *places[t, p][local], data)
    for files in places.values():
        (path,) = {path for path, _ in files.values()}
        with naming("sync", path):
            file = ops.reopen(path)
            try:
                ops.fsync(file)
            finally:
                file.close()
            ops.fsync_dir(path.parent)


def _put(ops: FileOps, path: Path, offset: int, data: memoryview) -> None:
    with naming("write", path):
        file = ops.reopen(path)
        try:
            file.seek(offset)
            write_all(ops, file, data)
        finally:
            file.close()


def nbytes_of_ranks(model: Model, ranks: Ranks, padded: int) -> int:
    """Bytes of all tensors in all ranks' files: norms are in every tensor rank's, the vocabulary is padded."""
    shapes = (each for p in range(ranks.pp) for each in _local_shapes(model, ranks, p, padded))
    return ranks.tp * sum(math.prod(shape) * torch_dtype(dtype).itemsize for _, shape, dtype in shapes)


def _local_shapes(model: Model, ranks: Ranks, p: int, padded: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for item in model.items:
        name = theirs(item.name)
        for owner, local in _homes(name, model, ranks.pp):
            if owner == p:
                shape = (padded, *item.shape[1:]) if item.name in VOCABULARY else item.shape
                axis = split_axis(name)
                yield local, tuple(n // ranks.tp if dim == axis else n for dim, n in enumerate(shape)), item.dtype


def _homes(name: str, model: Model, pp: int) -> list[tuple[int, str]]:
    """The pipeline ranks that have a parameter, and its name there; a tied head is a copy on the last rank, if that is not the
    first."""
    if name == "embedding.word_embeddings.weight":
        copied = pp > 1 and model.section.get("tie_word_embeddings")
        return [(0, name), (pp - 1, "output_layer.weight")] if copied else [(0, name)]
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return [(pp - 1, name)]
    number, _, rest = name[len(prefix) :].partition(".")
    stage, local = divmod(int(number), int(model.section["num_layers"]) // pp)
    return [(stage, f"{prefix}{local}.{rest}")]


def _with_room(
    path: Path, shapes: Iterator[tuple[str, tuple[int, ...], str]], common: Mapping[str, Any]
) -> dict[str, tuple[Path, int]]:
    """Write everything of a rank's file but the tensors' bytes; returns where each tensor's are to go."""
    with FakeTensorMode():
        named = OrderedDict((name, torch.empty(shape, dtype=torch_dtype(dtype))) for name, shape, dtype in shapes)
        state: dict[str, Any] = OrderedDict(named)
        for name in named:
            module = name.rpartition(".")[0]
            if name.endswith(".weight") and module.endswith(tuple(LINEARS)):
                state[f"{module}._extra_state"] = None
        for layer in sorted({name.split(".")[2] for name in named if name.startswith("decoder.layers.")}, key=int):
            state[f"decoder.layers.{layer}.self_attention.core_attention._extra_state"] = None
        try:
            with torch.serialization.skip_data(materialize_fake_tensors=True), naming("write", path):
                torch.save({**common, "model": state}, path)
        except RuntimeError as error:  # what torch's writer makes of a disk that is full
            raise CheckpointError(f"cannot write {path}: {error}") from error
        back = torch.load(path, map_location="cpu", weights_only=False)["model"]  # our own, written a moment ago
    return {name: (path, back[name].untyped_storage()._checkpoint_offset) for name in named}


def _padded(item: Item, tensor: torch.Tensor, padded: int) -> torch.Tensor:
    if item.name not in VOCABULARY or len(tensor) == padded:
        return tensor
    out = torch.zeros((padded, *tensor.shape[1:]), dtype=tensor.dtype)
    as_integers(out)[: len(tensor)] = as_integers(tensor)
    return out


def _part(name: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    """A tensor-parallel rank's part."""
    axis = split_axis(name)
    if axis is None or tp == 1:
        return tensor
    if gated(name):
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, dim=axis)[rank].contiguous()
