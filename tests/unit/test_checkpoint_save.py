"""Saving: bytes as they were, one owner per slice, all or nothing, and what stays afterwards."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpoint import (
    CheckpointError,
    SingleProcess,
    find_resumable,
    load_into,
    open_checkpoint,
    rewrite_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from checkpoint.shards import DTYPE_TAGS, torch_dtype
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.errors import QEffectError
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import Killed, ScriptedOps, on_ranks, whole


def save(root: Path, step: int, value: float = 1.0, **kwargs: Any) -> Path:
    tensors = [whole("param/w", torch.full((2, 3), value)), whole("scale/w", torch.tensor(value), Role.SCALE)]
    return save_checkpoint(root, step, tensors, {"value": value}, SingleProcess(), {}, **kwargs)


def steps_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != "latest")


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order, picked out of the storage by offset and strides."""
    if tensor.numel() == 0:
        return b""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage()).numpy()
    index = np.asarray(sum(i * s for i, s in zip(np.indices(tensor.shape), tensor.stride(), strict=True)))
    places = index.reshape(-1) + tensor.storage_offset()
    return bytes(storage.reshape(-1, tensor.element_size())[places].tobytes())


@pytest.mark.parametrize("name", DTYPE_TAGS)
def test_every_dtype_comes_back_byte_for_byte(tmp_path: Path, name: str) -> None:
    """C12: all bit patterns, NaN payloads and signed zeros included; 0-dim, empty and strided tensors."""
    dtype = torch_dtype(name)
    patterns = torch.arange(256, dtype=torch.uint8).repeat(8)
    if dtype is torch.bool:
        patterns = patterns % 2
    full = patterns.view(dtype).reshape(16, -1)
    live = {
        "full": full,
        "scalar": full.reshape(-1)[3].clone(),
        "empty": torch.empty(0, 5, dtype=dtype),
        "columns": full[:, ::2],
        "one": full[:1, 2:][:, ::5][:, :1],  # one element, with a stride that is not 1
    }
    path = save_checkpoint(tmp_path, 1, [whole(k, v) for k, v in live.items()], {}, SingleProcess(), {})
    checkpoint = open_checkpoint(path)
    assert checkpoint.verify() == []
    for key, value in live.items():
        back = checkpoint.read(key)
        assert back.dtype == dtype and back.shape == value.shape and raw(back) == raw(value)
    target = torch.zeros(2048, dtype=torch.uint8).view(dtype).reshape(full.shape)
    address = target.data_ptr()
    load_into(checkpoint, [whole("columns", target[:, ::2])], strict=False)
    assert target.data_ptr() == address and raw(target[:, ::2]) == raw(full[:, ::2])
    assert not any(raw(target[:, 1::2]))


def test_masters_and_moments_keep_their_own_dtypes(tmp_path: Path) -> None:
    """C12: FP32 masters with BF16 moments."""
    master, moment = torch.randn(4, 5), torch.randn(4, 5).to(torch.bfloat16)
    tensors = [whole("master/w", master, Role.MASTER), whole("moment/w", moment, Role.MOMENT)]
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, 1, tensors, {}, SingleProcess(), {}))
    assert checkpoint.read("master/w").dtype == torch.float32 and raw(checkpoint.read("master/w")) == raw(
        master
    )
    assert checkpoint.read("moment/w").dtype == torch.bfloat16 and raw(checkpoint.read("moment/w")) == raw(
        moment
    )
    wrong = [whole("moment/w", torch.zeros(4, 5), Role.MOMENT)]
    with pytest.raises(ResumeError, match=r"'moment/w': its dtype is bfloat16 .* and float32 in this run"):
        load_into(checkpoint, wrong)


def test_any_safetensors_reader_opens_a_shard(tmp_path: Path) -> None:
    tensors = [whole("b", torch.randn(3)), whole("a", torch.tensor([True])), whole('ü "\\', torch.ones(2))]
    path = save_checkpoint(tmp_path, 1, tensors, {}, SingleProcess(), {})
    loaded = load_file(path / "rank00000.safetensors")
    assert {name: raw(value) for name, value in loaded.items()} == {t.name: raw(t.tensor) for t in tensors}


