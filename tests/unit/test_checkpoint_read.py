"""Reading: every damaged byte is noticed and named, nothing is unpickled, nothing is half loaded."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import (
    FORMAT,
    CheckpointError,
    SingleProcess,
    compare,
    load_into,
    open_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from checkpoint.manifest import read_manifest
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.state import LogicalTensor, Role
from tests.checkpoint_support import GOLDEN_DTYPES, GOLDEN_META, golden_state, on_ranks, whole, write_golden

GOLDEN = {number: Path(__file__).parent.parent / "golden" / f"format{number}" for number in (1, 2)}
EVERY_FORMAT = pytest.mark.parametrize("number", GOLDEN)


def small(rank: int = 0) -> list[LogicalTensor]:
    """Two tensors of rank ``rank`` of two; both ranks' files have the same length."""
    return [
        whole(f"param/layers.{rank}.w", torch.arange(4.0) + rank),
        whole(f"scale/layers.{rank}.w", torch.tensor(2.0 + rank), Role.SCALE),
    ]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    results = on_ranks(
        2, lambda comm: save_checkpoint(tmp_path / "root", 7, small(comm.rank), {}, comm, {"pp": comm.rank})
    )
    assert isinstance(results[0], Path)
    return results[0]


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest and give it a digest that fits, as somebody with bad intent would."""
    body = json.loads((path / "manifest.json").read_bytes())
    del body["digest"]
    change(body)
    rest = json.dumps(body, indent=1).encode()[2:] + b"\n"
    first = b'{"digest": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n'
    (path / "manifest.json").write_bytes(first + rest)


# --- damage ------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_shard_is_named(saved: Path) -> None:
    """C10: in data, the file and the tensor that owns the byte; in the header, the file and the nearest
    tensor.
    """
    file = saved / "rank00001.safetensors"
    good = file.read_bytes()
    checkpoint = open_checkpoint(saved)
    owners = {}
    for name in ("param/layers.1.w", "scale/layers.1.w"):
        part = checkpoint.entry(name).slices[0]
        owners |= dict.fromkeys(range(part.offset, part.offset + checkpoint.read(name).nbytes), name)
    assert len(good) == max(owners) + 1
    text = good.decode("latin1")
    for name in checkpoint.names():
        at = text.find(f'"{name}":')
        owners |= dict.fromkeys(range(at, text.find("}", at) + 1), name) if at >= 0 else {}
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        problems = checkpoint.verify()
        assert [problem.file for problem in problems] == [file.name], at
        assert problems[0].tensor == owners.get(at, "param/layers.1.w"), at
    file.write_bytes(good)
    assert checkpoint.verify() == []


def test_every_flipped_byte_of_the_manifest_is_noticed(saved: Path) -> None:
    """C10: whitespace and the digest itself included."""
    file = saved / "manifest.json"
    good = file.read_bytes()
    hexadecimal = range(good.index(b': "') + 3, good.index(b"\n") - 2)
    flips = [(at, 1 << at % 8) for at in range(len(good))] + [(at, 0x20) for at in hexadecimal]  # a → A
    for at, flip in flips:
        file.write_bytes(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])
        with pytest.raises(CheckpointError, match="manifest.json"):
            read_manifest(saved)
    assert [problem.file for problem in verify_checkpoint(saved)] == ["manifest.json"]
    file.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match="manifest.json is damaged"):
        open_checkpoint(saved)


def test_a_cut_a_longer_and_a_swapped_shard_are_named(saved: Path, tmp_path: Path) -> None:
    """C10: truncate, append a byte, swap two shards, remove one."""
    checkpoint = open_checkpoint(saved)
    first, second = saved / "rank00000.safetensors", saved / "rank00001.safetensors"
    good, other = first.read_bytes(), second.read_bytes()
    assert len(good) == len(other)

    first.write_bytes(good[:-1])
    problems = checkpoint.verify()
    assert all(problem.file == first.name for problem in problems)
    assert (problems[0].tensor, problems[-1].message) == ("scale/layers.0.w", "its slice [] is cut off")
    assert f"has {len(good) - 1} bytes instead of {len(good)}" in problems[0].message
    with pytest.raises(CheckpointError, match="rank00000.safetensors is damaged: .*'scale/layers.0.w'"):
        checkpoint.read("scale/layers.0.w")
    assert torch.equal(checkpoint.read("param/layers.0.w"), torch.arange(4.0))

    first.write_bytes(good + b"\0")
    (problem,) = checkpoint.verify()
    assert (problem.file, problem.tensor) == (first.name, "scale/layers.0.w") and "bytes instead" in str(
        problem
    )

    first.write_bytes(other)
    second.write_bytes(good)
    problems = checkpoint.verify()
    assert "rank00000.safetensors: tensor 'param/layers.0.w': the file holds the bytes of rank00001" in str(
        problems[0]
    )
    assert {(p.file, p.tensor) for p in problems} == {
        (f.name, f"{kind}/layers.{i}.w") for i, f in enumerate((first, second)) for kind in ("param", "scale")
    }
    with pytest.raises(CheckpointError, match="'param/layers.1.w'"):
        checkpoint.read("param/layers.1.w")

    first.write_bytes(good)
    second.unlink()
    (problem,) = checkpoint.verify()
    assert str(problem) == "rank00001.safetensors: tensor 'param/layers.1.w': the file is missing"
    with pytest.raises(CheckpointError, match="cannot open .*rank00001.safetensors"):
        checkpoint.read("scale/layers.1.w")


def test_a_manifest_replaced_after_opening_is_noticed(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    reseal(saved, lambda body: body["meta"].update(x=float("nan")))
    assert [problem.message for problem in checkpoint.verify()] == [
        "was replaced since the checkpoint was opened"
    ]
    assert open_checkpoint(saved).verify() == []


# --- what a manifest may say -------------------------------------------------------------------------------


def _escape(body: dict[str, Any]) -> None:
    body["files"]["../outside.safetensors"] = body["files"]["rank00000.safetensors"]


def _pickle(body: dict[str, Any]) -> None:
    body["tensors"]["param/layers.0.w"]["slices"][0]["file"] = "weights.pt"


def _gap(body: dict[str, Any]) -> None:
    body["files"]["rank00000.safetensors"]["hashed"] -= 8


def _longer(body: dict[str, Any]) -> None:
    body["files"]["rank00000.safetensors"]["size"] += 8


def _shared(body: dict[str, Any]) -> None:
    """Two tensors of the same bytes: a small file could stand for any amount of memory."""
    body["tensors"]["again"] = body["tensors"]["param/layers.0.w"]


def _unhashed(body: dict[str, Any]) -> None:
    del body["files"]["rank00000.safetensors"]["hashed"]


def _hole(body: dict[str, Any]) -> None:
    body["tensors"]["param/layers.0.w"]["shape"] = [5]


def _twice(body: dict[str, Any]) -> None:
    body["tensors"]["param/layers.0.w"]["slices"] *= 2


def _beyond(body: dict[str, Any]) -> None:
    body["tensors"]["param/layers.0.w"]["slices"][0]["offset"] = 10**6


def _unlisted(body: dict[str, Any]) -> None:
    del body["files"]["rank00001.safetensors"]


def _kind(body: dict[str, Any]) -> None:
    body["tensors"]["param/layers.0.w"]["dtype"] = "load"  # an attribute of torch that is no dtype


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_escape, r"files\.\.\./outside"),
        (_pickle, r"slices\.0\.file: .*pattern"),
        (_gap, "'param/layers.0.w' begins at byte 184 of rank00000.safetensors, and what is before it ends at 176"),
        (_longer, "rank00000.safetensors has 212 bytes, and header and tensors end at 204"),
        (_shared, "'param/layers.0.w' begins at byte 184 of rank00000.safetensors, and what is before it ends at 200"),
        (_unhashed, "format 2 needs `hashed`"),
        (_hole, "1 of 5 elements are in no slice"),
        (_twice, "overlap"),
        (_beyond, "reaches beyond the end of rank00000.safetensors"),
        (_unlisted, "`files` does not list"),
        (_kind, "unknown dtype 'load'"),
        (lambda body: body.update(step=-1), "step"),
        (lambda body: body.update(more=1), "more: Extra inputs"),
        (lambda body: body.update(format=0), "unknown format 0"),
        (lambda body: body["tensors"]["param/layers.0.w"].update(role="wish"), "role"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    reseal(saved, change)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(saved)


def test_a_newer_format_is_refused_by_its_number(saved: Path) -> None:
    reseal(saved, lambda body: body.update(format=3, novelty={}))
    with pytest.raises(CheckpointError, match="has format 3; .* up to format 2: update qeffect-lm"):
        open_checkpoint(saved)


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "step_00000001")
    with pytest.raises(CheckpointError, match="has no manifest.json"):
        open_checkpoint(tmp_path)
    for content in (b"", b"[]", b"\xff\xfe", b"{}", b'"x"'):
        (tmp_path / "manifest.json").write_bytes(content)
        with pytest.raises(CheckpointError, match="manifest.json is damaged"):
            open_checkpoint(tmp_path)


class _Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def test_a_pickle_is_never_opened(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: a pickle beside the shards, or in the place of one: neither is unpickled."""
    bomb = pickle.dumps(_Bomb(str(tmp_path / "exploded")))
    for name in ("rng.pkl", "model.pt", "latest", "extra.safetensors"):
        (saved / name).write_bytes(bomb)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was unpickled")

    for module, function in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, function, refuse)
    checkpoint = open_checkpoint(saved)
    assert checkpoint.verify() == [] and compare(checkpoint, checkpoint).same
    load_into(checkpoint, [*small(0), *small(1)])
    (saved / "rank00000.safetensors").write_bytes(bomb)
    assert {problem.file for problem in checkpoint.verify()} == {"rank00000.safetensors"}
    with pytest.raises(ResumeError, match="rank00000.safetensors"):
        load_into(checkpoint, [*small(0), *small(1)])
    assert not (tmp_path / "exploded").exists()


