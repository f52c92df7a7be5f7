"""Random generators of the process, as saved and restored state.

Training draws nothing from them (dropout is keyed, initialisation and data order have generators of their own), but a
user's layer or callback may, so they are saved, restored last on resume, and put back after evaluation and capture.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.layers.dropout import host_key


@dataclass(frozen=True)
class GeneratorStates:
    """States of Python's, NumPy's and torch's default generators (and of each CUDA device's)."""

    python: Any
    numpy: Any
    cuda: list[torch.Tensor]
    torch: torch.Tensor


def save_generators() -> GeneratorStates:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return GeneratorStates(random.getstate(), np.random.get_state(), cuda, torch.get_rng_state())


def restore_generators(states: GeneratorStates) -> None:
    random.setstate(states.python)
    np.random.set_state(states.numpy)
    torch.set_rng_state(states.torch)
    if states.cuda:
        torch.cuda.set_rng_state_all(states.cuda)


def seed_generators(seed: int, rank: int) -> None:
    """Give each rank its own, reproducible start."""
    key = host_key("generators", seed, rank) & 0xFFFFFFFF
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)


def generator_tensors() -> dict[str, torch.Tensor]:
    """The generators as typed tensors: ``torch`` (uint8), ``numpy`` (int64: 624 words, position, gauss flag and bits) and
    ``python`` (int64: version, words and position, gauss flag and bits)."""
    states = save_generators()
    _, words, position, has_gauss, gauss = states.numpy
    numpy_state = np.concatenate([words.astype(np.int64), [position, has_gauss, _bits(gauss)]])
    version, internal, python_gauss = states.python
    gauss_bits = _bits(0.0 if python_gauss is None else python_gauss)
    python_state = [version, *internal, int(python_gauss is not None), gauss_bits]
    tensors = {
        "torch": states.torch.clone(),
        "numpy": torch.from_numpy(numpy_state.astype(np.int64)),
        "python": torch.tensor(python_state, dtype=torch.int64),
    }
    for i, state in enumerate(states.cuda):
        tensors[f"cuda{i}"] = state
    return tensors


def load_generator_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """The inverse of :func:`generator_tensors`.

    Raises:
        ResumeError: a tensor is not the state of its generator.
    """
    words, position, has_gauss, bits = np.split(tensors["numpy"].numpy(), [624, 625, 626])
    if not 0 <= position[0] <= 624 or words.min() < 0 or words.max() >= 2**32:  # numpy believes it, and reads out of bounds
        raise ResumeError("the saved state of numpy's generator is none")
    np.random.set_state(("MT19937", words.astype(np.uint32), int(position[0]), int(has_gauss[0]), _float(int(bits[0]))))
    version, *internal, has_gauss, bits = tensors["python"].tolist()
    try:
        random.setstate((version, tuple(internal), _float(bits) if has_gauss else None))
        torch.set_rng_state(tensors["torch"])
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ResumeError(f"the saved state of a random generator is none: {error}") from None
    cuda = [tensors[f"cuda{i}"] for i in range(sum(name.startswith("cuda") for name in tensors))]
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(cuda)


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


def _float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
