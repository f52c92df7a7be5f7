"""``python -m tools.explain``: traces of real runs read back, and unreadable ones named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qeffect_lm.app.assemble import assemble
from qeffect_lm.contract.errors import StaleWeightError
from tests.tiny import batch, config
from tools.cli import available
from tools.explain import main

LAYER = "layers.0.mlp.down"


@pytest.fixture(scope="module", params=["eager", "host_replay"])
def trace(request, tmp_path_factory) -> Path:
    """Two steps of two microbatches, and a third that a stale weight ends."""
    path = tmp_path_factory.mktemp("trace") / f"{request.param}.jsonl"
    settings = {
        "contract__mode": "trace",
        "contract__trace_file": str(path),
        "graphs__backend": request.param,
    }
    assembly = assemble(config(model__num_layers=1, pipeline__microbatches=2, **settings))
    assembly.prepare(batch(0, 2))
    for step in range(2):
        assembly.engine.step(step, batch(step, 2))
    assembly.ledger.versions.bump()
    with pytest.raises(StaleWeightError):
        assembly.engine.step(2, batch(2, 2))
    return path


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, list[str], str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def columns(lines: list[str]) -> list[list[str]]:
    """Action and text of each line below a step's heading, without the number."""
    return [line.split(maxsplit=1)[1].split(maxsplit=1) for line in lines if line.startswith("  ")]


def test_summary(trace, capsys):
    """By default: what ran, what was abandoned and why, and how to ask for more."""
    code, lines, _ = run(capsys, trace)
    assert code == 0
    assert lines[0] == f"{trace}: 1 run"
    assert lines[1].startswith("steps 0 to 2: 2 ended, 1 abandoned, ")
    counted = dict(reversed(line.split()) for line in lines[2:] if line.startswith("  "))
    assert (counted["begin_step"], counted["end_step"], counted["refresh"]) == ("3", "2", "3")
    expected = {"replay": "12", "capture": "1"} if "host_replay" in trace.name else {"weight_grad": "20"}
    assert expected.items() <= counted.items()
    text = "\n".join(lines)
    assert "step 2 was abandoned: StaleWeightError: 0F0 needs 'layers.0.attention.qkv.weight'" in text
    assert "layers that retain (5): head, layers.0.attention.out" in text
    assert "cached weights: 4; streams: collective, compute" in text and "still" not in text
    assert lines[-1].startswith("more: --step S")


def test_a_step_in_its_order(trace, capsys):
    """A line per action, in the order in which they ran, with slots; then commit, refresh and end."""
    code, lines, _ = run(capsys, trace, "--step", 1)
    assert code == 0 and lines[0] == "step 1"
    actions = [row[0] for row in columns(lines) if row[0][0] == "0"]
    assert actions == ["0INPUT0", "0F0", "0I0", "0INPUT1", "0F1", "0I1", "0W0", "0W1"]
    by_action = {row[0]: row[1] for row in columns(lines)}
    assert "5 lease effects; 4 weight effects" in by_action["0F1"]
    assert by_action["0F1"].endswith("slot W0.1, generation 2")
    assert by_action["0W0"].endswith("slot W0.0, generation 2") and "5 grad effects" in by_action["0W0"]
    steps = [row[1] for row in columns(lines) if row[0] == "step"]
    assert steps == [
        "begins",
        "COMMIT closes epoch 2: scales of epoch 3 from here on",
        "refresh: 4 weights cached with the scales of epoch 3",
        "ends: no lease is left",
    ]
    numbers = [int(line.split()[0]) for line in lines[1:]]
    assert numbers == sorted(numbers)


def test_the_life_of_a_lease(trace, capsys):
    code, lines, _ = run(capsys, trace, "--layer", LAYER, "--kind", "lease", "--step", 0, "--microbatch", 1)
    graph = " (graph)" if "host_replay" in trace.name else ""
    assert code == 0 and lines[0] == "step 0"
    assert columns(lines) == [
        ["0F1", f"lease   {LAYER} forwarded: retained in slot W0.1, generation 1{graph}"],
        ["0I1", f"lease   {LAYER} input gradient done{graph}"],
        ["0W1", f"lease   {LAYER} free: consumed from slot W0.1, generation 1{graph}"],
    ]


def test_the_life_of_a_weight(trace, capsys):
    """From its first cast, before the first step, to its last: versions and the epochs of the scales."""
    code, lines, _ = run(capsys, trace, "--layer", LAYER, "--kind", "weight")
    assert code == 0
    assert [line for line in lines if not line.startswith("  ")] == [
        "before the first step",
        "step 0",
        "step 1",
    ]
    casts = [row[1] for row in columns(lines) if row[0] == "weight"]
    assert casts == [f"{LAYER}.weight cached at version {v} with the scale of epoch {v + 1}" for v in range(3)]
    reads = [row for row in columns(lines) if row[0] != "weight"]
    assert [row[0] for row in reads] == ["0F0", "0I0", "0F1", "0I1"] * 2
    assert all("version 0" in row[1] for row in reads[:4]) and all("version 1" in row[1] for row in reads[4:])


