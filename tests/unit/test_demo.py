"""Where the demo runs: ranks and overrides by device and number of GPUs, and what is refused."""

from __future__ import annotations

import pytest

from qeffect_lm.config import load_config
from qeffect_lm.errors import UsageError
from tools import demo


def setup(*argv: str) -> demo.Setup:
    return demo.setup(demo.parser().parse_args(argv))


def test_on_a_cpu():
    made = setup()
    assert (made.device, made.ranks, made.overrides) == ("cpu", 2, ())
    assert made.every < made.kill < made.steps and f"train.steps={made.steps}" in made.proof()


@pytest.mark.parametrize(("visible", "argv", "ranks"), [(1, (), 1), (2, (), 2), (8, (), 2), (2, ("--gpus", "1"), 1)])
def test_on_gpus(monkeypatch, visible, argv, ranks):
    """Every configuration that it would run is a valid one, captured."""
    monkeypatch.setattr(demo, "gpus", lambda: visible)
    made = setup("--device", "cuda", *argv)
    assert made.ranks == ranks and made.every < made.kill < made.steps
    config = load_config(made.config, [*made.overrides, *made.proof()])
    assert config.parallel.pp == ranks and config.graphs.backend == "cuda_graphs" and config.run.device == "cuda"
    assert config.precision.fp8.recipe == "delayed" and config.contract.mode == "enforce"


def test_what_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(demo, "gpus", lambda: 0)
    assert demo.main(["--device", "cuda"]) == 2 and "make demo" in capsys.readouterr().err
    for options in (["--gpus", "1"], ["--backend", "te"]):
        assert demo.main(options) == 2 and f"error: {options[0]}" in capsys.readouterr().err
    monkeypatch.setattr(demo, "gpus", lambda: 2)
    with pytest.raises(UsageError, match="--gpus 3: torch sees 2"):
        setup("--device", "cuda", "--gpus", "3")


def test_a_python_without_torch(monkeypatch):
    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    with pytest.raises(UsageError, match="has no torch"):
        demo.gpus()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-mb", "1"], "--max-mb is 1; the demo's corpus has at least 10 MB"),
        (["--max-mb", "nan"], "--max-mb is nan"),
        (["--steps", "0"], "--steps is 0"),
        (["--corpus", "nowhere"], "--corpus nowhere: no stdlib.train.idx there"),
        (["--corpus", "old/corpus"], "--corpus old/corpus lies in old, which this demo makes anew"),
    ],
)
def test_a_wrong_request_leaves_an_earlier_demo_alone(tmp_path, monkeypatch, capsys, arguments, reason):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "old/corpus/stdlib.train.idx"
    kept.parent.mkdir(parents=True)
    kept.touch()
    (tmp_path / "old" / demo.MARKER).touch()
    assert demo.main(["--dir", "old", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {reason}") and kept.exists()
