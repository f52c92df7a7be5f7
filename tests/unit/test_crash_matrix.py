"""At every operation on the disk the writer is killed (a real SIGKILL of a real process), fails, or loses its directory.

After each, one newest complete checkpoint is there, it is what a resume takes, and saving goes on.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import CheckpointError, FileOps, find_resumable, load_into, open_checkpoint, step_name
from checkpoint.layout import temporary_name
from checkpoint.retention import temporaries
from tests.checkpoint_support import on_ranks
from tests.crashing import Operation, Recorder, Watched, dying, failing, in_processes, save_step, state
from tools import verify as tool

WORLD, OLD, NEW = 3, 2, 3
# Processes of which each is forked from one that has everything imported and nothing else begun.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.unit.test_crash_matrix"])


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A folder with steps 1 and 2 of three ranks; the matrix saves step 3 into copies of it and keeps two."""
    folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    with folder as name:
        root = Path(name).resolve() / "base"
        for step in (1, OLD):
            on_ranks(WORLD, lambda comm, step=step: save_step(root, step, comm, 0))
        yield root


@pytest.fixture(scope="module")
def traces(base: Path) -> list[list[Operation]]:
    """What each rank does to the disk in that save."""
    root = shutil.copytree(base, base.parent / "trace")
    recorders = [Recorder() for _ in range(WORLD)]
    on_ranks(WORLD, lambda comm: save_step(root, NEW, comm, 2, recorders[comm.rank]))
    shutil.rmtree(root)
    return [recorder.trace for recorder in recorders]


@contextlib.contextmanager
def cell(base: Path) -> Iterator[Path]:
    """A copy of ``base``, for one cell of the matrix."""
    with tempfile.TemporaryDirectory(dir=base.parent) as folder:
        yield shutil.copytree(base, Path(folder) / "root")


