"""Flat parameter storage: layout, views, the gather, and what it lists for a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qeffect_lm.optim.flat import ALIGNMENT_BYTES, FlatBuffers, ParamSpec
from qeffect_lm.state import Role

SPECS = [
    ParamSpec("norm", (5,), decay=False),
    ParamSpec("weight", (7, 9), decay=True),
    ParamSpec("old", (4, 3), decay=True, trainable=False),
    ParamSpec("head", (3, 2), decay=True),
]


@pytest.mark.parametrize(
    ("master", "param", "grad"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_layout(master: torch.dtype, param: torch.dtype, grad: torch.dtype) -> None:
    """Offsets are 256-byte aligned in every buffer; decayed, undecayed, frozen; nothing overlaps."""
    flat = FlatBuffers(SPECS, master_dtype=master, param_dtype=param, grad_dtype=grad)
    assert flat.names == ["weight", "head", "norm", "old"]
    assert flat.trainable_names == ["weight", "head", "norm"]
    end = 0
    for name in flat.names:
        entry = flat.entry(name)
        for dtype in (master, param, grad):
            assert entry.offset * dtype.itemsize % ALIGNMENT_BYTES == 0
        assert entry.offset >= end
        end = entry.offset + entry.numel
    ranges = [flat.decay_range, flat.no_decay_range, flat.frozen_range]
    assert [r.start for r in ranges[1:]] == [r.stop for r in ranges[:-1]]
    assert flat.decay_range.start == 0 and flat.frozen_range.stop == flat.master_buffer.numel()
    for name, piece in (("head", ranges[0]), ("norm", ranges[1]), ("old", ranges[2])):
        entry = flat.entry(name)
        assert piece.start <= entry.offset and entry.offset + entry.numel <= piece.stop
    for index, name in enumerate(flat.names):
        flat.master(name).fill_(index + 1)
    assert flat.master_buffer.count_nonzero() == sum(spec.numel for spec in SPECS), "views overlap or leak"


def test_views_are_live_and_gather_casts() -> None:
    """A separate parameter buffer follows the master only through gather; an equal dtype shares the
    storage."""
    flat = FlatBuffers(SPECS, param_dtype=torch.bfloat16)
    flat.master("weight").fill_(1.0 + 2**-12)
    assert flat.param("weight").dtype == torch.bfloat16 and flat.param("weight").count_nonzero() == 0
    address = flat.param("weight").data_ptr()
    flat.gather()
    assert torch.equal(flat.param("weight"), torch.ones(7, 9, dtype=torch.bfloat16))
    assert flat.param("weight").data_ptr() == address
    shared = FlatBuffers(SPECS)
    assert shared.param("weight").data_ptr() == shared.master("weight").data_ptr()


def test_logical_tensors() -> None:
    """Names, roles and axes; the moments of a frozen parameter and a shared parameter copy are not listed."""
    tp = ParamSpec("column", (4, 8), True, axes=("tp", None), global_shape=(8, 8), start=(4, 0))
    flat = FlatBuffers([*SPECS, tp], param_dtype=torch.bfloat16)
    listed = {item.name: item for item in flat.logical_tensors()}
    expected = {f"{kind}/{name}" for kind in ("master", "param") for name in flat.names}
    expected |= {f"{kind}/{name}" for kind in ("moment1", "moment2") for name in flat.trainable_names}
    assert set(listed) == expected
    assert not any(item.name.startswith("param/") for item in FlatBuffers(SPECS).logical_tensors())
    item = listed["moment2/column"]
    assert (item.role, item.global_shape, item.start) == (Role.MOMENT, (8, 8), (4, 0))
    assert item.axes == ("tp", None) and item.replicated == ("dp", "ep", "cp")
    assert item.tensor.data_ptr() == flat.moment2("column").data_ptr()
    assert listed["master/norm"].replicated == ("dp", "ep", "cp", "tp")


def test_table_and_sizes() -> None:
    """The printable table names every parameter and its offset; bytes are those of the buffers."""
    flat = FlatBuffers(SPECS, param_dtype=torch.bfloat16)
    table = flat.table()
    for name in flat.names:
        line = next(line for line in table.splitlines() if line.startswith(name))
        assert f"{flat.entry(name).offset:,}" in line and flat.entry(name).segment in line
    assert flat.bytes() == flat.master_buffer.numel() * 6 + flat.grad_buffer.numel() * 12


def test_errors() -> None:
    """Wrong names and contradictory specs are refused by name."""
    flat = FlatBuffers(SPECS)
    with pytest.raises(KeyError, match="no parameter 'wieght'"):
        flat.master("wieght")
    for view in (flat.grad, flat.moment1, flat.moment2):
        with pytest.raises(KeyError, match="'old' is frozen"):
            view("old")
    with pytest.raises(ValueError, match="two parameters are called 'norm'"):
        FlatBuffers([SPECS[0], ParamSpec("norm", (2,), decay=True)])
    with pytest.raises(ValueError, match="axes"):
        FlatBuffers([ParamSpec("w", (2, 2), True, axes=("tp",))])
    with pytest.raises(ValueError, match="global_shape and start"):
        FlatBuffers([ParamSpec("w", (2, 2), True, axes=("tp", None))])


def test_stage_without_parameters() -> None:
    """G6: a stage that holds nothing still has buffers, of length 0."""
    flat = FlatBuffers([])
    assert flat.master_buffer.numel() == 0 and flat.logical_tensors() == []
    flat.gather()
    assert "0 parameters" in flat.table()


def test_ranges_of_a_group_tile_the_main_gradients():
    """Weights lie before norms, so a chunk's gradients are two ranges; one chunk alone has everything in one."""
    specs = [
        ParamSpec(f"{chunk}.{name}", shape, name == "w", trainable=name != "f", group=chunk)
        for chunk in (2, 5)
        for name, shape in (("w", (70, 3)), ("n", (5,)), ("f", (9,)))
    ]
    flat = FlatBuffers(specs)
    ranges = {chunk: flat.ranges(chunk) for chunk in (2, 5)}
    assert [len(found) for found in ranges.values()] == [2, 2] and flat.ranges(3) == []
    edges = sorted(ranges[2] + ranges[5])
    assert edges[0][0] == 0 and edges[-1][1] == flat.grad_buffer.numel()
    assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False))
    for chunk, found in ranges.items():
        for name in (f"{chunk}.w", f"{chunk}.n"):
            entry = flat.entry(name)
            assert any(start <= entry.offset and entry.offset + entry.numel <= stop for start, stop in found)
    whole = FlatBuffers([replace(spec, group=0) for spec in specs])
    assert whole.ranges(0) == [(0, whole.grad_buffer.numel())]