@pytest.mark.parametrize("name", ["", "a\nb", "a\x1b[2J", "\ud800", "\u202e", "x" * 501])
def test_a_name_that_no_reader_takes_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="names have up to 500 characters, and each can be printed"):
        save_checkpoint(tmp_path, 1, [whole(name, torch.ones(2))], {}, SingleProcess(), {})
    assert steps_in(tmp_path) == []


def test_meta_comes_back_exactly(tmp_path: Path) -> None:
    class Kind(StrEnum):
        A = "a"

    meta = {"f": 0.1 + 0.2, "big": 2**130, "none": None, "t": (1, [True]), "k": Kind.A, "np": np.float64(0.3)}
    path = save_checkpoint(
        tmp_path, 1, [whole("w", torch.ones(1))], meta, SingleProcess(), {"pp": 0}, 0, {"x": 1}
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.meta == {
        "f": 0.1 + 0.2,
        "big": 2**130,
        "none": None,
        "t": [1, [True]],
        "k": "a",
        "np": 0.3,
    }
    assert checkpoint.rank_meta(0) == {"x": 1} and checkpoint.manifest.ranks[0].coords == {"pp": 0}
    assert checkpoint.step == 1 and checkpoint.manifest.versions["torch"].startswith(torch.__version__[:4])
    with pytest.raises(CheckpointError, match="none of them is rank 1"):
        checkpoint.rank_meta(1)


@pytest.mark.parametrize(
    ("meta", "words"),
    [({"a": {1: 2}}, r"meta\.a has the key 1"), ({"a": [torch.ones(1)]}, r"meta\.a\[0\] is a Tensor")],
)
def test_meta_that_json_would_change_is_refused(tmp_path: Path, meta: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        save_checkpoint(tmp_path, 1, [whole("w", torch.ones(1))], meta, SingleProcess(), {})
    assert steps_in(tmp_path) == []


# --- several ranks -----------------------------------------------------------------------------------------


def grid_state(dp: int, tp: int) -> list[LogicalTensor]:
    """A [7, 4] weight cut by rows on 3 tp ranks (3, 3, 1), replicated over dp; RNG per rank."""
    weight = torch.arange(28.0).reshape(7, 4)
    start, end = 3 * tp, min(3 * tp + 3, 7)
    cut = weight[start:end].clone()
    return [
        LogicalTensor("param/w", cut, Role.PARAM, (7, 4), (start, 0), ("tp", None), ("dp",)),
        whole("scale/w", torch.tensor(2.0), Role.SCALE),
        whole(f"rng/dp{dp}tp{tp}", torch.tensor([dp, tp]), Role.RNG, per_rank=True),
    ]


def save_grid(root: Path, alter: Any = None, ops: Any = None, step: int = 1) -> list[Any]:
    def body(comm: Any) -> Path:
        dp, tp = divmod(comm.rank, 3)
        tensors = grid_state(dp, tp)
        tensors = tensors if alter is None else alter(comm.rank, tensors)
        files = ops(comm.rank) if ops else None
        return save_checkpoint(
            root, step, tensors, {}, comm, {"dp": dp, "tp": tp}, 0, {"rank": comm.rank}, ops=files
        )

    return on_ranks(6, body)


def test_each_slice_has_one_owner_and_any_block_can_be_read(tmp_path: Path) -> None:
    """Saved on dp 2 × tp 3 with uneven rows, read whole and for tp 2."""
    assert save_grid(tmp_path) == [tmp_path / "step_00000001"] * 6
    checkpoint = open_checkpoint(tmp_path / "step_00000001")
    assert checkpoint.verify() == []
    assert [part.file for part in checkpoint.entry("param/w").slices] == [
        f"rank{r:05d}.safetensors" for r in range(3)
    ]
    assert len(checkpoint.entry("scale/w").slices) == 1 and checkpoint.entry("param/w").axes == ("tp", None)
    assert [checkpoint.rank_meta(r) for r in range(6)] == [{"rank": r} for r in range(6)]
    weight = torch.arange(28.0).reshape(7, 4)
    assert torch.equal(checkpoint.read("param/w"), weight)
    assert torch.equal(checkpoint.read("param/w", (2, 1), (3, 2)), weight[2:5, 1:3])
    assert torch.equal(checkpoint.read("param/w", (6, 3)), weight[6:, 3:])
    assert checkpoint.read("param/w", (2, 0), (0, 4)).shape == (0, 4)
    assert torch.equal(checkpoint.read("rng/dp1tp2"), torch.tensor([1, 2]))
    for start, rows in ((0, 4), (4, 3)):
        piece = LogicalTensor(
            "param/w", torch.zeros(rows, 4), Role.PARAM, (7, 4), (start, 0), ("tp", None), ("dp",)
        )
        load_into(checkpoint, [piece])
        assert torch.equal(piece.tensor, weight[start : start + rows])
    for bad in (((0,), (7,)), ((0, 0), (8, 4)), ((-1, 0), (1, 4))):
        with pytest.raises(CheckpointError, match="'param/w'"):
            checkpoint.read("param/w", *bad)
    with pytest.raises(CheckpointError, match="no tensor 'param/v'; the nearest name is 'param/w'"):
        checkpoint.read("param/v")


def _drop_rows(rank: int, tensors: list[LogicalTensor]) -> list[LogicalTensor]:
    return tensors[1:] if rank == 1 else tensors


def _write_twice(rank: int, tensors: list[LogicalTensor]) -> list[LogicalTensor]:
    return [*tensors[1:], replace(tensors[0], replicated=())] if rank == 5 else tensors


def _other_dtype(rank: int, tensors: list[LogicalTensor]) -> list[LogicalTensor]:
    return (
        [*tensors[:1], whole("scale/w", torch.tensor(2, dtype=torch.int64), Role.SCALE)]
        if rank == 4
        else tensors
    )


def _orphan(rank: int, tensors: list[LogicalTensor]) -> list[LogicalTensor]:
    return [*tensors, whole("bias", torch.ones(2))] if rank == 4 else tensors


def _outside(rank: int, tensors: list[LogicalTensor]) -> list[LogicalTensor]:
    bad = LogicalTensor("bias", torch.ones(3), Role.PARAM, (4,), (2,), (None,))
    return [*tensors, bad] if rank == 2 else tensors


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (_drop_rows, "'param/w' is not written exactly once: 12 of 28 elements are in no slice"),
        (_write_twice, r"'param/w' is not written exactly once: rank \d's slice .* overlap"),
        (_other_dtype, "'scale/w': dtype is 'float32' on rank 0 and 'int64' on rank 4"),
        (_orphan, "'bias' is held by rank 4 as a replica, but no rank owns it"),
        (_outside, r"rank 2: tensor 'bias': its piece \[2:5\] does not fit"),
    ],
)
def test_a_state_that_is_not_whole_is_never_committed(tmp_path: Path, alter: Any, words: str) -> None:
    errors = save_grid(tmp_path, alter)
    assert len({str(error) for error in errors}) == 1 and isinstance(errors[0], QEffectError)
    with pytest.raises(CheckpointError, match=words):
        raise errors[0]
    assert steps_in(tmp_path) == []


