"""What the tools' HTML pages share: colours, a few lines of script, and how data get into a page that needs no other file.

A page is a template with ``/*include NAME*/`` where a file beside it, or one of this folder, goes in, and ``__DATA__`` once,
inside ``<script type="application/json">``.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from qeffect_lm.errors import UsageError

_INCLUDE = re.compile(r"/\*include ([\w.]+)\*/")


def fill(template: Path, data: Any) -> str:
    """The page: ``data`` (JSON values, no NaN) put into ``template``.

    Every ``<`` of the data is written as an escape: no text of theirs ends the script element or opens a comment in it.
    """

    def included(found: re.Match[str]) -> str:
        beside = template.with_name(found[1])
        return (beside if beside.exists() else Path(__file__).with_name(found[1])).read_text(encoding="utf-8")

    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    before, after = _INCLUDE.sub(included, template.read_text(encoding="utf-8")).split("__DATA__")
    return before + text + after


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
