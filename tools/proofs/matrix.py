"""The matrix of ``tools.parity --device cuda``: which parts run where, one line a cell, and the report.

Cells of one pipeline rank run in this process; those of several in ranks that torchrun starts, each on a GPU of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from qeffect_lm import __version__
from qeffect_lm.errors import QEffectError, UsageError
from tools.bench.report import commit
from tools.common import ROOT

PARTS = ("lockstep", "killed", "float64")
SCOPES = ("action", "step")
WIDTHS = (256, 1024, 4096)
STEPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a GPU's matrix."""
    group = parser.add_argument_group("with --device cuda")
    group.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS), help="of the matrix (default: all)")
    group.add_argument("--hidden", nargs="*", type=int, default=list(WIDTHS), help="widths (default: 256 1024 4096)")
    group.add_argument("--steps", type=int, default=STEPS, help="of each run (default: %(default)s)")
    group.add_argument("--scope", nargs="*", choices=SCOPES, default=list(SCOPES), help="of the graphs (default: both)")
    group.add_argument("--backend", default="native", help="who runs the layers: native or te (default: %(default)s)")
    group.add_argument("--report", type=Path, metavar="FILE", help="write the cells there, as JSON")


def refuse_on_cpu(arguments: argparse.Namespace) -> None:
    """Options that the matrix on a CPU would not look at.

    Raises:
        UsageError: one of them was given.
    """
    mine = argparse.ArgumentParser()
    add_arguments(mine)
    given = [f"--{name}" for name, default in vars(mine.parse_args([])).items() if getattr(arguments, name) != default]
    if given:
        raise UsageError(f"{', '.join(given)}: only with --device cuda: add that, or leave it out")


