"""Start-up checks that look at files and import nothing: apex, our siblings; and the command qeffect."""

from __future__ import annotations

import base64
import hashlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from qeffect_lm import __version__
from qeffect_lm.errors import UsageError
from qeffect_lm.runtime.apex_probe import probe_apex
from qeffect_lm.runtime.install_check import SIBLINGS, check_installation
from tools import cli

BOMB = "raise SystemExit('imported')\n"  # nothing may import what is only looked at


def put(path: Path, text: str = BOMB) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def distribution(site: Path, name: str, version: str, files: list[str]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    put(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for file in files:
        digest = hashlib.sha256((site / file).read_bytes()).digest()
        lines.append(f"{file},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},1\n")
    put(info / "RECORD", "".join(lines))


def test_apex_absent(tmp_path: Path) -> None:
    assert probe_apex([str(tmp_path)]).kind == "absent"
    (tmp_path / "apex").mkdir()  # a folder of that name is nobody's package
    assert probe_apex([str(tmp_path)]).kind == "absent"


def test_apex_unrelated_is_named_with_its_distribution(tmp_path: Path) -> None:
    put(tmp_path / "apex/__init__.py")
    put(tmp_path / "apex/models/__init__.py")
    distribution(tmp_path, "apex", "0.9.10.dev0", ["apex/__init__.py", "apex/models/__init__.py"])
    status = probe_apex([str(tmp_path)])
    assert (status.kind, status.usable) == ("unrelated", False)
    assert "distribution apex 0.9.10.dev0" in status.message and str(tmp_path / "apex") in status.message
    assert "pip uninstall apex" in status.message
    assert "apex" not in sys.modules


def test_apex_of_nvidia_with_and_without_its_kernels(tmp_path: Path) -> None:
    put(tmp_path / "apex/__init__.py")
    put(tmp_path / "apex/optimizers/__init__.py")
    put(tmp_path / "apex/optimizers/fused_adam.py")
    status = probe_apex([str(tmp_path)])
    assert (status.kind, status.usable) == ("nvidia", False) and "amp_C" in status.message
    put(tmp_path / "amp_C.py", "an extension with other kernels")
    assert not probe_apex([str(tmp_path)]).usable
    put(tmp_path / "amp_C.py", "multi_tensor_adam stands in for the extension's symbol")
    assert probe_apex([str(tmp_path)]).usable
    assert "amp_C" not in sys.modules


def test_a_single_module_named_apex_is_unrelated(tmp_path: Path) -> None:
    put(tmp_path / "apex.py")
    assert probe_apex([str(tmp_path)]).kind == "unrelated"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder like site-packages with our packages in it."""
    site = tmp_path / "site"
    for name in ("qeffect_lm", *SIBLINGS):
        put(site / name / "__init__.py", f'"""Ours: {name}."""\nraise SystemExit("imported")\n')
    return site


def check(root: Path, *path: Path) -> None:
    check_installation(root, lambda name: PathFinder.find_spec(name, [str(p) for p in path]))


def test_the_source_tree_passes() -> None:
    check_installation()


def test_an_intruder_is_named(site: Path, tmp_path: Path) -> None:
    check(site, site)
    intruder = put(tmp_path / "theirs/tools/__init__.py").parent
    check(site, site, tmp_path / "theirs")
    with pytest.raises(UsageError, match="another package named 'tools'") as caught:
        check(site, tmp_path / "theirs", site)
    assert str(intruder) in str(caught.value) and "PYTHONPATH" in str(caught.value)


def test_a_missing_sibling_is_named(site: Path) -> None:
    (site / "pipeline/__init__.py").unlink()
    with pytest.raises(UsageError, match="pipeline has lost its __init__.py"):
        check(site, site)
    (site / "pipeline").rmdir()
    with pytest.raises(UsageError, match="'pipeline' of QEffect LM is missing"):
        check(site, site)


def test_an_overwritten_sibling_names_the_other_distribution(site: Path) -> None:
    ours = [f"{name}/__init__.py" for name in SIBLINGS]
    distribution(site, "qeffect-lm", "1.0", ours)
    check(site, site)
    put(site / "tools/__init__.py")
    distribution(site, "handy-tools", "2.5", ["tools/__init__.py"])
    with pytest.raises(UsageError, match=r"tools/__init__.py was overwritten by handy-tools 2.5"):
        check(site, site)


def test_qeffect_lists_and_dispatches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"qeffect-lm {__version__}\n"
    assert cli.main([]) == 2
    assert "usage: qeffect" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, line in cli.available().items():
        assert f"  {name}" in listed and line and line in listed
    assert "cli" not in cli.available()
    assert cli.main(["dif"]) == 2
    assert "did you mean diff?" in capsys.readouterr().err
    put(
        tmp_path / "echo.py",
        '"""Says it.\n\nMore."""\nfrom qeffect_lm.errors import UsageError\n\ndef main(argv):\n'
        '    if argv: raise UsageError("wrong " + argv[0])\n    return 5\n',
    )
    put(tmp_path / "library.py", '"""No tool: it has no main."""\n')
    import tools

    monkeypatch.setattr(tools, "__path__", [*tools.__path__, str(tmp_path)])
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "cli.py"))
    assert cli.available() == {"echo": "Says it."}
    assert cli.main(["echo"]) == 5
    assert cli.main(["echo", "x"]) == 2
    assert capsys.readouterr().err == "error: wrong x\n"
    sys.modules.pop("tools.echo", None)
