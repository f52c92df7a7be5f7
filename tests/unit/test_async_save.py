"""Saves in the background: what is copied, in which order things are told, one at a time, and how failures come back."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint.staging as staging_module
from checkpoint import CheckpointError, SingleProcess, find_resumable, open_checkpoint, save_checkpoint, scan, verify_checkpoint
from checkpoint.background import AsyncSaver, SaveEvent
from checkpoint.shards import DTYPE_TAGS, host_bytes, torch_dtype
from checkpoint.staging import ALIGNMENT, Staging
from qeffect_lm.contract.errors import StreamOrderError
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import ScriptedOps, on_ranks, whole
from tests.crashing import save_step, state
from tests.unit.engine_support import make, step
from tests.unit.test_engine_streams import drop_edges


def writer(root: Path, number: int, **kwargs: Any) -> Any:
    """What writes the copies of step ``number``."""
    return lambda tensors: save_checkpoint(root, number, tensors, {}, SingleProcess(), {}, **kwargs)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(host_bytes(tensor))


def test_the_source_may_be_overwritten_at_once(tmp_path: Path) -> None:
    """C6: the file has the values of the moment of the request, although the writer begins after they are gone."""
    gone = threading.Event()
    live = {"a": torch.randn(1000), "b": torch.randn(30, 7).to(torch.bfloat16)}
    before = {name: bits(tensor) for name, tensor in live.items()}
    saver = AsyncSaver(Staging())

    def write(tensors: list[LogicalTensor]) -> Path:
        assert gone.wait(20)
        return writer(tmp_path, 1)(tensors)

    saver.save(1, [whole(name, tensor) for name, tensor in live.items()], write)
    for tensor in live.values():
        tensor.zero_()
    gone.set()
    saver.wait()
    checkpoint = open_checkpoint(tmp_path / "step_00000001")
    assert {name: bits(checkpoint.read(name)) for name in live} == before and verify_checkpoint(checkpoint.path) == []


def test_every_kind_of_tensor_is_copied_bit_for_bit_into_memory_that_is_used_again() -> None:
    """All dtypes and patterns, 0-dim, empty and strided ones; the second save's copies lie where the first one's did."""
    items = []
    for name in DTYPE_TAGS:
        dtype = torch_dtype(name)
        patterns = torch.arange(256, dtype=torch.uint8).repeat(8)
        full = (patterns % 2 if dtype is torch.bool else patterns).view(dtype).reshape(16, -1)
        made = {"full": full, "scalar": full.reshape(-1)[3], "empty": torch.empty(0, 5, dtype=dtype), "columns": full[:, ::2]}
        items += [whole(f"{name}/{key}", value, Role.COUNTER) for key, value in made.items()]
    staging = Staging()
    staged = staging.stage(items)
    size, addresses = staging.nbytes, [one.tensor.data_ptr() for one in staged.tensors]
    assert staged.nbytes == sum(one.tensor.nbytes for one in items) <= size < staged.nbytes + ALIGNMENT * len(items)
    for source, copy in zip(items, staged.tensors, strict=True):
        assert (source.name, source.tensor.dtype, source.tensor.shape) == (copy.name, copy.tensor.dtype, copy.tensor.shape)
        assert bits(source.tensor) == bits(copy.tensor) and copy.tensor.is_contiguous()
        assert source.tensor.numel() == 0 or source.tensor.data_ptr() != copy.tensor.data_ptr()
    again = staging.stage(items)
    assert [one.tensor.data_ptr() for one in again.tensors] == addresses and staging.nbytes == size


class Slow:
    """Writers that wait until they may go on, and notice when two are at it."""

    def __init__(self, root: Path) -> None:
        self.root, self.go, self.at_once, self.most = root, threading.Event(), 0, 0

    def of(self, number: int) -> Any:
        def write(tensors: list[LogicalTensor]) -> Path:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            assert self.go.wait(20)
            path = writer(self.root, number)(tensors)
            self.at_once -= 1
            return path

        return write


def test_a_second_save_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    events: list[SaveEvent] = []
    slow, staging = Slow(tmp_path), Staging()
    saver = AsyncSaver(staging, events.append)
    live = torch.tensor([1.0])
    saver.save(1, [whole("w", live)], slow.of(1))
    live.fill_(2.0)
    second = threading.Thread(target=saver.save, args=(2, [whole("w", live)], slow.of(2)))
    second.start()
    time.sleep(0.2)
    assert second.is_alive() and slow.most == 1 and staging.nbytes == ALIGNMENT
    slow.go.set()
    second.join(20)
    saver.wait()
    assert slow.most == 1 and [open_checkpoint(one.path).read("w").item() for one in scan(tmp_path)] == [1.0, 2.0]
    assert [(one.what, one.step) for one in events] == [
        ("requested", 1), ("staged", 1), ("requested", 2), ("waiting", 2), ("durable", 1), ("staged", 2), ("durable", 2),
    ]  # fmt: skip
    waiting = str(events[3])
    assert waiting.startswith("checkpoint of step 2 waiting for that of step 1, which is still being written after 0.")
    assert "save less often (checkpoint.every) or to a faster disk" in waiting
    assert events[1].nbytes == 4 and events[4].nbytes == sum(f.stat().st_size for f in (tmp_path / "step_00000001").iterdir())
    assert events[5].seconds > 0.2 and events[6].seconds >= events[5].seconds


def test_a_failure_is_told_to_the_next_save_or_at_the_end_and_once(tmp_path: Path) -> None:
    events: list[SaveEvent] = []
    saver = AsyncSaver(Staging(), events.append)
    items = [whole("w", torch.ones(3))]
    writer(tmp_path, 1)(items)
    full = ScriptedOps(0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "write")
    saver.save(2, items, writer(tmp_path, 2, ops=full))
    for _ in range(200):
        if saver.failed:
            break
        time.sleep(0.01)
    assert saver.failed and events[-1].what == "failed" and "ENOSPC" in str(events[-1])
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: .*ENOSPC.*step_00000001 survives"):
        saver.save(3, items, writer(tmp_path, 3))
    assert not saver.failed and find_resumable(tmp_path) == tmp_path / "step_00000001"
    saver.save(3, items, writer(tmp_path, 3))
    saver.wait()
    assert find_resumable(tmp_path) == tmp_path / "step_00000003"

    def broken(tensors: list[LogicalTensor]) -> Path:
        raise MemoryError("none left")

    saver.save(4, items, broken)
    with pytest.raises(CheckpointError, match="the checkpoint of step 4 was not saved: MemoryError: none left"):
        saver.wait()
    saver.wait()


def test_nothing_waits_for_a_save_that_is_done(tmp_path: Path) -> None:
    """Although nobody has asked for its outcome yet: the events do not speak of a wait."""
    events: list[SaveEvent] = []
    saver = AsyncSaver(Staging(), events.append)
    for number in (1, 2):
        saver.save(number, [whole("w", torch.ones(3))], writer(tmp_path, number))
        for _ in range(4000):
            if not saver.busy:
                break
            time.sleep(0.005)
        assert not saver.busy
    saver.wait()
    assert [event.what for event in events] == ["requested", "staged", "durable"] * 2


def test_each_copy_is_waited_for_once_and_none_is_forgotten() -> None:
    """Two saves without a step between them: the optimizer waits for both, and the one after it for none."""
    copies, done = make("eager").engine.copies, []
    for number in (1, 2):
        with copies.until_update(lambda number=number: done.append(number)):
            pass
    for _ in range(2):
        copies.before_update()
        assert done == [1, 2]


def test_a_copy_that_fails_does_not_keep_the_optimizer_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that the writing thread makes: the step goes on, and the save is one that failed."""
    assembly = make("eager")
    step(assembly, 0)
    saver = AsyncSaver(Staging(assembly.engine.copies))
    real = staging_module._copy

    def fails(pairs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("no room")
        return real(pairs)

    monkeypatch.setattr(staging_module, "_copy", fails)
    saver.save(1, assembly.logical_tensors(), lambda _: Path())
    step(assembly, 1)
    with pytest.raises(CheckpointError, match="step 1 was not saved: MemoryError: no room"):
        saver.wait()


def test_without_a_thread_or_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails at once and is told as failed; nothing is left to wait for, and a later one goes through."""
    events: list[SaveEvent] = []
    saver = AsyncSaver(Staging(), events.append)
    items = [whole("w", torch.ones(3))]

    def none(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    for owner, name in ((threading.Thread, "start"), (Staging, "stage")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, none)
            with pytest.raises(CheckpointError, match="of step 1 was not saved: RuntimeError: can't start new thread"):
                saver.save(1, items, writer(tmp_path, 1))
        assert [event.what for event in events] == ["requested", "failed"] and not saver.busy and not saver.failed
        events.clear()
        saver.wait()
    saver.save(1, items, writer(tmp_path, 1))
    saver.wait()
    assert find_resumable(tmp_path) == tmp_path / "step_00000001"


def test_interrupted_while_the_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C: what is being written is waited for all the same."""
    real, saver = threading.Thread.start, AsyncSaver(Staging())

    def start(thread: threading.Thread) -> None:
        real(thread)
        if thread.name.startswith("checkpoint of"):
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    slowly = threading.Event()

    def write(tensors: list[LogicalTensor]) -> Path:
        slowly.wait(0.2)
        return writer(tmp_path, 1)(tensors)

    with pytest.raises(KeyboardInterrupt):
        saver.save(1, [whole("w", torch.ones(3))], write)
    saver.wait()
    assert find_resumable(tmp_path) == tmp_path / "step_00000001"


def test_news_that_cannot_be_told_are_not_a_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told(event: SaveEvent) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = AsyncSaver(Staging(), told)
    saver.save(1, [whole("w", torch.ones(1))], writer(tmp_path, 1))
    saver.wait()
    assert find_resumable(tmp_path) is not None and "cannot report that the checkpoint of step 1 durable" in caplog.text


def test_without_the_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "zeros", none)
    with pytest.raises(CheckpointError, match=r"need 64 B of host memory .*can't allocate.*checkpoint.async_save=false"):
        Staging().reserve([whole("w", torch.ones(3))])


