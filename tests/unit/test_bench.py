"""The benchmarks' command line: each command takes its own options and no other's."""

import json

import pytest

from tools import bench
from tools.bench import gpu, host
from tools.bench.command import Command


def test_every_command_is_there(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"    {command.name}" in said for command in (*host.COMMANDS, *gpu.COMMANDS))


@pytest.mark.parametrize("words", [["plans", "--gib", "1"], ["checkpoint", "--device", "cuda"], ["layers", "--seeds", "1"]])
def test_options_of_others_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(words)
    assert words[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layers", "--steps", "0"], "--steps 0: at least one"),
        (["curves", "--steps", "0"], "--steps 0"),
        (["curves", "--seeds", "1,x"], "--seeds 1,x: numbers from 1 on"),
        (["contract", "--layers", "2,0"], "--layers 2,0: numbers from 1 on"),
        (["kernels", "--parts", "norm"], "--parts and --tune-shapes say what --tune measures"),
        (["products"], "products are measured on a GPU"),
        (["plans", "--plans", "8"], "--plans 8: STAGESxMICROBATCHES"),
    ],
)
def test_wrong_values(words, said, capsys):
    assert bench.main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_unknown_products(capsys, monkeypatch):
    """Before anything is measured."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert bench.main(["products", "--kinds", "fp8,dense"]) == 2
    assert "--kinds dense: there are fp8, bf16, experts, experts-bf16, experts-drawn" in capsys.readouterr().err


def test_a_report_says_how_to_repeat_it(tmp_path, monkeypatch):
    """Whoever calls: ``qeffect bench`` too."""
    from tools.bench.report import header, write

    def run(arguments):
        write(header(arguments, "this one"), arguments.json)
        return 0

    monkeypatch.setattr(host, "COMMANDS", (Command("mine", "", "", run, {"--name": {}}),))
    out = tmp_path / "a b.json"
    assert bench.main(["mine", "--name", "x y", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["command"] == f"python -m tools.bench mine --name 'x y' --json '{out}'" and written["benchmark"] == "mine"
