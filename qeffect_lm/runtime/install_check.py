"""A start-up check that our top-level packages are ours.

``models``, ``pipeline``, ``checkpoint`` and ``tools`` are common names. A folder of that name earlier on
``sys.path`` would be imported instead of ours, and another distribution can overwrite ours in
``site-packages``; both would end in a puzzling error far from the cause. The check looks only: it imports
nothing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, distributions
from pathlib import Path

from qeffect_lm.errors import UsageError

SIBLINGS = ("models", "pipeline", "checkpoint", "tools")
DISTRIBUTION = "qeffect-lm"


def check_installation(
    root: Path | None = None,
    find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec,
    siblings: Iterable[str] = SIBLINGS,
) -> None:
    """Raise :class:`UsageError` naming the intruder unless every sibling lies beside us and is ours.

    ``root`` is the folder that holds ``qeffect_lm`` (found by itself); ``find`` resolves a name to a spec.
    """
    root = (Path(__file__).parents[2] if root is None else root).resolve()
    for name in siblings:
        spec = find(name)
        folder = _folder(spec)
        if folder is None:
            raise UsageError(
                f"the package {name!r} of QEffect LM is missing beside {root / 'qeffect_lm'}: another "
                f"distribution may have removed it; reinstall {DISTRIBUTION} "
                "(pip install --force-reinstall --no-deps)"
            )
        if folder.parent != root:
            raise UsageError(
                f"Python finds another package named {name!r} at {folder} before QEffect LM's own at "
                f"{root / name}: start from another folder, or take {folder.parent} out of PYTHONPATH "
                "(sys.path), or rename that package"
            )
        if spec is None or spec.origin is None:
            raise UsageError(f"{folder} has lost its __init__.py; reinstall {DISTRIBUTION}")
    _check_overwritten(root, siblings)


def _folder(spec: ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


def _check_overwritten(root: Path, siblings: Iterable[str]) -> None:
    """In an installed wheel, compare each package's ``__init__.py`` with the hash that pip noted."""
    installed = list(distributions(path=[str(root)]))
    ours = next((d for d in installed if d.metadata["Name"] == DISTRIBUTION), None)
    if ours is None:
        return  # a source tree
    for entry in ours.files or ():
        if entry.name != "__init__.py" or entry.parent.as_posix() not in siblings or entry.hash is None:
            continue
        file = Path(str(ours.locate_file(entry)))
        digest = hashlib.new(entry.hash.mode, file.read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != entry.hash.value:
            others = [d for d in installed if d is not ours and _claims(d, entry.as_posix())]
            names = ", ".join(f"{d.metadata['Name']} {d.version}" for d in others) or "something else"
            raise UsageError(
                f"{file} was overwritten by {names}: uninstall that, then reinstall {DISTRIBUTION} "
                "(pip install --force-reinstall --no-deps), or keep the two in separate environments"
            )


def _claims(found: Distribution, path: str) -> bool:
    return any(entry.as_posix() == path for entry in found.files or ())