# --- failing and dying -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "ENOSPC"), (errno.EIO, "EIO"), (errno.EACCES, "EACCES")]
)
@pytest.mark.parametrize(
    ("rank", "only", "at"), [(0, "write", 1), (2, "write", 1), (1, "fsync", 0), (2, "create", 0)]
)
def test_a_failing_rank_fails_all_and_the_previous_checkpoint_survives(
    tmp_path: Path, code: int, words: str, rank: int, only: str, at: int
) -> None:
    """C7: every rank raises one message that names rank, path, cause and the survivor; nothing is left
    behind.
    """
    save_grid(tmp_path, step=90)
    before = (tmp_path / "latest").read_bytes()
    error = OSError(code, os.strerror(code))
    errors = save_grid(tmp_path, ops=lambda r: ScriptedOps(at, error, only) if r == rank else None, step=100)
    message = str(errors[0])
    assert [str(other) for other in errors] == [message] * 6
    assert all(isinstance(other, CheckpointError) for other in errors)
    assert f"rank {rank}: cannot write {tmp_path}/.tmp-step_00000100/rank0000{rank}.safetensors" in message
    assert words in message and f"previous checkpoint {tmp_path}/step_00000090 survives" in message
    assert steps_in(tmp_path) == ["step_00000090"] and (tmp_path / "latest").read_bytes() == before
    assert verify_checkpoint(tmp_path / "step_00000090") == []
    assert save_grid(tmp_path, step=100) == [tmp_path / "step_00000100"] * 6


