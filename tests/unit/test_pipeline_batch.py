"""A step's data in storages that never move: what is staged where, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.batch import StepBuffers
from qeffect_lm.errors import UsageError
from qeffect_lm.layers.dropout import host_key
from tests.tiny import batch

SHAPE = (3, 2, 8)


def buffers(first: bool = True, last: bool = True, replica: int = 0, replicas: int = 1) -> StepBuffers:
    return StepBuffers(SHAPE, torch.ones(()), first=first, last=last, seed=5, replica=replica, replicas=replicas)


def data(seed: int):
    made = batch(seed, 3, sequence=8)
    made.loss_mask[1, :, 4:] = 0
    return replace(made, tokens=int(made.loss_mask.sum()))


def test_each_step_is_written_into_the_same_storages():
    mine = buffers()
    places = {name: tensor.data_ptr() for name, tensor in vars(mine).items() if isinstance(tensor, torch.Tensor)}
    assert set(places) == {"divisor", "keys", "inputs", "targets", "loss_mask"}
    for step in (0, 7):
        given = data(step)
        mine.load(step, given)
        assert {name: getattr(mine, name).data_ptr() for name in places} == places
        for name in ("inputs", "targets", "loss_mask"):
            assert torch.equal(getattr(mine, name), getattr(given, name)) and getattr(mine, name) is not getattr(given, name)
        assert mine.divisor == given.tokens == 3 * 2 * 8 - 8


def test_keys_differ_by_step_and_place():
    """A microbatch has the key of its place in the step over all replicas, so that 1 and 2 and 3 replicas draw alike."""
    keys: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}
    for replicas in (1, 2, 3):
        for step, found in keys.items():
            places: list[int] = [0] * (3 * replicas)
            for replica in range(replicas):
                mine = buffers(replica=replica, replicas=replicas)
                mine.load(step, data(0))
                places[replica::replicas] = mine.keys.tolist()
            assert places == [host_key(5, step, place) for place in range(3 * replicas)]
            found[replicas] = places
    assert len({*keys[0][3], *keys[1][3]}) == 18 and keys[1][3][:6] == keys[1][2]


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True), (False, False)])
def test_a_rank_stages_what_its_chunks_read(first, last):
    mine = buffers(first, last)
    mine.load(0, data(0))
    assert (mine.inputs is not None, mine.targets is not None, mine.loss_mask is not None) == (first, last, last)
    assert mine.divisor == 40 and mine.keys.ne(0).all()


@pytest.mark.parametrize("name", ["inputs", "targets", "loss_mask"])
@pytest.mark.parametrize("first", [True, False])
def test_another_shape_is_refused_before_anything_is_written(name, first):
    """Also one that a copy would take and spread over the buffer; every rank refuses alike, whatever it holds."""
    mine = buffers(first, not first)
    mine.load(0, data(0))
    before = {key: tensor.clone() for key, tensor in vars(mine).items() if isinstance(tensor, torch.Tensor)}
    given = data(1)
    for wrong in (getattr(given, name)[:, :1], getattr(given, name)[:2]):
        with pytest.raises(UsageError, match=r"the plan and its buffers are made for \[3, 2, 8\]"):
            mine.load(1, replace(given, **{name: wrong}))
    assert all(torch.equal(getattr(mine, key), tensor) for key, tensor in before.items())