def test_the_life_of_a_scale(trace, capsys):
    """Readers of one epoch, the commit that closes it, readers of the next."""
    code, lines, _ = run(capsys, trace, "--layer", f"{LAYER}.grad_output", "--kind", "scale")
    assert code == 0
    story = [row for row in columns(lines)]
    commits = [place for place, row in enumerate(story) if row[0] == "scale"]
    assert [story[place][1] for place in commits] == [
        "CALIBRATION closes epoch 0: scales of epoch 1 from here on",
        "COMMIT closes epoch 1: scales of epoch 2 from here on",
        "COMMIT closes epoch 2: scales of epoch 3 from here on",
    ]
    for epoch, (first, last) in enumerate(zip(commits, commits[1:], strict=False), 1):
        between = story[first + 1 : last]
        assert between and all(row[0] in ("0I0", "0I1") and f"epoch {epoch}" in row[1] for row in between)


def test_a_layer_with_everything_that_happened_to_it(trace, capsys):
    """Without a kind: leases, scales, weight and gradient of the layer, with the step's own events in
    between.
    """
    code, lines, _ = run(capsys, trace, "--layer", LAYER, "--step", 0, "--microbatch", 0)
    kinds = {row[1].split()[0] for row in columns(lines) if row[0].startswith("0")}
    assert code == 0 and kinds == {"lease", "scale", "weight", "grad"}
    steps = [row[1] for row in columns(lines) if row[0] == "step"]
    assert len(steps) == 4 and steps[0] == "begins"
    assert not any(row[0] in ("0F1", "0I1", "0W1") for row in columns(lines))


def test_a_prefix_takes_all_layers_below(trace, capsys):
    _, lines, _ = run(capsys, trace, "--layer", "layers.0.mlp", "--kind", "lease", "--step", 0, "--microbatch", 0)
    assert {row[1].split()[1] for row in columns(lines)} == {LAYER, "layers.0.mlp.gate_up"}
    code, _, err = run(capsys, trace, "--layer", "layers.0.ml")
    assert code == 1 and "did you mean layers.0.mlp.down?" in err


def test_streams(trace, capsys):
    code, lines, _ = run(capsys, trace, "--kind", "stream", "--step", 0)
    text = "\n".join(lines)
    assert code == 0 and "0F0        stream  on compute: read ('x', 0, 0), write ('retained_I', 0, 0)" in text
    assert "REDUCE     stream  on collective: write ('grads', 0)" in text


def test_what_is_not_there(trace, capsys):
    """Exit code 1, with what was perhaps meant."""
    for arguments, message in (
        (("--layer", "layers.0.mlp.dwn"), "no layer 'layers.0.mlp.dwn'; did you mean layers.0.mlp.down?"),
        (("--layer", "zzz"), "no layer 'zzz'; there are head, layers.0"),
        (("--step", 7), "no step 7; there are 0 to 2"),
        (("--step", 0, "--microbatch", 9), "nothing in the trace fits"),
        (("--microbatch", 9), "nothing in the trace fits"),
    ):
        code, lines, err = run(capsys, trace, *arguments)
        assert code == 1 and lines == [] and message in err, (arguments, err)


def test_a_killed_run_and_a_second_one(trace, capsys, tmp_path):
    """A file cut in the middle of a line is read up to there and says what was retained; a later run is told
    by default.
    """
    whole = trace.read_text().splitlines(keepends=True)
    effects = [json.loads(line) for line in whole]
    stop = next(
        place
        for place, effect in enumerate(effects)
        if effect.get("step") == 1 and effect.get("kind") == "W" and effect.get("microbatch") == 1
    )
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(whole[: stop + 1])[:-9])
    code, lines, err = run(capsys, cut)
    assert code == 0 and f"note: the last line, {stop + 1}, is incomplete and left out" in err
    assert "step 1 has no end: the run was stopped inside it, while these were retained:" in lines
    held = [line.strip() for line in lines if ", microbatch " in line]
    assert f"{LAYER}, chunk 0, microbatch 1: input gradient done" in held and len(held) == 5
    both = tmp_path / "both.jsonl"
    both.write_text("".join(whole[: stop + 1]) + "".join(whole[:20]))
    _, lines, _ = run(capsys, both)
    assert lines[0] == f"{both}: 2 runs, the last one:"
    assert "steps 0 to 0" in lines[1]
    assert run(capsys, both, "--run", 1, "--step", 1)[0] == 0
    assert run(capsys, both, "--step", 1)[0] == 1
    code, _, err = run(capsys, both, "--run", 3)
    assert code == 2 and err == "error: --run 3: the file holds runs 1 to 2\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("", "is empty: the run wrote no effect"),
        ("step 3, loss 2.1\n", "line 1: not an effect of a trace: 'step 3, loss 2.1'"),
        ('{"n": 0, "effect": "begin_step", "step": 0}\n{"loss": 1}\n{"n": 1}\n', "line 2: not an effect"),
        ('{"n": 0, "effect": "retain", "step": 0, "what": "a"}\n', "line 1: a retain effect without 'chunk'"),
        ("[1, 2]\n", "line 1: not an effect"),
    ],
)
def test_unreadable_files(content, message, capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    code, lines, err = run(capsys, path)
    assert code == 2 and lines == [] and err.startswith("error: ") and message in err and str(path) in err


def test_it_is_a_tool():
    assert available()["explain"].startswith("Tell from a trace what happened to a lease")