# --- loading into live storages ----------------------------------------------------------------------------


def zeroed(tensors: list[LogicalTensor]) -> list[LogicalTensor]:
    for item in tensors:
        item.tensor.zero_()
    return tensors


def assert_untouched(tensors: list[LogicalTensor]) -> None:
    assert not any(bool(item.tensor.any()) for item in tensors)


def test_loading_writes_into_the_same_storages(saved: Path) -> None:
    live = zeroed([*small(0), *small(1)])
    parameter = torch.nn.Parameter(torch.zeros(4))
    live[0] = replace(live[0], tensor=parameter)
    addresses = [item.tensor.data_ptr() for item in live]
    load_into(open_checkpoint(saved), live)
    assert [item.tensor.data_ptr() for item in live] == addresses and parameter.requires_grad
    for item, wanted in zip(live, [*small(0), *small(1)], strict=True):
        assert torch.equal(item.tensor, wanted.tensor)


def test_a_missing_history_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    """S7: one amax history is not in the checkpoint: never defaulted, and the tensors before it stay as they
    were.
    """
    names = [f"history/layers.{i}.attention.qkv.input" for i in range(3)]
    histories = [whole(name, torch.full((16,), 2.0), Role.AMAX_HISTORY) for name in names]
    kept = [item for item in histories if item.name != names[1]]
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, 1, kept, {}, SingleProcess(), {}))
    zeroed(histories)
    with pytest.raises(
        ResumeError, match=r"'history/layers.1.attention.qkv.input' \(amax_history\) is needed"
    ):
        load_into(checkpoint, histories, strict=False)
    assert_untouched(histories)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (
            whole("scale/layers.1.w", torch.zeros(()), Role.MOMENT),
            "its role is scale in .* and moment in this run",
        ),
        (
            whole("scale/layers.1.w", torch.zeros(1), Role.SCALE),
            r"its shape is \[\] in .* and \[1\] in this run",
        ),
        (
            whole("scale/layers.1.w", torch.zeros((), dtype=torch.float64), Role.SCALE),
            "its dtype is float32 in .* and float64 in this run",
        ),
        (whole("scale/layers.2.w", torch.zeros(()), Role.SCALE), "'scale/layers.2.w' .scale. is needed"),
        (
            LogicalTensor("param/layers.1.w", torch.zeros(2), Role.PARAM, (4,), (3,), (None,)),
            r"'param/layers.1.w' has the shape \[4\]; start \[3\] with extent \[2\] lies outside",
        ),
    ],
)
def test_each_disagreement_is_named_before_the_first_write(
    saved: Path, last: LogicalTensor, words: str
) -> None:
    live = [*zeroed([*small(0), *small(1)[:1]]), last]
    with pytest.raises(ResumeError, match=words):
        load_into(open_checkpoint(saved), live)
    assert_untouched(live)


