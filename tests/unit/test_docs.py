"""The documentation: the site builds without a broken link, every error class has its row, every command has its options."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import pkgutil
import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from qeffect_lm import config_help
from qeffect_lm.config import Config
from qeffect_lm.errors import QEffectError
from tests.docs_commands import ROOT, blocks, inline

PROGRAMS = r"(make|torchrun|python|qeffect|srun|pip|zcat|STDLIB|cat|until|pkill|wait)\b"  # commands that are no tool's
KEYS = config_help.describe(Config)
COMMANDS = sorted({(b.page, c) for b in blocks() for c in b.commands} | set(inline()))


def test_the_site_builds(tmp_path: Path) -> None:
    """Strict: a link to a page, a heading or a file that is not there, or a page outside of the navigation, ends the build."""
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(mkdocs, cwd=ROOT, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "tutorial.html").read_text()
    assert "Kill it, and go on" in page and (tmp_path / "pictures" / "leases.svg").exists()
    outside = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', page)
    assert outside == [], "nothing is fetched from elsewhere"


def test_links_of_the_readme() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


def _errors() -> set[str]:
    names = set()
    for package in ("qeffect_lm", "models", "pipeline", "checkpoint", "tools"):
        for found in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if re.search(r"\.(te|kernels|integrations|proofs|benchmarks)\b", found.name) or found.name.endswith("__main__"):
                continue
            for name, value in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
                if issubclass(value, QEffectError):
                    names.add(name)
    return {name for name in names if not name.startswith("_")}


def test_every_error_has_its_row() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    assert {name for name in _errors() if f"`{name}`" not in text} == set()
    assert set(re.findall(r"`(\w+(?:Error|Violation))`", text)) <= _errors(), "no row for a class that is gone"


@lru_cache
def _help(tool: str, *words: str) -> str:
    """What ``python -m tool words --help`` prints; in this process."""
    module = importlib.import_module(tool)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        module.main([*words, "--help"])
    assert ended.value.code in (0, None)
    return out.getvalue()


def _words(command: str) -> list[str]:
    """The words after the program: of a tool ``tools.NAME …``, of training ``train.py …``; nothing for other commands."""
    words = shlex.split(command.removesuffix("&").split(" > ")[0].split(" | ")[0].split(" || ")[0])
    tool = next((n for n, word in enumerate(words) if word.startswith("tools.") and words[n - 1] == "-m"), None)
    if tool is not None:
        return words[tool:]
    return words[words.index("train.py") :] if "train.py" in words else []


def _faults(command: str) -> list[str]:
    words = _words(command)
    if not words:
        return [] if re.match(PROGRAMS, command) else [f"what is `{command}`?"]
    tool, rest = words[0], words[1:]
    if tool == "train.py":
        text = (ROOT / "qeffect_lm" / "app" / "main.py").read_text()
    elif rest and not rest[0].startswith("-") and re.search(rf"^\s+{re.escape(rest[0])}\b", _help(tool), re.M):
        text = _help(tool, rest[0])
    else:
        text = _help(tool)
    options = [word.split("=")[0] for word in rest if word.startswith("--") and word != "--help"]
    faults = [f"{tool} has no option {option}" for option in options if not re.search(rf"{option}\b", text)]
    keys = [word.partition("=")[0] for word in rest if re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+=.*", word)]
    return faults + [f"the configuration has no key {key}" for key in keys if key not in KEYS]


@pytest.mark.parametrize("page", sorted({page for page, _ in COMMANDS}))
def test_options_and_keys_of_its_commands_exist(page: str) -> None:
    faults = {command: _faults(command) for where, command in COMMANDS if where == page}
    assert {command: found for command, found in faults.items() if found} == {}


def test_commands_are_found() -> None:
    """The reader of commands: continued lines, comments, inputs, inline ones; and what it must find fault with."""
    assert ("tutorial.md", "torchrun --nproc-per-node 2 train.py tutorial.yaml") in COMMANDS and len(COMMANDS) > 80
    assert not any("microbatch_size" in command or command.startswith("EOF") for _, command in COMMANDS)
    assert _faults("python -m tools.verify runs/mine --al") and _faults("python train.py A.yaml model.hiden_size=3")
    assert _faults("python -m tools.bench saving --hidden 3") and not _faults("python -m tools.bench saving --gib 1")
