"""Megatron checkpoints as target of a conversion: parameters alone, as Megatron's own ``release`` checkpoints are.

``torch_dist`` is written once for every layout, since Megatron reshards it when it loads: each layer's tensor is one entry
of a stacked one, as Megatron's default has it. ``mp_rank`` folders are written for one number of tensor-parallel and
pipeline ranks.

What is written are pickles (there is no other form of these files), made here of plain values, tensors and one ``Namespace``.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
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
from checkpoint.hf.description import describe
from checkpoint.hf.tensors import tensor_groups
from checkpoint.megatron.legacy import FILE
from checkpoint.megatron.names import LINEARS, VOCABULARY, gated, model_section, split_axis, theirs
from checkpoint.megatron.read import TRACKER
from checkpoint.megatron.torch_dist import COMMON, CONFIG, METADATA
from checkpoint.native import checked
from checkpoint.portable import Item, Model, check_names
from checkpoint.shards import as_integers, host_bytes, torch_dtype
from qeffect_lm.errors import UsageError

RELEASE = "release"
SHARD_SIZE = 5_000_000_000
DIVISOR = 128  # Megatron's --make-vocab-size-divisible-by
# Of each layer, what Transformer Engine keeps a state for; none is given, and Megatron then starts with fresh ones.
_WITH_STATE = (*LINEARS, "self_attention.core_attention")


@dataclass(frozen=True)
class Ranks:
    """The layout of ``mp_rank`` folders; None stands for ``torch_dist``, which has none."""

    tp: int = 1
    pp: int = 1


def check_model(model: Model, ranks: Ranks | None) -> argparse.Namespace:
    """Whether Megatron-core's GPT model can be this one; returns the arguments that describe it.

    Raises:
        UsageError: names the key, parameter or number that does not fit.
    """
    groups = tensor_groups(model.section, model.seq_len)
    items = {item.name: item.shape for item in model.items}
    check_names(model.where, items, {group.ours: group.shape for group in groups})
    for item in model.items:
        theirs(item.name)
    arguments = _arguments(model, ranks)
    back = model_section(vars(arguments), "Megatron's arguments")
    back["vocab_size"] = model.section["vocab_size"]
    wanted, got = describe(model.section, model.seq_len), describe(back)
    for key in (field.name for field in fields(wanted)):
        if key != "family" and getattr(wanted, key) != getattr(got, key):
            raise UsageError(f"model.{key} is {getattr(wanted, key)!r}, which Megatron's arguments cannot say")
    if ranks is not None:
        for what, number, size in (
            ("tensor-parallel", ranks.tp, wanted.num_kv_heads),
            ("tensor-parallel", ranks.tp, wanted.ffn_size),
            ("pipeline", ranks.pp, wanted.num_layers),
        ):
            if number < 1 or size % number:
                raise UsageError(f"{number} {what} ranks do not divide {size}: choose another --tp or --pp")
    return arguments


def _arguments(model: Model, ranks: Ranks | None) -> argparse.Namespace:
    """What Megatron reads of a checkpoint's arguments (``--use-checkpoint-args``), and compares with its own."""
    d = describe(model.section, model.seq_len)
    tp = 1 if ranks is None else ranks.tp
    padded = d.vocab_size if ranks is None else -(-d.vocab_size // (DIVISOR * tp)) * DIVISOR * tp
    scaling = d.rope_scaling
    return argparse.Namespace(
        num_layers=d.num_layers,
        hidden_size=d.hidden_size,
        ffn_hidden_size=d.ffn_size,
        seq_length=min(d.max_position_embeddings, model.seq_len or d.max_position_embeddings),
        num_attention_heads=d.num_heads,
        group_query_attention=True,
        num_query_groups=d.num_kv_heads,
        kv_channels=d.head_dim,
        max_position_embeddings=d.max_position_embeddings,
        position_embedding_type="rope",
        add_position_embedding=True,
        use_rotary_position_embeddings=True,
        rotary_base=int(d.rope_theta) if d.rope_theta.is_integer() else d.rope_theta,
        rotary_percent=1.0,
        rotary_interleaved=False,
        use_rope_scaling=scaling["type"] == "llama3",
        rope_scaling_factor=scaling.get("factor", 8.0),
        add_bias_linear=False,
        add_qkv_bias=d.attention_bias == "qkv",
        qk_layernorm=d.qk_norm,
        swiglu=True,
        squared_relu=False,
        untie_embeddings_and_output_weights=not d.tie_word_embeddings,
        apply_layernorm_1p=False,
        normalization="RMSNorm",
        norm_epsilon=d.norm_eps,
        apply_query_key_layer_scaling=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_experts=None,
        vocab_size=d.vocab_size,
        padded_vocab_size=padded,
        make_vocab_size_divisible_by=DIVISOR,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1 if ranks is None else ranks.pp,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        ckpt_format="torch_dist" if ranks is None else "torch",
    )


def write_megatron(
    model: Model, folder: Path, ops: FileOps, ranks: Ranks | None = None, shard_size: int = SHARD_SIZE
) -> None:
    """Write ``release`` and the file that names it into ``folder``, each file synced; one tensor in memory at a time.

    Raises:
        UsageError: as :func:`check_model`.
        CheckpointError: a file system operation failed.
    """
    arguments = check_model(model, ranks)
    with naming("create", folder / RELEASE):
        ops.mkdir(folder / RELEASE)
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "num_floating_point_operations_so_far": 0}
    if ranks is None:
        _write_torch_dist(model, folder / RELEASE, common, ops, shard_size)
    else:
        _write_ranks(model, folder / RELEASE, common, ops, ranks)
    write_file(ops, folder / TRACKER, RELEASE.encode())


