"""The wheel: what it holds; its scripts start, or name the intruder, beside other tools/ and models/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qeffect_lm import __version__

pytestmark = pytest.mark.xdist_group("wheel")  # one worker builds it, once

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("qeffect_lm", "models", "pipeline", "checkpoint", "tools")
FILES = ("train.py", "setup.cfg", "pyproject.toml", "LICENSE", "README.md")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: no build output gets into the tree, and no older one into the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, source / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    (source / "tests/__init__.py").write_text("")  # must not get in
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed into a folder of its own (with ``bin``)."""
    target = tmp_path_factory.mktemp("site") / "site-packages"
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A user's project with packages and a train.py named like ours."""
    for name in ("tools", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the stranger was imported')\n")
    (tmp_path / "train.py").write_text("raise SystemExit('the stranger was imported')\n")
    return tmp_path


def run(command: list[str], cwd: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))}
    environ["PYTHONPATH"] = os.pathsep.join(str(p) for p in path)
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=90)


def test_what_the_wheel_holds(wheel: Path) -> None:
    assert wheel.name == f"qeffect_lm-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        scripts = archive.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {*PACKAGES, "train.py", f"qeffect_lm-{__version__}.dist-info"}
    for package in PACKAGES:
        packed = {n for n in names if n.startswith(f"{package}/") and n.endswith(".py")}
        assert packed == {p.relative_to(ROOT).as_posix() for p in (ROOT / package).rglob("*.py")}
    configs = {p.relative_to(ROOT).as_posix() for p in (ROOT / "models/configs").glob("*.yaml")}
    assert configs and configs <= set(names)
    pages = {p.relative_to(ROOT).as_posix() for end in ("html", "css", "js") for p in (ROOT / "tools").rglob(f"*.{end}")}
    assert len(pages) >= 6 and pages <= set(names)
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.11" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "apex" not in metadata.lower().split("description-content-type")[0]
    assert "qeffect-train = " in scripts and "qeffect = " in scripts


def test_scripts_work_beside_a_stranger(site: Path, strange: Path) -> None:
    """The working folder's tools/, models/ and train.py do not matter: it is not on a script's path."""
    for script in ("qeffect", "qeffect-train"):
        done = run([str(site / "bin" / script), "--version"], strange, site)
        assert done.returncode == 0, done.stderr
        assert __version__ in done.stdout
    done = run([str(site / "bin/qeffect"), "--help"], strange, site)
    assert done.returncode == 0 and "diff" in done.stdout and "explain" in done.stdout


@pytest.mark.parametrize("script", ["qeffect", "qeffect-train"])
def test_a_stranger_on_the_path_is_named(site: Path, strange: Path, script: str) -> None:
    done = run([str(site / "bin" / script), "--version"], strange, strange, site)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: Python finds another package named 'models'")
    assert str(strange / "models") in done.stderr and "PYTHONPATH" in done.stderr


def test_python_dash_c_from_a_strangers_folder(site: Path, strange: Path) -> None:
    """`python -c` and `-m` put the working folder first; the check speaks before anything is imported."""
    code = "from qeffect_lm.runtime.install_check import check_installation; check_installation()"
    done = run([sys.executable, "-c", code], strange, site)
    assert done.returncode == 1 and str(strange / "models") in done.stderr
    assert "the stranger was imported" not in done.stderr
    quiet = strange / "quiet"
    quiet.mkdir()
    done = run([sys.executable, "-c", code + "; import qeffect_lm; print(qeffect_lm.__file__)"], quiet, site)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(site / "qeffect_lm/__init__.py")


def test_an_overwriting_distribution_is_named(site: Path, tmp_path: Path) -> None:
    """Another wheel that brings its own top-level ``tools`` into the same folder."""
    target = tmp_path / "site-packages"
    shutil.copytree(site, target)
    (target / "tools/__init__.py").write_text("'''theirs'''\n")
    info = target / "handy_tools-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: handy-tools\nVersion: 2.5\n")
    (info / "RECORD").write_text("tools/__init__.py,,\n")
    done = run([sys.executable, str(target / "bin/qeffect"), "--version"], tmp_path, target)
    assert done.returncode == 2
    assert "tools/__init__.py was overwritten by handy-tools 2.5" in done.stderr
