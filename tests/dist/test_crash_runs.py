"""Training runs that are killed within a save, at its operations on the disk: resumed, they equal the run that never was."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint import find_resumable, step_name, writer
from qeffect_lm.app import main
from tests.crashing import Operation, Recorder, Watched
from tests.runs import CONFIG, assert_same_run, overrides, run_here, write_config
from tools import verify as tool
from tools.common import free_port

# Processes of which each is forked from one that has torch imported and nothing else begun.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.dist.test_crash_runs", "qeffect_lm.app.run"])
ASYNC = "checkpoint.async_save=true"
STEPS, EVERY, SAVE = 8, 2, 4  # the save of step 4 is the one that the runs die in


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a configuration and ``whole``, a run that nothing happens to."""
    path = tmp_path_factory.mktemp("crash")
    text = CONFIG.replace("num_layers: 4", "num_layers: 2").replace("{steps: 12}", f"{{steps: {STEPS}}}")
    write_config(path, text.replace("{every: 3, keep: 0}", f"{{every: {EVERY}, keep: 1}}"))
    assert run_here(path, "whole")[0] == 0
    return path


@pytest.fixture(scope="module")
def trace(folder: Path) -> list[Operation]:
    """What one process does to the disk in the save of step 4."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder()
        patch.setattr(writer, "FileOps", lambda: recorder)
        assert run_here(folder, "recorded", f"train.steps={SAVE}")[0] == 0
    begins = [i for i, one in enumerate(recorder.trace) if one.name == "mkdir"]
    return recorder.trace[begins[-1] :]


class Faulty:
    """Before the operation ``at`` (counted from 0) of the save of step 4 the process is killed, or with ``full`` the disk is
    full."""

    def __init__(self, at: int, full: bool) -> None:
        self._left: int | None = None
        self._at, self._full = at, full
        self.ops = Watched(self._before)

    def _before(self, _: int, operation: Operation) -> None:
        if self._left is None and step_name(SAVE) in str(operation.path):
            self._left = self._at
        if self._left == 0 and self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._left is not None:
            self._left -= 1


def one_rank(rank: int, world: int, port: int, argv: list[str], output: str, at: int | None, full: bool) -> None:
    """``train.py`` in a process of its own; ``at`` is the operation before which this rank dies, or finds its disk full."""
    log = open(output, "w")  # noqa: SIM115 (the process's output until it ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if at is not None:
        faulty = Faulty(at, full)
        writer.FileOps = lambda: faulty.ops  # type: ignore[misc, assignment]
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main.leave(main.main(argv, os.environ), os.environ)


def launch(
    folder: Path, name: str, world: int, victim: int, at: int | None, *more: str, full: bool = False
) -> tuple[list[int], str]:
    """Exit codes (negative: the signal) and output of a run whose rank ``victim`` dies, or finds its disk full."""
    argv = [str(folder / "tiny.yaml"), *overrides(folder, name, *more)]
    port = free_port()
    outputs = [folder / f"{name}-{rank}.log" for rank in range(world)]
    ranks = [
        FORKS.Process(target=one_rank, args=(rank, world, port, argv, str(outputs[rank]), at if rank == victim else None, full))
        for rank in range(world)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
    return [one.exitcode for one in ranks], "\n".join(path.read_text() for path in outputs)


def place(trace: list[Operation], wanted: Callable[[Operation], bool]) -> int:
    return next(i for i, one in enumerate(trace) if wanted(one))


def dies_and_goes_on(folder: Path, trace: list[Operation], at: int, *more: str) -> None:
    """One process, killed before operation ``at``, started again."""
    name = f"dies-{at}-{len(more)}-{len(list(folder.iterdir()))}"  # another test's may have died at the same place
    codes, output = launch(folder, name, 1, 0, at, *more)
    assert codes == [-signal.SIGKILL], output
    renamed = place(trace, lambda one: one.target is not None and one.target.name == step_name(SAVE))
    root = folder / name / "checkpoints"
    newest = find_resumable(root)
    step = SAVE if at > renamed else SAVE - EVERY
    assert newest is not None and newest.name == step_name(step), trace[at]
    assert tool.main([str(root)]) == 0
    code, said = run_here(folder, name, *more)
    assert code == 0 and f"resumed at {step}, ran {step + 1}…{STEPS} of {STEPS}" in said
    assert assert_same_run(folder, "whole", name) > 100


def test_killed_before_the_rename_while_training_goes_on(folder: Path, trace: list[Operation]) -> None:
    """In the background, that is; ``whole`` saved synchronously, and they are equal."""
    dies_and_goes_on(folder, trace, place(trace, lambda one: one.name == "rename"), ASYNC)


@pytest.mark.long
@pytest.mark.parametrize("more", [[], [ASYNC]], ids=["at once", "in the background"])
def test_killed_before_every_operation(folder: Path, trace: list[Operation], more: list[str]) -> None:
    """Every one of them but the writes that follow a write."""
    for at, one in enumerate(trace):
        if one.name != "write" or trace[at - 1].name != "write":
            dies_and_goes_on(folder, trace, at, *more)


def test_two_stages_whose_disk_gets_full_in_the_background(folder: Path) -> None:
    """Of one of them: both end at the same step with its message, and what they go on from is whole."""
    codes, output = launch(folder, "full", 2, 1, 1, "parallel.pp=2", ASYNC, full=True)
    assert codes == [1, 1], output
    said = [line for line in output.splitlines() if line.startswith("error (rank")]
    assert len(said) == 2 and all("step 4 was not saved: rank 1: cannot write" in line and "ENOSPC" in line for line in said)
    newest = find_resumable(folder / "full" / "checkpoints")
    assert newest is not None and newest.name == step_name(SAVE - EVERY)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["pp", "dp"])
def test_two_ranks_save_the_same_in_the_background(folder: Path, layout: str) -> None:
    """Replicas are compared there too."""
    for name, more in ((f"{layout}-at-once", []), (f"{layout}-background", [ASYNC])):
        codes, output = launch(folder, name, 2, 0, None, f"parallel.{layout}=2", *more)
        assert codes == [0, 0], output
    assert assert_same_run(folder, f"{layout}-at-once", f"{layout}-background") > 100


@pytest.mark.long
@pytest.mark.parametrize(("victim", "more"), [(0, []), (1, []), (0, [ASYNC]), (1, [ASYNC])])
def test_one_of_two_stages_is_killed(folder: Path, victim: int, more: list[str]) -> None:
    """Over gloo, in each stage of a save: the other ends too and says that it lost a peer; both go on when started again."""
    kinds = [("mkdir", ".tmp-"), ("write", ".safetensors"), ("fsync", ".safetensors")]
    if victim == 0:
        kinds += [("create", "manifest.json"), ("rename", ".tmp-step"), ("create", ".tmp-latest"), ("unlink", "manifest.json")]
    for number, (kind, what) in enumerate(kinds[victim:]):
        name = f"stages-{victim}-{number}-{len(more)}"
        at = _operation_of(folder, victim, kind, what)
        codes, output = launch(folder, name, 2, victim, at, "parallel.pp=2", *more)
        assert codes[victim] == -signal.SIGKILL, output
        assert codes[1 - victim] == 1 and "was lost" in output, output
        codes, output = launch(folder, name, 2, victim, None, "parallel.pp=2", *more)
        assert codes == [0, 0], output
        assert_same_run(folder, "whole", name, same_layout=False)


def _operation_of(folder: Path, rank: int, kind: str, what: str) -> int:
    """Where one of two ranks does something in the save of step 4, as a run of both tells."""
    path = folder / f"trace-of-{rank}"
    if not path.exists():
        name = f"recorded-{rank}"
        argv = [str(folder / "tiny.yaml"), *overrides(folder, name, "parallel.pp=2", f"train.steps={SAVE}")]
        port = free_port()
        ranks = [FORKS.Process(target=_record, args=(r, port, argv, str(path) if r == rank else "")) for r in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(120)
    lines = path.read_text().splitlines()
    begins = next(i for i, line in enumerate(lines) if step_name(SAVE) in line)
    return next(i for i, line in enumerate(lines[begins:]) if line.startswith(kind) and what in line)


def _record(rank: int, port: int, argv: list[str], path: str) -> None:
    recorder = Recorder()
    writer.FileOps = lambda: recorder  # type: ignore[misc, assignment]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert main.main(argv, os.environ) == 0
    if path:
        Path(path).write_text("\n".join(f"{one.name} {one.path}" for one in recorder.trace))
