"""The tools as a user runs them: parity with its controls, the benchmark, generation on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.runs import CONFIG, run_here, write_config
from tools import parity
from tools.common import ROOT


def tool(name: str, *arguments: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"tools.{name}", *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.mark.long
def test_parity_cells():
    """A captured and a killed cell against the plain reference, each with a control that differs."""
    only = ["--schedule", "1f1b", "--stages", "1", "--execution", "captured", "--window", "step"]
    done = tool("parity", "--json", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] == 2 and report["failed"] == 0
    whole, killed = report["cells"]
    assert not whole["killed"] and killed["killed"] and whole["tensors"] == killed["tensors"] > 200
    assert all(cell["equal"] and cell["control_differs"] and cell["control_first"] for cell in report["cells"])


@pytest.mark.long
def test_parity_matrix():
    done = tool("parity", timeout=1500)
    assert done.returncode == 0 and "38 cells bitwise equal" in done.stdout, done.stdout + done.stderr


def test_parity_on_a_cpu_refuses_what_only_a_gpu_heeds(capsys):
    """It would run all cells and none of them as asked."""
    assert parity.main(["--hidden", "256", "--report", "cells.json"]) == 2
    assert "--hidden, --report: only with --device cuda" in capsys.readouterr().err


@pytest.mark.long
def test_parity_notices_a_difference(tmp_path):
    """The matrix can fail: with a capture that freezes a wrong learning rate, the captured cell is reported as different."""
    matrix = parity.Matrix(tmp_path)
    cell = parity.Cell("1f1b", 1, "captured", False, "step")
    original = matrix._run

    def run(cell_, name, more=()):
        wrong = ["optim.lr=0.02"] if cell_.execution == "captured" and not name.endswith("control") else []
        return original(cell_, name, [*more, *wrong])

    matrix._run = run  # type: ignore[method-assign]
    verdict = matrix.check(cell)
    assert not verdict.equal and verdict.first == "loss of step 2" and not verdict.ok


@pytest.mark.long
def test_bench_contract(tmp_path):
    """The benchmark runs all modes on equal data and writes ratios; the figures themselves are not judged here."""
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)
    done = tool("bench", "contract", "--config", config, "--steps", "2", "--json", tmp_path / "bench.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert set(report["median_step_ms"]) == {"off", "enforce", "trace"} and report["ratio_of_sums"]["off"] == 1.0


def test_generate_and_diff_on_the_command_line(tmp_path):
    from qeffect_lm.data.tokenizer import train_sentencepiece

    write_config(tmp_path, CONFIG.replace("vocab_size: 64", "vocab_size: 400").replace("{steps: 12}", "{steps: 6}"))
    train_sentencepiece([(ROOT / "README.md").read_text()], tmp_path / "tokens", vocab_size=400)
    assert run_here(tmp_path, "run", f"data.tokenizer={tmp_path / 'tokens.model'}")[0] == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    generate = ("generate", checkpoints, "--prompt", "the ", "--max-new-tokens", "12", "--seed")
    texts = [tool(*generate, seed) for seed in ("1", "1", "2")]
    assert all(text.returncode == 0 and text.stdout.startswith("the ") for text in texts), texts[0].stderr
    assert texts[0].stdout == texts[1].stdout != texts[2].stdout
    same = tool("diff", checkpoints, checkpoints)
    other = tool("diff", checkpoints / "step_00000003", checkpoints / "step_00000006")
    missing = tool("diff", checkpoints, tmp_path / "nothing")
    of_optimizer = [part for name in ("master/", "mom", "am") for part in ("--ignore", name)]
    ignored = tool("diff", tmp_path / "run", checkpoints / "step_00000003", *of_optimizer)
    assert ignored.returncode == 1 and "master/" not in ignored.stdout  # a run's folder stands for its newest
    nothing = tool("diff", checkpoints, checkpoints / "step_00000003", "--ignore", "")
    assert nothing.returncode == 2 and "leaves no tensor to compare" in nothing.stderr
    assert [same.returncode, other.returncode, missing.returncode] == [0, 1, 2]
    assert "first differing tensor" in other.stdout and "Traceback" not in missing.stderr
    wrong = tool("generate", tmp_path / "nothing", "--prompt", "the ")
    assert wrong.returncode in (1, 2) and wrong.stderr.startswith("error:") and "Traceback" not in wrong.stderr
