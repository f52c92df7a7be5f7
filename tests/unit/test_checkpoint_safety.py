"""What a checkpoint of unknown origin may make a reader do: each bound by itself (the fuzz tries them together)."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import (
    CheckpointError,
    SingleProcess,
    compare,
    digests,
    find_resumable,
    open_checkpoint,
    resolve,
    save_checkpoint,
)
from checkpoint import layout as geometry
from checkpoint import manifest as manifests
from checkpoint.compare import META_MOST
from checkpoint.layout import Box, natural_key, tiling_fault
from checkpoint.manifest import DEPTH_MOST, incomplete_because, plain_json, read_manifest
from checkpoint.reader import unpacked
from checkpoint.retention import latest_name
from checkpoint.saved_run import check_saved_run
from qeffect_lm.contract.errors import ResumeError
from qeffect_lm.errors import QEffectError, shown
from qeffect_lm.runtime.rng import generator_tensors, load_generator_tensors
from tests.checkpoint_support import whole
from tests.hostile import bases, lay_out, nested, resealed
from tests.unit.test_checkpoint_read import reseal, saved  # noqa: F401  (a fixture)

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint with a training run's meta data."""
    lay_out(tmp_path / "case", bases(tmp_path / "base")[-1])
    return tmp_path / "case" / "step_00000003"


# --- the manifest -------------------------------------------------------------------------------------------


def first(body: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = body["tensors"]["param/layers.0.w"]
    return tensor


def _sizes(body: dict[str, Any], size: int, shape: list[int]) -> None:
    """One tensor alone in its file, both as large as they like."""
    body["tensors"] = {"w": first(body)}
    body["files"] = {"rank00000.safetensors": body["files"]["rank00000.safetensors"] | {"size": size}}
    body["tensors"]["w"] |= {"shape": shape, "axes": [None] * len(shape)}
    body["tensors"]["w"]["slices"][0] |= {"shape": shape, "start": [0] * len(shape)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(step=1.0), "step: Input should be a valid integer"),
        (lambda body: body.update(step=True), "step: Input should be a valid integer"),
        (lambda body: body.update(step=2**63), "step: Input should be less than"),
        (lambda body: body.update(format=True), "format: Input should be a valid integer"),
        (lambda body: body.update(meta=nested(DEPTH_MOST, True)), f"more than {DEPTH_MOST} brackets within each other"),
        (lambda body: body.update(meta=nested(DEPTH_MOST, False)), f"more than {DEPTH_MOST} brackets within each other"),
        (lambda body: body["tensors"].update({"a\nb": first(body)}), r"tensors\.a\\nb\.\[key\]: .*cannot be printed"),
        (lambda body: body["tensors"].update({"\ud800": first(body)}), "unable to parse raw data as a unicode string"),
        (lambda body: body["tensors"].update({"x" * 900: first(body)}), r"tensors\.x{192}…: .*at most 512"),
        (lambda body: body["meta"].update({"k" * 1025: 1}), "a key has more than 1024 characters"),
        (lambda body: first(body).update(per_rank=1), "per_rank: Input should be a valid boolean"),
        (lambda body: _sizes(body, 2**62, [1] * 33), "at most 32 items"),
        (lambda body: _sizes(body, 2**63 - 1, [2**31, 2**31, 2]), r"shape \[2147483648, 2147483648, 2\] is larger than any"),
        (lambda body: _sizes(body, 184, [2**40, 0, 2**40]), "is larger than any memory"),
        (lambda body: body["files"]["rank00000.safetensors"].update(hashed=10**9, size=10**9 + 20), "a header of 1000000000"),
        (lambda body: body["ranks"][0].update(coords={"pp": -1}), "coords.pp: Input should be greater"),
    ],
)
def test_a_manifest_is_bounded(saved: Path, change: Change, words: str) -> None:  # noqa: F811
    reseal(saved, change)
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(saved)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_a_large_header_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(manifests, "HEADER_MOST", 100)
    with pytest.raises(CheckpointError, match="rank00000.safetensors has a header of 184 bytes; at most 100"):
        open_checkpoint(saved)


