"""A Megatron checkpoint as source of a conversion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint.hf.folder import CONFIG as HF_CONFIG
from checkpoint.hf.folder import INDEX, read_small, travelling
from checkpoint.hf.read import HEADER
from checkpoint.hf.tensors import tensor_groups
from checkpoint.hf.values import is_size
from checkpoint.layout import natural_key
from checkpoint.megatron.found import MASTER, MOMENTS, Found, number
from checkpoint.megatron.legacy import read_legacy
from checkpoint.megatron.names import LINEARS, VOCABULARY, model_section, ours
from checkpoint.megatron.pieces import Pieces
from checkpoint.megatron.torch_dist import CONFIG, METADATA, read_torch_dist
from checkpoint.native import whole_config
from checkpoint.portable import Item, Model, Progress, cast, check_layers, check_names, main_dtype
from qeffect_lm.contract.timeline import EMPTY
from qeffect_lm.errors import UsageError
from qeffect_lm.state import Role

TRACKER = "latest_checkpointed_iteration.txt"
TOKENIZER = "tokenizer"  # a folder beside the checkpoints, of ours: Megatron keeps none
# Our quantised tensors of a linear: kind → (which of Transformer Engine's tensors, its column there).
_ROLES = {"input": ("fwd", 0), "weight": ("fwd", 1), "grad_output": ("bwd", 0)}
_PREFIXES = {"exp_avg": ("moment1", Role.MOMENT), "exp_avg_sq": ("moment2", Role.MOMENT), MASTER: ("master", Role.MASTER)}


def read_megatron(
    path: Path,
    *,
    allow_pickle: bool,
    weights_only: bool = False,
    section: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    dtype: str | None = None,
) -> Model:
    """The model in a Megatron checkpoint, and the state of its training; checks everything but the numbers.

    Args:
        path: a folder with ``latest_checkpointed_iteration.txt``, or one checkpoint in it (``iter_…``, ``release``).
        allow_pickle: the user's consent to have pickles opened, in a process of their own.
        weights_only: leave the training's state behind.
        section: our model section, for a checkpoint without Megatron's arguments.
        vocab_size: the number of tokens, where the arguments do not tell: rows behind them are padding.
        dtype: cast the parameters (not the state) to it.

    Raises:
        UsageError: something is refused; names the key, tensor or argument.
    """
    folder = checkpoint_folder(path)
    if not allow_pickle:
        raise UsageError(
            f"{folder}: every Megatron checkpoint holds pickles (torch_dist too: its index {METADATA}, and what is no tensor), "
            "and opening one can run code of whoever made it. Here they are opened in a process of their own, by unpicklers "
            "that import and call nothing: if you trust where this checkpoint comes from, add --allow-pickle"
        )
    found = read_torch_dist(folder) if (folder / CONFIG).exists() else read_legacy(folder)
    where = str(folder)
    section = _section(found, section, vocab_size, where)
    check_layers(where, section, len(found.parameters))
    wanted = {group.ours: group.shape for group in tensor_groups(section)}
    parameters = _by_our_names(found.parameters, where)
    _check(where, parameters, wanted)
    items = [_item(name, parameters[name], wanted[name]) for name in sorted(wanted, key=natural_key)]
    state, contract, left = ([], None, _left(found)) if weights_only else _state(found, parameters, wanted, where)
    args = found.args or {}
    samples, length = args.get("consumed_train_samples"), args.get("seq_length")
    if length is not None and not is_size(length):
        raise UsageError(f"{where}: the argument seq_length is {length!r}, a whole number from 1 on is needed")
    if samples is not None:
        samples = number(samples, "the argument consumed_train_samples", "samples")
    progress = Progress(found.iteration, (samples or 0) * (length or 0), samples)
    return Model(
        where=where,
        section=dict(section),
        items=[cast(item, dtype) if dtype is not None else item for item in items],
        dtype=dtype or main_dtype(items),
        main=main_dtype(items),
        seq_len=length,
        files=_tokenizer(folder.parent / TOKENIZER),
        state=state,
        progress=Progress() if weights_only else progress,
        contract=contract,
        dropped=tuple([*_padding(parameters, wanted), *found.dropped, *left]),
    )


def checkpoint_folder(path: Path) -> Path:
    """The folder of one checkpoint: the given one, or the one that the tracker file above it names.

    Raises:
        UsageError: neither.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is no folder")
    tracker = path / TRACKER
    if tracker.exists():
        said = read_small(tracker).decode(errors="replace").strip()
        if said != "release" and not re.fullmatch("[0-9]{1,18}", said):
            raise UsageError(f"{tracker} says {said[:40]!r}, which is neither a number nor 'release'")
        path = path / (said if said == "release" else f"iter_{int(said):07d}")
        if not path.is_dir():
            raise UsageError(f"{tracker} names {path.name}, which is not there")
    if (path / CONFIG).exists() or any(path.glob("mp_rank_*")):
        return path
    if (path / METADATA).exists():
        raise UsageError(f"{path} has no {CONFIG}, which Megatron writes last: the save was interrupted")
    raise UsageError(f"{path} is no Megatron checkpoint: it has neither {CONFIG} nor mp_rank folders, nor {TRACKER}")


