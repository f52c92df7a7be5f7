"""tools.bench watching: each way to follow a run does its work there, and what it costs is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qeffect_lm.config import Config
from qeffect_lm.runtime.metrics import read_metrics
from tools.benchmarks import watching


def small(folder: Path, **logging: object) -> Config:
    return Config.from_dict(
        {
            "run": {"dir": str(folder)},
            "model": {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "ffn_size": 16},
            "precision": {"fp8": {"recipe": "delayed", "history": 16}},
            "pipeline": {"microbatches": 2},
            "graphs": {"backend": "host_replay"},
            "data": {"seq_len": 16, "microbatch_size": 1},
            "train": {"steps": 10},
            "logging": {"tensorboard": True, **logging},
        }
    )


def test_every_way_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have what their way writes, in as many steps as it ran; a way that takes a while in its own calls shows it, in its
    own time and in the ratio to steps that nothing follows."""
    pytest.importorskip("tensorboardX")
    slow, append = 0.02, watching.MetricsWriter.write

    def delayed(writer: watching.MetricsWriter, metrics: object) -> None:
        watching.time.sleep(slow)
        append(writer, metrics)  # type: ignore[arg-type]

    monkeypatch.setattr(watching.MetricsWriter, "write", delayed)
    found = watching.measure(small(tmp_path), 0, 1, lambda _: None, block=2)
    ways = found["ways"]
    assert list(ways) == [way.name for way in watching.WAYS if "wandb" not in way.name]
    named = {way.name: way for way in watching.WAYS}
    for name, row in ways.items():
        written = "metrics" in named[name].sinks
        assert (row["own_us"] > 1e6 * slow) == written, name
        assert row["own_share"] > 0 and len(row["ratios"]) == 1
        assert not written or row["ratio"] > 1.0
    steps = 2 * 3  # two rounds of blocks of two and one before them; and two of everything at first
    writing = [way for way in watching.WAYS if "metrics" in way.sinks]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == steps * len(writing) + 2 and all("peak_leases" in row.extra for row in rows)

    def lines(way: str, file: str) -> int:
        path = tmp_path / f"way-{[one.name for one in watching.WAYS].index(way)}" / file
        return len(path.read_text().splitlines()) if path.exists() else 0

    assert lines("FP8 histories, each step", "scales.jsonl") == steps
    assert lines("timeline, each step", "timelines.jsonl") == steps
    assert lines(watching.CONFIGURED, "timelines.jsonl") == 1 and lines(watching.CONFIGURED, "scales.jsonl") == 0
    assert lines("warnings", "events.jsonl") == steps * 2 + 2  # those of the way of events, and of everything
    assert watching.table("here", found).count("\n") == len(ways)
    json.dumps(found, allow_nan=False)


def test_a_whole_graph_that_nothing_times(tmp_path: Path) -> None:
    """What cannot be measured is left out, not shown as free."""
    config = small(tmp_path, wandb="disabled", tensorboard=False)
    config = config.model_copy(update={"graphs": config.graphs.model_copy(update={"scope": "step"})})
    ways = watching.measure(config, 0, 1, lambda _: None, block=1)["ways"]
    assert not {"work timed, against the plan", "timeline, each step", "TensorBoard", "wandb, offline"} & set(ways)
    assert watching.CONFIGURED in ways
