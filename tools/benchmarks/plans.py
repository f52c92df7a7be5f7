"""How long ``tools.plan`` takes to make, check and time the plan of many ranks: each schedule in a process of its own."""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qeffect_lm.errors import QEffectError

SIZES = "32x256,64x1024"
COSTS = "18.522,18.086,9.337,0.601"
"""A row of the paper's table ("Zero Bubble Pipeline Parallelism", Qi et al., ICLR 2024): T_F, T_I, T_W, T_comm."""


class Case(NamedTuple):
    name: str
    options: tuple[str, ...]


def cases(stages: int) -> list[Case]:
    """Every schedule, interleaved 1F1B with two and three chunks, ``auto`` without and with a limit."""
    plain = [Case(name, ("--schedule", name)) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipev")]
    chunks = [
        Case(f"interleaved-1f1b, {number} chunks", ("--schedule", "interleaved-1f1b", "--chunks", str(number)))
        for number in (2, 3)
    ]
    made = ("--schedule", "auto")
    return [*plain, *chunks, Case("auto", made), Case(f"auto, at most {stages} M_B", (*made, "--memory-limit", str(stages)))]


def measure(sizes: Sequence[tuple[int, int]], root: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per size and schedule: seconds of wall time and of the process's CPU time, and actions.

    Args:
        sizes: (stages, microbatches).
        root: the source tree.
        say: called with each row as a line.
    """
    rows = []
    for stages, microbatches in sizes:
        for case in cases(stages):
            command = [sys.executable, "-m", "tools.plan", *case.options, "--stages", str(stages)]
            command += ["--microbatches", str(microbatches), "--costs", COSTS, "--json", "--lowered"]
            row = {"schedule": case.name, "stages": stages, "microbatches": microbatches, **_timed(command, root)}
            rows.append(row)
            say(_line(row))
    return rows


def _timed(command: list[str], root: Path) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise QEffectError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")
    report = json.loads(done.stdout)
    return {
        "actions": sum(map(len, report["actions"])),
        "wall_s": wall,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "bubble_rate": report["bubble_rate"],
        "sha256": hashlib.sha256(done.stdout.encode()).hexdigest(),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = f"{'schedule':28} {'ranks x microbatches':>20} {'actions':>10} {'wall s':>8} {'CPU s':>8} {'bubble':>8}"
    return "\n".join([head, *map(_line, rows)])


def _line(row: dict[str, Any]) -> str:
    size = f"{row['stages']} x {row['microbatches']}"
    return (
        f"{row['schedule']:28} {size:>20} {row['actions']:>10,} {row['wall_s']:>8.1f} {row['cpu_s']:>8.1f} "
        f"{row['bubble_rate']:>8.4f}"
    )