def test_three_ranks_commit_in_the_background(tmp_path: Path) -> None:
    """One checkpoint of all ranks, from copies; a rank that fails fails all, each in its own thread, with one message."""

    def body(comm: Any) -> list[str]:
        saver, said = AsyncSaver(Staging()), []
        for number, failing in ((1, None), (2, 1), (3, None)):
            live = state(comm.rank, number)
            ops = ScriptedOps(0, only="fsync") if comm.rank == failing else None

            def write(tensors: list[LogicalTensor], number: int = number, ops: Any = ops) -> Path:
                return save_step(tmp_path, number, comm, 0, ops, tensors)

            saver.save(number, live, write)
            for item in live:
                item.tensor.zero_()
            try:
                saver.wait()
            except CheckpointError as error:
                said.append(str(error))
        return said

    said = on_ranks(3, body)
    assert len(said[0]) == 1 and said == [said[0]] * 3 and "rank 1: cannot write" in said[0][0]
    assert [one.step for one in scan(tmp_path)] == [1, 3]
    for one in scan(tmp_path):
        checkpoint = open_checkpoint(one.path)
        for rank in range(3):
            assert all(bits(checkpoint.read(item.name)) == bits(item.tensor) for item in state(rank, one.step))


COPY = "the copy for a checkpoint (read on stream 'saving')"
COPY_OF_PARAMETERS = "the copy of the parameters for a checkpoint (read on stream 'saving')"
EDGES = {  # the edge that is left out (its number among those with stream saving) → what the first refused work says
    0: f"{COPY} is not ordered after ",
    1: f"is not ordered after {COPY}",
    3: f"STEP (write on stream 'compute') is not ordered after {COPY_OF_PARAMETERS}",
}


