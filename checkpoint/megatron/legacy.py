"""Reading ``mp_rank`` folders: one file of ``torch.save`` for each tensor-parallel and pipeline rank.

A rank's names have layer numbers of their own, from 0 on in each pipeline stage (and each virtual one); its tensors are the
rank's parts. The optimizer's state is by numbers: each group's parameters in the order of the model, matrices in the group that
decays, vectors in the one that does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint.layout import Box
from checkpoint.megatron.found import MASTER, MOMENTS, Found, arguments, extra_state, number, others_in, steps_of
from checkpoint.megatron.guard import Ref, open_files
from checkpoint.megatron.names import gated, one_by_one, split_axis
from checkpoint.megatron.pieces import Pieces
from checkpoint.shards import as_integers
from qeffect_lm.errors import UsageError

FILE = "model_optim_rng.pt"
DISTRIBUTED = "distrib_optim.pt"
_RANK = re.compile(r"mp_rank_(\d{1,9})(?:_(\d{1,9}))?(?:_(\d+))?")


def read_legacy(folder: Path) -> Found:
    """Everything in a folder of ``mp_rank_…`` folders; tensors stay where they are.

    Raises:
        UsageError: a rank's file is missing, ranks contradict each other, or expert-parallel ranks.
    """
    grid = _grid(folder)
    ranks = sorted(grid)
    contents = dict(zip(ranks, open_files([grid[rank] for rank in ranks]), strict=True))
    for rank, content in contents.items():
        chunks = _chunks(content) if isinstance(content, dict) else []
        if not chunks or not all(isinstance(chunk, dict) for chunk in chunks):
            raise UsageError(f"{grid[rank]} holds no model: it was not saved by Megatron")
    first = contents[ranks[0]]
    found = Found(arguments(first.get("args")), common=first)
    if first.get("iteration") is not None:
        found.iteration = number(first["iteration"], "the iteration")
    tp, pp = max(rank[0] for rank in ranks) + 1, max(rank[1] for rank in ranks) + 1
    for axis, size in (("tensor", tp), ("pipeline", pp)):
        told = (found.args or {}).get(f"{axis}_model_parallel_size")
        if told is not None and told != size:
            raise UsageError(f"{folder} has the folders of {size} {axis}-parallel ranks, and {told} saved this checkpoint")
    refs = _by_global_name(contents, tp, pp, found)
    found.parameters = {name: _merge(name, parts) for name, parts in refs.items()}
    _read_optimizer(grid, contents, tp, pp, found)
    _drop_tied_copy(found)
    found.dropped += others_in(first)
    return found


def _grid(folder: Path) -> dict[tuple[int, int], Path]:
    """(tensor rank, pipeline rank) → file; all of a rectangle are there."""
    grid: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match is None:
            continue
        if match[3] is not None:
            raise UsageError(f"{path} belongs to an expert-parallel rank: load it with Megatron and save it as torch_dist")
        rank = int(match[1]), int(match[2] or 0)
        if rank in grid:
            raise UsageError(f"{path} and {grid[rank].parent.name} are of one rank")
        grid[rank] = path / FILE
    if not grid:
        raise UsageError(f"{folder} has no mp_rank folders")
    tp, pp = (max(rank[axis] for rank in grid) + 1 for axis in (0, 1))
    _check_grid(folder, grid, tp, pp)
    return grid


def _check_grid(folder: Path, grid: Mapping[tuple[int, int], Path], tp: int, pp: int) -> None:
    for rank in ((t, p) for t in range(tp) for p in range(pp)):
        if rank not in grid or not grid[rank].is_file():
            name = f"mp_rank_{rank[0]:02d}" if pp == 1 else f"mp_rank_{rank[0]:02d}_{rank[1]:03d}"
            raise UsageError(
                f"{folder / name / FILE} is missing: {tp} tensor-parallel and {pp} pipeline ranks saved this checkpoint"
            )


def _chunks(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The model parts of a rank: one, or one for each virtual stage."""
    if "model" in content:
        return [content["model"]]
    numbers = sorted(int(key[5:]) for key in content if re.fullmatch(r"model\d+", str(key)))
    return [content[f"model{number_}"] for number_ in numbers]