# ---- torch_dist ----------------------------------------------------------------------------------------------------


def _write_torch_dist(model: Model, folder: Path, common: dict[str, Any], ops: FileOps, shard_size: int) -> None:
    layers = int(model.section["num_layers"])
    metadata = Metadata(state_dict_metadata={}, planner_data=None, storage_data={})
    with _Distcp(folder, ops, shard_size, metadata) as files:
        for item in model.items:
            key, place = _stacked(theirs(item.name))
            tensor = checked(item)
            start = (0,) * tensor.dim() if place is None else (place, *(0,) * tensor.dim())
            whole = tensor.shape if place is None else (layers, *tensor.shape)
            files.tensor(key, tensor if place is None else tensor[None], start, whole)
        for module in _WITH_STATE:
            for layer in range(layers):
                files.object(f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}", [None])
    write_file(ops, folder / COMMON, _saved({**common, "content_metadata": {"singleton_local_shards": False}}))
    write_file(ops, folder / METADATA, pickle.dumps(metadata))
    write_file(ops, folder / CONFIG, json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode())


def _stacked(name: str) -> tuple[str, int | None]:
    """The key of a layer's tensor among all layers', and the layer."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name, None
    number, _, rest = name[len(prefix) :].partition(".")
    return prefix + rest, int(number)


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
        if entry.properties.dtype != tensor.dtype:
            raise UsageError(f"{key} is {entry.properties.dtype} in one layer and {tensor.dtype} in another: add --dtype")
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


# ---- mp_rank folders -----------------------------------------------------------------------------------------------


def _write_ranks(model: Model, folder: Path, common: dict[str, Any], ops: FileOps, ranks: Ranks) -> None:
    """Each rank's file is first written with room for its tensors, by torch; then the tensors, one after the other."""
    padded = common["args"].padded_vocab_size
    places: dict[tuple[int, int], dict[str, tuple[Path, int]]] = {}
    for t in range(ranks.tp):
        for p in range(ranks.pp):
            path = folder / (f"mp_rank_{t:02d}" if ranks.pp == 1 else f"mp_rank_{t:02d}_{p:03d}") / FILE
            with naming("create", path.parent):
                ops.mkdir(path.parent)
            places[t, p] = _with_room(path, _local_shapes(model.items, ranks, p, padded), common)
    for item in model.items:
        name = theirs(item.name)
        tensor = _padded(item, checked(item), padded)
        p, local = _owner(name, int(model.section["num_layers"]), ranks.pp)
        for t in range(ranks.tp):
            path, offset = places[t, p][local]
            with naming("write", path):
                file = ops.reopen(path)
                try:
                    file.seek(offset)
                    write_all(ops, file, host_bytes(_part(name, tensor, t, ranks.tp)))
                finally:
                    file.close()
    for files in places.values():
        (path,) = {path for path, _ in files.values()}
        with naming("sync", path):
            file = ops.reopen(path)
            try:
                ops.fsync(file)
            finally:
                file.close()
            ops.fsync_dir(path.parent)


def _local_shapes(items: Sequence[Item], ranks: Ranks, p: int, padded: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    layers = 1 + max(int(item.name.split(".")[1]) for item in items if item.name.startswith("layers."))
    for item in items:
        name = theirs(item.name)
        owner, local = _owner(name, layers, ranks.pp)
        if owner == p:
            shape = (padded, *item.shape[1:]) if item.name in VOCABULARY else item.shape
            axis = split_axis(name)
            yield local, tuple(n // ranks.tp if dim == axis else n for dim, n in enumerate(shape)), item.dtype


def _owner(name: str, layers: int, pp: int) -> tuple[int, str]:
    """The pipeline rank of a parameter, and its name there."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return (0 if name.startswith("embedding.") else pp - 1), name
    number, _, rest = name[len(prefix) :].partition(".")
    stage, local = divmod(int(number), layers // pp)
    return stage, f"{prefix}{local}.{rest}"


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
        with torch.serialization.skip_data(materialize_fake_tensors=True), naming("write", path):
            torch.save({**common, "model": state}, path)
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
