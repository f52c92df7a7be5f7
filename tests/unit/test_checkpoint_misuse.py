"""What users do to checkpoints: renamed, moved, read without rights, read while a run removes them, wrong arguments."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import SingleProcess, digests, find_resumable, resolve, retention, save_checkpoint, scan
from checkpoint.record import record_path
from qeffect_lm.contract.errors import ResumeError
from tests.checkpoint_support import whole
from tools import diff, inspect, replay, verify

TOOLS = {"verify": verify.main, "diff": diff.main, "inspect": inspect.main, "replay": replay.main}


def save(root: Path, step: int) -> Path:
    made = save_checkpoint(root, step, [whole("w", torch.ones(3) * step)], {"data": {"cursor": step}}, SingleProcess(), {})
    assert isinstance(made, Path)
    return made


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Makes opening what is under a path fail, whoever the tests run as."""
    real = os.open

    def deny(under: Path, number: int) -> None:
        def opened(path: Any, *rest: Any, **named: Any) -> int:
            if Path(path).is_relative_to(under):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **named)

        monkeypatch.setattr(digests.os, "open", opened)

    return deny


# ---- which one is resumed from ---------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_name_is_not_of_that_step(tmp_path: Path, caplog: Any, capsys: Any) -> None:
    """Renamed from 5 to 9: a run that took it for 9 would train from 5 on and run into it, never to save over it."""
    save(tmp_path, 5)
    newest = save(tmp_path, 6)
    (tmp_path / "step_00000005").rename(tmp_path / "step_00000009")
    assert find_resumable(tmp_path) == newest == resolve(tmp_path) and "holds step 5: it was renamed" in caplog.text
    assert verify.main([str(tmp_path)]) == 0 and "step_00000009  INCOMPLETE" in capsys.readouterr().out
    assert verify.main([str(tmp_path / "step_00000009")]) == 1
    save_checkpoint(tmp_path, 9, [whole("w", torch.ones(3))], {}, SingleProcess(), {}, keep=1)  # it is moved aside, not lost
    assert (tmp_path / "step_00000009.partial-1").is_dir() and find_resumable(tmp_path) == tmp_path / "step_00000009"
    shutil.copytree(tmp_path / "step_00000009", tmp_path / "best")
    assert verify.main([str(tmp_path / "best")]) == 0  # a name that says no step is as good as any


def test_what_latest_names_and_is_gone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    """An older one is resumed from, aloud: whether it is a file now, a link to nowhere, or nothing."""
    older, newer = save(tmp_path, 5), save(tmp_path, 6)
    assert find_resumable(tmp_path) == newer and caplog.text == ""
    shutil.rmtree(newer)
    for make in (lambda: None, lambda: newer.write_text("x"), lambda: (newer.unlink(), newer.symlink_to("/absent/step"))):
        make()
        caplog.clear()
        assert find_resumable(tmp_path) == older
        assert "names step_00000006, which is not there: resuming from step 5 instead" in caplog.text
        assert verify.main([str(tmp_path)]) == 0
        assert capsys.readouterr().out.rstrip().endswith("latest names step_00000006, which is not there")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("what", ["manifest.json", "rank00000.safetensors"])
def test_what_cannot_be_read_is_not_passed_over(tmp_path: Path, denied: Any, capsys: Any, number: int, what: str) -> None:
    """It may be whole: rights that one user lacks must not send the run back to an older state."""
    save(tmp_path, 5)
    path = save(tmp_path, 6)
    denied(path / what, number)
    if what == "manifest.json":
        with pytest.raises(ResumeError, match=f"step_00000006 may be the newest .*cannot read .*{errno.errorcode[number]}"):
            find_resumable(tmp_path)
        assert [one.unreadable for one in scan(tmp_path)] == [False, True]
    assert verify.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert errno.errorcode[number] in out and ("step_00000006  UNREADABLE" in out or "step_00000006  DAMAGED" in out)


def test_what_is_known_to_be_something_else_is_passed_over(tmp_path: Path) -> None:
    """A manifest that is a link, a folder or a pipe is no manifest, and no rights will make it one."""
    older, path = save(tmp_path, 5), save(tmp_path, 6) / "manifest.json"
    for make in (lambda: path.symlink_to(older / "manifest.json"), path.mkdir, lambda: os.mkfifo(path)):
        path.unlink() if path.is_symlink() or path.is_file() else path.is_dir() and path.rmdir()
        make()
        assert find_resumable(tmp_path) == older and not any(one.unreadable for one in scan(tmp_path))


def test_a_folder_of_checkpoints_that_has_another_in_it(tmp_path: Path, capsys: Any) -> None:
    """``latest`` says that it is one itself; all tools read the same."""
    save(tmp_path, 5)
    save(tmp_path / "checkpoints", 9)
    assert resolve(tmp_path) == tmp_path / "step_00000005"
    assert verify.main([str(tmp_path)]) == 0 and "step_00000005  sound" in capsys.readouterr().out
    (tmp_path / "latest").unlink()
    assert resolve(tmp_path) == tmp_path / "checkpoints/step_00000009"
    assert verify.main([str(tmp_path)]) == 0 and "step_00000009  sound" in capsys.readouterr().out


