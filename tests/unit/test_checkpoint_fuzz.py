"""Hostile checkpoints: a clear error or a sound reading, nothing outside, no memory that nothing vouches for, no pickle."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.manifest import MANIFEST_MOST
from qeffect_lm.errors import QEffectError
from qeffect_lm.runtime.metrics import MetricsWriter, StepMetrics, read_metrics
from tests.hostile import SNIPPETS, bases, hostile, noise

ROOT = Path(__file__).resolve().parents[2]


def fuzz(folder: Path, first: int, count: int) -> dict[str, Any]:
    """Read these inputs in a process of its own; what it counted."""
    command = [sys.executable, "-m", "tests.fuzz_checkpoints", str(folder), "--first", str(first), "--count", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["inputs"] == count == sum(n for name, n in found.items() if name not in ("inputs", "peak_mb"))
    assert found["peak_mb"] < 700
    return found


def test_some_hostile_checkpoints(tmp_path: Path) -> None:
    """Enough of every kind that the harness itself is tried each time."""
    found = fuzz(tmp_path, 1_000_000, 250)
    kinds = "manifest refused", "manifest sound", "meta sound", "meta refused", "shard damaged", "file damaged", "latest sound"
    for kind in kinds:
        assert found.get(kind, 0) > 0, kind


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 24_000, 4_000))
def test_many_hostile_checkpoints(tmp_path: Path, first: int) -> None:
    """Issue: at least 20,000 mutated inputs."""
    fuzz(tmp_path, first, 4_000)


def test_an_input_is_its_number(tmp_path: Path) -> None:
    """What a long run found can be looked at again: ``--first NUMBER --count 1``."""
    sound = bases(tmp_path)
    for number in range(40):
        (kind, files), (again, same) = (hostile(number, sound, [b"x"]) for _ in range(2))
        assert kind == again and files.keys() == same.keys()
        assert all(files[name] == same[name] for name in files if isinstance(files[name], bytes))


def test_the_metrics_file_of_a_run_may_hold_anything(tmp_path: Path) -> None:
    """What a resume finds in metrics.jsonl: lines that are none are moved away, those before the resumed step stay."""
    lines = [StepMetrics(step, 2.0, 1.0, 0.1, 8, 9.0, 3.0, extra={"more": [1, 2]}).to_json() for step in range(1, 6)]
    sound = "".join(f"{line}\n" for line in lines).encode()
    nonfinite = [b'{"step": 1, "nonfinite": []}', b'{"step": 1, "nonfinite": {"loss": []}}']
    odd = [b"null", b"[]", b"1", b'"x"', b'{"step": true}', *nonfinite, *SNIPPETS]
    path = tmp_path / "metrics.jsonl"
    for number in range(600):
        draw = random.Random(number)
        content = noise(draw, sound) if draw.random() < 0.8 else sound + draw.choice(odd) + b"\n" + lines[4].encode()
        path.write_bytes(content)
        with_errors(lambda: read_metrics(path))
        with MetricsWriter(path, 3) as writer:
            writer.write(StepMetrics(4, 2.0, 1.0, 0.1, 8, 9.0, 3.0))
        assert [record.step for record in read_metrics(path)][-1] == 4
        for other in tmp_path.glob("*superseded*"):
            other.unlink()


def with_errors(work: Callable[[], object]) -> None:
    try:
        work()
    except QEffectError as error:
        assert "\n" not in str(error)


def test_limits_are_those_of_the_docs() -> None:
    text = (ROOT / "docs/checkpoints.md").read_text()
    assert f"{MANIFEST_MOST >> 20} MiB" in text
