"""Writing ``torch_dist``: one layout for any ranks, since Megatron reshards it when it loads.

Each layer's tensor is one entry of a stacked one, as Megatron's default has it, and each expert's one of its layer's entry.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoint.fileops import FileOps, naming, write_all, write_file
from checkpoint.megatron.names import LINEARS, theirs
from checkpoint.megatron.torch_dist import COMMON, CONFIG, METADATA
from checkpoint.native import checked
from checkpoint.portable import Model

# Of each layer, what Transformer Engine keeps a state for; none is given, and Megatron then starts with fresh ones.
_WITH_STATE = (*LINEARS, "self_attention.core_attention")
_EXPERT = re.compile(r"(mlp\.experts\.)local_experts\.(\d+)(\..+)")


def write_torch_dist(model: Model, folder: Path, common: dict[str, Any], ops: FileOps, shard_size: int) -> None:
    layers, experts = int(model.section["num_layers"]), (model.section.get("moe") or {}).get("num_experts")
    metadata = Metadata(state_dict_metadata={}, planner_data=None, storage_data={})
    with _Distcp(folder, ops, shard_size, metadata) as files:
        for item in model.items:
            key, place = stacked_key(theirs(item.name, experts is not None))
            tensor = checked(item)
            start = (*place, *(0,) * tensor.dim())
            whole = (*(layers, experts)[: len(place)], *tensor.shape)
            files.tensor(key, tensor[(None,) * len(place)], start, whole)
        for module, layer in ((module, layer) for module in _WITH_STATE for layer in range(layers)):
            if experts is None or not module.startswith("mlp."):
                files.object(f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}", [None])
                continue
            at = f"decoder.layers.mlp.experts.experts.{module.removeprefix('mlp.')}._extra_state"
            for expert in range(experts):
                files.object(f"{at}/shard_{layer}.{expert}_{layers}.{experts}", [None])
    write_file(ops, folder / COMMON, _saved({**common, "content_metadata": {"singleton_local_shards": False}}))
    write_file(ops, folder / METADATA, pickle.dumps(metadata))
    write_file(ops, folder / CONFIG, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode())


def stacked_key(name: str) -> tuple[str, tuple[int, ...]]:
    """The key of a tensor among all layers' and experts', and which layer, which expert of it; () for what is in no layer."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name, ()
    number, _, rest = name[len(prefix) :].partition(".")
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return prefix + rest, (int(number),)
    return f"{prefix}{expert[1]}experts{expert[3]}", (int(number), int(expert[2]))


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Distcp:
    """Files ``__0_0.distcp``, ``__0_1.distcp``, …: one little torch file after the other, and the index of them."""

    def __init__(self, folder: Path, ops: FileOps, limit: int, metadata: Metadata) -> None:
        self.folder, self.ops, self.limit, self.metadata = folder, ops, limit, metadata
        self._number, self._at = -1, limit
        self._file: Any = None

    def __enter__(self) -> _Distcp:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close(sync=error is None)

    def tensor(self, key: str, tensor: torch.Tensor, start: Sequence[int], whole: Sequence[int]) -> None:
        """A chunk of the tensor ``key``."""
        index = MetadataIndex(key, torch.Size(start))
        self.metadata.storage_data[index] = self._append(_saved(tensor.contiguous()))
        chunk = ChunkStorageMetadata(offsets=torch.Size(start), sizes=tensor.shape)
        entry = self.metadata.state_dict_metadata.get(key)
        if entry is None:
            properties = TensorProperties(dtype=tensor.dtype)
            entry = TensorStorageMetadata(properties=properties, size=torch.Size(whole), chunks=[])
            self.metadata.state_dict_metadata[key] = entry
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(chunk)

    def object(self, key: str, value: Any) -> None:
        self.metadata.state_dict_metadata[key] = BytesStorageMetadata()
        self.metadata.storage_data[MetadataIndex(key)] = self._append(_saved(value))

    def _append(self, raw: bytes) -> _StorageInfo:
        if self._at and self._at + len(raw) > self.limit or self._file is None:
            self._close()
            self._number, self._at = self._number + 1, 0
            with naming("write", self.folder):
                self._file = self.ops.create(self.folder / self._name)
        info = _StorageInfo(self._name, self._at, len(raw))
        with naming("write", self.folder / self._name):
            write_all(self.ops, self._file, memoryview(raw))
        self._at += len(raw)
        return info

    @property
    def _name(self) -> str:
        return f"__0_{self._number}.distcp"

    def _close(self, sync: bool = True) -> None:
        if self._file is None:
            return
        try:
            if sync:
                with naming("sync", self.folder / self._name):
                    self.ops.fsync(self._file)
        finally:
            self._file.close()
            self._file = None
