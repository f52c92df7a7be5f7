"""Hugging Face models: how their tensors and configurations correspond to ours, and the folders they lie in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from checkpoint.hf.llama import Llama
from checkpoint.hf.mapping import Family
from qeffect_lm.errors import UsageError

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in (Llama(),)})


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a ``config.json`` belongs to, by ``model_type`` and ``architectures``.

    Raises:
        UsageError: it names none, one that is not built, or two that disagree.
    """
    kind = config.get("model_type")
    found = next((family for family in FAMILIES.values() if family.model_type == kind), None)
    if found is None:
        known = ", ".join(family.model_type for family in FAMILIES.values())
        raise UsageError(f"{where}: model_type is {kind!r}; what can be converted: {known}")
    architectures = config.get("architectures")
    if architectures is not None and architectures != [found.architecture]:
        raise UsageError(
            f"{where}: architectures is {architectures!r}, and model_type {kind!r}: {[found.architecture]} would go with it"
        )
    return found


def family_named(name: str) -> Family:
    """The family of a configuration's ``model.family``. Raises :class:`UsageError` where it has no counterpart."""
    if name not in FAMILIES:
        raise UsageError(f"model.family {name!r} has no Hugging Face counterpart; those that have: {', '.join(FAMILIES)}")
    return FAMILIES[name]
