"""The mesh: coordinates, peers, process groups, errors."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qeffect_lm.errors import UsageError
from qeffect_lm.parallel import mesh as mesh_module
from qeffect_lm.parallel.mesh import AXES, LINES, Mesh, axes_of

SIZES = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES}).filter(lambda sizes: math.prod(sizes.values()) <= 54)


def test_order_of_ranks():
    """tp fastest, then ep, dp, and pp slowest."""
    sizes = {"pp": 2, "dp": 2, "ep": 2, "tp": 2}
    order = [tuple(Mesh(sizes, rank).coord(axis) for axis in ("pp", "dp", "ep", "tp")) for rank in range(16)]
    assert order == list(itertools.product(range(2), repeat=4))
    mesh = Mesh({"pp": 3, "dp": 2}, 3)
    assert (mesh.coord("pp"), mesh.coord("dp"), mesh.coord("tp"), mesh.rank, mesh.world) == (1, 1, 0, 3, 6)
    assert mesh.peers("pp") == [1, 3, 5] and mesh.peers("dp") == [2, 3] and mesh.peers("ep") == [3]
    assert mesh.rank_at(pp=2) == 5 and mesh.rank_at(dp=0) == 2 and mesh.rank_at(pp=0, dp=0) == 0


@given(sizes=SIZES)
def test_coordinates_and_ranks_are_inverse(sizes):
    """Every rank has its own coordinates, rank_at finds it, and peers share all other coordinates."""
    world = Mesh(sizes).world
    seen = set()
    for rank in range(world):
        mesh = Mesh(sizes, rank)
        coords = mesh.coords
        assert mesh.rank_at(**coords) == mesh.rank_at() == rank and mesh.coords_of(rank) == coords
        assert all(0 <= coords[axis] < mesh.size(axis) for axis in AXES)
        seen.add(tuple(coords.items()))
        for axis in AXES:
            peers = mesh.peers(axis)
            assert len(peers) == sizes[axis] and peers[mesh.coord(axis)] == rank
            for i, peer in enumerate(peers):
                assert mesh.coords_of(peer) == {**coords, axis: i}
    assert len(seen) == world


def test_axes_not_named_have_size_one():
    mesh = Mesh({})
    assert mesh.world == 1 and mesh.coords == dict.fromkeys(AXES, 0) and mesh.peers("tp") == [0]
    assert all(mesh.group(axis) is None and mesh.size(axis) == 1 for axis in AXES)
    mesh.coords["pp"] = 5
    assert mesh.coord("pp") == 0, "coords is a copy"


@given(sizes=SIZES)
def test_groups(sizes):
    """All ranks create the same groups in the same order; the groups of an axis or a line partition the world; a rank's own
    is that of its peers, one of a single rank is none, and no two lines of the same ranks have two."""
    orders = []
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(Mesh(sizes).world):
            made: list[tuple[int, ...]] = []
            patch.setattr(mesh_module.dist, "new_group", lambda ranks, made=made, **_: made.append(tuple(ranks)) or ranks)
            mesh = Mesh(sizes, rank)
            mesh.create_groups()
            orders.append(made)
            for axis in (*AXES, *LINES):
                assert mesh.group(axis) == (mesh.peers(axis) if mesh.size(axis) > 1 else None)
                assert mesh.others(axis) == [peer for peer in mesh.peers(axis) if peer != rank]
                assert mesh.peers(axis)[mesh.coord(axis)] == rank
    assert all(order == orders[0] for order in orders)
    world = len(orders)
    kinds = {tuple(axis for axis in axes_of(line) if sizes[axis] > 1) for line in (*AXES, *LINES)} - {()}
    lengths = [math.prod(sizes[axis] for axis in kind) for kind in kinds]
    assert len(orders[0]) == sum(world // n for n in lengths)
    assert sorted(itertools.chain(*orders[0])) == sorted(list(range(world)) * len(lengths))


@pytest.mark.parametrize(
    ("sizes", "rank", "message"),
    [
        ({"pp": 2, "sp": 2}, 0, "unknown mesh axis 'sp': the axes are pp, dp, ep, cp, tp"),
        ({"pp": 0}, 0, "pp has size 0"),
        ({"pp": 2}, 2, "rank 2 is outside a mesh of 2 ranks"),
        ({"pp": 2}, -1, "rank -1 is outside"),
    ],
)
def test_errors(sizes, rank, message):
    with pytest.raises(UsageError, match=message):
        Mesh(sizes, rank)