def test_a_name_that_is_there_twice_is_refused(saved: Path) -> None:  # noqa: F811
    """Which of the two counts would depend on the reader."""
    raw = (saved / "manifest.json").read_text()
    body = raw[raw.index("\n") + 1 :].replace('"step": 7,', '"step": 7,\n "step": 8,')
    (saved / "manifest.json").write_bytes(manifests._first_line(body.encode()) + body.encode())
    with pytest.raises(CheckpointError, match="not valid JSON .*'step' is there twice"):
        open_checkpoint(saved)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "\x00", "{}x"])
def test_what_python_cannot_parse_is_damage(saved: Path, text: str) -> None:  # noqa: F811
    body = f'"meta": {text}'.encode()
    (saved / "manifest.json").write_bytes(manifests._first_line(body) + body)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(saved)


def test_a_manifest_of_any_size_is_not_read(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Nor written: what one version saves, it can read."""
    os.truncate(saved / "manifest.json", manifests.MANIFEST_MOST + 1)
    with pytest.raises(CheckpointError, match="and at most 536870912 are read"):
        open_checkpoint(saved)
    monkeypatch.setattr(manifests, "MANIFEST_MOST", 1000)
    with pytest.raises(CheckpointError, match=r"the manifest would have \d+ bytes; at most 1000"):
        save_checkpoint(tmp_path / "x", 1, [whole(f"w{i}", torch.ones(1)) for i in range(9)], {}, SingleProcess(), {})


def test_meta_as_deep_as_it_is_written_can_be_read(tmp_path: Path) -> None:
    """The deepest that a writer takes, and one more."""
    deepest = DEPTH_MOST - 3
    lists, objects = ({"a": nested(deepest - 1, square)} for square in (True, False))
    path = save_checkpoint(tmp_path, 1, [], lists, SingleProcess(), {}, rank_meta=objects)
    checkpoint = open_checkpoint(path)
    assert checkpoint.meta == lists and checkpoint.rank_meta(0) == objects
    with pytest.raises(CheckpointError, match="too deep for a manifest"):
        plain_json(nested(deepest + 1, True), "meta")
    assert plain_json({"k" * 1024: 1}, "meta")
    with pytest.raises(CheckpointError, match="a key of 1025 characters; at most 1024"):
        plain_json({"k" * 1025: 1}, "meta")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["manifest.json", "rank00000.safetensors"])
def test_only_files_of_the_folder_itself_are_read(saved: Path, tmp_path: Path, name: str, kind: str) -> None:  # noqa: F811
    """A link leads out of it, a pipe would be waited for: neither is opened, whatever is behind."""
    checkpoint = open_checkpoint(saved)
    path = (saved / name).rename(tmp_path / "outside")
    {"link": (saved / name).symlink_to, "pipe": os.mkfifo, "folder": os.mkdir}[kind](path if kind == "link" else saved / name)
    words = "symbolic link" if kind == "link" else "not a regular file"
    assert words.split()[-1] in str(incomplete_because(saved)) or "regular file" in str(incomplete_because(saved))
    with pytest.raises(CheckpointError, match=words):
        read_manifest(saved)
        checkpoint.read("param/layers.0.w")
    assert words in str(checkpoint.verify()[0])


def test_memory_is_taken_for_bytes_that_are_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A manifest claims a tensor of a terabyte; the file has some bytes."""
    size = 2**40
    reseal(saved, lambda body: _sizes(body, 184 + 4 * size, [size]))
    checkpoint = open_checkpoint(saved)
    monkeypatch.setattr(torch, "empty", None)
    cut = digests.pieces
    monkeypatch.setattr(digests, "pieces", lambda nbytes, piece: cut(nbytes, piece) if nbytes < 1000 else None)
    with pytest.raises(CheckpointError, match="rank00000.safetensors is damaged: the bytes of tensor 'w'"):
        checkpoint.read("w")
    with pytest.raises(CheckpointError, match="'w'"):
        checkpoint.check([("w", checkpoint.box("w"))])
    assert [problem.tensor for problem in checkpoint.verify()] == ["w", "w"]


# --- documents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),  # without time stamps: the names of the cases must not depend on when they are collected
    [
        (gzip.compress(bytes(1001), mtime=0), "more than 1000 bytes"),
        (gzip.compress(bytes(10_000_000), mtime=0), "more than 1000 bytes"),
        (gzip.compress(b"a", mtime=0) * 2, "something follows it"),
        (gzip.compress(b"a", mtime=0) + b"x", "something follows it"),
        (gzip.compress(b"a", mtime=0)[:-1], "cut short"),
        (b"", "cut short"),
    ],
)
def test_what_unpacks_is_bounded(content: bytes, words: str) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=words):
        unpacked(content, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert unpacked(gzip.compress(bytes(1000)), 1000) == bytes(1000) and unpacked(gzip.compress(b""), 1000) == b""


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b"\xff", mtime=0), gzip.compress(b"a", mtime=0)[:-4] + b"abcd"])
def test_a_document_that_is_no_text_is_an_error(tmp_path: Path, content: bytes) -> None:
    """Though its manifest vouches for the bytes."""
    files = bases(tmp_path / "base")[-1]
    resealed(files, "rank00000.graphs.txt.gz", content)
    lay_out(tmp_path / "case", files)
    with pytest.raises(CheckpointError, match="rank00000.graphs.txt.gz is not a compressed text"):
        open_checkpoint(tmp_path / "case" / "step_00000003").document(0, "graphs")