def test_damage_is_found_before_the_first_write(saved: Path) -> None:
    file = saved / "rank00001.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    live = zeroed([*small(0), *small(1)])
    with pytest.raises(ResumeError, match="rank00001.safetensors is damaged: .*'scale/layers.1.w'"):
        load_into(open_checkpoint(saved), live)
    assert_untouched(live)


def test_extras_of_a_role_are_refused_when_strict(saved: Path) -> None:
    live = zeroed([small(0)[0], *small(1)])  # all of the role param, one of the two of the role scale
    with pytest.raises(ResumeError, match=r"'scale/layers.0.w' \(scale\) is in .* has no place"):
        load_into(open_checkpoint(saved), [live[0], live[1], live[2]])
    assert_untouched(live)
    load_into(open_checkpoint(saved), [live[0], live[1]])  # no tensor of the role scale is asked for at all
    load_into(open_checkpoint(saved), live, strict=False)
    assert torch.equal(live[2].tensor, small(1)[1].tensor)


def test_ranks_load_their_parts_together_or_not_at_all(saved: Path) -> None:
    """Each stage holds its own layers: extras are judged over all ranks, and one rank's failure stops all."""
    checkpoint = open_checkpoint(saved)
    live = [zeroed(small(0)), zeroed(small(1))]
    assert on_ranks(2, lambda comm: load_into(checkpoint, live[comm.rank], comm=comm)) == [None, None]
    assert all(
        torch.equal(a.tensor, b.tensor) for r in (0, 1) for a, b in zip(live[r], small(r), strict=True)
    )

    live = [zeroed(small(0)), zeroed(small(5))]
    errors = on_ranks(2, lambda comm: load_into(checkpoint, live[comm.rank], comm=comm))
    assert [type(error) for error in errors] == [ResumeError] * 2 and str(errors[0]) == str(errors[1])
    assert "rank 1: tensor 'param/layers.5.w' (param) is needed" in str(errors[0])
    assert_untouched([*live[0], *live[1]])


