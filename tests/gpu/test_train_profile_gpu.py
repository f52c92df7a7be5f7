"""``train.profile`` on a GPU: ranges around launches and replays, the device's kernels below them, times of the compute stream.

    python -m pytest -q tests/gpu/test_train_profile_gpu.py
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.runs import CONFIG, assert_same_run, run_here, write_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("graphs", ["action", "step"])
def test_replays_are_ranges(tmp_path: Path, graphs: str) -> None:
    """Each replay under its name, with kernels on the device; the table adds up; the same bits as without."""
    sizes = CONFIG.replace("device: cpu", "device: cuda").replace("backend: host_replay", "backend: cuda_graphs")
    write_config(tmp_path, sizes)
    short = ["train.steps=4", "checkpoint.every=0", f"graphs.scope={graphs}"]
    assert run_here(tmp_path, "on", *short, "train.profile.steps=3-4")[0] == 0
    assert run_here(tmp_path, "off", *short)[0] == 0
    assert_same_run(tmp_path, "on", "off")
    folder = tmp_path / "on" / "profile"
    events = json.loads(gzip.decompress((folder / "rank0.step3-4.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    wanted = ["STEP_GRAPH"] if graphs == "step" else ["F s0 mb0 slot0", "W s0 mb0 slot0", "REFRESH", "COMMIT"]
    assert all(names.count(name) == 2 for name in wanted)
    assert any(event.get("cat") == "kernel" for event in events)
    table = json.loads((folder / "time.step3-4.json").read_text())
    (rank,) = table["ranks"]
    times = {kind: cell["ms"] for kind, cell in rank["kinds"].items()}
    assert table["device"] == "cuda" and sum(times.values()) == pytest.approx(rank["step_ms"])
    busy = times["step graph"] if graphs == "step" else times["F"] + times["I"] + times["W"]
    assert 0 < busy < rank["step_ms"]
