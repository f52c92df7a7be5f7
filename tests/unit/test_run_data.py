"""Whole runs on blended, packed data: resumed to the sample, told by source, changed only when told to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qeffect_lm.data.indexed import IndexedWriter
from qeffect_lm.errors import UsageError
from tests.runs import CONFIG, assert_same_run, checkpoint_of, metrics_of

DATA = "data: {seq_len: 16, microbatch_size: 2, packing: whole, documents: reset}"


def corpus(prefix: Path, seed: int) -> str:
    """Documents of 2 to 40 tokens."""
    generator = np.random.Generator(np.random.PCG64(seed))
    with IndexedWriter(prefix, vocab_size=64) as writer:
        writer.add_documents([generator.integers(0, 64, generator.integers(2, 40)) for _ in range(60)])
    return str(prefix)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("a", "b", "c")):
        corpus(folder / name, seed)
    (folder / "tiny.yaml").write_text(CONFIG.replace("data: {seq_len: 16, microbatch_size: 2}", DATA))
    return folder


def options(folder: Path, name: str, *more: str, blend: tuple[str, ...] = ("0.75 a", "0.25 b")) -> list[str]:
    entries = ", ".join(f"'{entry.split()[0]} {folder / entry.split()[1]}'" for entry in blend)
    return [f"run.dir={folder / name}", f"data.blend=[{entries}]", f"data.valid={folder / 'c'}", *more]


def run(folder: Path, name: str, *more: str, blend: tuple[str, ...] = ("0.75 a", "0.25 b")) -> list[str]:
    from qeffect_lm.app.run import train_run
    from qeffect_lm.config import load_config
    from qeffect_lm.runtime.launch import LaunchEnv

    said: list[str] = []
    config = load_config(folder / "tiny.yaml", options(folder, name, *more, blend=blend))
    assert train_run(config, LaunchEnv.from_mapping({}), said.append) == 0
    return said


FLAT = ("optim.min_lr_ratio=1", "optim.warmup_steps=0")


def test_a_blended_run_resumes_to_the_sample(folder: Path) -> None:
    """C2: stopped after 3 of 6 steps, it is the run without a stop, cursor and losses by source included."""
    run(folder, "whole", "train.steps=6", *FLAT)
    run(folder, "parts", "train.steps=3", *FLAT)
    run(folder, "parts", "train.steps=6", *FLAT)
    assert_same_run(folder, "whole", "parts")
    rows = [[(m.loss, m.extra["loss/a"], m.extra["loss/b"]) for m in metrics_of(folder, name)] for name in ("whole", "parts")]
    assert rows[0] == rows[1] and len(rows[0]) == 6
    for loss, a, b in rows[0]:
        assert loss is not None and min(float(a), float(b)) <= loss <= max(float(a), float(b))  # type: ignore[arg-type]
    data = checkpoint_of(folder, "whole").meta["data"]
    assert data["next_sample"] == 6 * 8 and [source["weight"] for source in data["blends"][0]["sources"]] == [3, 1]


def test_another_blend_is_refused_unless_told(folder: Path) -> None:
    """And then it is in the checkpoint from when on."""
    run(folder, "other", "train.steps=3", *FLAT)
    blend = ("0.5 b", "0.5 c")
    with pytest.raises(UsageError, match=r"now b x 1, c x 1.*data\.accept_blend=true"):
        run(folder, "other", "train.steps=6", *FLAT, blend=blend)
    said = run(folder, "other", "train.steps=6", "data.accept_blend=true", *FLAT, blend=blend)
    assert any("recorded in the data cursor: saved" in line and "(from sample 24 on)" in line for line in said)
    blends = checkpoint_of(folder, "other").meta["data"]["blends"]
    assert [one["first"] for one in blends] == [0, 24]
    assert [source["offset"] for source in blends[1]["sources"]] == [6, 0]
    assert set(metrics_of(folder, "other")[-1].extra) >= {"loss/b", "loss/c"}


def test_uneven_microbatches_are_one_big_batch(folder: Path) -> None:
    """G4: padding and documents leave each microbatch another number of targets; the step is that of one microbatch of all."""
    options = ("precision.fp8.recipe=none", "model.dropout=0.0", "train.steps=2", *FLAT)
    run(folder, "four", *options)
    run(folder, "one", "data.microbatch_size=8", "pipeline.microbatches=1", "pipeline.w_delay=0", *options)
    four, one = ([(m.loss, m.grad_norm, m.tokens) for m in metrics_of(folder, name)] for name in ("four", "one"))
    assert four[0][2] == one[0][2] < 8 * 16
    for a, b in zip(four, one, strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-5) and a[1] == pytest.approx(b[1], rel=1e-4)  # sums in another order


def test_blends_are_written_as_weight_and_path(folder: Path) -> None:
    for blend, message in ((("x a",), "'x "), (("1 a", "0 b"), "above 0")):
        with pytest.raises(UsageError, match=message):
            run(folder, "bad", blend=blend)
    with pytest.raises(UsageError, match=r"data\.train and data\.blend are both set"):
        run(folder, "bad", f"data.train={folder / 'a'}")
