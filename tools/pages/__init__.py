"""What the tools' HTML pages share: colours, layout, a few lines of script, and how a page is made that needs no other file.

A page is a template with ``/*include NAME*/`` or ``<!--include NAME-->`` where a file beside it, or one of this folder, goes
in. One that a script draws has ``__DATA__`` once, inside ``<script type="application/json">`` (:func:`fill`); one that needs no
script is made of HTML (:func:`document`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from qeffect_lm.errors import UsageError

_INCLUDE = re.compile(r"/\*include ([\w.]+)\*/|<!--include ([\w.]+)-->")
DOCUMENT = Path(__file__).with_name("document.html")


def fill(template: Path, data: Any) -> str:
    """The page: ``data`` (JSON values, no NaN) put into ``template``.

    Every ``<`` of the data is written as an escape: no text of theirs ends the script element or opens a comment in it.
    """

    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    before, after = _included(template).split("__DATA__")
    return before + text + after


def document(title: str, about: str, body: Sequence[str], style: str = "") -> str:
    """A page without scripts.

    Args:
        title, about: text, of its head.
        body: HTML.
        style: CSS beside the shared one.
    """
    parts = {"TITLE": escape(title), "ABOUT": escape(about), "BODY": "\n".join(body), "STYLE": style.strip()}
    return re.sub("__(TITLE|ABOUT|BODY|STYLE)__", lambda found: parts[found[1]], _included(DOCUMENT))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; all columns but the first are numbers, on the right."""
    cells = "".join(f'<th class="{"num" if n else ""}">{escape(name)}</th>' for n, name in enumerate(head))
    lines = "".join(
        "<tr>" + "".join(f'<td class="{"num" if n else "key"}">{escape(cell)}</td>' for n, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def listed(lines: Sequence[str]) -> str:
    """Sentences."""
    return '<ul class="lacks">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _included(template: Path) -> str:
    def one(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        beside = template.with_name(name)
        return (beside if beside.exists() else Path(__file__).with_name(name)).read_text(encoding="utf-8")

    return _INCLUDE.sub(one, template.read_text(encoding="utf-8"))


def write(path: Path, page: str) -> None:
    """Write a page; a file that is there is replaced in one step.

    Raises:
        UsageError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder; give a file's name")
        temporary.write_text(page, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