def test_an_exception_that_is_no_oserror_does_not_hang_the_others(tmp_path: Path) -> None:
    errors = save_grid(
        tmp_path, ops=lambda r: ScriptedOps(0, MemoryError("no host memory")) if r == 3 else None
    )
    assert all("rank 3: MemoryError: no host memory" in str(error) for error in errors)
    assert "no earlier checkpoint" in str(errors[0])


def operations(tmp_path: Path) -> list[tuple[str, str]]:
    """The disk operations of a third save that keeps two, in order."""
    save(tmp_path / "base", 1)
    save(tmp_path / "base", 2)
    root = shutil.copytree(tmp_path / "base", tmp_path / "count")
    ops = ScriptedOps()
    save(root, 3, ops=ops, keep=2)
    return ops.log


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    """Shards, then manifest, then directory, then rename, then parent, then latest, then retention."""
    log = operations(tmp_path)
    marks = [entry for entry in log if entry[0] not in ("write", "create")]
    assert marks == [
        ("mkdir", ".tmp-step_00000003"),
        ("fsync", "rank00000.safetensors"),
        ("fsync", "manifest.json"),
        ("fsync_dir", ".tmp-step_00000003"),
        ("rename", "step_00000003"),
        ("fsync_dir", "count"),
        ("fsync", ".tmp-latest"),
        ("rename", "latest"),
        ("fsync_dir", "count"),
        ("rename", ".tmp-delete-step_00000001"),
        ("fsync_dir", "count"),
        ("unlink", "manifest.json"),
        ("unlink", "rank00000.safetensors"),
        ("rmdir", ".tmp-delete-step_00000001"),
    ]


def test_failing_at_any_operation_gives_an_error_or_a_saved_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C7: before the rename all is as it was; between rename and `latest` the message says what is there."""
    log = operations(tmp_path)
    renamed, published = log.index(("rename", "step_00000003")), log.index(("rename", "latest"))
    for k in range(len(log)):
        root = shutil.copytree(tmp_path / "base", tmp_path / f"fail{k}")
        caplog.clear()
        if k > published + 1:  # only retention is left: the run goes on and says so
            save(root, 3, keep=2, ops=ScriptedOps(k))
            assert "cannot remove" in caplog.text
            assert (root / "latest").read_text() == "step_00000003\n"
            continue
        with pytest.raises(CheckpointError) as caught:
            save(root, 3, keep=2, ops=ScriptedOps(k))
        assert "rank 0: cannot " in str(caught.value) and str(root) in str(caught.value)
        if k <= renamed:
            assert f"{root}/step_00000002 survives and `latest` is unchanged" in str(caught.value)
            assert steps_in(root) == ["step_00000001", "step_00000002"]
        else:
            assert "step_00000003 itself is complete" in str(caught.value)
            assert verify_checkpoint(root / "step_00000003") == [] and (root / "step_00000001").exists()
        if k <= published:
            assert (root / "latest").read_text() == "step_00000002\n"


def test_an_unusable_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=f"rank 0: cannot create {tmp_path}/file"):
        save(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="must not be negative"):
        save(tmp_path / "x", -1)


def test_a_shard_that_rank_0_cannot_see_is_noticed(tmp_path: Path) -> None:
    """A folder that is not shared between hosts: another rank's file is not there when rank 0 looks."""

    class Elsewhere(ScriptedOps):
        def create(self, path: Path) -> Any:
            (tmp_path / "other_host").mkdir(exist_ok=True)
            return super().create(tmp_path / "other_host" / path.name)

    errors = save_grid(tmp_path / "root", ops=lambda r: Elsewhere() if r == 1 else None)
    assert all("written by rank 1" in str(e) and "must share one checkpoint folder" in str(e) for e in errors)

    class Behind(ScriptedOps):
        def fsync(self, file: Any) -> None:
            super().fsync(file)
            os.truncate(file.name, 8)  # as rank 0's host sees it yet

    errors = save_grid(tmp_path / "behind", ops=lambda r: Behind() if r == 1 else None)
    assert all("written by rank 1" in str(e) and "is 8 bytes long as rank 0 sees it" in str(e) for e in errors)


