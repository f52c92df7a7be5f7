"""``python -m tools.explain``: traces of real runs read back, and unreadable ones named."""

from __future__ import annotations

from pathlib import Path

import pytest

from qeffect_lm.app.assemble import assemble
from qeffect_lm.contract.errors import StaleWeightError
from tests.tiny import batch, config
from tools.cli import available
from tools.explain import main

pytestmark = pytest.mark.xdist_group("explain")  # the traces are made once
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
    """By default: the violation, what ran, what was abandoned and why, and how to ask for more."""
    code, lines, _ = run(capsys, trace)
    assert code == 0
    assert lines[0] == "violation 1 of 1: StaleWeightError"
    start = lines.index(f"{trace}: 1 run")
    assert lines[start + 1].startswith("steps 0 to 2: 2 ended, 1 abandoned, ")
    counted = dict(reversed(line.split()) for line in lines[start + 2 :] if line.startswith("  "))
    assert (counted["begin_step"], counted["end_step"], counted["refresh"], counted["bump"]) == ("3", "2", "3", "3")
    expected = {"replay": "12", "capture": "1"} if "host_replay" in trace.name else {"action": "12", "broken": "1"}
    assert expected.items() <= counted.items()
    text = "\n".join(lines)
    assert "step 2 was abandoned: StaleWeightError: 0F0 needs 'layers.0.attention.qkv.weight'" in text
    assert "layers that retain (5): head, layers.0.attention.out" in text
    assert "cached weights: 4; streams: collective, compute" in text and "no end" not in text
    assert lines[-2].startswith("more: --violation, --step S") and "--lease C,M" in lines[-1]


