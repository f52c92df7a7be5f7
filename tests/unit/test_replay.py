"""tools.replay: a resume repeats the recorded step bit for bit, and every broken one is noticed, by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint, open_checkpoint, rewrite_checkpoint
from checkpoint.manifest import Manifest
from checkpoint.record import bits, differing, float_of, read_record, record_path, write_record
from pipeline.step_end import StepEnd
from qeffect_lm.app import recording
from qeffect_lm.app.replay import CONTROLS, replay
from qeffect_lm.runtime.launch import LaunchEnv
from tests.runs import CONFIG, assert_same_run, overrides, run_here, write_config
from tools import replay as tool
from tools.common import environment, launch

INPUT = "layers.0.attention.qkv.input"
WEIGHT = "layers.1.mlp.down.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of 7 steps with dropout, ``run``, saved every second."""
    path = tmp_path_factory.mktemp("replay")
    text = CONFIG.replace("num_layers: 4", "num_layers: 2").replace("{steps: 12}", "{steps: 7}").replace("every: 3", "every: 2")
    write_config(path, text)
    assert run_here(path, "run")[0] == 0
    return path


@pytest.fixture
def here(monkeypatch):
    """The tool's steps run in this process."""

    def launched(arguments: Any, checkpoint: Checkpoint, number: int) -> dict[str, Any]:
        done = replay(checkpoint, LaunchEnv(), arguments.overrides, arguments.control)
        assert done is not None
        return json.loads(json.dumps(tool.told(done)))

    monkeypatch.setattr(tool, "_launched", launched)


def at(folder: Path, step: int, run: str = "run") -> Path:
    return folder / run / "checkpoints" / f"step_{step:08d}"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, report, errors."""
    code = tool.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def different(report: dict[str, Any]) -> dict[str, list[str]]:
    return {part["name"]: part["different"] for part in report["runs"][0]["parts"] if part["different"]}


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() + str(path.stat().st_mtime_ns) for path in files}


def test_a_sound_resume_repeats_the_step(folder, here, capsys):
    """Two runs of it: all parts equal, one fingerprint, and nothing of the run is written."""
    records = sorted(path.name for path in record_path(at(folder, 2)).parent.iterdir())
    assert records == ["step_00000002.json", "step_00000004.json", "step_00000006.json"]
    before = contents(folder)
    code, report, _ = run(capsys, at(folder, 4), "--runs", 2)
    assert contents(folder) == before
    assert code == 0 and report["equal"] and len(report["fingerprints"]) == 1 and report["recorded_by"] == "run"
    parts = {part["name"]: part["compared"] for part in report["runs"][0]["parts"]}
    assert list(parts)[:2] == ["plan", "graphs"] and len(parts) == 13 and min(parts.values()) > 0
    assert parts["gradients"] == 15 and parts["state"] > 120 and parts["state at the save"] > 70
    record = read_record(at(folder, 4))
    assert record is not None and record.step == 5 and report["runs"][0]["loss"] == record.loss()
    assert tool.main([str(at(folder, 4))]) == 0 and capsys.readouterr().out.rstrip().endswith("equal, bit for bit")


def test_the_trace_of_a_run_is_left_alone(folder, here, capsys):
    """Mode ``trace`` writes a file beside the run: a replay writes its own elsewhere."""
    assert run_here(folder, "traced", "contract.mode=trace", "train.steps=3")[0] == 0
    before = contents(folder / "traced")
    assert any(name.endswith("trace.jsonl") for name in before)
    assert run(capsys, at(folder, 2, "traced"))[0] == 0 and contents(folder / "traced") == before


def test_another_schedule_repeats_it_too(folder, here, capsys):
    """Window ``step``: gradients and state do not depend on the plan; what was changed on purpose is not compared."""
    code, report, _ = run(capsys, at(folder, 2), "pipeline.schedule=zb-h1", "pipeline.w_delay=0")
    skipped = {part["name"]: part["why_not"] for part in report["runs"][0]["parts"] if part["why_not"]}
    assert code == 0 and skipped.keys() == {"plan", "graphs"} and "pipeline.schedule" in skipped["plan"]


def test_changed_graphs_are_told_and_the_step_is_compared_all_the_same(folder, here, capsys, monkeypatch):
    """Another library or other code: here with an operation more that changes no number."""
    real = StepEnd.sum_losses_

    def changed(self: StepEnd) -> None:
        real(self)
        self._mine.mul_(1.0)

    monkeypatch.setattr(StepEnd, "sum_losses_", changed)
    code, report, _ = run(capsys, at(folder, 2))
    assert code == 1 and different(report) == {"graphs": ["rank 0"]} and report["runs"][0]["first"] == "graphs: rank 0"
    assert any(note.startswith("accepted: rank 0's graphs are not those of") for note in report["runs"][0]["notes"])


@pytest.mark.parametrize(
    ("control", "first", "more"),
    [
        ("scale", "restored state: scale/layers.0.attention.out.input", ["state at the save", "numbers", "gradients", "state"]),
        ("history", "restored state: amax_history/layers.0.attention.out.input", ["state at the save", "state"]),
        ("cache", "restored counters: weights/versions/layers.0.attention.qkv.weight", []),
        ("rng", "restored state: rng/dp0.ep0.pp0.tp0/torch", ["state at the save", "generators"]),
        ("dropout", "data: microbatch 0 random key", ["numbers", "gradients", "state"]),
        ("cursor", "restored cursor: next_sample", ["data", "numbers", "gradients", "state", "cursor"]),
        ("plan", "plan: plan", ["graphs"]),
    ],
)
def test_every_control_is_noticed(folder, here, capsys, control, first, more):
    """The state is broken after all of the restore's own checks."""
    code, report, _ = run(capsys, at(folder, 4), "--control", control)
    assert code == 1 and not report["equal"] and report["runs"][0]["first"] == first
    assert list(different(report))[1:] == more
    refused = report["runs"][0]["refused"]
    assert (refused or "").startswith("StaleWeightError: 0F0 needs" if control == "cache" else "")
    assert bool(refused) == (control == "cache")
    assert tool.main([str(at(folder, 4)), "--control", control]) == 1
    assert f"DIFFERENT; first {first}" in capsys.readouterr().out


