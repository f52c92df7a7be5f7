"""I3: versions of weights and of their cached forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qeffect_lm.contract.errors import ContractViolation, StaleWeightError
from qeffect_lm.contract.versions import WeightVersions

NAMES = ("a.weight", "b.weight", "c.weight")
BOTH = ("rows", "columns")


def made(*names: str, epoch: int = 1, layouts=BOTH) -> WeightVersions:
    versions = WeightVersions(NAMES)
    for name in names or NAMES:
        versions.refreshed(name, epoch=epoch, layouts=layouts)
    return versions


def fails(call, *args, message: str = "", **kwargs) -> StaleWeightError:
    with pytest.raises(StaleWeightError) as caught:
        call(*args, **kwargs)
    assert message in str(caught.value)
    assert isinstance(caught.value, ContractViolation)
    return caught.value


@pytest.mark.parametrize("how", ["eager", "replay"])
def test_a_write_through_raw_storage_needs_a_bump(how):
    """V1: torch's counter does not see a raw write; after ``bump`` a read of the cache at the old version
    raises.
    """
    weight = torch.ones(4)
    before = weight._version
    torch.tensor([], dtype=torch.float32).set_(weight.untyped_storage())[0] = 7.0
    assert weight._version == before and float(weight[0]) == 7.0
    versions = made()
    read(versions, how, "a.weight")
    versions.bump(["a.weight"])
    error = fails(
        read,
        versions,
        how,
        "a.weight",
        message="at version 1, the cache holds version 0, the parameter is at 1",
    )
    assert error.place == {"layer": "a.weight", "microbatch": 2, "cached_version": 0, "parameter_version": 1}
    assert "0F2 needs" in str(error) and "refresh the cache" in str(error)
    read(versions, how, "b.weight")
    versions.refreshed("a.weight", epoch=1, layouts=BOTH)
    read(versions, how, "a.weight")
    assert versions.stale == frozenset()


def read(versions: WeightVersions, how: str, name: str, layout: str = "rows", epoch: int | None = 1) -> None:
    if how == "eager":
        versions.require(name, layout, epoch=epoch, reader="0F2", microbatch=2)
    else:
        versions.require_all(((name, layout),), epoch=epoch, reader="0F2", microbatch=2)


@pytest.mark.parametrize("how", ["eager", "replay"])
def test_a_bump_of_everything(how):
    versions = made()
    versions.bump()
    assert versions.versions == dict.fromkeys(NAMES, 1) and versions.stale == frozenset(NAMES)
    for name in NAMES:
        fails(read, versions, how, name)
        versions.refreshed(name, epoch=1, layouts=BOTH)
        read(versions, how, name)


@pytest.mark.parametrize("how", ["eager", "replay"])
@pytest.mark.parametrize("epoch", [1, None])
def test_a_cache_that_was_never_made(how, epoch):
    """Also when every other weight has one, and when the epoch does not matter (window microbatch)."""
    versions = made("a.weight", "b.weight")
    error = fails(
        read,
        versions,
        how,
        "c.weight",
        epoch=epoch,
        message="0F2 needs the cached weight 'c.weight', never made",
    )
    assert error.place["layer"] == "c.weight"
    fails(read, WeightVersions(NAMES), how, "a.weight", epoch=epoch)
    versions.refreshed("c.weight", epoch=1, layouts=BOTH)
    read(versions, how, "c.weight", epoch=epoch)


@pytest.mark.parametrize("how", ["eager", "replay"])
def test_a_missing_layout(how):
    """V4: evaluation needs one layout, training two; the missing one is made at the same version, and both
    are there.
    """
    versions = made(layouts=["rows"])
    read(versions, how, "a.weight", "rows")
    error = fails(
        read,
        versions,
        how,
        "a.weight",
        "columns",
        message="layout 'columns' of 'a.weight', the cache holds ['rows']",
    )
    assert error.place == {"layer": "a.weight", "microbatch": 2}
    versions.refreshed("a.weight", epoch=1, layouts=BOTH)
    read(versions, how, "a.weight", "columns")
    assert versions.versions["a.weight"] == versions.caches["a.weight"].version == 0
    versions.refreshed("a.weight", epoch=1, layouts=["rows"])  # and gone again
    fails(read, versions, how, "a.weight", "columns")


@pytest.mark.parametrize("how", ["eager", "replay"])
def test_the_scale_epoch(how):
    """In window step a cache has the current epoch's scale; in window microbatch (epoch None) it keeps its
    own.
    """
    versions = made(epoch=4)
    error = fails(read, versions, how, "b.weight", epoch=5, message="the scale of epoch 5, the cache has epoch 4")
    assert (error.place["cached_epoch"], error.place["epoch"], error.place["microbatch"]) == (4, 5, 2)
    read(versions, how, "b.weight", epoch=None)
    read(versions, how, "a.weight", epoch=4)
    versions.refreshed("b.weight", epoch=5, layouts=BOTH)
    read(versions, how, "b.weight", epoch=5)
    fails(read, versions, how, "a.weight", epoch=5)  # one of several epochs around
    read(versions, how, "a.weight", epoch=4)


def test_a_reader_may_state_a_version():
    """Whoever began with version v refuses both an older cache and a parameter that moved on."""
    versions = made()
    versions.require("a.weight", "rows", epoch=None, version=0)
    error = fails(
        versions.require,
        "a.weight",
        "rows",
        epoch=None,
        version=1,
        message="a reader needs 'a.weight' at version 1",
    )
    assert (error.place["cached_version"], error.place["parameter_version"]) == (0, 0)
    versions.bump(["a.weight"])
    fails(versions.require, "a.weight", "rows", epoch=None, version=0, message="the parameter is at 1")
    versions.refreshed("a.weight", epoch=1, layouts=BOTH)
    fails(versions.require, "a.weight", "rows", epoch=None, version=0, message="the cache holds version 1")


def test_casts_are_counted_per_weight():
    """V3, V5: one cast per version, however many readers (evaluation first, then every microbatch) come."""
    versions = made()
    for microbatch in range(5):
        for layout in BOTH:
            versions.require("a.weight", layout, epoch=1, microbatch=microbatch)
    assert versions.casts == dict.fromkeys(NAMES, 1)
    versions.bump()
    for name in NAMES:
        versions.refreshed(name, epoch=2, layouts=BOTH)
    assert versions.casts == dict.fromkeys(NAMES, 2)


def test_a_parameter_without_a_cache_is_never_stale():
    versions = made("a.weight")
    versions.bump()
    assert versions.stale == {"a.weight"}
    assert versions.state() == {
        "versions": dict.fromkeys(NAMES, 1),
        "cache_version": {"a.weight": 0},
        "cache_epoch": {"a.weight": 1},
    }


names = st.sampled_from(NAMES)
layouts = st.sampled_from([("rows",), ("columns",), BOTH])
operations = st.one_of(
    st.tuples(st.just("bump"), st.one_of(st.none(), st.lists(names, unique=True))),
    st.tuples(st.just("refresh"), st.lists(names, unique=True, min_size=1), st.integers(0, 2), layouts),
    st.tuples(st.just("refresh"), st.just(list(NAMES)), st.integers(0, 2), st.just(BOTH)),
    st.tuples(
        st.just("read"),
        st.lists(st.tuples(names, st.sampled_from(BOTH)), min_size=1, max_size=4),
        st.integers(0, 2),
    ),
    st.tuples(st.just("read"), st.just([(n, b) for n in NAMES for b in BOTH]), st.integers(0, 2)),
)


@settings(max_examples=120)
@given(st.lists(operations, min_size=5, max_size=30), st.booleans())
def test_replays_and_eager_reads_refuse_the_same(script, any_epoch):
    """Random bumps and refreshes: a graph's reads pass exactly when each read alone passes, by a plain
    account of both.
    """
    versions = WeightVersions(NAMES)
    version = dict.fromkeys(NAMES, 0)
    cache: dict[str, tuple[int, int, tuple[str, ...]]] = {}
    for op, *args in script:
        if op == "bump":
            versions.bump(args[0])
            for name in NAMES if args[0] is None else args[0]:
                version[name] += 1
        elif op == "refresh":
            for name in args[0]:
                versions.refreshed(name, epoch=args[1], layouts=args[2])
                cache[name] = (version[name], args[1], args[2])
        else:
            epoch = None if any_epoch else args[1]
            good = []
            for name, layout in args[0]:
                held = cache.get(name)
                fine = held is not None and held[0] == version[name] and epoch in (None, held[1]) and layout in held[2]
                good.append(fine)
                assert passes(lambda n=name, b=layout, e=epoch: versions.require(n, b, epoch=e)) == fine
            for _ in range(2):
                assert passes(lambda a=tuple(args[0]), e=epoch: versions.require_all(a, epoch=e)) == all(good)
        assert versions.stale == {name for name, held in cache.items() if held[0] != version[name]}


def passes(call) -> bool:
    try:
        call()
    except StaleWeightError:
        return False
    return True