# --- the folder ---------------------------------------------------------------------------------------------


SAID = ["../step_00000007", "/etc", "step_" + "9" * 5000, "step_" + "9" * 20, "step_٠٠٠٠٠٠٠٧", "x" * 10_000_000, "\0"]


@pytest.mark.parametrize("content", SAID)
def test_latest_may_say_anything(saved: Path, content: str) -> None:  # noqa: F811
    (saved.parent / "latest").write_text(content)
    assert latest_name(saved.parent) is None
    assert resolve(saved.parent) == saved == find_resumable(saved.parent)


def test_latest_may_be_anything(saved: Path) -> None:  # noqa: F811
    latest = saved.parent / "latest"
    latest.unlink()
    os.mkfifo(latest)
    assert latest_name(saved.parent) is None and find_resumable(saved.parent) == saved


def test_names_of_any_length_sort_and_show() -> None:
    names = [f"a.{'9' * 5000}", f"a.1{'0' * 5000}", "a.007", "a.7", "a.08", "a.b"]
    assert sorted(names, key=natural_key) == ["a.007", "a.7", "a.08", names[0], names[1], "a.b"]
    assert shown("a\n\ud800\x1b[2J", 5) == "a\\n\\ud800\\x1b[…" and shown("ü\\") == "ü\\"


# --- slices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rows", "columns", "grid", "ragged"])
def test_any_number_of_slices_is_compared_quickly(kind: str) -> None:
    """20,000 slices of a tensor, cut in any of the ways in which ranks cut; quadratic time would be minutes."""
    n = 20_000
    if kind == "rows":
        shape, boxes = (n, 4), [Box((i, 0), (1, 4)) for i in range(n)]
    elif kind == "columns":
        shape, boxes = (4, n), [Box((0, i), (4, 1)) for i in range(n)]
    elif kind == "grid":
        shape, boxes = (200, 100), [Box((i, j), (1, 1)) for i in range(200) for j in range(100)]
    else:  # eight columns, each cut into rows at places of its own
        shape = (8 * 2500, 8)
        cuts = [[0, *range(column + 1, 20_000, 8), 20_000] for column in range(8)]
        boxes = [Box((a, c), (b - a, 1)) for c in range(8) for a, b in zip(cuts[c], cuts[c][1:], strict=False)]
    began = time.process_time()
    assert tiling_fault(shape, boxes) is None
    twice = tiling_fault(shape, [*boxes, boxes[-1]])
    assert twice is not None and "overlap" in twice
    assert time.process_time() - began < 10


