"""AdamW by NVIDIA apex's ``FusedAdam``. Not run here: apex is built from source and no registry has it; this follows its
documented interface (``apex.optimizers.FusedAdam``)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from qeffect_lm.errors import UsageError
from qeffect_lm.optim.flat import FlatBuffers
from qeffect_lm.optim.fused_adam import REMEDY, FusedAdamW
from qeffect_lm.runtime.apex_probe import probe_apex


def check_installed(search_path: Sequence[str] | None = None) -> None:
    """Nothing of a package called apex is imported before its files say that it is NVIDIA's.

    Raises:
        UsageError: absent, built without its extension, or another package of that name; names its owner.
    """
    status = probe_apex(search_path)
    if status.kind == "absent":
        raise UsageError(f"optim.backend=apex needs NVIDIA's apex, which is not installed: build it from source, or {REMEDY}")
    if not status.usable:
        raise UsageError(f"optim.backend=apex: {status.message}; or {REMEDY}")


def make(flat: FlatBuffers, search_path: Sequence[str] | None = None, **settings: Any) -> FusedAdamW:
    """Raises UsageError as :func:`check_installed`, without a GPU, or where apex cannot be imported."""
    check_installed(search_path)
    if flat.device.type != "cuda":
        raise UsageError(f"optim.backend=apex needs a GPU, and this run uses the {flat.device.type}: {REMEDY}")
    try:
        fused = import_module("apex.optimizers").FusedAdam
    except (ImportError, OSError, AttributeError) as error:
        raise UsageError(f"optim.backend=apex: apex cannot be imported ({error}): build it again, or {REMEDY}") from error
    return FusedAdamW(flat, fused=fused, name="apex", **settings)