# ---- reading while a run goes on -------------------------------------------------------------------------------------


def removed_while(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, root: Path) -> None:
    """At the first call of a function the run saves step 6 and removes step 5."""
    real, left = getattr(module, name), [True]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if left and left.pop():
            save_checkpoint(root, 6, [whole("w", torch.ones(3))], {}, SingleProcess(), {}, keep=1)
        return real(*arguments, **named)

    monkeypatch.setattr(module, name, wrapped)


@pytest.mark.parametrize("when", [(verify, "open_checkpoint"), (verify, "verify"), (retention, "incomplete_because")])
def test_verify_while_a_run_removes_the_old_ones(tmp_path: Path, monkeypatch: Any, capsys: Any, when: tuple[Any, str]) -> None:
    """What went while it was read is not damage; the one that came is read instead."""
    save(tmp_path, 5)
    removed_while(monkeypatch, *when, tmp_path)
    assert verify.main([str(tmp_path)]) == 0 and "step_00000006  sound" in capsys.readouterr().out


def test_verify_of_all_while_a_run_removes_some(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    save(tmp_path, 4)
    save(tmp_path, 5)
    real = verify.verify

    def slow(checkpoint: Any, workers: Any) -> Any:
        shutil.rmtree(tmp_path / "step_00000004", ignore_errors=True)
        return real(checkpoint, workers)

    monkeypatch.setattr(verify, "verify", slow)
    assert verify.main([str(tmp_path), "--all"]) == 0
    out = capsys.readouterr().out
    assert "step_00000004  was removed meanwhile" in out and "step_00000005  sound" in out


def test_the_newest_is_found_while_a_run_removes_the_old_ones(tmp_path: Path, monkeypatch: Any) -> None:
    save(tmp_path, 5)
    (tmp_path / "latest").unlink()
    removed_while(monkeypatch, retention, "incomplete_because", tmp_path)
    assert resolve(tmp_path) == tmp_path / "step_00000006"


# ---- names and arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", TOOLS)
def test_what_cannot_be_looked_at_is_exit_code_2(tmp_path: Path, capsys: Any, monkeypatch: Any, tool: str) -> None:
    """A name too long, no rights on the way: one line, and with ``--json`` an object that says so."""
    real = os.stat

    def stat(path: Any, *rest: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "locked")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "stat", stat)
    for name in ("x" * 300, "locked", "locked/step_00000005"):
        arguments = [str(tmp_path / name)] * (2 if tool == "diff" else 1)
        assert TOOLS[tool](arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
        assert TOOLS[tool]([*arguments, "--json"]) == 2
        assert list(json.loads(capsys.readouterr().out)) == ["error"]


@pytest.mark.parametrize("tool", ["verify", "inspect"])
def test_a_checkpoint_by_the_folder_that_one_is_in(tmp_path: Path, capsys: Any, monkeypatch: Any, tool: str) -> None:
    monkeypatch.chdir(save(tmp_path, 5))
    assert TOOLS[tool](["."]) == 0 and (tool != "verify" or "step_00000005  sound" in capsys.readouterr().out)


def test_the_record_of_a_checkpoint_by_another_name(tmp_path: Path, monkeypatch: Any) -> None:
    """By a link, or from within: the record is beside the folder itself; of a linked ``step_…`` it is beside the link."""
    path = save(tmp_path / "run", 5)
    (tmp_path / "best").symlink_to(path)
    (tmp_path / "other").mkdir()
    linked = tmp_path / "other" / path.name
    linked.symlink_to(path)
    monkeypatch.chdir(path)
    record = tmp_path / "run/replay/step_00000005.json"
    assert record_path(path) == record_path(tmp_path / "best") == record_path(Path(".")) == record
    assert record_path(linked) == tmp_path / "other/replay/step_00000005.json"


def test_a_comparison_of_nothing_is_refused(tmp_path: Path, capsys: Any) -> None:
    """Else a slip of the pen in a name would say "equal"."""
    a, b = str(save(tmp_path, 5)), str(save(tmp_path, 6))
    assert diff.main([a, b, "--ignore", "w"]) == 2 and "leaves no tensor to compare" in capsys.readouterr().err
    assert diff.main([a, b, "--ignore", "w", "--key", "data"]) == 1  # meta data are left
    assert diff.main([a, a, "--key", "data.cursor", "--key", "step"]) == 0
    capsys.readouterr()
    assert diff.main([a, a, "--key", "data.curso"]) == 2
    assert "--key data.curso: neither" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_limit_is_a_time(tmp_path: Path, capsys: Any, seconds: str) -> None:
    assert replay.main([str(save(tmp_path, 5)), "--timeout", seconds]) == 2
    assert capsys.readouterr().err.startswith(f"error: --timeout {seconds}: seconds")
