"""Names and geometry: directories in numeric order, slices that tile a tensor exactly once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.layout import Box, is_temporary, natural_key, step_name, step_of, tiling_fault

shapes = st.lists(st.integers(0, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it: the whole, cut again and again at random places."""
    shape = draw(shapes)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[dim]))  # 0 and the end leave an empty piece, as uneven shards do
        for offset, extent in ((0, cut), (cut, box.shape[dim] - cut)):
            start, size = list(box.start), list(box.shape)
            start[dim] += offset
            size[dim] = extent
            boxes.append(Box(tuple(start), tuple(size)))
    return shape, draw(st.permutations(boxes))


@st.composite
def any_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape, boxes = draw(tilings())
    edits = draw(st.lists(st.sampled_from(["drop", "twice", "move", "grow"]), max_size=2))
    for edit in edits if shape else []:
        if not boxes:
            break
        i, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        start, size = list(boxes[i].start), list(boxes[i].shape)
        if edit == "drop":
            del boxes[i]
            continue
        if edit == "twice":
            boxes.append(boxes[i])
            continue
        (start if edit == "move" else size)[dim] += draw(st.integers(-1, 1))
        boxes[i] = Box(tuple(start), tuple(size))
    return shape, boxes


def _counted_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """The same question answered by painting every cell."""
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        if any(
            a < 0 or n < 0 or a + n > size for a, n, size in zip(box.start, box.shape, shape, strict=True)
        ):
            return False
        counts[box.within(Box((0,) * len(shape), shape))] += 1
    return bool((counts == 1).all()) and (counts.size > 0 or len(boxes) > 0)


@settings(max_examples=200)
@given(tilings())
def test_a_tiling_is_accepted(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert tiling_fault(shape, boxes) is None


@settings(max_examples=200)
@given(any_boxes())
def test_tiling_agrees_with_painting_every_cell(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert (tiling_fault(shape, boxes) is None) == _counted_once(shape, boxes)


def test_tiling_faults_say_what_is_wrong() -> None:
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert tiling_fault((4, 3), halves) is None
    assert tiling_fault((4, 3), halves[:1]) == "6 of 12 elements are in no slice"
    twice = [*halves, Box((1, 1), (1, 1))]
    fault = tiling_fault((4, 3), twice, ["rank 0", "rank 1", "rank 2"])
    assert fault == "rank 0 [0:2, 0:3] and rank 2 [1:2, 1:2] overlap"
    assert "does not fit into the shape [3, 3]" in (tiling_fault((3, 3), halves) or "")
    assert tiling_fault((0, 4), []) == "no slice holds it"
    assert "overlap" in (tiling_fault((), [Box((), ()), Box((), ())]) or "")


def test_one_cell_in_the_place_of_another_is_always_found() -> None:
    """An overlap and a hole of the same size: the sum of volumes says nothing."""
    cells = [Box((i, j), (1, 1)) for i in range(3) for j in range(3)]
    for i, j in itertools.permutations(range(9), 2):
        moved = [cells[j] if k == i else cell for k, cell in enumerate(cells)]
        assert "overlap" in (tiling_fault((3, 3), moved) or "")


@given(tilings(), st.data())
def test_intersections_of_a_tiling_tile_any_block(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    """What makes reading for another layout possible: each block is put together from parts of the slices."""
    shape, boxes = case
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    extent = tuple(data.draw(st.integers(0, size - a)) for a, size in zip(start, shape, strict=True))
    block = Box(start, extent)
    parts = [common for box in boxes if (common := box.intersection(block)) is not None]
    assert sum(part.volume for part in parts) == block.volume
    counts = np.zeros(block.shape, dtype=int)
    for part in parts:
        counts[part.within(block)] += 1
    assert (counts == 1).all()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_00000100", 100),
        ("step_123456789", 123456789),
        ("step_00000000", 0),
        ("step_100", None),
        ("step_000000100", None),
        ("step_00000100.partial-1", None),
        ("step_0000010x", None),
        ("notes", None),
        (".tmp-step_00000100", None),
    ],
)
def test_only_our_own_directory_names_count(name: str, step: int | None) -> None:
    assert step_of(name) == step
    if step is not None:
        assert step_name(step) == name


def test_temporary_names_are_recognised_narrowly() -> None:
    assert is_temporary(".tmp-step_00000100") and is_temporary(".tmp-delete-step_00000100")
    assert not any(
        map(is_temporary, [".tmp-", ".tmp-mine", "step_00000100", ".tmp-delete-x", "tmp-step_00000100"])
    )


def test_names_sort_by_their_numbers() -> None:
    names = ["layers.10.w", "layers.2.w", "embedding.weight", "layers.2.a"]
    assert sorted(names, key=natural_key) == ["embedding.weight", "layers.2.a", "layers.2.w", "layers.10.w"]