def test_the_controls_that_the_tool_offers_are_all(folder):
    assert tuple(CONTROLS) == tool.CONTROLS


def one_ulp(value: torch.Tensor) -> torch.Tensor:
    """The first element, one ulp up."""
    changed = value.clone().reshape(-1)
    changed[0] = torch.nextafter(changed[0], torch.tensor(torch.inf))
    return changed.reshape(value.shape)


def other_word(value: torch.Tensor) -> torch.Tensor:
    """A generator's state of other numbers, still one that it can have."""
    return torch.cat([value[:1] ^ 2**31, value[1:]])


@pytest.mark.parametrize(
    ("name", "change", "first"),
    [
        (f"scale/{INPUT}", one_ulp, f"state at the save: scale/{INPUT}"),
        (f"amax_history/{INPUT}", lambda value: value.roll(1), f"state at the save: amax_history/{INPUT}"),
        (f"moment1/{WEIGHT}", one_ulp, "state: m"),  # the ulp may reach the master
        ("rng/dp0.ep0.pp0.tp0/numpy", other_word, "state at the save: rng/dp0.ep0.pp0.tp0/numpy"),
        (f"scale/{WEIGHT}", one_ulp, "refused: ResumeError: tensor 'cached_weight"),
        (f"cached_weight/{WEIGHT}", None, f"refused: ResumeError: tensor 'cached_weight/{WEIGHT}' (cached_weight) was rebuilt"),
        (f"amax_open/{WEIGHT}", lambda value: value * 2, f"refused: ResumeError: tensor 'amax_open/{WEIGHT}'"),
    ],
)
def test_a_checkpoint_that_was_tampered_with(folder, tmp_path, here, capsys, name, change, first):
    """The files are sound, their content is not what was saved. ``None``: the bytes of the checkpoint before."""
    source, before = open_checkpoint(at(folder, 4)), open_checkpoint(at(folder, 2))
    value = before.read(name) if change is None else change(source.read(name))
    assert not torch.equal(value.float(), source.read(name).float())
    changed = rewrite_checkpoint(source, tmp_path, {name: value})
    shutil.copytree(at(folder, 4).parent / "replay", tmp_path / "replay")
    code, report, _ = run(capsys, changed)
    assert code == 1 and report["runs"][0]["first"].startswith(first)


