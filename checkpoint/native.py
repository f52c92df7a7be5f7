"""Our own checkpoints as source and target of a conversion.

A conversion writes one folder that *is* a checkpoint (``manifest.json`` in it): the parameters under ``param/…``, and with a
training's state that too. ``checkpoint.init_from`` starts a run from it, ``tools.generate`` samples from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from checkpoint.assembly import Report, Written, assemble
from checkpoint.fileops import FileOps, write_file
from checkpoint.layout import MANIFEST, CheckpointError, is_companion, natural_key
from checkpoint.manifest import FileEntry, Manifest, RankEntry, library_versions, plain_json
from checkpoint.portable import Item, Model, Progress, Quantised, main_dtype
from checkpoint.reader import Checkpoint, open_checkpoint
from checkpoint.retention import resolve
from checkpoint.shards import Segment, torch_dtype, write_shard
from checkpoint.writer import write_companion
from qeffect_lm import __version__
from qeffect_lm.config import Config
from qeffect_lm.config_yaml import dump_yaml
from qeffect_lm.errors import UsageError
from qeffect_lm.state import Role

MODEL_FILE = "model.yaml"
SHARD_SIZE = 5_000_000_000
GENERATION_LENGTH = 4096  # the longest context that is prepared without being asked for: its RoPE tables take memory
_ROLES = {
    "param": Role.PARAM,
    "master": Role.MASTER,
    "moment1": Role.MOMENT,
    "moment2": Role.MOMENT,
    "optimizer": Role.COUNTER,
    "scale": Role.SCALE,
    "amax_history": Role.AMAX_HISTORY,
    "amax_open": Role.AMAX_OPEN,
}


def role_of(full_name: str) -> Role:
    """The role that the first part of a tensor's full name says."""
    return _ROLES[full_name.partition("/")[0]]


def read_native(path: Path, *, wide: bool = False, fp8: bool = False) -> Model:
    """The model of a checkpoint: a ``step_…`` folder, a run's folder (its newest), or what a conversion made.

    Args:
        wide: take the masters, where they are wider than the parameters that were computed with.
        fp8: take the cached weights of FP8 linears, with their scales.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
        UsageError: it holds no model that can be converted.
    """
    checkpoint = open_checkpoint(resolve(path))
    saved = checkpoint.meta.get("config")
    if not isinstance(saved, Mapping) or not isinstance(saved.get("model"), Mapping):
        raise UsageError(f"{checkpoint.path} holds no configuration: it was not saved by a training run or a conversion")
    prefixes = ("master", "param") if wide else ("param", "master")
    items = [_item(checkpoint, full) for full in _parameters(checkpoint, prefixes)]
    scales = _cached(checkpoint) if fp8 else {}
    items = [_item(checkpoint, f"cached_weight/{item.name}") if item.name in scales else item for item in items]
    taken = {f"cached_weight{part}/{name}" for name in scales for part in ("", "_scale_inv")}
    taken |= {f"scale/{name.removesuffix('.weight')}.input" for name in scales}
    origin, tokens = checkpoint.within("origin"), checkpoint.meta.get("tokens", 0)
    return Model(
        where=str(checkpoint.path),
        section=dict(saved["model"]),
        items=items,
        dtype=str(origin.get("dtype") or main_dtype(items)),
        seq_len=checkpoint.within("config", "data").get("seq_len"),
        main=str(origin.get("main") or main_dtype(items)),
        files={name: raw for name, raw in checkpoint.companions().items() if name != MODEL_FILE},
        progress=Progress(checkpoint.step, tokens if isinstance(tokens, int) else 0),
        fp8=scales,
        dropped=_left_behind(checkpoint, items, taken),
    )


def _parameters(checkpoint: Checkpoint, prefixes: Sequence[str]) -> list[str]:
    """The full name of each parameter, under the first of ``prefixes`` that has it."""
    found: dict[str, str] = {}
    for prefix in reversed(prefixes):
        for full in checkpoint.manifest.tensors:
            kind, _, name = full.partition("/")
            if kind == prefix:
                found[name] = full
    if not found:
        raise UsageError(f"{checkpoint.path} holds no parameters")
    return [found[name] for name in sorted(found, key=natural_key)]


def _item(checkpoint: Checkpoint, full: str) -> Item:
    entry = checkpoint.entry(full)
    return Item(full.partition("/")[2], entry.shape, entry.dtype, lambda: checkpoint.read(full))


def _cached(checkpoint: Checkpoint) -> dict[str, Quantised]:
    """The parameters of which an FP8 form was saved, and its scales."""
    found = {}
    for full in checkpoint.manifest.tensors:
        kind, _, name = full.partition("/")
        if kind == "cached_weight":
            scale = f"scale/{name.removesuffix('.weight')}.input"
            given = _scalar(checkpoint, scale, inverse=True) if scale in checkpoint.manifest.tensors else None
            found[name] = Quantised(_scalar(checkpoint, f"cached_weight_scale_inv/{name}"), given)
    if not found:
        raise UsageError(f"{checkpoint.path} holds no FP8 weights: it is of a run without FP8, or of a conversion")
    return found


def _scalar(checkpoint: Checkpoint, full: str, inverse: bool = False) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        value = checkpoint.read(full).float().reshape(())
        return value.reciprocal() if inverse else value

    return read


