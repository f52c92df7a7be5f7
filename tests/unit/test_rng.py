"""Random generators as saved state (the unit part of case C1)."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from qeffect_lm.runtime.rng import (
    generator_tensors,
    load_generator_tensors,
    restore_generators,
    save_generators,
    seed_generators,
)


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = save_generators()
    yield
    restore_generators(before)


def draws() -> list[float]:
    """Several draws of each kind from each generator; an odd number of normal ones."""
    values = [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(40) + 0.0,
        *np.random.randn(3),
        np.random.rand(),
    ]
    return [float(v) for v in [*values, *torch.randn(3), torch.randint(1000, ())]]


@pytest.mark.parametrize("gauss", [0, 1, 2], ids="{} normal draws before".format)
@pytest.mark.parametrize("way", ["states", "tensors"])
def test_round_trip(way, gauss):
    """C1: saved, moved on, restored: the same draws and the same bytes, in the middle of a pair of normal
    numbers too (both Python and NumPy keep the second one)."""
    seed_generators(5, 0)
    draws()
    for _ in range(gauss):
        random.gauss(0, 1)
        np.random.randn()
    if way == "states":
        saved = save_generators()
    else:
        saved = {name: tensor.clone() for name, tensor in generator_tensors().items()}
    bytes_then = generator_tensors()
    first = draws()
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    random.gauss(0, 1)
    assert draws() != first
    restore_generators(saved) if way == "states" else load_generator_tensors(saved)
    bytes_now = generator_tensors()
    assert set(bytes_now) == set(bytes_then) and {"torch", "numpy", "python"} <= set(bytes_now)
    assert all(torch.equal(bytes_now[name], bytes_then[name]) for name in bytes_then)
    assert draws() == first


def test_typed():
    """Fixed shapes and dtypes, whatever the state (a checkpoint's tensors keep their shape)."""
    for _ in range(2):
        tensors = generator_tensors()
        assert tensors["torch"].dtype == torch.uint8 and tensors["torch"].dim() == 1
        assert (tensors["numpy"].dtype, tensors["numpy"].shape) == (torch.int64, (627,))
        assert (tensors["python"].dtype, tensors["python"].shape) == (torch.int64, (628,))
        random.gauss(0, 1)
        np.random.randn()


@pytest.mark.parametrize("value", [0.0, -0.0, 5e-324, -1.5, 1e308])
def test_gauss_is_kept_to_the_bit(value):
    """A pending normal number of 0, a signed zero or a denormal is still pending, with its sign."""
    version, internal, _ = random.getstate()
    random.setstate((version, internal, value))
    name, words, position, _, _ = np.random.get_state()
    np.random.set_state((name, words, position, 1, value))
    saved = generator_tensors()
    random.seed(1), np.random.seed(1)
    load_generator_tensors(saved)
    assert np.float64(random.getstate()[2]).tobytes() == np.float64(value).tobytes()
    _, _, _, pending, gauss = np.random.get_state()
    assert pending == 1 and np.float64(gauss).tobytes() == np.float64(value).tobytes()


def test_tensors_are_copies():
    saved = generator_tensors()
    before = {name: tensor.clone() for name, tensor in saved.items()}
    draws()
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    assert not all(torch.equal(generator_tensors()[name], before[name]) for name in saved)


def test_seed_generators():
    """Reproducible per (seed, rank), different between ranks and seeds, for each of the three."""

    def three(seed: int, rank: int) -> tuple[float, float, float]:
        seed_generators(seed, rank)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert three(1, 0) == three(1, 0)
    for other in (three(1, 1), three(2, 0)):
        assert all(a != b for a, b in zip(three(1, 0), other, strict=True))


def test_cuda_generators(monkeypatch):
    """Device states by number: twelve devices come back in their order, not cuda0, cuda1, cuda10, …"""
    states = [torch.tensor([i], dtype=torch.uint8) for i in range(12)]
    loaded = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", loaded.extend)
    saved = generator_tensors()
    assert [int(saved[f"cuda{i}"]) for i in range(12)] == list(range(12))
    load_generator_tensors(saved)
    assert [int(state) for state in loaded] == list(range(12))
    loaded.clear()
    restore_generators(save_generators())
    assert [int(state) for state in loaded] == list(range(12))
