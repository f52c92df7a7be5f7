"""What both layouts of a Megatron checkpoint come down to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpoint.megatron.guard import Record, Ref
from checkpoint.megatron.pieces import Pieces
from qeffect_lm.errors import UsageError

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"


@dataclass
class Found:
    """A checkpoint, tensor by tensor.

    Attributes:
        args: the arguments of Megatron's training script; None where it was saved by another program.
        parameters: by Megatron's names with global layer numbers.
        state: ``exp_avg``, ``exp_avg_sq`` and ``fp32_param`` → by the parameter's name.
        steps: the optimizer's step counts that were found; they have to be equal.
        extra: a module's name → Transformer Engine's state of it, one for each tensor-parallel rank.
        common: what else was saved with it.
        dropped: what is there and is not taken, in words.
        no_optimizer: why there is no optimizer state, where there is none.
    """

    args: Mapping[str, Any] | None
    iteration: int = 0
    parameters: dict[str, Pieces] = field(default_factory=dict)
    state: dict[str, dict[str, Pieces]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    extra: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    no_optimizer: str | None = None


def arguments(value: Any) -> Mapping[str, Any] | None:
    """The arguments out of a Namespace; a dtype among them is its name."""
    if isinstance(value, Record) and isinstance(value.state, dict):
        return {str(key): each for key, each in value.state.items()}
    return None


def number(value: Any, what: str, of: str = "steps") -> int:
    """A whole number, perhaps a tensor of one."""
    if isinstance(value, Ref):
        value = value.read()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value < 2**62:
        raise UsageError(f"{what} is {value!r}, which is no number of {of}")
    return value


def steps_of(optimizer: Any) -> list[int]:
    """Every step count in an optimizer's state dict: shared, of a group, or of a parameter."""
    found = []
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
    state = inner.get("state") if isinstance(inner, dict) else None
    if isinstance(state, dict):
        if "common_step" in state:
            found.append(number(state["common_step"], "the optimizer's common_step"))
        own = [each["step"] for each in state.values() if isinstance(each, dict) and "step" in each]
        found += [number(step, "a parameter's step") for step in own]
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and group.get("step") is not None:
            found.append(number(group["step"], "a parameter group's step"))
    return found


def others_in(common: Mapping[str, Any]) -> list[str]:
    """What else was saved beside the model, and means nothing here: schedules, random states, Megatron's arguments."""
    taken = {"checkpoint_version", "iteration", "optimizer", "content_metadata"}
    names = sorted(key for key in common if isinstance(key, str) and key not in taken and not key.startswith("model"))
    return [f"{name}, which is Megatron's own" for name in names]


def extra_state(value: Any) -> Mapping[str, Any] | None:
    """Transformer Engine's state of a layer, where it holds FP8 scales."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, dict) and "amax_history_fwd" in value else None
