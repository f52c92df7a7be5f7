"""Families by name: those that come with the framework, those of installed packages, and a function anywhere on the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from models.gpt2 import gpt2
from models.llama import llama
from models.mistral import mistral
from models.mixtral import mixtral
from models.qwen2 import qwen2
from models.qwen3 import qwen3
from qeffect_lm.errors import UsageError

Family = Callable[..., Any]  # (config, recipe, dtype) → a ModelSpec, most easily a Decoder

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {"llama": llama, "mistral": mistral, "mixtral": mixtral, "qwen2": qwen2, "qwen3": qwen3, "gpt2": gpt2}
)
GROUP = "qeffect_lm.families"  # of entry points
_MEMBERS = ("hidden_size", "vocab_size", "num_layers", "parameters", "ties", "chunk", "meta_chunk")


def find_family(name: str) -> Family:
    """The family called ``name``, or with ``module:function`` that function.

    Raises:
        UsageError: there is none, or it cannot be imported.
    """
    if ":" in name:
        return _imported(name)
    found = FAMILIES.get(name)
    if found is not None:
        return found
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in installed:
        return _called(name, installed[name].load)
    known = ", ".join([*FAMILIES, *sorted(installed.keys() - FAMILIES.keys())])
    raise UsageError(f"model.family is {name!r}; the families are {known}, or module:function for one of your own")


def check_model(name: str, model: Any) -> None:
    """Raises UsageError where a family gave something that is no model."""
    missing = [member for member in _MEMBERS if not hasattr(model, member)]
    if missing:
        raise UsageError(
            f"model.family {name!r} gave a {type(model).__name__} without {missing[0]}: a family gives a "
            "models.decoder.Decoder, or what models.spec.ModelSpec describes"
        )


def _imported(name: str) -> Family:
    module, _, function = name.partition(":")
    if not module or not function:
        raise UsageError(f"model.family {name!r}: module:function is needed, such as my_family:build")

    def load() -> Any:
        here = str(Path.cwd())  # a console script does not have it on its path
        sys.path.append(here)
        try:
            found = importlib.import_module(module)
        finally:
            sys.path.remove(here)
        if not hasattr(found, function):
            where = getattr(found, "__file__", None) or module
            raise UsageError(f"model.family {name!r}: {where} has no {function}")
        return getattr(found, function)

    return _called(name, load)


def _called(name: str, load: Callable[[], Any]) -> Family:
    try:
        found = load()
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        missing = f"there is no module {error.name!r}" if error.name else str(error)
        raise UsageError(f"model.family {name!r}: {missing} in this folder or on PYTHONPATH") from error
    except Exception as error:  # whatever a user's file raises while it is imported
        raise UsageError(f"model.family {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UsageError(f"model.family {name!r} is a {type(found).__name__}, not a function of (config, recipe, dtype)")
    return found  # type: ignore[no-any-return]