def _tokenizer(folder: Path) -> dict[str, bytes]:
    """The files in a folder of this name beside the checkpoint, where ``--to megatron`` or the user put them."""
    if not folder.is_dir():
        return {}
    names = [name for name in travelling(folder)[0] if name not in (HF_CONFIG, INDEX) and not name.endswith(HEADER)]
    return {name: read_small(folder / name) for name in names}


def _section(found: Found, given: Mapping[str, Any] | None, vocab_size: int | None, where: str) -> dict[str, Any]:
    """The model, out of the arguments, or as the user says; where both are there they have to agree."""
    if found.args is None and given is None:
        raise UsageError(f"{where} holds no arguments of Megatron's training script: say what the model is with --model FILE")
    section = dict(given or {}) if found.args is None else model_section(found.args, where)
    padded = section.get("vocab_size")
    told = (found.args or {}).get("vocab_size") if vocab_size is None else vocab_size
    if told is not None and not is_size(told):
        raise UsageError(f"{where}: the number of tokens is {told!r}, a whole number from 1 on is needed")
    section["vocab_size"] = told or (given or {}).get("vocab_size") or padded
    if found.args is None:  # as the user wrote it
        whole_config("--model", section, {"data": {"seq_len": 1}, "train": {"steps": 1}})
    if found.args is not None and told is None and (given or {}).get("vocab_size") is None:
        raise UsageError(
            f"{where}: how many tokens there are is not told, only that the embedding has {padded} rows, perhaps some of them "
            "padding: add --vocab-size"
        )
    for key, value in (given or {}).items():
        if found.args is not None and value is not None and key in section and section[key] != value and key != "family":
            raise UsageError(f"{where}: {key} is {section[key]!r} by its arguments, and {value!r} by --model")
    return section


def _by_our_names(parameters: Mapping[str, Pieces], where: str) -> dict[str, Pieces]:
    named: dict[str, Pieces] = {}
    for theirs, pieces in parameters.items():
        name = ours(theirs)
        if name is None:
            raise UsageError(f"{where}: the tensor {theirs} belongs to no model that is converted")
        if name in named:
            raise UsageError(f"{where}: {theirs} and {named[name].name} are the same parameter")
        named[name] = pieces
    return named


def _check(where: str, parameters: Mapping[str, Pieces], wanted: Mapping[str, tuple[int, ...]]) -> None:
    shapes = {}
    for name, pieces in parameters.items():
        shape = pieces.shape
        if name in VOCABULARY and name in wanted and shape[0] > wanted[name][0]:
            shape = (wanted[name][0], *shape[1:])
        shapes[name] = shape
    check_names(where, shapes, wanted)


