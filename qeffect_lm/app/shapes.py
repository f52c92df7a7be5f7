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


def saved_config(checkpoint: Checkpoint, family: str | None = None) -> dict[str, dict[str, Any]]:
    """The saved configuration, by section. What is in the sections is not checked here.

    Args:
        family: a ``module:function`` that the user has named: code that a checkpoint names is not run because it says so.

    Raises:
        CheckpointError: there is none; its model is made by a function that the user has not named; or it has more layers, or
            experts in them, than there are tensors: models are made layer by layer.
    """
    saved = checkpoint.meta.get("config")
    if not isinstance(saved, dict) or not all(isinstance(values, dict) for values in saved.values()):
        raise CheckpointError(f"{checkpoint.path} holds no configuration of a run")
    layers, tensors = saved.get("model", {}).get("num_layers"), len(checkpoint.manifest.tensors)
    if isinstance(layers, int) and layers > tensors:
        raise CheckpointError(
            f"{checkpoint.path}: the saved configuration has {shown(str(layers))} layers, and there are {tensors} tensors"
        )
    moe = saved.get("model", {}).get("moe")
    experts = moe.get("num_experts") if isinstance(moe, dict) else None
    if isinstance(experts, int) and isinstance(layers, int) and layers * experts > tensors:
        raise CheckpointError(
            f"{checkpoint.path}: the saved configuration has {shown(str(experts))} experts a layer, and there are {tensors} "
            "tensors"
        )
    if own_family(saved) not in (None, family):
        raise CheckpointError(
            f"{checkpoint.path}: its model is made by {shown(str(own_family(saved)))}, code that does not come with the "
            "checkpoint and is not run because it says so: name it if you trust it (--family, or for a replay model.family=)"
        )
    return saved


def own_family(saved: Mapping[str, Any]) -> str | None:
    """The ``module:function`` that makes a saved configuration's model; None for a family that is installed."""
    model = saved.get("model")
    name = model.get("family") if isinstance(model, Mapping) else None
    return name if isinstance(name, str) and ":" in name else None


def config_problems(checkpoint: Checkpoint) -> list[Problem]:
    """Masters and parameters against the model of the saved configuration; nothing where there is no configuration, or where
    its model is made by a function outside the framework (which is not called).

    Nothing is allocated for a model that the checkpoint does not hold, whatever size its configuration claims.
    """
    saved = checkpoint.meta.get("config")
    if "config" not in checkpoint.meta or (isinstance(saved, dict) and own_family(saved) is not None):
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