# --- the golden checkpoint ---------------------------------------------------------------------------------


@EVERY_FORMAT
def test_the_golden_checkpoint_stays_readable(number: int) -> None:
    """Written by the first version of each format, by two ranks, one tensor cut unevenly; every dtype, 0-dim, empty, NaN,
    -0.0.
    """
    folder = GOLDEN[number] / "step_00000003"
    checkpoint = open_checkpoint(folder)
    assert checkpoint.manifest.format == number and checkpoint.step == 3 and checkpoint.meta == GOLDEN_META
    assert checkpoint.verify() == [] and [checkpoint.rank_meta(r) for r in (0, 1)] == [
        {"draws": 0},
        {"draws": 1},
    ]
    weight = torch.arange(15, dtype=torch.float32).reshape(5, 3) / 7
    assert torch.equal(checkpoint.read("param/layers.0.attention.qkv.weight"), weight)
    assert torch.equal(
        checkpoint.read("moment/layers.0.attention.qkv.weight", (2, 1), (2, 2)), -weight[2:4, 1:]
    )
    assert checkpoint.read("special").view(torch.int32).tolist() == [0x7FC00001, -0x80000000]
    assert checkpoint.read("history/empty").shape == (0, 16) and checkpoint.read("rng/rank1").tolist()[0] == 1
    for i, name in enumerate(GOLDEN_DTYPES):
        back = checkpoint.read(f"kinds/{name}")
        assert str(back.dtype) == f"torch.{name}"
        expected = [float(bool(n + i)) if name == "bool" else float(n + i) for n in range(6)]
        if name == "float8_e5m2":
            expected = [{9: 8.0, 11: 12.0, 13: 12.0, 15: 16.0}.get(int(x), x) for x in expected]
        assert back.to(torch.float64).reshape(-1).tolist() == expected, name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20_000


@EVERY_FORMAT
def test_damage_of_the_golden_checkpoint_is_named(tmp_path: Path, number: int) -> None:
    """Whatever a format's digests are of: a byte of the header, of a slice, after the end."""
    folder = shutil.copytree(GOLDEN[number], tmp_path / "copy") / "step_00000003"
    file = folder / "rank00001.safetensors"
    good = file.read_bytes()
    for content, words in (
        (good.replace(b"rng/rank1", b"rng/rank2"), "'rng/rank1': its entry in the file's header is damaged"),
        (good[:-1] + b"\x7f", "'rng/rank1': the bytes of its slice [0:8] do not match"),
        (good + b"\0", "'rng/rank1': has 345 bytes instead of 344"),
    ):
        file.write_bytes(content)
        (problem,) = open_checkpoint(folder).verify()
        assert words in str(problem)


@EVERY_FORMAT
def test_what_is_written_today_equals_the_golden_checkpoint(tmp_path: Path, number: int) -> None:
    assert isinstance(write_golden(tmp_path)[0], Path)
    golden, written = (open_checkpoint(root / "step_00000003") for root in (GOLDEN[number], tmp_path))
    result = compare(golden, written, None)
    if number == FORMAT:  # nor did the format itself change meanwhile
        assert written.manifest.files == golden.manifest.files and written.manifest.tensors == golden.manifest.tensors
    assert result.same and len(result.equal) == len({t.name for r in (0, 1) for t in golden_state(r)})


@EVERY_FORMAT
def test_the_golden_checkpoint_loads_on_one_rank(tmp_path: Path, number: int) -> None:
    copied = shutil.copytree(GOLDEN[number], tmp_path / "copy") / "step_00000003"
    live = torch.zeros(5, 3)
    item = whole("param/layers.0.attention.qkv.weight", live)
    load_into(open_checkpoint(copied), [item])
    assert torch.equal(live, torch.arange(15, dtype=torch.float32).reshape(5, 3) / 7)
