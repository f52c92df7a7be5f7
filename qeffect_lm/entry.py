"""The console scripts ``qeffect-train`` and ``qeffect``.

They live here and not in ``train`` and ``tools``, because those names are common: with another project's
folder on PYTHONPATH, ``qeffect-train`` would run that project's train.py. So the check comes first and the
import after it.
"""

from __future__ import annotations

import importlib
import sys

from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.install_check import SIBLINGS, check_installation


def qeffect_train() -> int:
    """``qeffect-train CONFIG [section.key=value ...]``, also under ``torchrun --no-python``."""
    return _run("train")


def qeffect() -> int:
    """``qeffect TOOL [arguments]``."""
    return _run("tools.cli")


def _run(module: str) -> int:
    try:
        check_installation(siblings=(*SIBLINGS, "train"))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return int(importlib.import_module(module).main() or 0)
