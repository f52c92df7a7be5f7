"""GPU kernels of backend ``native``: Triton for what is memory-bound, cuBLASLt for the products.

Nothing here is imported until :func:`usable` says so: without Triton, or on CPU, layers run their torch reference. Modules
with kernels import Triton at their top; this one imports nothing. Kernel configurations are constants in the source: no
timing decides anything at run time.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32", "torch.float8_e4m3fn", "torch.float8_e5m2")


def launched(name: str, *arguments: object) -> None:
    """Tell a capture of a kernel that the dispatcher does not see, with its tensors and constants; else nothing happens."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode = _get_current_dispatch_mode()
    if mode is not None:
        told = getattr(mode, "foreign", None)
        if told is not None:
            told(name, arguments)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether what is done to ``tensor`` is a GPU's: it lies on one, or on the meta device, where a GPU's work is rehearsed
    without its data (:mod:`qeffect_lm.app.rehearsal`)."""
    return tensor.is_cuda or tensor.is_meta


def usable(tensor: torch.Tensor) -> bool:
    """Whether the kernels take ``tensor``: on a GPU, at most 32 bits wide, Triton installed. Tests replace this function."""
    return on_gpu(tensor) and str(tensor.dtype) in DTYPES and find_spec("triton") is not None


def quantises(tensor: torch.Tensor) -> bool:
    """Whether the kernels that write FP8 take ``tensor``.

    On a GPU not float32: from whole tiles of it Triton 3.6 writes a wrong transposed copy on an H200 (the rows are right),
    which only the gradients of weights would show.
    """
    return usable(tensor) and not (on_gpu(tensor) and str(tensor.dtype) == "torch.float32")