def _padding(parameters: Mapping[str, Pieces], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [
        f"{pieces.shape[0] - wanted[name][0]} rows of padding of {name}"
        for name, pieces in parameters.items()
        if name in VOCABULARY and pieces.shape[0] > wanted[name][0]
    ]


def _item(name: str, pieces: Pieces, shape: tuple[int, ...], full: str | None = None, role: Role = Role.PARAM) -> Item:
    rows = shape[0] if pieces.shape != shape else None
    return Item(full or name, shape, pieces.dtype, lambda: pieces.read(rows), role)


# ---- the training's state ------------------------------------------------------------------------------------------


def _left(found: Found) -> list[str]:
    """What ``--weights-only`` leaves behind."""
    left = [f"{len(by_name)} tensors {kind} of the optimizer" for kind, by_name in found.state.items()]
    left += ["the optimizer's state, in Megatron's buffers"] if found.no_optimizer else []
    return left + ([f"FP8 scales and histories of {len(found.extra)} layers"] if found.extra else [])


def _state(
    found: Found, parameters: Mapping[str, Pieces], wanted: Mapping[str, tuple[int, ...]], where: str
) -> tuple[list[Item], dict[str, Any] | None, list[str]]:
    """Masters, moments, step count, scales and histories; and what is told of what is not there."""
    if found.no_optimizer is not None:
        raise UsageError(f"{where}: {found.no_optimizer}")
    if not found.state:
        return [], None, ["no optimizer state is there", *_left(found)]
    state: list[Item] = []
    for kind in (*MOMENTS, MASTER):
        if kind == MASTER and kind not in found.state:  # trained in float32: the parameters are the masters
            state += [cast(_item(n, parameters[n], wanted[n], f"master/{n}", Role.MASTER), "float32") for n in wanted]
            continue
        named = _by_our_names(found.state.get(kind, {}), where)
        _check(f"{where}, {kind}", named, wanted)
        prefix, role = _PREFIXES[kind]
        state += [_item(name, named[name], wanted[name], f"{prefix}/{name}", role) for name in wanted]
    if len(set(found.steps)) != 1:
        said = "no step count" if not found.steps else f"step counts from {min(found.steps)} to {max(found.steps)}"
        raise UsageError(f"{where}: the optimizer has {said}: convert with --weights-only")
    step = torch.tensor(found.steps[0], dtype=torch.int64)
    state.append(Item("optimizer/step", (), "int64", lambda: step, Role.COUNTER))
    scales, history = _scales(found.extra, where)
    unknown = [f"FP8 scales and histories of {module}" for module in found.extra if _linear(module) is None]
    return [*state, *scales], {"scales": {"history": history}} if scales else None, unknown


def _scales(extra: Mapping[str, Sequence[Mapping[str, Any]]], where: str) -> tuple[list[Item], int]:
    """Scales and amax histories of our roles out of Transformer Engine's extra states.

    Its histories have the amax of the running window first (0 between two), then the older ones from the oldest to the newest;
    ours have the newest first. Ranks that did not reduce their amax are taken together: the largest amax, the smallest scale.
    """
    items: list[Item] = []
    lengths = set()
    for module, states in sorted(extra.items(), key=lambda pair: natural_key(pair[0])):
        layer = _linear(module)
        if layer is None:
            continue
        for kind, (side, column) in _ROLES.items():
            histories = [_tensor(state, f"amax_history_{side}", module, where) for state in states]
            scales = [_tensor(state, f"scale_{side}", module, where) for state in states]
            if any(each.dim() != 2 or each.shape[1] <= column or each.shape != histories[0].shape for each in histories):
                raise UsageError(f"{where}: the FP8 history of {module} has the shape {list(histories[0].shape)}")
            together = torch.stack([each[:, column] for each in histories]).amax(0).float()
            newest = together.flip(0)[: len(together) - 1]
            history = torch.cat([newest, torch.zeros(1)])
            running = together[0] if bool(together[0] > 0) else torch.tensor(EMPTY)
            scale = torch.stack([each.reshape(-1)[column] for each in scales]).amin(0).float()
            lengths.add(len(history))
            values = {"scale": scale, "amax_history": history, "amax_open": running.float()}
            roles = {"scale": Role.SCALE, "amax_history": Role.AMAX_HISTORY, "amax_open": Role.AMAX_OPEN}
            items += [
                Item(f"{what}/{layer}.{kind}", tuple(value.shape), "float32", _giver(value), roles[what])
                for what, value in values.items()
            ]
    if len(lengths) > 1:
        raise UsageError(f"{where}: FP8 histories have different lengths: {sorted(lengths)}")
    return items, lengths.pop() if lengths else 0


def _giver(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: value.clone()


def _linear(module: str) -> str | None:
    """Our name of a linear with FP8 roles; None for what is none."""
    rest = re.sub(r"^decoder\.layers\.\d+\.", "", module)
    name = ours(f"{module}.weight") if rest in LINEARS or ".local_experts." in rest else None
    return None if name is None else name.removesuffix(".weight")


def _tensor(state: Mapping[str, Any], key: str, module: str, where: str) -> torch.Tensor:
    value = state.get(key)
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{where}: the FP8 state of {module} has no {key}")
    return value
