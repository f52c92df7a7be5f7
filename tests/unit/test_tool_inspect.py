"""tools.inspect: what is in a checkpoint, what is odd about its scales, and their picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import SingleProcess, open_checkpoint, save_checkpoint
from checkpoint.scales import ScaleRow, scale_rows
from checkpoint.sums import of_checkpoint, state_digest
from qeffect_lm.contract.timeline import ScaleTimeline
from qeffect_lm.fp8.recipes import roles_of
from qeffect_lm.runtime.scale_picture import draw
from tests.checkpoint_support import golden_state
from tests.tiny import config
from tools import inspect as tool

LAYERS = ["layers.0.attention.qkv", "layers.0.mlp.down", "layers.10.mlp.down", "layers.2.mlp.down"]
VERSIONS = {"a.weight": 7, "b.weight": 7}


def rolled(**settings: Any) -> ScaleTimeline:
    """A timeline after ten windows in which roles are idle, silent or not finite now and then."""
    timeline = ScaleTimeline([role for layer in LAYERS for role in roles_of(layer)], **settings)
    generator, skip = torch.Generator().manual_seed(3), torch.zeros((), dtype=torch.bool)
    for _ in range(10):
        timeline.open_amax.copy_(torch.rand(len(timeline.roles), generator=generator) * 10)
        for value in (-1.0, 0.0, math.inf, 1e-38):
            timeline.open_amax[int(torch.randint(0, len(timeline.roles), (), generator=generator))] = value
        timeline.roll_(skip)
    timeline.open_amax[0] = 5.0
    return timeline


def saved(root: Path, timeline: ScaleTimeline, step: int = 9, **meta: Any) -> Path:
    fp8 = {"recipe": "delayed", "window": timeline.window, "amax": timeline.amax, "margin": timeline.margin}
    settings = config(**{f"precision__fp8__{key}": value for key, value in fp8.items()}, precision__fp8__history=4)
    weights = {"versions": VERSIONS, "cache_version": {"a.weight": 7}, "cache_epoch": {"a.weight": 10}}
    about = {
        "config": settings.to_dict(),
        "tokens": 1234,
        "layout": {"pp": 2, "dp": 1},
        "contract": {"timeline": timeline.state(), "weights": weights},
        "wandb": {"id": "abc"},
        **meta,
    }
    return save_checkpoint(root, step, timeline.logical_tensors(), about, SingleProcess(), {})


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = tool.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("window", ["step", "microbatch"])
@pytest.mark.parametrize("amax", ["max", "most_recent"])
def test_the_scale_of_a_history_is_the_one_that_the_timeline_made(tmp_path, capsys, window, amax):
    """Bit for bit, for each role whose history gives one; a scale off by one ulp is named, and no other."""
    timeline = rolled(window=window, amax=amax, margin=1, history=4)
    rows = scale_rows(open_checkpoint(saved(tmp_path / "sound", timeline)))
    assert [row.name for row in rows[:3]] == [f"{LAYERS[0]}.{kind}" for kind in ("input", "weight", "grad_output")]
    assert list(dict.fromkeys(row.layer for row in rows)) == [LAYERS[0], LAYERS[1], LAYERS[3], LAYERS[2]]
    assert sum(row.expected is not None for row in rows) > 8
    assert all(row.expected in (None, row.scale) for row in rows)
    chosen = next(row for row in rows if row.expected is not None)
    timeline.scale[timeline.index[chosen.name]] = float(torch.tensor(chosen.scale).nextafter(torch.tensor(0.0)))
    off = saved(tmp_path / "off", timeline)
    assert "1 × scale is not its history's" in run(capsys, off)[1].splitlines()[-1]
    again = scale_rows(open_checkpoint(off))
    assert [row.name for row in again if any("its history's" in note for note in row.notes)] == [chosen.name]


def test_numbers_and_notes():
    """Made-up histories: each oddity has its note, and a sound one has none."""

    def row(scale: float, *history: float, kind: str = "input") -> ScaleRow:
        return ScaleRow("layers.0.mlp.down", kind, scale, history, -1.0, None)

    sound = row(448 / 4, 2.0, 4.0, 1.0, 0.0)
    assert (sound.latest, sound.middle, sound.zeros, sound.headroom, sound.rise, sound.notes) == (2.0, 2.0, 1, 1.0, -1.0, [])
    assert row(57344 / 4, 2.0, 4.0, kind="grad_output").headroom == 1.0
    assert row(1.0, 0.0, 0.0).notes == ["never seen"] and row(1.0, 0.0, 0.0).headroom is None
    assert row(112.0, 4.0, 4.0, 4.0).notes == ["stuck: one amax in all of the history"]
    assert row(224.0, 4.0, 2.0).notes == ["saturates by 1 bits", "rose by 1 bits"]
    assert row(math.nan, 4.0, 5.0).notes == ["scale is no positive number"]
    assert row(1.0, 4.0).notes == [] and row(1.0).document()["max"] is None


def test_the_tool_on_a_run(tmp_path, capsys):
    timeline = rolled(history=4)
    path = saved(tmp_path / "run/checkpoints", timeline)
    for given in (tmp_path / "run", tmp_path / "run/checkpoints", path):
        code, out, _ = run(capsys, given)
        assert code == 0 and "after 1,234 tokens" in out and "1 rank: pp=2 dp=1" in out
    assert "2 parameters at version 7; 1 FP8 caches of version 7, epoch 10" in out and '{"id": "abc"}' in out
    assert "forward 0, backward 0; 0 commits, window step" in out and "fp8.recipe=delayed" in out
    row = scale_rows(open_checkpoint(path))[0]
    line = next(line for line in out.splitlines() if "layers.0.attention.qkv" in line)
    assert f"{row.scale:.4g}" in line and f"{row.latest:.4g}" in line and f"{row.headroom:.2f} bits" in line
    code, out, _ = run(capsys, path, "--json", "--layer", "layers.2.*")
    document = json.loads(out)
    assert "state_digest" not in document
    digest = json.loads(run(capsys, path, "--json", "--digest")[1])["state_digest"]
    assert digest == state_digest(of_checkpoint(open_checkpoint(path))) and digest in run(capsys, path, "--digest")[1]
    assert code == 0 and {one["layer"] for one in document["scales"]} == {"layers.2.mlp.down"}
    assert len(document["scales"]) == 3 and len(document["scales"][0]["history"]) == 4
    assert document["weights"]["stale"] == [] and document["step"] == 9
    sizes = {one["role"]: one for one in document["tensors"]}
    assert sizes["amax_history"]["elements"] == 48 and sizes["scale"]["bytes"] == 48
    weights = {"versions": VERSIONS, "cache_version": {"a.weight": 6}, "cache_epoch": {"a.weight": 10}}
    old = saved(tmp_path / "old", timeline, contract={"timeline": timeline.state(), "weights": weights})
    assert "STALE: a.weight" in run(capsys, old)[1]
    cursor: dict[str, Any] = {"next_sample": 96, "blends": [{"first": 0, "sources": [{}, {}]}], "batches": [[0, 8], [64, 16]]}
    out = run(capsys, saved(tmp_path / "cursor", timeline, data=cursor))[1]
    assert "next_sample 96, 2 sources from sample 0 on, 8 samples a step from sample 0 on, 16 samples a step from s" in out
    assert "cursor     x 1, blends 5\n" in run(capsys, saved(tmp_path / "foreign", timeline, data={"x": 1, "blends": 5}))[1]


def test_a_checkpoint_of_something_else(tmp_path, capsys):
    """No configuration, no contract, no scales of ours: what is there is shown."""
    path = save_checkpoint(tmp_path, 3, golden_state(0)[:3], {}, SingleProcess(), {})
    code, out, _ = run(capsys, path)
    assert code == 0 and "no scale histories" in out and "tokens" not in out
    code, _, err = run(capsys, path, "--picture", tmp_path / "x.png")
    assert code == 2 and "no scale history to draw" in err


def test_exit_codes(tmp_path, capsys):
    path = saved(tmp_path / "c", rolled(history=4))
    for arguments, said in (
        ([tmp_path / "absent"], "does not exist"),
        ([tmp_path / "c/step_00000001"], "not a complete checkpoint"),
        ([path, "--layer", "layers.9.*"], "fits none of the scales"),
        ([path, "--picture", "x.gif"], "has to end in one of .png, .svg, .pdf"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    shard = next(path.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, _, err = run(capsys, path)
    assert code == 1 and "do not match their SHA-256" in err


def test_pictures(tmp_path, capsys):
    """PNG and SVG; one row or many, windows that were never seen, a history of one, no headroom at all."""
    pytest.importorskip("matplotlib")
    path = saved(tmp_path / "c", rolled(history=4))
    code, out, _ = run(capsys, path, "--picture", tmp_path / "made/scales.svg")
    assert code == 0 and out.rstrip().endswith("scales.svg")
    text = (tmp_path / "made/scales.svg").read_text()
    assert text.startswith("<?xml") and "run, step 9" in text
    many = [(f"layers.{i}.mlp.down", kind, (1.0, 2.0**i), 0.5) for i in range(32) for kind in ("input", "weight")]
    for entries in (many, [("a", "input", (0.0,), None)], [("a", "input", (1.0, 0.0, 2.0), -9.0), ("b", "weight", (), None)]):
        made = draw(entries, tmp_path / "some.png", title="t")
        assert made.read_bytes().startswith(b"\x89PNG")
