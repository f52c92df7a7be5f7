"""For people who add layers and parts: :func:`check_layer` and :func:`check_part` verify one, :class:`Harness` runs one.

Unlike the rest of qeffect_lm it drives the sibling packages (a stage, a checkpoint), as an application does.
"""

from __future__ import annotations

from qeffect_lm.testing.check import LayerReport, check_layer, check_part
from qeffect_lm.testing.harness import Harness, Microbatch
from qeffect_lm.testing.watch import LayerCheckError

__all__ = ["Harness", "LayerCheckError", "LayerReport", "Microbatch", "check_layer", "check_part"]
