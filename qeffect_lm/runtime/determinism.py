"""What has to be set for a run to give the same bytes every time.

Two moments matter. Some libraries read environment variables once, while torch is imported:
:func:`apply_before_torch` sets those. The rest are torch's own switches: :func:`apply_to_torch`. This
module imports torch only inside the latter, so it is safe to import first.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

from qeffect_lm.errors import QEffectError, UsageError

_ANY_OF = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8")}  # both deterministic by NVIDIA's documentation


def determinism_environment(threads: int = 1) -> dict[str, str]:
    """Variables that must hold before torch is imported; ``threads``: CPU threads per process.

    - ``CUBLAS_WORKSPACE_CONFIG=:4096:8``: fixed cuBLAS workspaces (8 of 4 MiB), without which cuBLAS may
      pick kernels whose result depends on timing; torch's deterministic mode asks for it.
    - ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``: Transformer Engine takes deterministic attention backwards only.
    - ``MKL_CBWR=AUTO``: MKL's conditional numerical reproducibility, on the best code path of this processor.
      Without it the order of a sum may follow the *alignment* of the operands, which changes from process to
      process. AUTO and COMPATIBLE are the two values that MKL documents for processors of any maker (AVX2 and
      AVX512 are for Intel's). COMPATIBLE would make different processors agree as well, but it stays on SSE2
      code (measured on an AMD EPYC: 13.6 ms against 7.0 with AUTO and 6.2 with none, a [1024,256] x
      [256,1024] float32 product), and nothing here promises equal bytes on different kinds of processor.
    - ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS``: sums are split by thread, so the count is part of the answer.
      ``OMP_DYNAMIC`` and ``MKL_DYNAMIC`` off keep the libraries from using fewer on a busy machine.
    """
    if threads < 1:
        raise UsageError(f"train.threads: {threads} given, at least 1 thread is needed")
    return {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "MKL_CBWR": "AUTO",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
    }


def apply_before_torch(
    environ: MutableMapping[str, str], threads: int = 1
) -> dict[str, tuple[str | None, str]]:
    """Set :func:`determinism_environment` in ``environ``; returns what changed as ``{name: (old, new)}``.

    A value that is deterministic as well (``CUBLAS_WORKSPACE_CONFIG=:16:8``) is left alone; others are
    replaced. Raises :class:`QEffectError` when torch is imported already and a variable is missing or
    different: the libraries have read the environment by then, and a change would only look as if it worked.
    """
    wanted = determinism_environment(threads)
    changes = {
        name: (environ.get(name), value)
        for name, value in wanted.items()
        if environ.get(name) not in _ANY_OF.get(name, (value,))
    }
    if changes and "torch" in sys.modules:
        listed = ", ".join(f"{name}={new} (it is {old or 'unset'})" for name, (old, new) in changes.items())
        raise QEffectError(
            f"torch was imported before the determinism variables were set: {listed}. Call "
            "qeffect_lm.runtime.determinism.apply_before_torch(os.environ) before the first import of torch, "
            "or export these variables before the process starts."
        )
    environ.update({name: new for name, (_, new) in changes.items()})
    return changes


def apply_to_torch(threads: int = 1) -> None:
    """Fix torch's thread count and refuse non-deterministic kernels, for the whole process.

    ``warn_only`` stays False: with it, FlashAttention's backward silently keeps its non-deterministic kernel.
    Filling uninitialised memory is switched off: it costs a write per new tensor and shows nothing that the
    contract's own poisoning does not.
    """
    import torch
    import torch.utils.deterministic

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