def test_a_step_in_its_order(trace, capsys):
    """A line per action, in the order in which they ran, with slots; then commit, refresh and end."""
    code, lines, _ = run(capsys, trace, "--step", 1)
    assert code == 0 and lines[0] == "step 1"
    actions = [row[0] for row in columns(lines) if row[0][0] == "0"]
    assert list(dict.fromkeys(actions)) == ["0INPUT0", "0F0", "0I0", "0INPUT1", "0F1", "0I1", "0W0", "0W1"]
    by_action = {row[0]: row[1] for row in columns(lines) if "slot" in row[1]}
    assert "5 lease effects; 4 weight effects" in by_action["0F1"]
    assert by_action["0F1"].endswith("slot W0.1, generation 2")
    assert by_action["0W0"].endswith("slot W0.0, generation 2") and "5 grad effects" in by_action["0W0"]
    steps = [row[1] for row in columns(lines) if row[0] == "step"]
    assert steps == [
        "begins",
        "bump: 9 parameters written",
        "COMMIT closes epoch 2: scales of epoch 3 from here on",
        "refresh: 4 weights cached with the scales of epoch 3",
        "ends: no lease is left",
        "bump: 9 parameters written",
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
    written = [row[1] for row in columns(lines) if row[0] == "weight" and "written" in row[1]]
    assert written == [f"{LAYER}.weight written: version {v} from here on" for v in (1, 2, 3)]
    casts = [row[1] for row in columns(lines) if row[0] == "weight" and "cached" in row[1]]
    assert casts == [f"{LAYER}.weight cached at version {v} with the scale of epoch {v + 1}" for v in range(3)]
    reads = [row for row in columns(lines) if row[0] != "weight"]
    assert [row[0] for row in reads] == ["0F0", "0I0", "0F1", "0I1"] * 2
    assert all("version 0" in row[1] for row in reads[:4]) and all("version 1" in row[1] for row in reads[4:8])


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
    assert len(steps) == 5 and steps[0] == "begins"
    assert not any(row[0] in ("0F1", "0I1", "0W1") for row in columns(lines))


def test_a_prefix_takes_all_layers_below(trace, capsys):
    _, lines, _ = run(capsys, trace, "--layer", "layers.0.mlp", "--kind", "lease", "--step", 0, "--microbatch", 0)
    assert {row[1].split()[1] for row in columns(lines)} == {LAYER, "layers.0.mlp.gate_up"}


def test_streams(trace, capsys):
    code, lines, _ = run(capsys, trace, "--kind", "stream", "--step", 0)
    text = "\n".join(lines)
    assert code == 0 and "0F0        stream  on compute: read x.0.0" in text
    assert "REDUCE     stream  on collective: write grads_W.0" in text
    assert "stream  on collective: waits for event compute@" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layer", "layers.0.mlp.dwn"), "no layer 'layers.0.mlp.dwn' in the trace; did you mean layers.0.mlp.down?"),
        (("--layer", "layers.0.ml"), "did you mean layers.0.mlp.down?"),
        (("--layer", "zzz"), "no layer 'zzz' in the trace; there are head, layers.0"),
        (("--buffer", "grads_W"), "no buffer 'grads_W' in the trace; did you mean grads_W.0?"),
        (("--weight", "layers.0.mlp.down.wait"), "did you mean layers.0.mlp.down.weight?"),
        (("--scale", "layers.0.mlp.down.inputs"), "did you mean layers.0.mlp.down.input?"),
        (("--slot", "W0.7"), "no slot 'W0.7' in the trace; did you mean W0."),
        (("--stream", "computer"), "did you mean compute?"),
        (("--lease", "0,9"), "no lease '0,9' in the trace; did you mean 0,"),
        (("--lease", "0,1,layers.0.mlp.dwn"), "no layer 'layers.0.mlp.dwn' in the trace; did you mean"),
        (("--lease", "first"), "--lease first: give chunk,microbatch"),
        (("--step", 7), "no step 7; there are 0 to 2"),
        (("--violation", 2), "--violation 2: there are violations 1 to 1"),
        (("--run", 3), "--run 3: "),
        (("--html", "/nowhere/at/all.html"), "cannot write /nowhere/at/all.html"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest(arguments, message, trace, capsys):
    code, lines, err = run(capsys, trace, *arguments)
    assert code == 2 and lines == [] and message in err and err.count("\n") == 1


def test_nothing_fits(trace, capsys):
    for arguments in (("--step", 0, "--microbatch", 9), ("--microbatch", 9), ("--lease", "0,1", "--kind", "grad")):
        code, lines, err = run(capsys, trace, *arguments)
        assert (code, lines, err) == (1, [], "nothing in the trace fits\n")


def test_a_killed_run_and_a_second_one(trace, capsys, tmp_path):
    """A file cut in the middle of a line is read up to there and says what was retained; a later run is told by default."""
    whole = trace.read_text().splitlines(keepends=True)
    act = '["r"' if "host_replay" in trace.name else '["a"'
    stop = [place for place, line in enumerate(whole) if line.startswith(act)][11]  # step 1's W of microbatch 1
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(whole[: stop + 1])[:-9])
    code, lines, err = run(capsys, cut)
    assert code == 0 and f"line {stop + 1} is incomplete (its process was killed) and left out" in err
    assert "step 1 has no end: the run was stopped inside it, while these were retained:" in lines
    held = [line.strip() for line in lines if ", microbatch " in line]
    assert f"{LAYER}, chunk 0, microbatch 1: input gradient done" in held and len(held) == 5
    both = tmp_path / "both.jsonl"
    both.write_text("".join(whole[: stop + 1]) + "".join(whole[:60]))
    _, lines, _ = run(capsys, both)
    assert lines[0] == f"{both}: 2 runs, one of them:"
    assert "steps 0 to 0" in lines[1]
    assert run(capsys, both, "--run", 1, "--step", 1)[0] == 0
    assert run(capsys, both, "--step", 1)[0] == 2
    code, _, err = run(capsys, both, "--run", 3)
    assert code == 2 and err == f"error: --run 3: {both} holds runs 1 to 2\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("", "is empty: not a trace"),
        ("step 3, loss 2.1\n", "line 1: not a trace: 'step 3, loss 2.1'"),
        ('{"n": 0, "effect": "retain", "step": 0}\n', "a trace of an older version"),
        ('["qeffect-trace",2,{}]\n', "is a trace of format 2"),
        ('["qeffect-trace",1,{}]\n', "a header and nothing else"),
    ],
)
def test_unreadable_files(content, message, capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_text(content)
    code, lines, err = run(capsys, path)
    assert code == 2 and lines == [] and err.startswith("error: ") and message in err and str(path) in err
    assert err.count("\n") == 1


def test_it_is_a_tool():
    assert available()["explain"].startswith("Tell from a trace what happened to a lease")


def test_a_record_with_senseless_values_is_one_line(tmp_path, capsys):
    """Well-formed lines that no run writes: refused like any file that is no trace, whatever was asked for."""
    path = tmp_path / "trace.jsonl"
    path.write_text('["qeffect-trace",1,{}]\n["s",0]\n["c","COMMIT",0,5]\n["z"]\n')
    assert main([str(path), "--step", "0"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and str(path) in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "--step", "1"], "--step has no effect with --size"),
        (["--size", "--html", "x.html"], "--html has no effect with --size"),
        (["--html", "x.html", "--buffer", "x"], "--buffer has no effect with --html"),
        (["--html", "x.html", "--kind", "weight"], "--kind has no effect with --html"),
        (["--violation", "--microbatch", "0"], "--microbatch has no effect with --violation"),
        (["--violation", "--layer", "head"], "--layer has no effect with --violation"),
        (["--lease", "0,1", "--layer", "head"], "--layer has no effect with --lease"),
    ],
)
def test_choices_that_would_be_ignored(options, message, capsys, tmp_path):
    code, lines, err = run(capsys, tmp_path / "never-read.jsonl", *options)
    assert code == 2 and lines == [] and err == f"error: {message}: leave one of them out\n"