def test_a_cache_version_that_is_one_old(folder, tmp_path, here, capsys):
    """In the manifest: the restore refuses by name."""
    target = tmp_path / "step_00000004"
    shutil.copytree(at(folder, 4).parent, tmp_path, dirs_exist_ok=True)
    manifest = open_checkpoint(target).manifest
    meta = json.loads(json.dumps(manifest.meta))
    meta["contract"]["weights"]["cache_version"][WEIGHT] -= 1
    changed: Manifest = manifest.model_copy(update={"meta": meta})
    (target / "manifest.json").write_bytes(changed.to_bytes())
    code, report, _ = run(capsys, target)
    assert code == 1 and f"cached weight '{WEIGHT}': cache_version 3 was saved, 4 was rebuilt" in report["runs"][0]["first"]


def test_without_a_record(folder, tmp_path, here, capsys):
    """None: exit code 2, and ``--record`` makes one that later replays are compared with."""
    shutil.copytree(at(folder, 4), tmp_path / "step_00000004")
    code, report, err = run(capsys, tmp_path / "step_00000004")
    assert (code, list(report)) == (2, ["error"]) and "has no record of step 5" in err and "--record makes one" in err
    code, report, _ = run(capsys, tmp_path / "step_00000004", "--record")
    assert code == 0 and report["recorded_now"].endswith("step_00000004.json")
    made, original = read_record(tmp_path / "step_00000004"), read_record(at(folder, 4))
    assert made is not None and original is not None and made.made_by == "replay"
    assert made.state == original.state and made.numbers == original.numbers and made.before == original.before
    code, report, _ = run(capsys, tmp_path)
    assert code == 0 and report["recorded_by"] == "replay"
    code, _, _ = run(capsys, tmp_path, "--control", "cursor")
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}/checkpoints/step_00000007"], "to run again. step_00000006 beside it has a record"),
        (["{run}/checkpoints/step_00000007", "--record"], "is the end of its run, which has 7 steps: there is no step"),
        (["{run}/checkpoints/step_00000003"], "is not a complete checkpoint"),
        (["{run}/checkpoints/step_00000002", "--runs", "0"], "--runs 0: at least one"),
        (["{run}/checkpoints/step_00000002", "--record", "--control", "scale"], "--record keeps what a sound resume does"),
        (["{run}/checkpoints/step_00000002", "data.train=/absent"], "/absent"),
        (["{run}/checkpoints/step_00000002", "run.seed=7"], "these keys may not change on resume"),
        (["{run}/checkpoints/step_00000002", "parallel.pp=2"], "start 2 processes"),
    ],
)
def test_what_cannot_be_replayed_is_exit_code_2(folder, here, capsys, arguments, said):
    code, report, err = run(capsys, *(argument.format(run=folder / "run") for argument in arguments))
    assert code == 2 and err == f"error: {report['error']}\n" and said in err


def test_records_that_are_not_of_this_checkpoint(folder, tmp_path, here, capsys):
    """Damaged, of a newer format, of another save of the same step."""
    shutil.copytree(at(folder, 4).parent, tmp_path, dirs_exist_ok=True)
    path = record_path(tmp_path / "step_00000004")
    whole = path.read_text()
    for content, said in (
        (whole[:-9], "is damaged, it is no record of a step"),
        (whole.replace('"format": 1', '"format": 2'), "another format"),
        (whole.replace('"step": 5,', ""), "is damaged"),
        (whole.replace('"save_id": "', '"save_id": "0'), "after another save of that step"),
    ):
        path.write_text(content)
        code, _, err = run(capsys, tmp_path / "step_00000004")
        assert code == 2 and said in err


# ---- the records of a run --------------------------------------------------------------------------------------------


def test_records_go_with_their_checkpoints(folder):
    """Retention removes a checkpoint, the next record takes the old ones with it; what is not ours stays."""
    notes = folder / "kept/checkpoints/replay/notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    assert run_here(folder, "kept", "checkpoint.keep=1")[0] == 0
    assert sorted(path.name for path in notes.parent.iterdir()) == ["notes.txt", "step_00000006.json"]


def test_checkpoint_record_false_keeps_none(folder, monkeypatch):
    """And reads nothing: the step after a save is like any other."""
    monkeypatch.setattr(recording, "Summer", None)
    assert run_here(folder, "none", "checkpoint.record=false")[0] == 0
    assert not (folder / "none/checkpoints/replay").exists()