def _by_global_name(
    contents: Mapping[tuple[int, int], Mapping[str, Any]], tp: int, pp: int, found: Found
) -> dict[str, list[Ref]]:
    """Each parameter's parts in the order of the tensor ranks, under its global name."""
    refs: dict[str, list[Ref]] = {}
    for t in range(tp):
        for (p, v), names in _numbering([contents[t, p] for p in range(pp)]).items():
            for local, name in names.items():
                value = _chunks(contents[t, p])[v][local]
                if name.endswith("._extra_state"):
                    state = extra_state(value)
                    if state is not None:
                        found.extra.setdefault(name.removesuffix("._extra_state"), []).append(state)
                elif isinstance(value, Ref):
                    refs.setdefault(name, []).append(value)
                elif value is not None:
                    raise UsageError(f"{name} is no tensor")
    for name, parts in refs.items():
        if len(parts) != tp:
            raise UsageError(f"{name} is on {len(parts)} of {tp} tensor-parallel ranks")
    return refs


def _numbering(stages: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], dict[str, str]]:
    """(pipeline rank, virtual stage) → local name → global name. Layers are counted through the virtual stages, in each through
    the ranks."""
    numbered: dict[tuple[int, int], dict[str, str]] = {}
    before = 0
    chunks = [_chunks(stage) for stage in stages]
    if len({len(each) for each in chunks}) != 1:
        raise UsageError("the pipeline ranks have different numbers of virtual stages")
    for v in range(len(chunks[0])):
        for p, parts in enumerate(chunks):
            names, layers = {}, 0
            for local in parts[v]:
                match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", local)
                if local.startswith(("language_model.", "word_embeddings_for_head.")):
                    raise UsageError(
                        f"{local}: this is a model of Megatron before Megatron-core; convert it with Megatron's own "
                        "tools/checkpoint first"
                    )
                names[local] = local if match is None else one_by_one(f"decoder.layers.{before + int(match[1])}.{match[2]}")
                layers = layers if match is None else max(layers, int(match[1]) + 1)
            numbered[p, v] = names
            before += layers
    return numbered


