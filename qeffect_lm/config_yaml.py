"""Reading and writing configuration files: a small YAML dialect, inheritance and command-line overrides.

The dialect is YAML 1.2's core schema, not PyYAML's 1.1: there ``mode: off`` becomes False, ``lr: 1e-3`` a
text and ``1:30`` the number 90. Here ``off`` is a text, ``1e-3`` a number, and a key written twice is an
error.
Nothing here knows which keys exist; :mod:`qeffect_lm.config` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from qeffect_lm.errors import UsageError

Path_ = tuple[str, ...]
COMMAND_LINE = "command line"

_RESOLVERS = [
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+0123456789."),
    ),
]


class _Loader(yaml.SafeLoader):
    """SafeLoader with the resolvers above and without repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what :class:`_Loader` would otherwise read as something else."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (_Loader, _Dumper):
    for _tag, _pattern, _first in _RESOLVERS:
        _class.add_implicit_resolver(_tag, _pattern, _first)


def _float_text(value: float) -> str:
    """The shortest text that reads back as the same float64 (and as a float, not an integer)."""
    if value != value:
        return ".nan"
    if value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return repr(value)


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:float", _float_text(value))


_Dumper.add_representer(float, _represent_float)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. Raises :class:`UsageError` that names ``source`` and the place."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        raise UsageError(f"{source}{place}: not valid YAML: {problem}") from None


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML text that :func:`parse_yaml` reads back as equal data; keys stay in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


@dataclass
class Layered:
    """Merged configuration data, and where each value came from (a file's name or "command line")."""

    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[Path_, str] = field(default_factory=dict)

    def merge(self, update: dict[str, Any], source: str, prefix: Path_ = ()) -> None:
        """Lay ``update`` over the data; mappings merge key by key, anything else replaces."""
        target = self._mapping_at(prefix)
        for key, value in ((str(k), v) for k, v in update.items()):
            path = (*prefix, key)
            self.sources[path] = source
            if isinstance(value, dict):
                if not isinstance(target.get(key), dict):
                    target[key] = {}
                self.merge(value, source, path)
            elif value is None and isinstance(target.get(key), dict):
                continue  # "optim:" with every key commented out says nothing
            else:
                target[key] = value

    def set(self, path: Path_, value: Any, source: str) -> None:
        """Set one value by its path."""
        nested: Any = value
        for key in reversed(path):
            nested = {key: nested}
        self.merge(nested, source)

    def source_of(self, path: Path_) -> str | None:
        """Where the value at ``path``, or the nearest mapping around it, was written."""
        while path:
            if path in self.sources:
                return self.sources[path]
            path = path[:-1]
        return None

    def _mapping_at(self, path: Path_) -> dict[str, Any]:
        target = self.data
        for key in path:
            target = target[key]
        return target


def read_layers(path: str | Path) -> Layered:
    """Read a configuration file and, below it, the files it names as ``base:`` (relative to the naming file).

    Raises :class:`UsageError` for a missing or unreadable file, invalid YAML, a text that is not a mapping,
    and a cycle of bases, which is spelled out.
    """
    chain: list[Path] = []
    layers: list[tuple[str, dict[str, Any]]] = []
    current: Path | None = Path(path)
    while current is not None:
        resolved = current.resolve()
        if resolved in chain:
            names = " -> ".join(str(p) for p in [*chain[chain.index(resolved) :], resolved])
            raise UsageError(f"configuration files inherit from each other in a circle: {names}")
        data = _read_mapping(current, named_by=chain[-1] if chain else None)
        chain.append(resolved)
        base = data.pop("base", None)
        if base is not None and not isinstance(base, str):
            raise UsageError(f"{current}: base: {base!r} given, the path of one YAML file is expected")
        layers.append((str(current), data))
        current = current.parent / base if base is not None else None
    merged = Layered()
    for source, data in reversed(layers):
        merged.merge(data, source)
    return merged


def _read_mapping(path: Path, named_by: Path | None) -> dict[str, Any]:
    where = f" (the base of {named_by})" if named_by is not None else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"no configuration file {path}{where}; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the configuration file {path}{where}: {error}") from None
    data = parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(
            f"{path}: sections such as 'model:' are expected at the top, not a {type(data).__name__}"
        )
    return data


def split_overrides(overrides: Iterable[str]) -> list[tuple[Path_, str]]:
    """Cut ``section.key=value`` texts into (path, value text). Raises :class:`UsageError` for other forms."""
    result = []
    for override in overrides:
        name, separator, value = override.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        if not separator or len(path) < 2 or not all(path):
            raise UsageError(
                f"argument {override!r} is not of the form section.key=value, for example optim.lr=1e-3"
            )
        result.append((path, value))
    return result
