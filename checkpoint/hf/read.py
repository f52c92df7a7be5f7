"""A Hugging Face folder as source of a conversion."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from checkpoint.digests import pieces
from checkpoint.hf.config import model_section
from checkpoint.hf.folder import CONFIG, Folder, Place, open_folder, read_into, read_small, travelling
from checkpoint.hf.tensors import EMBEDDING, Chosen, Group, choose_tensors, tensor_groups, to_ours
from checkpoint.portable import Item, Model, check_layers, main_dtype
from checkpoint.shards import torch_dtype
from qeffect_lm.errors import UsageError

HEADER = ".header.json"  # the end of the name under which a shard's header travels


def read_hf(path: Path, dtype: str | None = None) -> Model:
    """The model in a folder of safetensors files; checks everything but the numbers.

    Args:
        dtype: cast all parameters to it; None: each keeps its own.

    Raises:
        UsageError: files, tensors or configuration contradict each other, or are more than our model can be; names the key.
    """
    folder = open_folder(path)
    with naming(path / CONFIG):
        found = model_section(folder.config)
    check_layers(str(path), found.section, len(folder.tensors))
    with naming(path):
        chosen = choose_tensors(found.section, folder.tensors)
        groups = tensor_groups(found.section)
        items = [_item(folder, group, chosen, dtype) for group in groups]
        if chosen.head is not None:
            _check_head(folder, chosen)
    go, stay = travelling(path)
    files = {name: read_small(path / name) for name in go}
    files |= {file + HEADER: raw for file, raw in folder.headers.items()}
    unused = [name.name for name in sorted(path.glob("*.safetensors")) if name.name not in folder.headers]
    dropped = [
        *found.notes,
        *(f"{name}, which follows from the configuration" for name in chosen.dropped if name != chosen.head),
        *(f"the file {name}" for name in stay),
        *(f"the file {name}, which the model does not consist of" for name in unused),
    ]
    return Model(
        where=str(path),
        section=found.section,
        items=items,
        dtype=stated_dtype(folder.config) or main_dtype(items),
        main=_main(folder),
        files=files,
        dropped=tuple(dropped),
    )


class naming:
    """What a :class:`UsageError` inside is about: a path, before its text."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UsageError):
            raise UsageError(f"{self.path}: {error}") from error


def _item(folder: Folder, group: Group, chosen: Chosen, dtype: str | None) -> Item:
    """One of our tensors: shapes and dtypes of theirs are compared now, the numbers read later."""
    own = {name: chosen.names[name] for name in group.names}
    for name, shape in group.theirs:
        place = folder.tensors[own[name]]
        if place.shape != shape:
            raise UsageError(f"{own[name]} has the shape {list(place.shape)}, {CONFIG} makes it {list(shape)}")
        if not place.dtype.startswith(("float", "bfloat")) or place.dtype.startswith("float8"):
            raise UsageError(f"{own[name]} is {place.dtype}: parameters of 16 bits and more are read")
    kinds = {folder.tensors[source].dtype for source in own.values()}
    if len(kinds) > 1 and dtype is None:
        said = ", ".join(f"{source} {folder.tensors[source].dtype}" for source in own.values())
        raise UsageError(f"{said}: they are one tensor here, {group.ours}: choose one dtype with --dtype")

    def read() -> torch.Tensor:
        tensors = {name: folder.read(source) for name, source in own.items()}
        if dtype is not None:
            tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in tensors.items()}
        return to_ours(group, tensors)

    return Item(group.ours, group.shape, dtype or kinds.pop(), read)


def _check_head(folder: Folder, chosen: Chosen) -> None:
    """A tied model's head that was saved beside its embedding has to be equal to it (compared piece by piece)."""
    assert chosen.head is not None
    group = next(group for group in tensor_groups(model_section(folder.config).section) if group.ours == EMBEDDING)
    source = chosen.names[group.names[0]]
    if not _equal(folder, folder.tensors[chosen.head], folder.tensors[source]):
        raise UsageError(
            f"tie_word_embeddings is true, and {chosen.head} differs from {source}: set it to false in {CONFIG} if the head is "
            f"a weight of its own, or remove {chosen.head}"
        )


def _equal(folder: Folder, a: Place, b: Place) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    for at, length in pieces(a.nbytes):
        one, other = bytearray(length), bytearray(length)
        for place, buffer in ((a, one), (b, other)):
            read_into(folder.path / place.file, place.offset + at, memoryview(buffer), "a tied head")
        if one != other:
            return False
    return True


def _main(folder: Folder) -> str:
    """The dtype of most elements, as they lie there."""
    count: Counter[str] = Counter()
    for place in folder.tensors.values():
        count[place.dtype] += math.prod(place.shape)
    return count.most_common(1)[0][0]


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype that ``config.json`` names; None where it names none."""
    value = config.get("dtype", config.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None