def test_slices_that_take_too_long_to_compare_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stairs: each row crosses hundreds of slices."""
    n = 300
    stairs = [Box((i, i), (n, 1)) for i in range(n)]
    assert "elements are in no slice" in str(tiling_fault((2 * n, n), stairs))
    monkeypatch.setattr(geometry, "WORK", 100)
    monkeypatch.setattr(geometry, "WORK_EACH", 1)
    assert "300 slices are cut in such a way that comparing them takes too long" in str(tiling_fault((2 * n, n), stairs))


# --- what a resume reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda meta: meta.pop("plan"), "meta.plan: Field required"),
        (lambda meta: meta.update(tokens=-1), "meta.tokens: Input should be greater"),
        (lambda meta: meta.update(config=[]), "meta.config: Input should be a valid dictionary"),
        (lambda meta: meta["config"].update(model=3), "meta.config.model: Input should be a valid dictionary"),
        (lambda meta: meta["config"]["data"].update(microbatch_size="2"), "meta.config.data.microbatch_size: Input should be"),
        (lambda meta: meta["config"]["pipeline"].update(schedule=[]), "meta.config.pipeline.schedule: Input should be"),
        (lambda meta: meta.update(plan={}), "meta.plan: Input should be a valid string"),
        (lambda meta: meta["contract"]["timeline"]["epochs"].update(sideways=1), "epochs.sideways"),
        (lambda meta: meta["contract"]["weights"]["versions"].update(w="3"), "meta.contract.weights.versions.w"),
        (lambda meta: meta.update(graph_fingerprints=["a"]), "2 ranks wrote it, and meta has 1 graph fingerprints"),
        (lambda meta: meta.update(layout={"dp": 3}), r"the layout \{'dp': 3\}"),
        (lambda meta: meta.update(layout={"dp": 0}), "meta.layout.dp: Input should be greater"),
        (lambda meta: meta.update(wandb=7), "meta.wandb"),
    ],
)
def test_meta_data_of_a_run_are_checked_by_name(run: Path, change: Change, words: str) -> None:
    check_saved_run(open_checkpoint(run))
    reseal(run, lambda body: change(body["meta"]))
    with pytest.raises(CheckpointError, match=f"manifest.json is not of a training run: .*{words}"):
        check_saved_run(open_checkpoint(run))


def _numpy(at: int, value: int) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors["numpy"].__setitem__(at, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_numpy(624, 625), "numpy's generator"),
        (_numpy(624, -1), "numpy's generator"),
        (_numpy(3, 2**32), "numpy's generator"),
        (_numpy(3, -1), "numpy's generator"),
        (lambda tensors: tensors["python"].__setitem__(5, -1), "random generator"),
        (lambda tensors: tensors["python"].__setitem__(0, 9), "random generator"),
        (lambda tensors: tensors["torch"].fill_(255), "random generator"),
    ],
)
def test_generators_take_only_states_of_theirs(change: Callable[[dict[str, torch.Tensor]], object], words: str) -> None:
    """numpy itself believes any position and reads what is behind its words."""
    tensors = generator_tensors()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    load_generator_tensors(tensors)
    change(tensors)
    with pytest.raises(ResumeError, match=words):
        load_generator_tensors(tensors)
    load_generator_tensors(kept)
    assert all(torch.equal(kept[name], now) for name, now in generator_tensors().items())


def test_no_configuration_makes_a_model_that_is_not_there(run: Path) -> None:
    """Layers are made one by one: not before the checkpoint is known to hold as many tensors."""
    from qeffect_lm.app.inference import load_for_inference
    from qeffect_lm.app.shapes import config_problems

    for change, words in (
        (lambda config: config["model"].update(num_layers=1, moe={"num_experts": 10**12}), "experts a layer, and there are 6"),
        (lambda config: config["model"].update(num_layers=10**12, moe={}), "has 1000000000000 layers, and there are 6 tensors"),
        (lambda config: (config["model"].update(num_layers=1), config.pop("pipeline")), "cannot be read .KeyError: 'pipeline'"),
        (lambda config: config.update(run=3), "holds no configuration of a run"),
    ):
        reseal(run, lambda body, change=change: change(body["meta"]["config"]))
        if "KeyError" not in words:
            (problem,) = config_problems(open_checkpoint(run))
            assert words in str(problem)
        with pytest.raises(QEffectError, match=words):
            load_for_inference(run)


def test_no_code_runs_because_a_checkpoint_names_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family ``module:function``, in a module that lies where somebody starts a tool: not imported, unless he names it."""
    from qeffect_lm.app.inference import load_for_inference
    from qeffect_lm.app.replay import replay_config
    from tools import inspect
    from tools import verify as verify_tool

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_the_checkpoint.py").write_text("open('ran', 'w')\nraise RuntimeError('ran')\n")
    name = "of_the_checkpoint:family"
    reseal(run, lambda body: body["meta"]["config"]["model"].update(family=name, num_layers=1))
    checkpoint = open_checkpoint(run)
    assert verify_tool.main([str(run)]) == 0 and inspect.main([str(run)]) == 0
    for ask in (
        lambda: load_for_inference(run),
        lambda: load_for_inference(run, family="another:family"),
        lambda: replay_config(checkpoint, [], tmp_path),
        lambda: replay_config(checkpoint, [f"model.family={name}", "model.family=llama"], tmp_path),
    ):
        with pytest.raises(CheckpointError, match="is made by of_the_checkpoint:family, code that does not come with the"):
            ask()
    assert not (tmp_path / "ran").exists()
    assert replay_config(checkpoint, [f"model.family={name}"], tmp_path).model.family == name
    with pytest.raises(QEffectError, match="ran"):
        load_for_inference(run, family=name)
    assert (tmp_path / "ran").exists()