def test_a_complete_checkpoint_is_never_overwritten_a_partial_one_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, 5, value=1.0)
    with pytest.raises(CheckpointError, match="exists already and is complete"):
        save(tmp_path, 5, value=2.0)
    assert open_checkpoint(path).meta == {"value": 1.0}
    (path / "manifest.json").unlink()
    save(tmp_path, 5, value=3.0)
    assert open_checkpoint(path).meta == {"value": 3.0} and "aside" in caplog.text
    assert steps_in(tmp_path) == ["step_00000005", "step_00000005.partial-1"]
    assert (tmp_path / "step_00000005.partial-1" / "rank00000.safetensors").exists()


# --- which one to resume, which ones to keep ---------------------------------------------------------------


def make_partial(root: Path, step: int) -> Path:
    path = save(root, step)
    (path / "manifest.json").unlink()
    return path


def test_retention_counts_complete_checkpoints_in_numeric_order(tmp_path: Path) -> None:
    """C9: steps 9, 10, 100 and a partial 110, keep 2: 10 and 100 stay, the partial one and strangers too."""
    partial = make_partial(tmp_path, 110)
    save(tmp_path, 9)
    save(tmp_path, 10)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_7").mkdir()
    (tmp_path / ".tmp-step_00000099").mkdir()
    (tmp_path / ".tmp-mine").mkdir()
    save(tmp_path, 100, keep=2)
    assert steps_in(tmp_path) == [
        ".tmp-mine", "notes", "step_00000010", "step_00000100", "step_00000110", "step_7",
    ]  # fmt: skip
    assert (partial / "rank00000.safetensors").exists()
    assert find_resumable(tmp_path) == tmp_path / "step_00000100"


def test_keep_zero_keeps_all_and_what_was_just_saved_always_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3, 50):
        save(tmp_path, step)
    assert len(steps_in(tmp_path)) == 4
    save(tmp_path, 10, keep=1)  # after going back to an older state, say
    assert steps_in(tmp_path) == ["step_00000010", "step_00000050"]
    assert (tmp_path / "latest").read_text() == "step_00000010\n"


@pytest.mark.parametrize(("step", "keep"), [(-1, 0), (1, -1)])
def test_steps_and_counts_are_not_negative(tmp_path: Path, step: int, keep: int) -> None:
    with pytest.raises(CheckpointError, match="must not be negative"):
        save(tmp_path, step, keep=keep)


def test_a_linked_checkpoint_is_never_removed(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "elsewhere", 1)
    root = tmp_path / "root"
    root.mkdir()
    (root / "step_00000001").symlink_to(elsewhere)
    for step in (2, 3):
        save(root, step, keep=1)
    assert steps_in(root) == ["step_00000001", "step_00000003"] and verify_checkpoint(elsewhere) == []


def test_nothing_to_resume_is_none_and_partial_only_is_an_error(tmp_path: Path) -> None:
    """C8: only partial checkpoints: an error that lists them, never a silent fresh start."""
    assert find_resumable(tmp_path / "absent") is None
    (tmp_path / "notes").mkdir()
    assert find_resumable(tmp_path) is None
    make_partial(tmp_path, 10)
    cut = save(tmp_path, 20) / "rank00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (save(tmp_path, 30) / "rank00000.safetensors").unlink()
    with pytest.raises(ResumeError) as caught:
        find_resumable(tmp_path)
    message = str(caught.value)
    assert "step_00000010: " in message and "has no manifest.json" in message
    assert f"step_00000020: {cut} has" in message and "step_00000030: cannot read" in message
    assert caught.value.exit_code == 1


