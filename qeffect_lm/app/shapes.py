"""Which parameters a saved configuration's model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models import build_model
from qeffect_lm.app.assemble import DTYPES
from qeffect_lm.config import Config


def model_shapes(saved: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Logical name → global shape of every parameter; allocates none of them and needs no device.

    Args:
        saved: the configuration as a checkpoint's manifest holds it, by section.

    Raises:
        UsageError: it is no configuration of this version.
    """
    sections = {name: dict(values) for name, values in saved.items() if isinstance(values, Mapping)}
    sections["run"] = {**sections.get("run", {}), "device": "cpu"}
    sections["model"] = {**sections.get("model", {}), "backend": "native"}  # names and shapes are the same for all
    for section in ("parallel", "pipeline", "graphs", "contract", "optim", "checkpoint", "launch"):  # no say in shapes
        sections.pop(section, None)
    sections["precision"] = {"dtype": sections.get("precision", {}).get("dtype", "float32"), "fp8": {"recipe": "none"}}
    config = Config.from_dict(sections)
    model = build_model(config, None, DTYPES[config.precision.dtype])
    return {spec.name: tuple(spec.shape) for spec in model.parameters()}