def verified(root: Path) -> str:
    """The name of the one newest complete checkpoint, as tools.verify and a resume find it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = tool.main([str(root), "--all", "--json"])
    report = json.loads(said.getvalue())
    assert code == 0 and not report["incomplete"], report
    assert all(not one["problems"] for one in report["checkpoints"])
    newest = find_resumable(root)
    assert newest is not None and report["newest_complete"] == str(newest)
    assert report["checkpoints"][-1]["path"] == str(newest)
    assert (root / report["latest"]).is_dir()
    return newest.name


def assert_goes_on(root: Path, expected: int) -> None:
    """Step ``expected`` is found, loads as it was saved on every rank, and the next save leaves nothing behind."""
    name = verified(root)
    assert name == step_name(expected)
    checkpoint = open_checkpoint(root / name)

    def resume(comm: Any) -> None:
        live = state(comm.rank, 0)
        load_into(checkpoint, live, comm=comm)
        for item, saved in zip(live, state(comm.rank, expected), strict=True):
            assert torch.equal(item.tensor, saved.tensor)
        save_step(root, expected + 1, comm, 2)

    assert on_ranks(WORLD, resume) == [None] * WORLD
    assert verified(root) == step_name(expected + 1)
    assert sorted(path.name for path in root.iterdir()) == ["latest", step_name(expected), step_name(expected + 1)]


def _save(root: Path, victim: int, at: int, everyone: bool, torn: bool) -> None:
    """In a process of its own: three ranks, of which one dies."""

    def body(comm: Any) -> None:
        save_step(root, NEW, comm, 2, dying(at, everyone, torn) if comm.rank == victim else FileOps())

    in_processes(WORLD, body, root.parent / f"{root.name}.said")


def killed(root: Path, victim: int, at: int, everyone: bool, torn: bool) -> tuple[list[int], list[str]]:
    """How each rank ended, and its error."""
    process = FORKS.Process(target=_save, args=(root, victim, at, everyone, torn))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    codes, messages = json.loads((root.parent / f"{root.name}.said").read_text())
    return codes, messages


@pytest.mark.parametrize(("victim", "everyone"), [(0, True), (0, False), (1, True), (2, False)])
def test_killed_at_every_operation(base: Path, traces: list[list[Operation]], victim: int, everyone: bool) -> None:
    """SIGKILL before each operation of a rank: to it alone, and those that live end with an error that says so; or to all ranks
    at that moment, within each write too."""
    trace = traces[victim]
    renamed = _index(trace, step_name(NEW), len(trace))
    told = _index(trace, ".tmp-delete-step_00000001", len(trace)) - 1  # from here on, the others know that it is saved
    cells = [(at, torn) for at, one in enumerate(trace) for torn in {False, everyone and one.name == "write"}]
    for at, torn in cells:
        with cell(base) as root:
            codes, messages = killed(root, victim, at, everyone, torn)
            what = (str(trace[at]), codes, messages)
            others = codes[:victim] + codes[victim + 1 :]
            assert codes[victim] == -signal.SIGKILL, what
            if at > told:
                assert set(others) <= {0, -signal.SIGKILL}, what
            elif everyone:
                assert set(others) == {-signal.SIGKILL}, what
            else:
                assert set(others) == {3} and sum("was lost" in message for message in messages) == WORLD - 1, what
            assert_goes_on(root, NEW if at > renamed else OLD)


def _index(trace: list[Operation], target: str, otherwise: int) -> int:
    """Where something is renamed to ``target``."""
    return next((i for i, one in enumerate(trace) if one.target and one.target.name == target), otherwise)


ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ESTALE]


@pytest.mark.parametrize("victim", [0, 2])
def test_an_error_at_every_operation(base: Path, traces: list[list[Operation]], victim: int) -> None:
    """A full or failing disk, one that turned read-only, a quota, a lost server, in turn: one message on all ranks, or saved.

    A write that fails takes half of its bytes first, as a disk does that gets full.
    """
    trace = traces[victim]
    renamed, retention = _index(trace, step_name(NEW), len(trace)), _index(trace, ".tmp-delete-step_00000001", len(trace))
    for at, one in enumerate(trace):
        code = ERRORS[at % len(ERRORS)]
        with cell(base) as root:
            ops = [FileOps() for _ in range(WORLD)]
            ops[victim] = failing(at, OSError(code, os.strerror(code)))
            results = on_ranks(WORLD, lambda comm, root=root, ops=ops: save_step(root, NEW, comm, 2, ops[comm.rank]))
            if at >= retention:  # the checkpoint is safe, what is old goes with the next one
                assert results == [root / step_name(NEW)] * WORLD, one
            else:
                message = str(results[0])
                assert all(isinstance(result, CheckpointError) and str(result) == message for result in results), (one, results)
                assert f"rank {victim}: cannot " in message and errno.errorcode[code] in message, message
                kept = f"{step_name(NEW)} itself is complete" if at > renamed else f"{step_name(OLD)} survives"
                assert kept in message and not temporaries(root), message
            assert_goes_on(root, NEW if at > renamed else OLD)


@pytest.mark.parametrize("what", ["the folder", "what is being written"])
def test_a_directory_that_vanishes_at_every_operation(base: Path, traces: list[list[Operation]], what: str) -> None:
    """An unmounted folder, a cleaning job that takes the temporary directory: an error, and when the folder is back, all is."""
    trace = traces[0]
    renamed = _index(trace, step_name(NEW), len(trace))
    last = _index(trace, ".tmp-delete-step_00000001", len(trace)) if what == "the folder" else renamed + 1
    for at in range(1, last):
        with cell(base) as root:
            away = root.with_name("away")
            gone = root if what == "the folder" else root / temporary_name(NEW)
            ops = [FileOps() for _ in range(WORLD)]
            ops[0] = Watched(lambda number, _, at=at, gone=gone, away=away: gone.rename(away) if number == at else None)
            results = on_ranks(WORLD, lambda comm, root=root, ops=ops: save_step(root, NEW, comm, 2, ops[comm.rank]))
            assert all(isinstance(result, CheckpointError) for result in results), (trace[at], results)
            assert "ENOENT" in str(results[0]) or "as rank 0 sees it" in str(results[0]), results[0]
            if what == "the folder":
                assert at > renamed or f"{root} itself is not there" in str(results[0])
                away.rename(root)
            assert_goes_on(root, NEW if at > renamed else OLD)


def _save_as_nobody(root: Path) -> None:
    """In a process of its own, since root may write everywhere."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    in_processes(1, lambda comm: save_step(root, NEW, comm, 2), root.parent / "said" / "x")


def test_a_folder_that_may_not_be_written_to(base: Path) -> None:
    """Really read-only: an error that says so, on all that is there nothing changes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        root = shutil.copytree(base, folder / "root")
        (folder / "said").mkdir()
        for path, mode in ((folder, 0o755), (folder / "said", 0o777), (root, 0o555)):
            path.chmod(mode)
        process = FORKS.Process(target=_save_as_nobody, args=(root,))
        process.start()
        process.join(60)
        codes, messages = json.loads((folder / "said" / "x").read_text())
        root.chmod(0o755)
        assert codes == [3] and "(EACCES)" in messages[0] and f"{step_name(OLD)} survives" in messages[0], messages
        assert_goes_on(root, OLD)