def test_resume_goes_by_number_and_warns_about_newer_partial_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (9, 100, 10):
        save(tmp_path, step)
    make_partial(tmp_path, 110)
    (tmp_path / "latest").write_text("step_00000009\n")
    assert find_resumable(tmp_path) == tmp_path / "step_00000100"
    assert "step_00000110" in caplog.text
    (tmp_path / "latest").unlink()
    assert find_resumable(tmp_path) == tmp_path / "step_00000100"


def test_latest_without_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    """C8: `latest` proves that there was one; starting afresh would hide its loss."""
    (tmp_path / "latest").write_text("step_00000010\n")
    with pytest.raises(ResumeError, match="names step_00000010, which is not there"):
        find_resumable(tmp_path)


def test_an_interrupted_first_save_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(Killed):
        save(tmp_path, 10, ops=ScriptedOps(1, Killed(), "write"))
    assert steps_in(tmp_path) == [".tmp-step_00000010"]
    assert find_resumable(tmp_path) is None and "interrupted save" in caplog.text
    save(tmp_path, 10)
    assert steps_in(tmp_path) == ["step_00000010"]


def test_rewriting_changes_what_was_asked_and_nothing_else(tmp_path: Path) -> None:
    save_grid(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a" / "step_00000001")
    path = rewrite_checkpoint(source, tmp_path / "b", {"scale/w": torch.tensor(4.0)})
    copy = open_checkpoint(path)
    assert copy.verify() == [] and copy.manifest.ranks == source.manifest.ranks and copy.meta == source.meta
    assert copy.read("scale/w").item() == 4.0
    for name in source.names():
        assert copy.entry(name).model_dump(exclude={"slices"}) == source.entry(name).model_dump(
            exclude={"slices"}
        )
        assert name == "scale/w" or raw(copy.read(name)) == raw(source.read(name))
    with pytest.raises(CheckpointError, match="no tensor 'scale/v'"):
        rewrite_checkpoint(source, tmp_path / "c", {"scale/v": torch.tensor(4.0)})
    with pytest.raises(CheckpointError, match="'scale/w' is float32"):
        rewrite_checkpoint(source, tmp_path / "c", {"scale/w": torch.tensor(4)})


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [save(tmp_path / name, 1) for name in "ab"]
    for file in sorted(os.listdir(paths[0])):
        assert (paths[0] / file).read_bytes() == (paths[1] / file).read_bytes()
    assert json.loads((paths[0] / "manifest.json").read_bytes())["format"] == 2


def test_no_part_of_a_save_is_a_pickle(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for file in path.iterdir():
        with pytest.raises((pickle.UnpicklingError, ValueError, KeyError, EOFError, IndexError)):
            pickle.loads(file.read_bytes())


def test_documents_of_ranks(tmp_path: Path) -> None:
    """Text beside the shards: each rank's own, sealed like a shard, taken over by a rewrite; equal text, equal bytes."""

    def body(comm: Any) -> Path:
        documents = {"graphs": f"of rank {comm.rank}\nüé\n"} if comm.rank < 2 else None
        tensors = [whole("w", torch.ones(2))] if comm.rank == 0 else []
        return save_checkpoint(tmp_path / "root", 1, tensors, {}, comm, {"pp": comm.rank}, documents=documents)

    path = on_ranks(3, body)[0]
    checkpoint = open_checkpoint(path)
    assert [checkpoint.document(rank, "graphs") for rank in range(3)] == ["of rank 0\nüé\n", "of rank 1\nüé\n", None]
    assert checkpoint.verify() == [] and checkpoint.document(0, "other") is None
    copy = open_checkpoint(rewrite_checkpoint(checkpoint, tmp_path / "copy", {"w": torch.zeros(2)}))
    assert copy.document(1, "graphs") == "of rank 1\nüé\n"
    file = "rank00001.graphs.txt.gz"
    assert copy.manifest.files[file] == checkpoint.manifest.files[file]
    (path / file).write_bytes((copy.path / "rank00000.graphs.txt.gz").read_bytes())
    with pytest.raises(CheckpointError, match=rf"{file} is damaged"):
        checkpoint.document(1, "graphs")
    assert {problem.file for problem in checkpoint.verify()} == {file}
