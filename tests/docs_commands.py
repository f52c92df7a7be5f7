"""The commands in README.md and docs/*.md: the lines of their ``sh`` blocks and the inline ones that begin like a command.

``tests/unit/test_docs.py`` looks at each (does the tool exist, does it have these options, does the configuration have these
keys), ``tests/dist/test_docs_run.py`` runs those of the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.S | re.M)
_PROGRAM = r"(?:\$ )?(?:python -m tools\.|python train\.py |torchrun |qeffect-train )"
_INDENTED = re.compile(rf"(?:^    {_PROGRAM}.*\n(?:^     +\S.*\n)*)+", re.M)
_INLINE = re.compile(r"`((?:python -m tools\.|python train\.py |torchrun )[^`]*)`")


@dataclass(frozen=True)
class Block:
    """An ``sh`` block, or an indented one of commands alone: its page, the line it begins at, its text."""

    page: str
    line: int
    text: str

    @property
    def commands(self) -> list[str]:
        """One string each: continued lines joined, comments off, what is fed to a command (``<<``) left out."""
        without_input = re.sub(r"(<<'(\w+)'[^\n]*)\n.*?^\2$", r"\1", self.text, flags=re.S | re.M)
        joined = re.sub(r"\\\n\s*", " ", without_input)
        lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line]


def blocks() -> Iterator[Block]:
    for path in PAGES:
        text = path.read_text()
        for found in _BLOCK.finditer(text):
            yield Block(path.name, text.count("\n", 0, found.start()) + 2, found.group(1))
        for found in _INDENTED.finditer(text):
            lines = (line.strip().removeprefix("$ ") for line in found.group().splitlines())
            yield Block(path.name, text.count("\n", 0, found.start()) + 1, "\n".join(lines) + "\n")


def inline() -> Iterator[tuple[str, str]]:
    """(page, command) of the inline ones; an ellipsis ends them."""
    for path in PAGES:
        for found in _INLINE.finditer(re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)):
            command = " ".join(found.group(1).split()).split("…")[0].strip()
            if "NAME" not in command and "\\|" not in command:
                yield path.name, command
