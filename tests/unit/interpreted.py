"""Runs the Triton kernels on CPU, in Triton's interpreter; on a machine with a GPU, on the GPU.

The interpreter's own narrowing casts round ties upwards, lose carries and NaN. What a GPU runs is put in their place here: to
nearest even, and to FP8 saturating (``cvt.rn.satfinite``). The same tests on a GPU show that the instructions do just that.

    from tests.unit.interpreted import DEVICE, kernels_run, reference  # kernels_run is a fixture: the import is enough
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from qeffect_lm import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"

if find_spec("triton") is None:
    pytest.skip("needs Triton (extra test)", allow_module_level=True)

_NARROW = {
    "fp8e4nv": (torch.float8_e4m3fn, 448.0, torch.uint8),
    "fp8e5": (torch.float8_e5m2, 57344.0, torch.uint8),
    "bf16": (torch.bfloat16, math.inf, torch.uint16),
}


def _as_the_hardware(original):
    def convert(values, source, target, rounding):
        if source.name != "fp32" or target.name not in _NARROW:
            return original(values, source, target, rounding)
        dtype, largest, bits = _NARROW[target.name]
        wide = torch.from_numpy(np.array(values, dtype=np.float32))
        return wide.clamp(-largest, largest).to(dtype).view(bits).numpy().reshape(values.shape)

    return convert


def _once_per_launch(original):
    """The interpreter puts its functions into triton.language again at every call of a device function, which takes most of
    its time; what the launch put there stays until the launch ends."""
    import triton.language as tl

    def patch_lang(fn):
        seen = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        done = all(not tl.core.is_builtin(value.load) for value in seen) and not tl.core.is_builtin(tl.tensor.to)
        return None if done else original(fn)

    return patch_lang


def _one_element_is_a_number(original):
    """The bounds of a loop may come from memory; NumPy 2.4 no longer makes a number of an array of one element."""

    def patch_lang_tensor(tensor, *scope):
        original(tensor, *scope)
        index = lambda self: int(self.handle.data.item())  # noqa: E731
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    return patch_lang_tensor


def run_kernels(patch: pytest.MonkeyPatch) -> None:
    """From now on the dispatch takes the kernels, wherever this runs."""
    if INTERPRETED:
        from triton.runtime import interpreter

        from qeffect_lm.kernels import norm

        patch.setattr(interpreter, "_convert_float", _as_the_hardware(interpreter._convert_float))
        patch.setattr(interpreter, "_patch_lang_tensor", _one_element_is_a_number(interpreter._patch_lang_tensor))
        patch.setattr(interpreter, "_patch_lang", _once_per_launch(interpreter._patch_lang))
        patch.setattr(norm, "RUNS", 8)  # it takes milliseconds per program
    patch.setattr(kernels, "usable", lambda tensor: tensor.dtype is not torch.float64)


@pytest.fixture(autouse=True, scope="module")
def kernels_run() -> Iterator[None]:
    """The kernels in the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        run_kernels(patch)
        yield


@contextmanager
def reference() -> Iterator[None]:
    """The torch reference instead of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "usable", lambda tensor: False)
        yield