def _left_behind(checkpoint: Checkpoint, items: Sequence[Item], taken: Set[str]) -> tuple[str, ...]:
    """What a checkpoint holds besides the parameters, and what else is ``taken``, by role."""
    names = {item.name for item in items}
    count: dict[str, int] = {}
    for full, entry in checkpoint.manifest.tensors.items():
        kind, _, name = full.partition("/")
        if kind in ("param", "master") and name in names or full in taken:
            continue
        count[str(entry.role)] = count.get(str(entry.role), 0) + 1
    return tuple(f"{number} tensors of role {role}" for role, number in sorted(count.items()))


def saved_config(model: Model) -> dict[str, Any]:
    """A whole configuration around the model's section, all else at its default, as a checkpoint's meta data holds it.

    Raises:
        UsageError: the section is none of this version's.
    """
    more = {
        "precision": {"dtype": precision(model)},
        "data": {"seq_len": min(context_of(model), GENERATION_LENGTH)},
        "train": {"steps": max(1, model.progress.step)},
    }
    return whole_config(model.where, model.section, more)


def whole_config(where: str, section: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with this model section. Raises :class:`UsageError` that names ``where`` and the keys at fault."""
    try:
        return Config.from_dict({"model": section, **more}).to_dict()
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def context_of(model: Model) -> int:
    """The longest sequence the model is meant for."""
    return int(model.section.get("max_position_embeddings") or model.seq_len or GENERATION_LENGTH)


def precision(model: Model) -> str:
    """The compute type that goes with the parameters; float16 is none of ours."""
    main = main_dtype(model.items)
    return main if main in ("bfloat16", "float32", "float64") else "float32"


def write_native(model: Model, folder: Path, ops: FileOps, shard_size: int = SHARD_SIZE) -> None:
    """Write a checkpoint's files into ``folder``, each synced, the manifest last; one tensor in memory at a time."""
    config = saved_config(model)
    named = [(f"param/{item.name}", item) for item in model.items] + [(item.name, item) for item in model.state]
    files: list[tuple[str, int, str, int]] = []
    written: list[Written] = []
    for number, group in enumerate(_groups(named, shard_size), 1):
        file = f"weights-{number:05d}.safetensors"
        group.sort(key=lambda pair: -torch_dtype(pair[1].dtype).itemsize)  # wide elements first: so all are aligned
        segments, begin = [], 0
        for full, item in group:
            segments.append(Segment(full, item.dtype, item.shape, begin))
            begin += item.nbytes
        shard = write_shard(ops, folder / file, segments, (checked(item) for _, item in group))
        files.append((file, shard.size, shard.header_sha256, shard.header))
        for (full, item), segment, digest in zip(group, segments, shard.digests, strict=True):
            place: dict[str, Any] = {"file": file, "key": full, "start": (0,) * len(item.shape), "shape": item.shape}
            place |= {"offset": shard.header + segment.begin, "sha256": digest}
            written.append(Written(full, _description(full, item), place))
    beside = {**model.files, MODEL_FILE: model_file(config)}
    files += [write_companion(ops, folder / name, raw) for name, raw in beside.items() if is_companion(name)]
    report = Report(0, {}, {}, files, written, {})
    manifest = Manifest(
        step=model.progress.step,
        meta=plain_json(_meta(model, config), "meta"),
        ranks=(RankEntry(rank=0, coords={}, meta={}),),
        versions=library_versions(),
        files={name: FileEntry(size=size, sha256=sha256, hashed=hashed) for name, size, sha256, hashed in files},
        tensors=assemble([report]),
    )
    write_file(ops, folder / MANIFEST, manifest.to_bytes())


def _meta(model: Model, config: dict[str, Any]) -> dict[str, Any]:
    progress = model.progress
    return {
        "qeffect_lm": __version__,
        "kind": "training" if model.state else "weights",
        "step": progress.step,
        "tokens": progress.tokens,
        "samples": progress.samples,
        "config": config,
        "origin": {
            "dtype": model.dtype,
            "main": model.main,
            "dropped": list(model.dropped),
        },
        **({} if model.contract is None else {"contract": dict(model.contract)}),
    }


def checked(item: Item) -> torch.Tensor:
    """The item's tensor. Raises :class:`CheckpointError` where a reader gave another shape or dtype than it said."""
    tensor = item.read()
    if tuple(tensor.shape) != item.shape or str(tensor.dtype) != f"torch.{item.dtype}":
        got, due = f"{tensor.dtype} {list(tensor.shape)}", f"{item.dtype} {list(item.shape)}"
        raise CheckpointError(f"{item.name}: {got} was read, {due} was due")
    return tensor


def _description(full: str, item: Item) -> dict[str, Any]:
    axes = (None,) * len(item.shape)
    return {"shape": item.shape, "dtype": item.dtype, "role": role_of(full).value, "axes": axes, "per_rank": False}


def _groups(named: Sequence[tuple[str, Item]], limit: int) -> list[list[tuple[str, Item]]]:
    """In the given order, as many tensors to a file as ``limit`` bytes hold; at least one."""
    groups: list[list[tuple[str, Item]]] = []
    room = 0
    for full, item in named:
        if not groups or item.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append((full, item))
        room -= item.nbytes
    return groups


def model_file(config: Mapping[str, Any]) -> bytes:
    """The model section as a YAML file that a run's configuration can take as its ``base:``."""
    section = {key: value for key, value in config["model"].items() if value is not None}
    text = dump_yaml({"model": section, "precision": {"dtype": config["precision"]["dtype"]}})
    return b"# The model of this checkpoint, for a run's configuration:  base: <this file>\n" + text.encode()
