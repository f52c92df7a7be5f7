"""The order of a commit, on a recorded trace: power cuts at every operation, on a disk that keeps as little as it may."""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from checkpoint import CheckpointError, find_resumable, open_checkpoint, scan, verify_checkpoint
from checkpoint.layout import DELETING, LATEST, temporary_name
from qeffect_lm.contract.errors import ResumeError
from tests.checkpoint_support import on_ranks
from tests.crashing import Operation, Recorder, save_step
from tests.disk_model import Disk, Tree, read_tree, write_tree

FOLDER = Path("runs") / "mine" / "checkpoints"
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # thousands of states: not on a disk if there is a choice


class Story:
    """A save, recorded: the folder before it, what it did, and which steps may and must be found afterwards.

    ``before`` is what was there, safe (None: not even the folder, and what stands above it is not safe either); ``old`` the
    newest step in it; ``step`` the one that is saved.
    """

    def __init__(self, top: Path, before: Sequence[int], ranks: int, keep: int, left: str = "") -> None:
        self.top, self.old, self.step = top, max(before, default=None), max(before, default=0) + 1
        root = top / FOLDER
        top.mkdir()
        self.tree: Tree = {}
        self.trace: list[Operation] = []
        for step in before:
            on_ranks(ranks, lambda comm, step=step: save_step(root, step, comm, 0))
        if left == "a dead save":
            shutil.copytree(root / "step_00000001", root / temporary_name(3))
        if before:
            self.tree = read_tree(top)
        if left == "a dead removal":  # its rename was done, and is not safe
            victim = root / "step_00000001"
            self.trace.append(Operation("rename", victim, root / f"{DELETING}{victim.name}"))
            victim.rename(root / f"{DELETING}{victim.name}")
        recorder = Recorder()
        results = on_ranks(ranks, lambda comm: save_step(root, self.step, comm, keep, recorder))
        assert results == [root / f"step_{self.step:08d}"] * ranks
        self.trace += recorder.trace

    def syncs(self) -> list[int]:
        """Where the trace syncs something that the model covers."""
        covered = [one.path == self.top or self.top in one.path.parents for one in self.trace]
        return [i for i, one in enumerate(self.trace) if one.name.startswith("fsync") and covered[i]]


def states(story: Story, trace: Sequence[Operation], begin: int = 0, samples: int = 6) -> Iterator[tuple[int, Tree]]:
    """(operations done, what is left), each state once, from ``begin`` operations on."""
    disk = Disk(story.top, story.tree)
    rng = random.Random(len(trace))
    seen: set[str] = set()
    for done in range(len(trace) + 1):
        if done:
            disk.apply(trace[done - 1])
        if done < begin:
            continue
        for tree in disk.crashes(rng, samples):
            key = f"{done == len(trace)} {tree}"
            if key not in seen:
                seen.add(key)
                yield done, tree


def violation(story: Story, finished: bool, folder: Path) -> str | None:
    """What is wrong in ``folder`` after a power cut during the save, or after it; None when all is as promised."""
    root = folder / FOLDER
    allowed = {f"step_{story.step:08d}"} | (set() if finished or story.old is None else {f"step_{story.old:08d}"})
    try:
        newest = find_resumable(root)
        for found in scan(root):
            if found.fault is not None:
                return f"half a checkpoint: {found.fault}"
            problems = verify_checkpoint(found.path)
            if problems:
                return f"damaged, and taken for whole: {problems[0]}"
            if open_checkpoint(found.path).meta != {"step": found.step}:
                return f"{found.path.name} holds another step"
    except (CheckpointError, ResumeError) as error:
        return str(error)
    if newest is None:
        return "no checkpoint" if finished or story.old is not None else None
    if newest.name not in allowed:
        return f"{newest.name} would be resumed"
    latest = (root / LATEST).read_text() if (root / LATEST).exists() else None
    named = {f"{found.path.name}\n" for found in scan(root)} | ({None} if story.old is None else set())
    if latest not in ({f"{newest.name}\n"} if finished else named):
        return f"{newest.name} is there, and `latest` says {latest!r}"
    return None


def first_violation(story: Story, trace: Sequence[Operation], begin: int = 0) -> str | None:
    """Where and what; None when every state is as promised."""
    for done, tree in states(story, trace, begin):
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            write_tree(Path(folder) / "left", tree)
            what = violation(story, done == len(trace), Path(folder) / "left")
        if what is not None:
            last = trace[done - 1] if done else "nothing"
            return f"after operation {done} ({last}): {what}"
    return None


STORIES = {
    "first save, new folders": ([], 1, 1, ""),
    "one rank": ([1, 2], 1, 1, ""),
    "two ranks": ([1, 2], 2, 1, ""),
    "after a save that died": ([1, 2], 1, 0, "a dead save"),
    "after a removal that died": ([1, 2], 1, 1, "a dead removal"),
}


@pytest.fixture(params=STORIES)
def story(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Story]:
    caplog.set_level(logging.ERROR)  # each state with leftovers would be warned about
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Story(Path(folder).resolve() / "disk", *STORIES[request.param])


def test_whatever_a_power_cut_loses_one_whole_checkpoint_is_the_newest(story: Story) -> None:
    """At every operation, with any part of what was not synced lost; and once the save returned, it is the new one."""
    assert first_violation(story, story.trace) is None


def test_every_fsync_is_needed(story: Story) -> None:
    """A writer without one of its fsyncs (or with it too late) is caught."""
    for i in story.syncs():
        mutant = [*story.trace[:i], *story.trace[i + 1 :]]
        assert first_violation(story, mutant, begin=i) is not None, f"{i}: {story.trace[i]}"
