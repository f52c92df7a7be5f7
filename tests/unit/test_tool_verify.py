"""tools.verify: every damage is found and named, on one thread or several, and what crashes leave does no harm."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from checkpoint import digests, open_checkpoint, save_checkpoint
from checkpoint.comm import SingleProcess
from checkpoint.verify import verify
from qeffect_lm.app.shapes import model_shapes
from qeffect_lm.state import Role
from tests.checkpoint_support import whole
from tests.tiny import config
from tests.unit.test_checkpoint_read import saved  # noqa: F401  (a fixture)
from tools import verify as tool


def model_checkpoint(root: Path, step: int = 3, change: dict[str, torch.Tensor] | None = None) -> Path:
    """Masters and parameters of the tiny model, and its configuration."""
    settings = config()
    shapes = model_shapes(settings.to_dict())
    tensors = {f"{role}/{name}": torch.zeros(shape) for name, shape in shapes.items() for role in ("master", "param")}
    tensors |= change or {}
    roles = {"master": Role.MASTER, "param": Role.PARAM}
    items = [whole(name, tensor, roles[name.partition("/")[0]]) for name, tensor in tensors.items() if tensor is not None]
    made = save_checkpoint(root, step, items, {"config": settings.to_dict()}, SingleProcess(), {})
    assert isinstance(made, Path)
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = tool.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("workers", [1, 4])
def test_threads_find_what_one_pass_finds(saved, workers, monkeypatch):  # noqa: F811
    """Any byte of any file, flipped: the same problems as the plain reading, and none in a sound checkpoint."""
    monkeypatch.setattr(digests, "TASK", 8)
    checkpoint = open_checkpoint(saved)
    assert verify(checkpoint, workers) == [] == checkpoint.verify()
    rng = random.Random(workers)
    for name in sorted(checkpoint.manifest.files):
        path = saved / name
        sound = path.read_bytes()
        for place in rng.sample(range(len(sound)), 12):
            path.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << rng.randrange(8)]) + sound[place + 1 :])
            assert verify(checkpoint, workers) == checkpoint.verify() != []
        for damaged in (sound[:-1], sound + b"\0", b""):
            path.write_bytes(damaged)
            assert verify(checkpoint, workers) == checkpoint.verify() != []
        path.unlink()
        assert verify(checkpoint, workers) == checkpoint.verify() != []
        path.write_bytes(sound)
    assert verify(checkpoint, workers) == []


def test_a_sound_run(tmp_path, capsys):
    """Of a folder the newest complete one is read; ``--all`` reads all; a run's folder will do."""
    for step in (3, 20, 100):
        model_checkpoint(tmp_path / "run/checkpoints", step)
    code, out, _ = run(capsys, tmp_path / "run")
    assert code == 0 and "step_00000100  sound: step 100" in out and out.count("not read; --all") == 2
    assert out.rstrip().endswith("newest complete: step_00000100; latest names step_00000100")
    code, out, _ = run(capsys, tmp_path / "run/checkpoints", "--all", "--json", "--workers", "2")
    found = json.loads(out)
    assert code == 0 and [one["step"] for one in found["checkpoints"]] == [3, 20, 100]
    assert all(one["problems"] == [] and one["nbytes"] > 1000 for one in found["checkpoints"])
    assert run(capsys, tmp_path / "run/checkpoints/step_00000020")[0] == 0


def test_what_a_crash_leaves_does_no_harm(tmp_path, capsys):
    """A save without its manifest, one that is half there, a removal cut short: listed; the newest complete one counts."""
    good = model_checkpoint(tmp_path, 5)
    shutil.copytree(good, tmp_path / ".tmp-step_00000006")
    shutil.copytree(good, tmp_path / ".tmp-delete-step_00000004")
    shutil.copytree(good, tmp_path / "step_00000007")
    next((tmp_path / "step_00000007").glob("*.safetensors")).unlink()
    code, out, _ = run(capsys, tmp_path)
    assert code == 0 and "step_00000005  sound" in out and "step_00000007  INCOMPLETE: cannot read" in out
    assert ".tmp-step_00000006  left by" in out and ".tmp-delete-step_00000004  left by" in out
    assert "newest complete: step_00000005" in out


def test_damage_has_exit_code_1_and_a_name(tmp_path, capsys):
    path = model_checkpoint(tmp_path)
    shard = next(path.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    code, out, _ = run(capsys, path)
    assert code == 1 and "DAMAGED" in out and f"{shard.name}: tensor " in out and "do not match their SHA-256" in out
    (path / "manifest.json").write_text("{}")
    code, out, _ = run(capsys, path)
    assert code == 1 and "INCOMPLETE" in out and "newest complete: none" in out


def test_what_was_complete_once_is_damaged(tmp_path, capsys):
    """A file of the checkpoint that ``latest`` names is cut, gone, or its manifest edited: exit code 1, with file and tensor,
    though an older one is whole. So is an older one, with ``--all`` or named itself; else it is listed (C10)."""
    model_checkpoint(tmp_path, 3)
    path = model_checkpoint(tmp_path, 20)
    shard, manifest = next(path.glob("*.safetensors")), path / "manifest.json"
    content, sealed = shard.read_bytes(), manifest.read_bytes()

    def damaged(said: str, *arguments: str) -> None:
        code, out, _ = run(capsys, tmp_path, *arguments)
        assert code == 1 and "step_00000020  DAMAGED" in out and said in out and "step_00000003  sound" in out

    shard.write_bytes(content[:-1])
    damaged(f"{shard.name}: tensor ")
    assert "newest complete: step_00000003; latest names step_00000020, which is damaged" in run(capsys, tmp_path)[1]
    shard.unlink()
    damaged("the file is missing")
    shard.write_bytes(content)
    manifest.write_bytes(sealed.replace(b'"step": 20', b'"step": 21'))
    damaged("damaged or was edited")
    manifest.write_bytes(sealed)
    assert run(capsys, tmp_path)[0] == 0

    older = next((tmp_path / "step_00000003").glob("*.safetensors"))
    older.write_bytes(content + b"x")
    assert run(capsys, tmp_path)[0] == 0  # a resume takes a sound one
    for arguments in ([tmp_path, "--all"], [older.parent]):
        code, out, _ = run(capsys, *arguments)
        assert code == 1 and "step_00000003  DAMAGED" in out and f"{older.name}: tensor " in out


@pytest.mark.parametrize("what", ["absent", "shape", "foreign"])
def test_the_manifest_against_its_configuration(tmp_path, capsys, what):
    """A parameter that the model lacks, one of another shape, one that it does not know: named."""
    name = "layers.0.mlp.down.weight"
    changes = {
        "absent": {f"master/{name}": None, f"param/{name}": None},
        "shape": {f"param/{name}": torch.zeros(3, 5)},
        "foreign": {"param/layers.99.mlp.down.weight": torch.zeros(2)},
    }
    path = model_checkpoint(tmp_path, change=changes[what])
    code, out, _ = run(capsys, path)
    said = {
        "absent": f"tensor {name!r}: is not there; the saved configuration has it",
        "shape": f"tensor {name!r}: has the shape [3, 5], the saved configuration says",
        "foreign": "no parameter of the saved configuration's model",
    }
    assert code == 1 and said[what] in out


def test_no_checkpoint_is_exit_code_2(tmp_path, capsys):
    for arguments in ([tmp_path], [tmp_path / "absent"], [tmp_path / "step_00000001"], [tmp_path, "--workers", "0"]):
        code, out, err = run(capsys, *arguments)
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