@pytest.mark.parametrize("backend", ["eager", "host_replay"])
@pytest.mark.parametrize("left_out", [None, 0, 1, 3])
def test_every_edge_between_copies_and_steps_is_needed(backend: str, left_out: int | None) -> None:
    """I4, T4: trapped at the copy, or at the first work that would change what is copied. (Edge 2 repeats edge 0: between two
    steps nothing new is launched.)"""
    assembly = make(backend)
    step(assembly, 0)
    seen: list[tuple[str, str]] = []

    def drop(source: str, target: str, _: int) -> bool:
        if "saving" in (source, target):
            seen.append((source, target))
            return len(seen) - 1 == left_out
        return False

    drop_edges(assembly, drop)

    def copy_and_step() -> None:
        Staging(assembly.engine.copies).stage(assembly.logical_tensors()).complete()
        step(assembly, 1)

    if left_out is None:
        copy_and_step()
        assert seen == [("compute", "saving"), ("saving", "compute")] * 2
        return
    with pytest.raises(StreamOrderError) as caught:
        copy_and_step()
    assert EDGES[left_out] in str(caught.value)


@pytest.mark.parametrize("backend", ["eager", "host_replay"])
def test_a_step_runs_while_its_state_is_copied_and_its_optimizer_waits(backend: str) -> None:
    """Copies made as late as can be are those of the moment of the request; the step's result is what it always is."""
    alone, assembly = make(backend), make(backend)
    for one in (alone, assembly):
        step(one, 0)
    before = {item.name: bits(item.tensor) for item in assembly.logical_tensors()}
    staged = Staging(assembly.engine.copies).stage(assembly.logical_tensors())
    reached = threading.Event()
    wait = assembly.engine.copies.before_update

    def arrived() -> None:
        reached.set()
        wait()

    assembly.engine.copies.before_update = arrived  # type: ignore[method-assign]

    def late() -> None:
        assert reached.wait(20)
        time.sleep(0.1)
        staged.complete()

    thread = threading.Thread(target=late)
    thread.start()
    step(assembly, 1)
    thread.join()
    step(alone, 1)
    assert {item.name: bits(item.tensor) for item in staged.tensors} == before
    after = {item.name: bits(item.tensor) for item in assembly.logical_tensors()}
    assert after == {item.name: bits(item.tensor) for item in alone.logical_tensors()}
    moved = {name.partition("/")[0] for name in after if after[name] != before[name]}
    assert {"master", "moment1", "cached_weight", "amax_open", "scale"} <= moved and assembly.engine.copies.waited >= 0.1
