"""Resharding of flat storages on any mesh of pp, dp and tp: uneven cuts along tp, shards of the optimizer's state, replicas.

Training has no tensor parallelism yet; the storages and the checkpoint have. Each rank of the first mesh holds its pieces of
one made-up logical state; after a save, each rank of the second one has to hold its own, byte for byte, and the ranks together
the digest of the whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint import Communicator, load_into, open_checkpoint, save_checkpoint
from checkpoint.resume import prove
from checkpoint.shards import as_integers
from checkpoint.sums import Summer, state_digest
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.optim.flat import FlatBuffers, ParamSpec, Shard
from qeffect_lm.parallel.mesh import Mesh
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import on_ranks
from tests.resharding import AT_ONCE, finish
from tests.unit.test_sums import random_bits

VOCAB, HIDDEN = 259, 300
# name → (shape, the dimension that tp cuts, whether it is trained, pipeline stage as a part of all)
PARAMETERS: dict[str, tuple[tuple[int, ...], int | None, bool, float]] = {
    "embedding.weight": ((VOCAB, HIDDEN), 0, True, 0.0),
    "layers.0.qkv.weight": ((10, 6), 0, True, 0.1),
    "layers.0.norm.weight": ((6,), None, True, 0.1),
    "layers.1.out.weight": ((6, 10), 1, True, 0.6),
    "layers.1.frozen.weight": ((5, 7), 1, False, 0.6),
    "head.bias": ((VOCAB,), 0, True, 0.99),
}
SCALES = ("layers.0.qkv.input", "layers.1.out.weight")


@st.composite
def meshes(draw: st.DrawFn) -> tuple[dict[str, int], bool]:
    """Sizes of at most 12 ranks, and whether the optimizer's state is shared."""
    tp = draw(st.integers(1, 4))
    dp = draw(st.integers(1, 3))
    pp = draw(st.integers(1, max(1, min(3, 12 // (tp * dp)))))
    return {"pp": pp, "dp": dp, "tp": tp}, draw(st.booleans())


def cut(size: int, parts: int, number: int) -> tuple[int, int]:
    """First index and extent of one of ``parts`` pieces, as even as they go: the first ones take one more."""
    sizes = [size // parts + (i < size % parts) for i in range(parts)]
    return [0, *accumulate(sizes)][number], sizes[number]


class Rank:
    """The storages of one rank of a mesh."""

    def __init__(self, sizes: Mapping[str, int], rank: int, shared: bool) -> None:
        self.mesh = mesh = Mesh(sizes, rank)
        stages = mesh.size("pp")
        self.extra: list[LogicalTensor] = []
        specs = []
        for name, (shape, along, trainable, depth) in PARAMETERS.items():
            if int(depth * stages) != mesh.coord("pp"):
                continue
            start, local = [0] * len(shape), list(shape)
            axes: list[str | None] = [None] * len(shape)
            if along is not None:
                start[along], local[along] = cut(shape[along], mesh.size("tp"), mesh.coord("tp"))
                axes[along] = "tp"
            specs.append(
                ParamSpec(name, tuple(local), True, tuple(axes), shape, tuple(start), trainable, group=int(2 * depth))
            )
            if len(shape) == 2 and trainable and along is not None:
                cached = torch.zeros(local, dtype=torch.uint8).view(torch.float8_e4m3fn)
                item = LogicalTensor(f"cached/{name}", cached, Role.CACHED_WEIGHT, shape, tuple(start), tuple(axes), ("dp",))
                self.extra.append(item)
        shard = Shard(mesh.size("dp"), mesh.coord("dp"), 2**18) if shared and mesh.size("dp") > 1 else None
        self.flat = FlatBuffers(specs, param_dtype=torch.bfloat16, moment_dtype=torch.bfloat16, shard=shard)
        for place, name in enumerate(SCALES):
            if place * (stages - 1) == mesh.coord("pp"):
                self.extra.append(LogicalTensor.whole(f"scale/{name}", torch.zeros(()), Role.SCALE))
                self.extra.append(LogicalTensor.whole(f"amax_history/{name}", torch.zeros(5), Role.AMAX_HISTORY))
        everywhere = ("dp", "pp", "tp", "ep")
        counter = torch.zeros((), dtype=torch.int64)
        self.extra.append(LogicalTensor.whole("optimizer/step", counter, Role.COUNTER, replicated=everywhere))
        if mesh.coord("pp") == stages - 1 and stages > 1:  # the other end's copy of a tied weight
            start, rows = cut(VOCAB, mesh.size("tp"), mesh.coord("tp"))
            copy = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
            shape, axes2 = (VOCAB, HIDDEN), ("tp", None)
            copied = LogicalTensor("param/embedding.weight", copy, Role.PARAM, shape, (start, 0), axes2, ("dp", "pp"))
            self.extra.append(copied)

    @property
    def items(self) -> list[LogicalTensor]:
        return [*self.flat.logical_tensors(), *self.extra]

    def pieces(self, state: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(what this rank holds, what it should), as integers."""
        found = []
        for item in self.items:
            place = tuple(slice(a, a + n) for a, n in zip(item.start, item.tensor.shape, strict=True))
            found.append((as_integers(item.tensor), as_integers(state[item.name])[place]))
        return found


def logical_state(seed: int) -> dict[str, torch.Tensor]:
    """Random bits for every logical tensor."""
    whole = Rank({}, 0, shared=False)
    return {item.name: random_bits(item.global_shape, item.tensor.dtype, seed + i) for i, item in enumerate(whole.items)}


def check(first: tuple[dict[str, int], bool], second: tuple[dict[str, int], bool], seed: int) -> None:
    state = logical_state(seed)
    wanted = state_digest({name: Summer().of(t, t.shape, (0,) * t.dim()) for name, t in state.items()})
    with tempfile.TemporaryDirectory() as folder:

        def saves(comm: Communicator) -> None:
            rank = Rank(first[0], comm.rank, first[1])
            for held, value in rank.pieces(state):
                held.copy_(value)
            save_checkpoint(Path(folder), 1, rank.items, {}, comm, rank.mesh.coords)

        finish(on_ranks(Mesh(first[0]).world, saves))
        checkpoint = open_checkpoint(Path(folder) / "step_00000001")
        shapes = {name: entry.shape for name, entry in checkpoint.manifest.tensors.items()}
        assert shapes == {name: tensor.shape for name, tensor in state.items()}

        def loads(comm: Communicator) -> str:
            rank = Rank(second[0], comm.rank, second[1])
            load_into(checkpoint, rank.items, comm=comm)
            assert all(torch.equal(held, value) for held, value in rank.pieces(state))
            return prove(checkpoint, rank.items, comm, rank.mesh.coords)

        told = on_ranks(Mesh(second[0]).world, loads)
        finish(told)
        assert set(told) == {f"logical state of {len(state)} tensors equal to the checkpoint's, digest {wanted}"}


@settings(max_examples=12, phases=AT_ONCE)
@given(meshes(), meshes(), st.integers(0, 99))
def test_any_mesh_to_any_other(first, second, seed):
    check(first, second, seed)


@pytest.mark.long
@settings(max_examples=200, phases=AT_ONCE)
@given(meshes(), meshes(), st.integers(0, 99))
def test_any_mesh_to_any_other_often(first, second, seed):
    check(first, second, seed)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_vocabulary_that_no_number_of_ranks_divides(ranks):
    """C4: 259 rows on 2, 3, 4 tp ranks, and DP 2 → 3: logical tensors are equal and unpadded."""
    check(({"tp": ranks}, False), ({"tp": ranks % 4 + 1}, False), 0)
    check(({"dp": 2}, True), ({"dp": 3, "tp": ranks}, True), 1)


@pytest.mark.parametrize("what", ["changed", "missing", "twice"])
def test_a_state_that_did_not_come_over_whole_is_refused(tmp_path, what):
    """After the load one rank changes a byte, or the ranks together hold a piece never, or twice: each rank raises the name."""
    state = logical_state(5)
    one = Rank({}, 0, shared=False)
    for held, value in one.pieces(state):
        held.copy_(value)
    on_ranks(1, lambda comm: save_checkpoint(tmp_path, 1, one.items, {}, comm, {}))
    checkpoint = open_checkpoint(tmp_path / "step_00000001")
    name = "moment1/layers.1.out.weight"

    def loads(comm: Communicator) -> Any:
        rank = Rank({"dp": 2, "tp": 2}, comm.rank, shared=True)
        load_into(checkpoint, rank.items, comm=comm)
        items = rank.items
        mine = [item for item in items if item.name == name]
        if mine and what == "changed":
            as_integers(mine[0].tensor)[-1, -1] ^= 1
        items = [item for item in items if item.name != name or what != "missing"]
        return prove(checkpoint, [*items, *(mine if what == "twice" else [])], comm, rank.mesh.coords)

    results = on_ranks(4, loads)
    assert all(isinstance(error, ResumeError) for error in results)
    assert {str(error).split(" of all ranks")[0] for error in results} == {f"tensor {name!r}"}