def run(arguments: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Exit code 0 when every cell is equal and every control differs."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    leads = int(os.environ.get("RANK", "0")) == 0
    cells: list[dict[str, Any]] = []

    def found(cell: dict[str, Any], shown: bool = False) -> None:
        cells.append(cell)
        if leads and not shown:
            say(line(cell))
        if leads and arguments.report is not None:  # after each: a run that is cut short keeps what it found
            arguments.report.parent.mkdir(parents=True, exist_ok=True)
            arguments.report.write_text(json.dumps(report(arguments.device, cells), indent=1) + "\n")

    _run_here(arguments, found)
    if leads and "WORLD_SIZE" not in os.environ:
        for row in one_answer(list(cells)):
            found(row)
    if leads:
        passed = sum(cell["ok"] for cell in cells)
        say(f"{passed} cells equal with a control that differs, {len(cells) - passed} not")
    return 0 if cells and all(cell["ok"] for cell in cells) else 1


def one_answer(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Window ``step``: all plans, numbers of ranks and scopes of one model have the same losses, bit for bit; the control is a
    cell of window ``microbatch``, where the order of commits is part of the arithmetic."""
    groups: dict[tuple[int, int, float], list[dict[str, Any]]] = {}
    for cell in cells:
        if "losses" in cell:
            groups.setdefault((cell["hidden"], cell["layers"], cell["dropout"]), []).append(cell)
    rows = []
    for (hidden, layers, dropout), found in groups.items():
        same = [cell for cell in found if cell["window"] == "step"]
        others = [cell for cell in found if cell["window"] != "step"]
        if len(same) < 2 or not others:
            continue
        odd = next((cell for cell in same if cell["losses"] != same[0]["losses"]), None)
        control = next((cell for cell in others if cell["losses"] != same[0]["losses"]), None)
        rows.append(
            {
                "cell": f"one answer of {len(same)} plans, hidden {hidden}x{layers} dropout {dropout:g}",
                "ok": odd is None and control is not None,
                "steps": same[0]["steps"],
                "tensors": len(same),
                "first": None if odd is None else f"{odd['cell']} against {same[0]['cell']}",
                "control_first": None if control is None else control["cell"],
                "plans": [cell["cell"] for cell in same],
                "seconds": 0.0,
            }
        )
    return rows


def report(device: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The cells with what they ran on."""
    import torch

    name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if device == "cuda" else platform.processor()
    return {
        "proof": "parity",
        "command": f"python -m tools.parity {' '.join(sys.argv[1:])}",
        "qeffect_lm": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "cells": cells,
    }


class Found(Protocol):
    """Told of each cell as soon as it is done; ``shown``: its line was printed already."""

    def __call__(self, cell: dict[str, Any], shown: bool = False) -> None: ...


def _run_here(arguments: argparse.Namespace, found: Found) -> None:
    import torch

    world = int(os.environ.get("WORLD_SIZE", "1"))
    visible = torch.cuda.device_count()
    if arguments.device == "cuda" and not visible:
        raise UsageError("--device cuda, but torch sees no GPU here")
    stages = arguments.stages or ([1, 2] if visible > 1 else [1])
    if arguments.device == "cuda" and max(stages) > visible:
        raise UsageError(f"--stages {max(stages)}: torch sees {visible} GPUs, and each rank takes one of its own")
    if world > 1:
        _ranks(arguments, world, found)
        return
    for pp in stages:
        if pp == 1:
            _single(arguments, found)
        elif "lockstep" in arguments.part:
            for cell in _under_torchrun(arguments, pp):
                found(cell, shown=True)
        if "killed" in arguments.part:
            _killed(arguments, pp, found)


def _single(arguments: argparse.Namespace, found: Found) -> None:
    """Lock step and the reference on one device."""
    from checkpoint import SingleProcess
    from qeffect_lm.parallel.mesh import Mesh
    from tools.proofs import double, lockstep
    from tools.proofs.cells import LAYERS, Cell, cells

    if "float64" in arguments.part:
        threads = min(16, len(os.sched_getaffinity(0)))
        for number, hidden in enumerate([*arguments.hidden, min(arguments.hidden)]):
            dropout = 0.1 if number == len(arguments.hidden) else 0.0
            cell = Cell("1f1b", "step", hidden, LAYERS.get(hidden, 4), backend=arguments.backend, dropout=dropout)
            found(double.check(cell, arguments.device, threads))
    if "lockstep" in arguments.part:
        windows = arguments.window or ["step", "microbatch"]
        for cell in cells(1, arguments.hidden, windows, arguments.scope, arguments.backend):
            found(lockstep.check(cell, Mesh({}), SingleProcess(), arguments.device, arguments.steps))


def _ranks(arguments: argparse.Namespace, world: int, found: Found) -> None:
    """One of several ranks that torchrun started."""
    import torch
    import torch.distributed as dist

    from checkpoint import GroupCommunicator
    from qeffect_lm.parallel.mesh import Mesh
    from qeffect_lm.runtime.launch import LaunchEnv, init_process_group
    from tools.proofs import lockstep
    from tools.proofs.cells import cells

    env = LaunchEnv.from_mapping(os.environ)
    if arguments.device == "cuda":
        torch.cuda.set_device(env.local_rank)
    init_process_group(env, "cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo", 120.0)
    mesh = Mesh({"pp": world}, env.rank)
    mesh.create_groups()
    windows = arguments.window or ["step", "microbatch"]
    for cell in cells(world, arguments.hidden, windows, arguments.scope, arguments.backend):
        found(lockstep.check(cell, mesh, GroupCommunicator(), arguments.device, arguments.steps))
    dist.destroy_process_group()


def _under_torchrun(arguments: argparse.Namespace, pp: int) -> list[dict[str, Any]]:
    """Start the ranks, let them print, and read what they found."""
    with tempfile.TemporaryDirectory(prefix="qeffect-parity-") as folder:
        file = Path(folder) / "cells.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pp)]
        command += ["-m", "tools.parity", "--device", arguments.device, "--part", "lockstep", "--report", str(file)]
        command += ["--steps", str(arguments.steps), "--backend", arguments.backend]
        for option in ("hidden", "window", "scope"):
            values = getattr(arguments, option)
            command += [f"--{option}", *map(str, values)] if values else []
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=env).returncode
        if not file.exists():
            raise QEffectError(f"the cells of {pp} ranks ended with exit code {code} and no report")
        return list(json.loads(file.read_text())["cells"])


def _killed(arguments: argparse.Namespace, pp: int, found: Found) -> None:
    from tools.proofs.killed import Job, Runs, check

    plans = {"action": (("1f1b", "step", 0.1), ("zb-v", "microbatch", 0.0)), "step": (("zb-v", "step", 0.0),)}
    jobs = [
        Job(schedule, window, pp, scope, arguments.backend, dropout)
        for scope in arguments.scope
        for schedule, window, dropout in plans[scope]
    ]
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="qeffect-killed-"))

    def one(number: int) -> dict[str, Any]:
        return check(jobs[number], Runs(folder / f"{pp}-{number}", arguments.device, arguments.steps))

    try:  # side by side on a GPU: most of their time is that of starting processes
        with ThreadPoolExecutor(len(jobs) if arguments.device == "cuda" else 1) as pool:
            for cell in pool.map(one, range(len(jobs))):
                found(cell)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def line(cell: dict[str, Any]) -> str:
    """One cell for people."""
    if "bound" in cell:
        worst, control = cell["worst_relative_error"], cell["control_relative_error"]
        text = (
            f"loss off by {cell['loss_relative_error']:.1e} (bound {cell['loss_bound']:g}), {cell['gradients']} gradients by "
            f"at most {worst:.3f} (bound {cell['bound']:.3f}, control {control:.3f})"
        )
        return f"{cell['cell']:58} {'within' if cell['ok'] else 'NOT WITHIN'}: {text}  [{cell['seconds']} s]"
    result = "equal" if cell["first"] is None else f"DIFFERENT: {cell['first']}"
    faults = f"; NOT SOUND: {cell['faults'][0]}" if cell.get("faults") else ""
    control = f"control differs ({cell['control_first']})" if cell["control_first"] else "CONTROL DOES NOT DIFFER"
    number = cell.get("tensors_per_step") or cell["tensors"]
    return f"{cell['cell']:58} {cell['steps']} steps, {number:>5} tensors  {result}{faults}; {control}  [{cell['seconds']} s]"
