"""The benchmark of gradient placement: everything but the GPU's clock and node lists, on a small rank of this CPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipeline.actions import Kind
from qeffect_lm.fp8 import gemm
from qeffect_lm.layers import linear
from tools import bench
from tools.benchmarks import placement
from tools.benchmarks.layers import Size

SIZE = Size(64, 16, layers=1, device="cpu")


class Graph:
    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)


@pytest.fixture(scope="module")
def ours():
    return placement.Ours(SIZE, "host_replay")


def test_it_needs_a_gpu(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("measures here")
    assert bench.main(["placement", "--json", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err == "error: placement is measured on a GPU, and torch sees none here\n"
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    "options, said",
    [(["--shapes", "64"], "HIDDENxTOKENS"), (["--shapes", "0x16"], "HIDDENxTOKENS"), (["--steps", "0"], "at least")],
)
def test_wrong_arguments(capsys, options, said):
    assert bench.main(["placement", *options]) == 2
    assert said in capsys.readouterr().err


def test_lists_of_nodes_are_compared():
    """By kind, name and shape, however a node waits; on a CPU by operation."""
    gemm_line = "node kernel gemm grid=(8, 1, 1) block=(128, 1, 1) shared=0"
    other = "node kernel gemm grid=(9, 1, 1) block=(128, 1, 1) shared=0"
    add = "node kernel add grid=(1, 1, 1) block=(64, 1, 1) shared=0"
    before = placement.nodes_of([Graph(gemm_line, "operation product(x)"), Graph(gemm_line + " after=3")])
    assert before == Counter({gemm_line.removeprefix("node "): 2})
    after = placement.nodes_of([Graph(gemm_line, add), Graph(gemm_line, add, "node memcpy device to device 4x1x1 bytes")])
    copies = {"kernel add": 2, "memcpy device to device 4x1x1 bytes": 1}
    assert placement.added(before, after) == {"added": copies, "gone": {}, "count": 3}
    changed = placement.added(before, placement.nodes_of([Graph(gemm_line, other)]))
    assert changed == {"added": {"kernel gemm": 1}, "gone": {"kernel gemm": 1}, "count": 1}
    assert placement.nodes_of([Graph("operation aten.mm.out(x)", "operation aten.empty_like.default(x)")]) == {"aten.mm.out": 1}


def test_a_product_that_adds_and_one_that_overwrites_are_one_kernel():
    """cuBLASLt's names for them; other tiles, or another number of them, still count."""
    shape = " grid=(132, 1, 1) block=(384, 1, 1) shared="
    adds, writes = (f"node kernel nvjet_128x128_h_{beta}_coopA{shape}{size}" for beta, size in (("badd", 7), ("bz", 5)))
    before = placement.nodes_of([Graph(writes, adds, adds)])
    assert placement.added(before, placement.nodes_of([Graph(writes, writes, writes)])) == {"added": {}, "gone": {}, "count": 0}
    wider = writes.replace("128x128", "128x160")
    other = placement.added(before, placement.nodes_of([Graph(writes, writes, writes, wider)]))
    assert other == {"added": {"kernel nvjet_128x160_h_b_coopA": 1}, "gone": {}, "count": 1}


def test_ways_on_a_small_rank(ours):
    """Equal bits from graphs and eagerly; the temporary way is another list of launches for W, and within the bound."""
    placed, temporary = ours.gradients("placed"), ours.gradients("temporary")
    assert placement.same_bits(placed, ours.gradients("eager")) and ours.gemms == 16
    found = placement.difference(ours, placed, temporary)
    assert found["of_bound"] <= 1 and found["smallest_largest"] > 0
    lists = [placement.nodes_of(ours.graphs(name, Kind.W)) for name in ("placed", "temporary")]
    more = placement.added(*lists)
    assert more["added"] == {"aten.add_.Tensor": 12, "aten.copy_.default": 4, "aten.mm.out": 12}
    assert more["gone"] == {"aten.addmm_.default": 12}
    rest = [placement.nodes_of(ours.graphs(name, Kind.F, Kind.I)) for name in ("placed", "temporary")]
    assert rest[0] == rest[1] and rest[0].total() > 100


