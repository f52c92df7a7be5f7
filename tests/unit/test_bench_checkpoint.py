"""tools.bench checkpoint at sizes of a test: what it measures is right, and it cleans up."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path

import pytest
import torch

from tools import bench
from tools.benchmarks import large_state


def test_rates_and_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["checkpoint", "--gib", "0.004", "--rounds", "2", "--dir", str(tmp_path / "disk")]
    arguments += ["--json", str(tmp_path / "j")]
    assert bench.main(arguments) == 0
    report = json.loads((tmp_path / "j").read_text())
    assert report["bytes"] > 3e6 and os.listdir(tmp_path / "disk") == []
    names = {"write + fsync", "the same past the cache", "save", "read", "read on several threads", "load", "verify"}
    assert set(report["median_gb_per_s"]) == names | {"SHA-256 in memory"}
    assert all(len(values) == 2 and min(values) > 0 for values in report["gb_per_s"].values())
    median = report["median_gb_per_s"]
    assert report["ratios"]["save / write"] == median["save"] / median["write + fsync"]
    assert "load / faster read" in capsys.readouterr().out


def test_a_whole_state_rank_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never two ranks' tensors at once, and all of them come back."""
    here, most = 0, 0
    make = large_state.Spec.make

    def gone(nbytes: int) -> None:
        nonlocal here
        here -= nbytes

    def watched(spec: large_state.Spec) -> torch.Tensor:
        nonlocal here, most
        tensor = make(spec)
        weakref.finalize(tensor, gone, spec.nbytes)
        here += spec.nbytes
        most = max(most, here)
        return tensor

    monkeypatch.setattr(large_state.Spec, "make", watched)
    parts = large_state.ranks(20_000)
    found = large_state.run(20_000, tmp_path, lambda text: None)
    assert 0 < most <= found["largest_rank_bytes"] < found["bytes"] / 2
    assert found["ranks"] == len(parts) > 2 and found["tensors"] == sum(map(len, parts))
    assert found["bytes"] >= 14 * found["parameters"] > 14 * 15_000


def test_what_is_damaged_or_does_not_fit_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--gib", "0"], ["--rounds", "0"], ["--parameters", "3"], ["--gib", "1e9"], ["--parameters", "1e11"]):
        assert bench.main(["checkpoint", "--dir", str(tmp_path), *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    (tmp_path / "file").write_text("")
    assert bench.main(["checkpoint", "--dir", str(tmp_path / "file")]) == 2