def _merge(name: str, parts: Sequence[Ref]) -> Pieces:
    """The whole of a parameter out of the tensor ranks' parts."""
    axis, first = split_axis(name), parts[0]
    if axis is None or len(parts) == 1:
        if any(_differ(first, other) for other in parts[1:]):
            raise UsageError(f"{name} is the same on all tensor-parallel ranks in Megatron, and differs here")
        return Pieces(name, first.shape, first.dtype, ((Box((0,) * len(first.shape), first.shape), first),)).checked()
    shape = tuple(size * len(parts) if dim == axis else size for dim, size in enumerate(first.shape))
    blocks: list[tuple[Box, Ref]] = []
    for rank, part in enumerate(parts):
        if gated(name):  # this rank's gate, then its up
            half = part.shape[0] // 2
            for number_, begin in ((0, 0), (1, shape[0] // 2)):
                rows = part.rows(number_ * half, half)
                blocks.append((Box((begin + rank * half, *(0,) * (len(shape) - 1)), rows.shape), rows))
            continue
        start = tuple(rank * first.shape[dim] if dim == axis else 0 for dim in range(len(shape)))
        blocks.append((Box(start, part.shape), part))
    return Pieces(name, shape, first.dtype, tuple(blocks)).checked()


def _differ(a: Ref, b: Ref) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return True
    return bool((as_integers(a.read()) != as_integers(b.read())).any())


def _drop_tied_copy(found: Found) -> None:
    """The last stage's copy of a tied embedding."""
    if found.args is None or found.args.get("untie_embeddings_and_output_weights", False):
        return
    head, embedding = found.parameters.get("output_layer.weight"), found.parameters.get("embedding.word_embeddings.weight")
    if head is None or embedding is None:
        return
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if not same or bool((as_integers(head.read()) != as_integers(embedding.read())).any()):
        raise UsageError("output_layer.weight is tied to embedding.word_embeddings.weight, and differs from it")
    del found.parameters["output_layer.weight"]
    for kind in found.state.values():
        kind.pop("output_layer.weight", None)


# ---- optimizer -----------------------------------------------------------------------------------------------------


def _read_optimizer(
    grid: Mapping[tuple[int, int], Path], contents: Mapping[tuple[int, int], Mapping[str, Any]], tp: int, pp: int, found: Found
) -> None:
    if any((path.parent / DISTRIBUTED).exists() for path in grid.values()):
        found.no_optimizer = (
            f"its optimizer state is in {DISTRIBUTED}, the buffers of Megatron's distributed optimizer, whose order only that "
            "run knows: load it with Megatron and save it with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, "
            "or convert with --weights-only"
        )
        return
    if not all(isinstance(content.get("optimizer"), dict) for content in contents.values()):
        return
    parts: dict[str, dict[str, list[Ref]]] = {kind: {} for kind in (*MOMENTS, MASTER)}
    for t in range(tp):
        numbering = _numbering([contents[t, p] for p in range(pp)])
        for p in range(pp):
            names = [
                (global_name, value)
                for v, chunk in enumerate(_chunks(contents[t, p]))
                for local, value in chunk.items()
                if isinstance(value, Ref)
                for global_name in [numbering[p, v][local]]
            ]
            optimizer = contents[t, p]["optimizer"]
            found.steps += steps_of(optimizer)
            for kind, name, ref in _by_number(optimizer, names, grid[t, p]):
                parts[kind].setdefault(name, []).append(ref)
    for kind, by_name in parts.items():
        if by_name:
            found.state[kind] = {name: _merge(name, refs) for name, refs in by_name.items()}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(value: Any, index: int) -> Any:
    """An entry of what should be a list, or None."""
    found = _list(value)
    return found[index] if index < len(found) else None


def _by_number(
    optimizer: Mapping[str, Any], names: Sequence[tuple[str, Ref]], where: Path
) -> list[tuple[str, str, Ref]]:
    """(kind, parameter, tensor) of one rank's optimizer.

    Raises:
        UsageError: a group's numbers and shapes are not those of the model's matrices or vectors.
    """
    inner = optimizer.get("optimizer", optimizer)
    if not isinstance(inner, dict):
        raise UsageError(f"{where}: the optimizer is no torch optimizer's state: convert with --weights-only")
    state, groups = inner.get("state", {}), inner.get("param_groups", [])
    if not isinstance(state, dict) or not all(isinstance(group, dict) for group in _list(groups)):
        raise UsageError(f"{where}: the optimizer's state and param_groups make no sense: convert with --weights-only")
    masters = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
    found: list[tuple[str, str, Ref]] = []
    for number_, group in enumerate(_list(groups)):
        decays = group.get("wd_mult", 1.0) != 0
        own = [(name, ref) for name, ref in names if (len(ref.shape) > 1 and not name.endswith("bias")) == decays]
        indices = _list(group.get("params"))
        if len(own) != len(indices):
            raise UsageError(
                f"{where}: parameter group {number_} of the optimizer has {len(indices)} parameters, the model {len(own)} that "
                f"{'decay' if decays else 'do not decay'}: convert with --weights-only"
            )
        for place, (index, (name, ref)) in enumerate(zip(indices, own, strict=True)):
            known = state.get(index) if isinstance(index, int) else None
            tensors = {kind: known.get(kind) if isinstance(known, dict) else None for kind in MOMENTS}
            if masters is not None:
                tensors[MASTER] = _at(_at(masters, number_), place)
            for kind, value in tensors.items():
                if not isinstance(value, Ref) or value.shape != ref.shape:
                    shape = list(value.shape) if isinstance(value, Ref) else None
                    what = f"the optimizer's {kind} of {name} has the shape {shape}, the parameter {list(ref.shape)}"
                    raise UsageError(f"{where}: {what}")
                found.append((kind, name, value))
    return found
