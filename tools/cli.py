"""The command `qeffect`: runs the tools by name.

``qeffect TOOL [arguments]`` calls ``tools.TOOL.main(arguments)``; every module of this folder with a
``main`` is a tool, so a new one needs no registration.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from qeffect_lm import __version__
from qeffect_lm.errors import QEffectError
from qeffect_lm.runtime.install_check import check_installation


def available() -> dict[str, str]:
    """The tools and the first line of each one's docstring, read without importing them."""
    tools = {}
    folder = Path(__file__).parent
    modules = {path.stem: path for path in folder.glob("[!_]*.py")}
    modules |= {path.parent.name: path for path in folder.glob("*/__init__.py")}  # a tool of several files
    for name, path in sorted(modules.items()):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
        if has_main and name != "cli":
            tools[name] = (ast.get_docstring(tree) or "").partition("\n")[0].replace("``", "")
    return tools


def usage() -> str:
    """The text of ``qeffect --help``."""
    tools = available()
    width = max(map(len, tools), default=0)
    lines = ["usage: qeffect TOOL [arguments]    qeffect TOOL --help    qeffect --version", "", "tools:"]
    lines += [f"  {name:{width}}  {line}" for name, line in tools.items()]
    return "\n".join([*lines, "", "Training is started by qeffect-train CONFIG (or python train.py CONFIG)."])


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch; returns the tool's exit code, 2 for a wrong request."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"qeffect-lm {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name = arguments[0]
    tools = available()
    if name not in tools:
        close = difflib.get_close_matches(name, tools, n=1)
        meant = f"; did you mean {close[0]}?" if close else f"; the tools are {', '.join(tools)}"
        print(f"error: no tool {name!r}{meant}", file=sys.stderr)
        return 2
    try:
        check_installation()
        return int(importlib.import_module(f"tools.{name}").main(arguments[1:]) or 0)
    except QEffectError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