def test_a_resumed_run_compares_itself(folder, capsys):
    """The step that a killed run had done already: told to be the same, or loudly not; the record of before stays."""

    def resumed(name: str, *more: str) -> list[str]:
        shutil.copytree(folder / "run", folder / name)
        for step in (6, 7):
            shutil.rmtree(at(folder, step, name))
        if more[:1] == ("tampered",):
            record = read_record(at(folder, 4, name))
            assert record is not None
            write_record(at(folder, 4, name).parent, type(record)(**{**vars(record), "gradients": {"grad/x": "y"}}))
        capsys.readouterr()
        assert run_here(folder, name, *more[1:])[0] == 0
        said = "".join(capsys.readouterr()).splitlines()
        return [line for line in said if line.removeprefix("WARNING: ").startswith("step 5")]

    assert resumed("again") == ["step 5 repeated the one that ran before the restart, bit for bit"]
    (line,) = resumed("odd", "tampered")
    assert line.startswith("WARNING: step 5 is not the one that ran before the restart; first in gradients: 16 of 16 DIFFER")
    assert resumed("changed", "", "optim.lr=0.02") == []  # it is another step, and says nothing of the old record
    records = [read_record(at(folder, 4, name)) for name in ("run", "again", "changed")]
    assert records[0] == records[1] == records[2]


def test_a_record_that_cannot_be_written_does_not_end_the_run(folder, capsys):
    (folder / "full/checkpoints").mkdir(parents=True)
    (folder / "full/checkpoints/replay").write_text("in the way")
    assert run_here(folder, "full")[0] == 0
    assert "".join(capsys.readouterr()).count("goes on without its record for tools.replay") == 3


def test_recording_changes_nothing(folder):
    """Losses, norms and state with and without records, saved at once or in the background."""
    for name, flag in (("with", "record=true"), ("without", "record=false"), ("background", "async_save=true")):
        assert run_here(folder, name, "checkpoint.every=1", f"checkpoint.{flag}")[0] == 0
    assert [read_record(at(folder, 6, name)) is None for name in ("with", "without", "background")] == [False, True, False]
    assert assert_same_run(folder, "with", "background") > 100
    assert assert_same_run(folder, "with", "without") > 100


def test_a_record_stays_although_its_checkpoint_is_still_being_written(folder, tmp_path):
    """In the background: the step after it may be faster. Records of others that are gone go."""
    record = read_record(at(folder, 4))
    assert record is not None
    path = write_record(tmp_path, record)
    assert read_record(tmp_path / "step_00000004") == record
    write_record(tmp_path, type(record)(**{**vars(record), "step": 9}))
    assert not path.exists() and record_path(tmp_path / "step_00000008").exists()


def test_what_is_absent_is_not_what_is_null():
    assert differing({"a": None, "b": 1}, {"b": 1, "c": None}) == ("a", "c")


def test_floats_keep_all_bits():
    for value in (1.5, -0.0, float("inf")):
        assert bits(float_of(bits(value))) == bits(value)
    assert bits(0.0) != bits(-0.0) and float_of(bits(float("nan"))) != float_of(bits(float("nan")))


@pytest.mark.long
def test_ten_resumes_of_two_stages(folder, capsys):
    """Ranks in processes of their own, each time from the start: ten equal fingerprints, on the saved layout and another."""
    settings = overrides(folder, "stages", "parallel.pp=2", "parallel.dp=1", "train.steps=3")
    code, output = launch(folder / "tiny.yaml", settings, 2, environment()).wait()
    assert code == 0, output
    code, report, err = run(capsys, at(folder, 2, "stages"), "--runs", 10)
    assert code == 0, err
    assert len(report["runs"]) == 10 and len(report["fingerprints"]) == 1 and len(report["fingerprints"][0]) == 3
    code, report, err = run(capsys, at(folder, 2, "stages"), "parallel.pp=1")
    assert code == 0, err
    code, report, _ = run(capsys, at(folder, 2, "stages"), "--control", "cache")
    assert code == 1 and "StaleWeightError" in report["runs"][0]["refused"]
    code, _, err = run(capsys, at(folder, 2, "stages"), "data.train=/absent")
    assert code == 2 and "/absent" in err and err.startswith("error: ")