def test_comparing_meta_data_takes_memory_of_their_size(saved: Path) -> None:  # noqa: F811
    """Sixty long keys around thousands of numbers: a path for each number would be a thousand times as long as the number."""
    value: Any = list(range(5000))
    for _ in range(DEPTH_MOST - 6):
        value = {"k" * 1024: value}
    reseal(saved, lambda body: body["meta"].update(a=value))
    checkpoint = open_checkpoint(saved)
    tracemalloc.start()
    assert compare(checkpoint, checkpoint, None).same
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_differences_of_meta_values_are_leaves(saved: Path, tmp_path: Path) -> None:  # noqa: F811
    """What one side lacks, kinds that differ, and empty containers; and there is an end to them."""
    a, b = saved, Path(shutil.copytree(saved, tmp_path / "b"))
    values = {"same": [1, {"x": None}], "gone": {"p": [1, {}]}, "kind": {"x": 1}, "leaf": {}, "bits": 1}
    others = {"same": [1, {"x": None}], "kind": [2], "leaf": {"y": []}, "bits": 1.0, "n": list(range(META_MOST))}
    for path, meta in ((a, values), (b, others)):
        reseal(path, lambda body, meta=meta: body.update(meta=meta))
    found = compare(open_checkpoint(a), open_checkpoint(b), ["gone", "kind", "leaf", "bits", "same"]).meta
    assert [(item.key, item.a, item.b) for item in found] == [
        ("bits", 1, 1.0), ("gone.p[0]", 1, "<absent>"), ("gone.p[1]", {}, "<absent>"), ("kind.x", 1, "<absent>"),
        ("kind[0]", "<absent>", 2), ("leaf", {}, "<absent>"), ("leaf.y", "<absent>", []),
    ]  # fmt: skip
    assert len(compare(open_checkpoint(a), open_checkpoint(b), None).meta) == META_MOST


def test_a_configuration_inherits_from_no_file(run: Path, tmp_path: Path) -> None:
    """``base:`` of a YAML file would be read by a replay."""
    from qeffect_lm.app.replay import replay_config

    reseal(run, lambda body: body["meta"]["config"].update(base="/etc/hostname"))
    with pytest.raises(QEffectError, match="config.base: Input should be a valid dictionary"):
        replay_config(open_checkpoint(run), [], tmp_path)


def test_json_of_thousands_of_brackets_within_a_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's parser gives up with an error of its own kind; so does whoever parses what a checkpoint carries."""
    from pipeline.plan import Plan
    from pipeline.program import Program
    from qeffect_lm.app.text import _object
    from tools import inspect

    deep = "[" * 100_000
    for parse in (Plan.from_json, Program.from_json):
        with pytest.raises(QEffectError, match="RecursionError"):
            parse(deep)
    reseal(run, lambda body: body["meta"].update(plan=deep))
    assert inspect.main([str(run)]) == 0 and "plan " not in capsys.readouterr().out
    (run / "config.json").write_text(deep)
    entry = {"size": len(deep), "hashed": len(deep), "sha256": hashlib.sha256(deep.encode()).hexdigest()}
    reseal(run, lambda body: body["files"].update({"config.json": entry}))
    with pytest.raises(QEffectError, match="config.json is no JSON"):
        _object(run / "config.json", open_checkpoint(run).read_file("config.json"))


def test_a_record_of_other_types_is_damage(tmp_path: Path) -> None:
    from checkpoint.record import read_record, record_path

    path = record_path(tmp_path / "step_00000003")
    path.parent.mkdir()
    for text in ("[" * 100_000, "[]", '{"format": 1}', json.dumps({"format": 1, "step": [], "numbers": 3})):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="is no record of a step"):
            read_record(tmp_path / "step_00000003")
