"""Reading ``torch_dist``: tensors by global names, whatever layout saved them.

A layer's tensors are either stacked, one entry per layer, under a key without a number
(``decoder.layers.mlp.linear_fc2.weight``), or each has a key of its own; gate and up may have keys of their own too
(``…weight_w``, ``…weight_v``). Experts are stacked inside their layer's entry (``…mlp.experts.experts.linear_fc1.weight``), or
numbered (``…mlp.experts.experts.3.linear_fc1.weight``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint.hf.folder import read_json
from checkpoint.layout import Box
from checkpoint.megatron.found import MASTER, MOMENTS, Found, arguments, extra_state, number, others_in, steps_of
from checkpoint.megatron.guard import open_files, open_torch_dist
from checkpoint.megatron.pieces import Pieces, stacked
from qeffect_lm.errors import UsageError

CONFIG, COMMON, METADATA = "metadata.json", "common.pt", ".metadata"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.((?:embedding|decoder|output_layer)\..+)")
_EXPERT = re.compile(r"(decoder\.layers\.\d+\.mlp\.experts\.)experts\.(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias))")
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
_RESHARDABLE = (
    "its optimizer state is in the buffers of Megatron's distributed optimizer, whose order only that run knows: save it once "
    "with --dist-ckpt-optim-fully-reshardable, or convert with --weights-only"
)


def read_torch_dist(folder: Path) -> Found:
    """Everything in a folder with ``metadata.json``; tensors stay where they are.

    Raises:
        UsageError: another backend, an unfinished save, or what makes no sense.
    """
    config = read_json(folder / CONFIG)
    if config.get("sharded_backend") != "torch_dist":
        raise UsageError(f"{folder / CONFIG} says {config!r}: torch_dist is the backend that is read")
    if not (folder / METADATA).is_file():
        raise UsageError(f"{folder} has no {METADATA}: copy that file too; its name begins with a dot")
    tensors, objects = open_torch_dist(folder)
    common = _common(folder, objects)
    found = Found(arguments(common.get("args")), common=common)
    if common.get("iteration") is not None:
        found.iteration = number(common["iteration"], "the iteration")
    whole = {key: _pieces(key, *entry) for key, entry in tensors.items()}
    _sort_tensors(_halves_joined(whole), found)
    _sort_objects(objects, found)
    if found.state:
        found.steps = steps_of(common.get("optimizer", {}))
    found.dropped += others_in(common)
    return found


def _common(folder: Path, objects: dict[str, Any]) -> Mapping[str, Any]:
    """What is no tensor: an object of its own, or before Megatron-core 0.19 a file."""
    if (folder / COMMON).is_file():
        common = open_files([folder / COMMON])[0]
    else:
        common = objects.get("common_state/shard_0_1")
        common = common[0] if isinstance(common, list) and common else common
    objects.pop("common_state/shard_0_1", None)
    if not isinstance(common, dict):
        raise UsageError(f"{folder} has neither {COMMON} nor a common state: it was not saved by Megatron")
    return common


def _pieces(key: str, dtype: str, shape: tuple[int, ...], chunks: list[Any]) -> Pieces:
    return Pieces(key, shape, dtype, tuple((Box(start, ref.shape), ref) for start, ref in chunks)).checked()


def _halves_joined(whole: dict[str, Pieces]) -> dict[str, Pieces]:
    """gate and up that have keys of their own, as one."""
    joined = {}
    for key, pieces in whole.items():
        if key.endswith(("weight_v", "bias_v")) and key[:-2] + "_w" in whole:
            continue
        other = whole.get(key[:-2] + "_v") if key.endswith(("weight_w", "bias_w")) else None
        if other is None:
            joined[key] = pieces
        else:
            joined[key[:-2]] = stacked(key[:-2], [pieces, other])
    return joined


def _sort_tensors(whole: Mapping[str, Pieces], found: Found) -> None:
    for key, pieces in whole.items():
        match = _STATE.fullmatch(key)
        if match is None and key.startswith(("optimizer.", "chained_")):
            found.no_optimizer = _RESHARDABLE
            continue
        kind, name = match.groups() if match else ("", key)
        if kind and kind not in (*MOMENTS, MASTER):
            found.dropped.append(f"{key}")
            continue
        target = found.parameters if not kind else found.state.setdefault(kind, {})
        for full, part in _layers(name, pieces):
            if full in target:
                raise UsageError(f"{full} is there twice, stacked with the other layers' and by itself")
            target[full] = part


def _layers(name: str, pieces: Pieces) -> list[tuple[str, Pieces]]:
    """By global layer numbers; a stacked tensor is one for each layer, and for each expert in it."""
    prefix = "decoder.layers."
    if not name.startswith(prefix) or name[len(prefix)].isdigit():
        return _experts(name, pieces)
    rest = name[len(prefix) :]
    layers = [(f"{prefix}{i}.{rest}", pieces.layer(i, f"{prefix}{i}.{rest}")) for i in range(pieces.shape[0])]
    return [each for layer in layers for each in _experts(*layer)]


def _experts(name: str, pieces: Pieces) -> list[tuple[str, Pieces]]:
    """One layer's tensor by the names of its experts, if it is theirs."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return [(name, pieces)]
    at, number_, rest = match.groups()
    if number_ is not None:
        return [(f"{at}local_experts.{int(number_)}.{rest}", pieces)]
    names = [f"{at}local_experts.{e}.{rest}" for e in range(pieces.shape[0] if len(pieces.shape) > 1 else 0)]
    return [(full, pieces.layer(e, full)) for e, full in enumerate(names)]


def _sort_objects(objects: Mapping[str, Any], found: Found) -> None:
    kinds = set()
    for key, value in objects.items():
        match = _OBJECT.fullmatch(key)
        name, index = (match[1], match[2]) if match else (key, "0")
        if not name.endswith("._extra_state"):
            kinds.add(name.split(".")[0] if not name.startswith("optimizer.distributed") else "optimizer")
            if name.startswith("optimizer.distributed"):
                found.no_optimizer = _RESHARDABLE
            continue
        module = name.removesuffix("._extra_state")
        if module.startswith("decoder.layers.") and not module[len("decoder.layers.")].isdigit():
            layer, _, index = index.partition(".")
            module = f"decoder.layers.{layer}.{module[len('decoder.layers.') :]}"
        if ".mlp.experts.experts.linear_" in module:
            module = module.replace(".experts.experts.", f".experts.local_experts.{index}.")
        module = module.replace(".experts.experts.", ".experts.local_experts.")
        state = extra_state(value)
        if state is not None:
            found.extra.setdefault(module, []).append(state)
    found.dropped += [f"{kind}, which is Megatron's own" for kind in sorted(kinds - {"optimizer"})]