def test_a_difference_is_seen(ours):
    """One element off by a thousandth of itself is far outside of the bound; a NaN is too."""
    placed = ours.gradients("placed")
    entry = ours.assembly.flat.entry(ours.linears[0].weight_name)
    for wrong in (1.001, torch.nan):
        other = placed.clone()
        at = entry.offset + int(placed[entry.offset : entry.offset + entry.numel].abs().argmax())
        other[at] *= wrong
        assert not placement.difference(ours, placed, other)["of_bound"] <= 1
        assert not placement.same_bits(placed, other)
    assert not placement.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_products_are_put_back():
    with pytest.raises(RuntimeError, match="in between"), placement.products_by(placement.through_a_temporary):
        assert linear.accumulate_scaled_mm is not gemm.accumulate_scaled_mm
        raise RuntimeError("in between")
    assert linear.accumulate_scaled_mm is gemm.accumulate_scaled_mm and linear.accumulate_mm is gemm.accumulate_mm


def test_one_product_for_all_microbatches(ours):
    """Is the sum of the microbatches' within what float32 rounds off, from its graph as well."""
    joined = placement.Joined(ours)
    assert 0 < joined.apart() < 1e-5
    ours.assembly.flat.grad_buffer.fill_(7.0)
    joined.replay()
    assert (ours.linears[0].grad_view() != 7.0).all()


def test_ways_take_turns():
    """Each is first equally often; the first two repetitions are forgotten."""
    order = []

    def clock(once):
        order.append(once())
        return 100.0 if len(order) <= 4 else float(len(order))

    found = placement.interleaved({"a": lambda: "a", "b": lambda: "b"}, 4, clock)
    assert "".join(order) == "abbaabbaabba" and found == {"a": 8.5, "b": 8.5}


def row(**changes):
    ms = {"placed": 1.0, "temporary": 1.2, "placed W": 0.5, "temporary W": 0.7, "coalesced W": 0.4}
    made = {
        "hidden": 4096, "tokens": 1024, "gemms": 96, "ms": ms, "eager_same_bits": True,
        "nodes": {"added": {"add": 96}, "gone": {}, "count": 96},
        "nodes_outside_w": {"added": {}, "gone": {}, "count": 0},
        "difference": {"max": 1e-6, "of_bound": 0.25, "smallest_largest": 0.1},
    }  # fmt: skip
    return made | changes


def test_what_is_not_as_promised():
    """Each promise of a row by itself."""
    assert placement.faults([row()]) == []
    slow = {"placed": 1.0, "temporary": 1.1}
    broken = {
        "less than 1.132": row(ms=slow),
        "less than 1.0": row(hidden=1024, ms={"placed": 1.0, "temporary": 0.99}),
        "node lists differ": row(nodes={"added": {"add": 95}, "gone": {}, "count": 95}),
        "1 fewer": row(nodes={"added": {"add": 96}, "gone": 1, "count": 96}),
        "F and I differ": row(nodes_outside_w={"added": {"x": 1}, "gone": {}, "count": 1}),
        "captured and eager": row(eager_same_bits=False),
        "of the bound": row(difference={"of_bound": float("nan"), "smallest_largest": 1.0}),
        "all zeros": row(difference={"of_bound": 0.0, "smallest_largest": 0.0}),
    }
    for said, made in broken.items():
        (fault,) = placement.faults([made])
        assert said in fault
    assert placement.faults([row(hidden=1024, ms=slow)]) == []


def test_table():
    """One line a row; Transformer Engine's figures where it ran."""
    te = {"te fused": 2.0, "te unfused": 3.0, "te fused W": 1.0, "te unfused W": 1.5}
    head, with_te, without = placement.table([row(te_ms=te), row(te_error="ImportError: none")]).splitlines()
    assert with_te.split() == "4096 1024 1.000 1.200 1.200 0.500 0.700 1.400 0.400 2.000 3.000 1.500 +96 2.50e-01 same".split()
    assert without.split()[9:12] == ["-", "-", "-"] and head.split()[:3] == ["hidden", "tokens", "placed"]
