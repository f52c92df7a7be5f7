"""tools.bench saving: what it reports is what happened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from checkpoint import scan
from tools.benchmarks import saving


def test_stall_beside_a_synchronous_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a disk that takes half a second: a save at once takes that, the loop's stall does not, durable does."""
    write = saving._write

    def slow(*arguments: Any) -> Path:
        time.sleep(0.5)
        return write(*arguments)

    monkeypatch.setattr(saving, "_write", slow)
    found = saving.measure_stall(1 << 20, tmp_path, 1, "cpu", 0.01, lambda _: None)
    assert found["sync"][0] > 0.5 and found["durable"][0] > 0.5 and found["stall"][0] < 0.5
    assert found["ratio"] == found["stall"][0] / found["sync"][0] and found["copy_bytes"] >= 1 << 20
    assert found["loop_step_writing"] > 0 and [one.step for one in scan(tmp_path)] == [5]
    assert "of a synchronous save (wanted: 5%)" in saving.table(found)
