"""The choice of kernel configurations: what is taken, what is written; the whole of it on stand-ins for GPU and clock."""

from __future__ import annotations

import json

import pytest
import torch
from torch.overrides import TorchFunctionMode

from qeffect_lm.kernels import cublaslt, tables
from tests.unit.interpreted import INTERPRETED, kernels_run  # noqa: F401
from tests.unit.test_kernels_cublaslt import algorithm, library, products  # noqa: F401  (fixtures)
from tools import bench
from tools.benchmarks import tune
from tools.benchmarks.tune import Found, chosen


def test_what_is_chosen():
    """The fastest valid candidate, unless it saves no more than noise."""
    assert chosen([Found("a", 10.0), Found("b", 9.0), Found("c", 8.0, False)]) == Found("b", 9.0)
    assert chosen([Found("a", 10.0), Found("b", 9.9)]) is None
    assert chosen([Found("a", 10.0), Found("b", 11.0)]) is None
    assert chosen([Found("a", 10.0, False), Found("b", 9.0)]) == Found("b", 9.0)
    assert chosen([Found("a", 10.0), Found("b", 5.0, False)]) is None


def test_the_promising_are_measured_again():
    """The first and the three fastest valid ones; a lucky first measurement is forgotten."""
    found = [Found(n, us, n != 1) for n, us in enumerate((10.0, 1.0, 5.0, 6.0, 7.0, 8.0))]
    asked = []

    def timed(choice: int, times: int) -> float:
        asked.append((choice, times))
        return 9.95

    assert [one.us for one in tune.refined(found, timed)] == [9.95, 1.0, 9.95, 9.95, 9.95, 8.0]
    assert sorted(asked) == [(0, 3), (2, 3), (3, 3), (4, 3)]


class _OnCpu(TorchFunctionMode):
    """What is made on a GPU is made here."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@pytest.mark.skipif(not INTERPRETED, reason="stands in for a GPU")
def test_a_table_is_made(products, library, monkeypatch, tmp_path):  # noqa: F811
    """Every part on small shapes, by a clock that likes one candidate of each; the file's other lines stay."""
    library.found = 3
    monkeypatch.setattr(tune, "_time", lambda made, size, times: clock(made, size))
    likes = {"tile": (32, 64, 4), "runs": 4}

    def clock(made, size):
        before = len(library.algorithms)
        made()()  # a candidate's own inputs, and its launch
        liked = [number >= 4900 for number in library.algorithms[before:]]
        liked += [tables.tile("swiglu", 16, 96) == tables.Tile(*likes["tile"])]
        liked += [tables.norm_rows(16, 128) == tables.Tile(16, 128, 1)]
        liked += [tables.norm_runs(16, 128, 256, 128).runs == likes["runs"]]
        return 5.0 if any(liked) else 10.0

    before = tmp_path / "before.json"
    empty: dict = {"norm_rows": {}, "norm_backward": {}, "products": []}
    before.write_text(json.dumps({"tiles": {"quantise": {"1x2": [64, 64, 4]}}, **empty}))
    monkeypatch.setattr(tables, "FILE", before)
    monkeypatch.setattr(tune, "VOCAB", 256)
    monkeypatch.setattr(cublaslt, "usual", lambda matrix: True)  # as on a GPU, whose storages lie so
    monkeypatch.setattr(tune, "REPEATS", 2)
    monkeypatch.setattr(tune, "TILES", ((64, 64, 8), likes["tile"]))
    monkeypatch.setattr(tune, "WHOLE_ROWS", ((4, 1), (16, 1)))
    monkeypatch.setattr(tune, "RUNS", ((4, 1, 1), (16, 1, 1)))
    monkeypatch.setattr(tune, "CublasLt", lambda device, algorithms: products)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "stand-in")
    said: list[str] = []
    with _OnCpu():
        made = tune.tune([tune.Layer.of("128:96:16")], tune.PARTS, said.append)
    kernels = {"quantise": "16x128", "norm": "16x128", "swiglu": "16x96", "swiglu_backward": "16x96", "rope_backward": "16x384"}
    assert made["tiles"] == {name: {shape: [32, 64, 4]} for name, shape in kernels.items()} | {
        "quantise": {"1x2": [64, 64, 4], "16x128": [32, 64, 4]}
    }
    assert made["norm_rows"] == {"16x128": [16, 1]}
    assert made["norm_backward"] == {"16x128": [4, 1, 1]}
    (entry,) = made["products"]
    assert (entry["device"], entry["cublaslt"], len(entry["algorithms"])) == ("stand-in", 130000, 15)
    for number in entry["algorithms"].values():
        assert number == algorithm(int.from_bytes(bytes.fromhex(number)[:8], "little")).hex()
        assert 4900 < int.from_bytes(bytes.fromhex(number)[:8], "little") < 5000
    assert json.loads(json.dumps(made)) == made and len(said) == 1 + 15 + 5 + 2


def test_what_cannot_be_asked(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None: torch.zeros(*shape))
    out = ["--json", str(tmp_path / "t.json")]
    assert bench.main(["kernels", "--tune", "--tune-shapes", "1024:x", *out]) == 2
    assert "hidden:MLP:tokens" in capsys.readouterr().err
    assert bench.main(["kernels", "--tune", "--parts", "tiles,speed", *out]) == 2
    assert "there is no speed" in capsys.readouterr().err and not (tmp_path / "t.json").exists()
