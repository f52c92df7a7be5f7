"""What every configuration key is, read off the pydantic models: for ``--help``, errors and documentation.

Nothing is written down twice: type, bounds, default, unit, meaning and resume rule come from the field.
"""

from __future__ import annotations

import difflib
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

OnResume = Literal["free", "warn", "refuse"]

LEGEND = (
    "A key is written section.key=value on the command line, or nested in a YAML file, where",
    "`base: other.yaml` inherits from another file. When a run resumes, a key marked free may differ,",
    "one marked warn may differ and the change is printed, one marked refuse may not differ.",
)


@dataclass(frozen=True)
class KeyInfo:
    """One configuration key. ``name`` is dotted (``optim.lr``), ``kind`` its type and bounds in words."""

    name: str
    kind: str
    default: Any
    required: bool
    unit: str
    description: str
    on_resume: OnResume
    annotation: Any

    @property
    def default_text(self) -> str:
        """The default as YAML would have it, or ``required``."""
        if self.required:
            return "required"
        return self.default if isinstance(self.default, str) else json.dumps(self.default)

    @property
    def expected(self) -> str:
        """What a value must be, with its unit: the tail of an error message."""
        return f"{self.kind} ({self.unit})" if self.unit else self.kind


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The nested models of ``model`` in order, as (dotted name, class)."""
    for name, info in model.model_fields.items():
        nested = section_class(info)
        if nested is not None:
            yield f"{prefix}{name}", nested
            yield from sections(nested, f"{prefix}{name}.")


def describe(model: type[BaseModel], prefix: str = "") -> dict[str, KeyInfo]:
    """Every key below ``model``, by dotted name, in the order of definition."""
    keys: dict[str, KeyInfo] = {}
    for name, info in model.model_fields.items():
        nested = section_class(info)
        if nested is not None:
            keys.update(describe(nested, f"{prefix}{name}."))
        else:
            keys[prefix + name] = _key_info(prefix + name, info)
    return keys


def section_class(info: FieldInfo) -> type[BaseModel] | None:
    """The nested model that a field holds, or None for a single key."""
    annotation: Any = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _key_info(name: str, info: FieldInfo) -> KeyInfo:
    extra = info.json_schema_extra
    if not isinstance(extra, dict) or not info.description:
        raise TypeError(f"the field {name} lacks a description, unit or resume rule")
    required = info.default is PydanticUndefined and info.default_factory is None
    nullable = not required and info.default is None
    return KeyInfo(
        name=name,
        kind=_kind(info.annotation, info.metadata, nullable),
        default=None if required else info.get_default(call_default_factory=True),
        required=required,
        unit=str(extra["unit"]),
        description=info.description,
        on_resume=typing.cast(OnResume, extra["on_resume"]),
        annotation=info.annotation,
    )


def _kind(annotation: Any, metadata: list[Any], nullable: bool) -> str:
    """A type in words, e.g. ``integer >= 1 or null``."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        nullable = nullable or type(None) in args
        rest = [a for a in args if a is not type(None)]
        text = " or ".join(_kind(a, metadata, False) for a in rest)
    elif origin is Literal:
        text = " | ".join(str(a) for a in args)
    elif origin is tuple:
        text = f"list of {_plural(_kind(args[0], metadata, False))}"
    else:
        names = {int: "integer", float: "number", str: "text", bool: "true | false"}
        text = names[annotation] + _bounds(metadata)
    return f"{text} or null" if nullable else text


def _plural(kind: str) -> str:
    word, separator, bounds = kind.partition(" ")
    return f"{word}s{separator}{bounds}"


def _bounds(metadata: list[Any]) -> str:
    parts = []
    for item in metadata:
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            bound = getattr(item, attribute, None)
            if bound is not None:
                parts.append(f"{sign} {_number(bound)}")
        if getattr(item, "min_length", None):
            parts.append("not empty")
    return " " + " and ".join(parts) if parts else ""


def _number(bound: float) -> str:
    large_power = isinstance(bound, int) and bound > 2**20 and bound & (bound - 1) == 0
    return f"2^{int(bound).bit_length() - 1}" if large_power else f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def nearest_key(unknown: str, known: list[str]) -> str:
    """The known dotted key that ``unknown`` most likely meant.

    A key of the same section with a like name comes first, then the same name in another section, then the
    most similar dotted name.
    """
    section, _, name = unknown.rpartition(".")
    by_last = {k: k.rpartition(".")[2] for k in known}
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    same_name = [k for k, last in by_last.items() if last == name]
    candidates = same_name or known
    return difflib.get_close_matches(unknown, candidates, n=1, cutoff=0.0)[0]


def help_text(model: type[BaseModel], width: int = 100) -> str:
    """All keys for a terminal: name, type, default, unit and resume rule in one line, the meaning below."""
    lines = ["Configuration keys", "", *LEGEND]
    keys = describe(model)
    for section, section_model in sections(model):
        own = [k for k in keys.values() if k.name.rpartition(".")[0] == section]
        if not own:
            continue
        title = (section_model.__doc__ or "").strip().splitlines()[0]
        lines += ["", f"{section}: {title}"]
        for key in own:
            facts = [key.kind, key.default_text if key.required else f"default {key.default_text}"]
            facts += [f"unit: {key.unit}"] if key.unit else []
            facts.append(f"on resume: {key.on_resume}")
            lines += textwrap.wrap(
                f"{key.name}  [{'; '.join(facts)}]", width, initial_indent="  ", subsequent_indent="      "
            )
            lines += textwrap.wrap(
                key.description, width, initial_indent="      ", subsequent_indent="      "
            )
    return "\n".join(lines) + "\n"


def markdown_tables(model: type[BaseModel]) -> str:
    """All keys as one Markdown table per section, for docs/configuration.md."""
    keys = describe(model)
    parts = []
    for section, section_model in sections(model):
        own = [k for k in keys.values() if k.name.rpartition(".")[0] == section]
        if not own:
            continue
        rows = [
            f"| `{k.name}` | {_cell(k.kind)} | {_cell(k.default_text)} | {_cell(k.unit)} "
            f"| {k.on_resume} | {_cell(k.description)} |"
            for k in own
        ]
        title = (section_model.__doc__ or "").strip().splitlines()[0]
        head = ["| key | type | default | unit | on resume | meaning |", "|---|---|---|---|---|---|"]
        parts.append("\n".join([f"### {section}", "", title, "", *head, *rows]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
