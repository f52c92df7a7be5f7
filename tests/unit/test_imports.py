"""The source tree keeps its rules: import directions, optional packages, os.environ, sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("qeffect_lm", "models", "pipeline", "checkpoint", "tools")
SIBLINGS = ("models", "pipeline", "checkpoint")
COMPOSERS = ("qeffect_lm.app", "qeffect_lm.integrations", "qeffect_lm.testing")  # may know the siblings
OPTIONAL = ("transformer_engine", "cudnn", "wandb", "matplotlib", "transformers", "tokenizers", "apex", "pyarrow", "zstandard",
            "tensorboardX")  # fmt: skip
MAX_FILE, MAX_FUNCTION = 600, 120


def sources() -> dict[str, str]:
    """Our Python files without the tests, as {path relative to the root: text}."""
    files = [ROOT / "train.py", *(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))]
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in files if p.exists()}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def within(module: str, packages: tuple[str, ...] | str) -> bool:
    packages = (packages,) if isinstance(packages, str) else packages
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports(path: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every absolute module name that a file imports, anywhere in it, with the line."""
    package = module_of(path).split(".") if path.endswith("__init__.py") else module_of(path).split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            # "from qeffect_lm import app" imports the submodule: look at both names.
            yield from ((f"{stem}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value, node.lineno


def allowed(importer: str, imported: str) -> bool:
    """The arrows of DESIGN section 4: train, tools, app, integrations, testing → siblings → the rest of qeffect_lm."""
    if within(imported, "tests"):
        return False
    if within(imported, ("tools", "train")):
        return within(importer, "tools") and within(imported, "tools")
    if within(importer, ("tools", "train")):
        return True
    if within(imported, COMPOSERS):
        return within(importer, COMPOSERS)
    if within(imported, SIBLINGS):
        return within(importer, COMPOSERS) or within(importer, imported.split(".")[0])
    return True


def wrong_arrows(files: dict[str, str]) -> list[str]:
    return [
        f"{path}:{line}: {module_of(path)} must not import {name}"
        for path, text in files.items()
        for name, line in imports(path, ast.parse(text))
        if within(name, (*PACKAGES, "train", "tests")) and not allowed(module_of(path), name)
    ]


def wrong_optional(files: dict[str, str]) -> list[str]:
    """Transformer Engine outside its backend and its optimizer's adapter, apex outside its own, others outside functions."""
    wrong = []
    for path, text in files.items():
        tree = ast.parse(text)
        backend = path.startswith("qeffect_lm/layers/te/")
        found = [(m, line) for m, line in imports(path, tree) if within(m, OPTIONAL)]
        in_functions = {
            id_
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for id_ in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for module, line in found:
            adapter = {"transformer_engine": "te", "apex": "apex"}.get(module.split(".")[0])
            ok = line in in_functions and adapter in (None, path.removeprefix("qeffect_lm/optim/").removesuffix("_adam.py"))
            if within(module, "transformer_engine"):
                ok = ok or backend
            if not ok:
                wrong.append(f"{path}:{line}: {module} may not be imported here")
    return wrong


def environment_reads(files: dict[str, str]) -> list[str]:
    """Where os.environ is touched outside train.py and tools."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    wrong = []
    for path, text in files.items():
        if within(module_of(path), ("train", "tools")):
            continue
        for node in ast.walk(ast.parse(text)):
            attribute = (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
                and node.attr in names
            )
            direct = isinstance(node, ast.ImportFrom) and node.module == "os"
            if attribute or (direct and any(alias.name in names for alias in node.names)):
                wrong.append(f"{path}:{node.lineno}: reads the environment")
    return wrong


def too_long(files: dict[str, str]) -> list[str]:
    wrong = []
    for path, text in files.items():
        lines = text.count("\n")
        if lines > MAX_FILE:
            wrong.append(f"{path}: {lines} lines, at most {MAX_FILE}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    wrong.append(
                        f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}"
                    )
    return wrong


def test_imports_go_one_way() -> None:
    assert wrong_arrows(sources()) == []


def test_optional_packages_stay_optional() -> None:
    assert wrong_optional(sources()) == []


def test_only_train_and_tools_read_the_environment() -> None:
    assert environment_reads(sources()) == []


def test_files_and_functions_stay_small() -> None:
    tests = {p.relative_to(ROOT).as_posix(): p.read_text() for p in (ROOT / "tests").rglob("*.py")}
    assert too_long(sources() | tests) == []


def test_every_package_has_a_docstring_in_its_init() -> None:
    folders = {p.parent for package in (*PACKAGES, "tests") for p in (ROOT / package).rglob("*.py")}
    for folder in sorted(folders):
        init = folder / "__init__.py"
        assert init.is_file(), f"{folder} has no __init__.py"
        assert ast.get_docstring(ast.parse(init.read_text())), f"{init} has no docstring"


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("models/llama.py", "from qeffect_lm.layers import norm", 0),
        ("models/llama.py", "from models import spec\nfrom . import spec", 0),
        ("models/llama.py", "import pipeline.engine", 1),
        ("pipeline/engine.py", "def f():\n    from checkpoint import writer", 1),
        ("checkpoint/writer.py", "from qeffect_lm import app", 1),
        ("checkpoint/writer.py", "import importlib\nimportlib.import_module('models.llama')", 1),
        ("qeffect_lm/app.py", "import models, pipeline, checkpoint", 0),
        ("qeffect_lm/app.py", "import tools.diff", 1),
        ("qeffect_lm/integrations/x.py", "from pipeline import engine", 0),
        ("qeffect_lm/runtime/loop.py", "from checkpoint import writer", 1),
        ("qeffect_lm/runtime/loop.py", "from .. import app", 1),
        ("qeffect_lm/runtime/__init__.py", "from . import launch\nfrom .. import errors", 0),
        ("qeffect_lm/runtime/loop.py", "from tests.helpers import run_distributed", 1),
        ("tools/parity.py", "from tools.diff import main\nfrom qeffect_lm.app import run", 0),
        ("tools/parity.py", "import train", 1),
        ("train.py", "from qeffect_lm.app import main", 0),
        ("train.py", "from tools.diff import main", 1),
    ],
)
def test_the_arrow_check_itself(path: str, text: str, count: int) -> None:
    assert len(wrong_arrows({path: text})) == count


def test_the_other_checks_themselves() -> None:
    te = "import transformer_engine.pytorch as te"
    assert wrong_optional({"qeffect_lm/layers/te/library.py": te}) == []
    assert len(wrong_optional({"qeffect_lm/layers/linear.py": te, "models/te.py": te})) == 2
    lazy = "def f():\n    import wandb\n"
    assert wrong_optional({"a.py": lazy}) == []
    assert len(wrong_optional({"a.py": "import wandb", "b.py": "def f():\n    import apex\n"})) == 2
    assert (
        environment_reads({"train.py": "import os\nos.environ", "tools/x.py": "import os\nos.getenv"}) == []
    )
    reads = {"models/x.py": "import os\nos.environ.get('A')", "qeffect_lm/app.py": "from os import getenv"}
    assert len(environment_reads(reads)) == 2
    assert len(too_long({"a.py": "x = 1\n" * 601, "b.py": "def f():\n" + "    x = 1\n" * 120})) == 2


def test_importing_the_package_and_its_config_is_light() -> None:
    """No torch, GPU library or logger comes along with `import qeffect_lm` and the configuration."""
    code = (
        "import sys, qeffect_lm, qeffect_lm.config, qeffect_lm.runtime.launch\n"
        "heavy = {'torch', 'transformer_engine', 'wandb', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
