"""Layouts of gloo ranks beside one process: the frame that the tests of each axis share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qeffect_lm.app.assemble import Assembly
from qeffect_lm.parallel.mesh import Mesh
from tests.tiny import Batch, Trained, config, train

Settings = dict[str, Any]
Items = list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


def items_of(assembly: Assembly) -> Items:
    """What a rank lists, FP8 as bytes (pickle knows no FP8)."""
    listed = assembly.logical_tensors()
    return [
        (i.name, i.global_shape, i.start, (i.tensor.view(torch.uint8) if i.tensor.dtype.itemsize == 1 else i.tensor).clone())
        for i in listed
    ]


def whole(ranks: list[Items]) -> dict[str, torch.Tensor]:
    """The logical tensors put together from all ranks' pieces."""
    found: dict[str, torch.Tensor] = {}
    for items in ranks:
        for name, shape, start, tensor in items:
            target = found.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            target[tuple(slice(a, a + n) for a, n in zip(start, tensor.shape, strict=True))] = tensor
    return found


def train_each(
    mesh: Mesh,
    base: Settings,
    variants: list[Settings],
    batches: Callable[[Settings], Callable[[int], Batch]],
    held_out: Callable[[Settings], Batch],
    tell: Callable[[Trained], tuple[Any, ...]] = lambda run: (items_of(run.assembly),),
) -> list[Any]:
    """On one rank of ``mesh``: three steps of each variant of ``base``, one after the other in the same process.

    Returns: of each variant ``((losses, norms, skips, held-out loss), *tell(run))``.
    """
    mesh.create_groups()
    layout = {f"parallel__{axis}": size for axis, size in mesh.sizes.items() if size > 1}
    told = []
    for settings in variants:
        run = train(config(**{**base, **layout, **settings}), 3, mesh=mesh, batches=batches(settings))
        evaluated = run.assembly.evaluator.run(held_out(settings))
        told.append(((run.losses, run.norms, run.skipped, evaluated), *tell(run)))
        if run.assembly.transport is not None:
            run.assembly.transport.close()
    return told


def same_on_all(results: list[list[Any]]) -> list[Any]:
    """The numbers of each variant, which all ranks tell alike."""
    for number in range(len(results[0])):
        assert all(rank[number][0] == results[0][number][0] for rank in results), number
    return [told[0] for told in results[0]]
