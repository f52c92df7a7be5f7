"""Which parameters a saved configuration's model has, and whether a checkpoint holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint import Checkpoint, CheckpointError, Problem
from checkpoint.layout import MANIFEST
from models import build_model
from qeffect_lm.app.assemble import DTYPES
from qeffect_lm.config import Config
from qeffect_lm.errors import QEffectError, shown


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


def saved_config(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """The saved configuration, by section. What is in the sections is not checked here.

    Raises:
        CheckpointError: there is none, or it has more layers than there are tensors: models are made layer by layer.
    """
    saved = checkpoint.meta.get("config")
    if not isinstance(saved, dict) or not all(isinstance(values, dict) for values in saved.values()):
        raise CheckpointError(f"{checkpoint.path} holds no configuration of a run")
    layers, tensors = saved.get("model", {}).get("num_layers"), len(checkpoint.manifest.tensors)
    if isinstance(layers, int) and layers > tensors:
        raise CheckpointError(
            f"{checkpoint.path}: the saved configuration has {shown(str(layers))} layers, and there are {tensors} tensors"
        )
    return saved


def config_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Masters and parameters against the model of the saved configuration; nothing where there is no configuration.

    Nothing is allocated for a model that the checkpoint does not hold, whatever size its configuration claims.
    """
    if "config" not in checkpoint.meta:
        return []
    tensors = checkpoint.manifest.tensors
    try:
        shapes = model_shapes(saved_config(checkpoint))
    except QEffectError as error:
        return [Problem(MANIFEST, None, f"the saved configuration cannot be read: {shown(str(error), 600)}")]
    problems = []
    for name, shape in shapes.items():
        entries = [tensors.get(f"{role}/{name}") for role in ("master", "param")]
        there = [entry for entry in entries if entry is not None]
        if not there:
            problems.append(Problem(MANIFEST, name, f"is not there; the saved configuration has it, {list(shape)}"))
        problems += [
            Problem(MANIFEST, name, f"has the shape {list(entry.shape)}, the saved configuration says {list(shape)}")
            for entry in there
            if entry.shape != shape
        ]
    for full in tensors:
        role, _, name = full.partition("/")
        if role in ("master", "param") and name not in shapes:
            problems.append(Problem(MANIFEST, full, "no parameter of the saved configuration's model"))
    return problems
