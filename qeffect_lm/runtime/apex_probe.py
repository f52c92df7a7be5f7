"""Which ``apex`` is installed, found out from its files: nothing of it is imported.

NVIDIA's apex is built from source; the package of that name on PyPI is something else entirely, and
importing it to find out would run a stranger's code. QEffect LM needs neither; who meant to have NVIDIA's
wants to know.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

_KERNEL = b"multi_tensor_adam"  # the name of the fused Adam kernel inside the extension module amp_C


@dataclass(frozen=True)
class ApexStatus:
    """``absent``, ``nvidia`` (usable only with its CUDA extension) or ``unrelated``, in words too."""

    kind: Literal["absent", "nvidia", "unrelated"]
    message: str
    usable: bool = False


def probe_apex(search_path: Sequence[str] | None = None) -> ApexStatus:
    """Recognise apex by the files of its distribution, without importing it.

    NVIDIA's has ``apex/optimizers`` and the extension ``amp_C`` with ``multi_tensor_adam``. ``search_path``
    stands in for ``sys.path``.
    """
    package = _package_folder(_find("apex", search_path))
    if package is None:
        return ApexStatus("absent", "apex is not installed (QEffect LM does not need it)")
    if (package / "optimizers" / "fused_adam.py").is_file():
        if _has_kernel(_find("amp_C", search_path)):
            return ApexStatus("nvidia", f"NVIDIA's apex at {package}", usable=True)
        return ApexStatus(
            "nvidia",
            f"NVIDIA's apex at {package} was built without its CUDA extension amp_C (multi_tensor_adam); "
            "build it again from source with --cpp_ext --cuda_ext to use its optimizers",
        )
    return ApexStatus(
        "unrelated",
        f"the package apex at {package}{_owner(package, search_path)} is not NVIDIA's apex: PyPI's package "
        "of that name is unrelated to it. If you wanted NVIDIA's, run `pip uninstall apex` and build it from "
        "NVIDIA's source; QEffect LM needs neither",
    )


def _find(name: str, search_path: Sequence[str] | None) -> ModuleSpec | None:
    if search_path is not None:
        return PathFinder.find_spec(name, list(search_path))
    try:
        return importlib.util.find_spec(name)  # a top-level name: looks, does not import
    except ValueError:  # somebody put a module without a spec into sys.modules
        return PathFinder.find_spec(name, sys.path)


def _package_folder(spec: ModuleSpec | None) -> Path | None:
    """Where the package's files lie. A folder without ``__init__.py`` is no installation of anything."""
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _has_kernel(spec: ModuleSpec | None) -> bool:
    if spec is None or spec.origin is None:
        return False
    try:
        return _KERNEL in Path(spec.origin).read_bytes()
    except OSError:
        return False


def _owner(package: Path, search_path: Sequence[str] | None) -> str:
    """`` (distribution NAME VERSION)`` of the distribution that lists the package's file, or nothing."""
    file = (package / "__init__.py" if package.is_dir() else package).resolve()
    for found in distributions(path=list(sys.path if search_path is None else search_path)):
        for entry in found.files or ():
            if entry.name == file.name and Path(str(found.locate_file(entry))).resolve() == file:
                return f" (distribution {found.metadata['Name']} {found.version})"
    return ""
