"""Benchmarks that need no GPU: data, the contract, plans, checkpoints."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from qeffect_lm import __version__
from qeffect_lm.errors import UsageError
from tools.bench.command import OVERRIDES, Command, check_steps, integers, listed, state, steps
from tools.bench.report import commit, deterministic, header, say, write
from tools.common import ROOT

LAYERS = (2, 8, 32)


def contract(arguments: argparse.Namespace) -> int:
    """Effects, actions, steps; prints tables, and writes the figures if asked to."""
    check_steps(arguments)
    layers = integers("--layers", arguments.layers)
    deterministic()
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to measure on CPU")
    from tools.benchmarks import actions, cuda_step, effects
    from tools.benchmarks import steps as whole_steps

    report = described(arguments)
    report["ns_per_effect"] = effects.measure()
    print(effects_table(report["ns_per_effect"]), flush=True)
    report["us_per_replayed_action"] = {str(count): actions.measure(arguments.config, count) for count in layers}
    print(actions_table(report["us_per_replayed_action"]), flush=True)
    if arguments.device == "cuda":
        report["captured_steps"] = [cuda_step.measure(size, arguments.steps) for size in cuda_step.SIZES]
        print(captured_table(report["captured_steps"]))
    else:
        report.update(whole_steps.measure(arguments.config, arguments.backend, arguments.steps))
        print(steps_table(report))
    write(report, arguments.json)
    return 0


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the figures are measured on."""
    import torch

    cuda = arguments.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}, 1 thread"
    return {**header(arguments, device), "backend": "cuda graphs" if cuda else arguments.backend}


def effects_table(figures: dict[str, dict[str, float]]) -> str:
    lines = [f"{'ns per effect':30} {'enforce':>9} {'off':>9}"]
    return "\n".join(lines + [f"{name:30} {ns['enforce']:>9.0f} {ns['off']:>9.0f}" for name, ns in figures.items()])


def actions_table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["", f"{'host us per replayed action':30} {'enforce':>9} {'off':>9} {'added':>9} {'enforce/off':>12}"]
    for layers, kinds in figures.items():
        for kind, us in kinds.items():
            lines.append(
                f"{f'{kind}, {layers} layers':30} {us['enforce']:>9.1f} {us['off']:>9.1f} {us['added']:>9.1f} "
                f"{us['enforce'] / us['off']:>12.2f}"
            )
    return "\n".join(lines)


def steps_table(report: dict[str, Any]) -> str:
    lines = ["", f"{'mode':8} {'median step ms':>15} {'sum / off':>10} {'median of step/off':>19}"]
    for mode, milliseconds in report["median_step_ms"].items():
        lines.append(
            f"{mode:8} {milliseconds:>15.2f} {report['ratio_of_sums'][mode]:>10.4f} "
            f"{report['median_of_paired_ratios'][mode]:>19.4f}"
        )
    return "\n".join(lines)


def captured_table(sizes: list[dict[str, Any]]) -> str:
    heads = ("bare ms", "off ms", "enforce ms", "enforce/off", "host us added")
    widths = (9, 9, 11, 12, 14)
    lines = ["", f"{'captured step':28} " + " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for size in sizes:
        ms = size["median_step_ms"]
        name = f"{size['layers']} x {size['hidden']}, {size['tokens']} tokens"
        lines.append(
            f"{name:28} {ms['bare']:>9.3f} {ms['off']:>9.3f} {ms['enforce']:>11.3f} {size['enforce_over_off']:>12.4f} "
            f"{size['added_host_us_per_action']:>14.1f}"
        )
    return "\n".join(lines)


def plans(arguments: argparse.Namespace) -> int:
    """Large plans, one process each."""
    from tools.benchmarks import plans as benchmark

    text = arguments.plans or benchmark.SIZES
    try:
        sizes = [(int(p), int(m)) for p, m in (word.split("x") for word in text.split(","))]
    except ValueError:
        raise UsageError(f"--plans {text}: STAGESxMICROBATCHES, with commas, as 32x256,64x1024") from None
    load = os.getloadavg()[0]
    rows = benchmark.measure(sizes, ROOT, say)
    print("\n" + benchmark.table(rows))
    report = {
        "benchmark": "plans",
        "command": arguments.command,
        "qeffect_lm": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "device": f"CPU {platform.machine()}, one process at a time",
        "load_average_before_and_after": [load, os.getloadavg()[0]],
        "cores": os.cpu_count(),
        "costs": benchmark.COSTS,
        "rows": rows,
    }
    write(report, arguments.json)
    return 0


def checkpointing(arguments: argparse.Namespace) -> int:
    """How fast a state is saved, loaded and verified."""
    if arguments.rounds < 1 or not 0 < arguments.gib < float("inf"):
        raise UsageError(f"--rounds {arguments.rounds} and --gib {arguments.gib}: positive numbers")
    if arguments.parameters is not None and not 1e4 <= arguments.parameters <= 1e12:
        raise UsageError(f"--parameters {arguments.parameters}: from 10,000 to 1e12")
    from tools.benchmarks import checkpoint as benchmark
    from tools.benchmarks import large_state

    load = os.getloadavg()[0]
    try:
        arguments.dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=arguments.dir) as name:
            if arguments.parameters is not None:
                found = large_state.run(int(arguments.parameters), Path(name), say)
                say("\n" + large_state.table(found))
            else:
                found = benchmark.measure(arguments.gib, Path(name), arguments.rounds, say)
                say("\n" + benchmark.table(found))
    except OSError as error:
        raise UsageError(f"--dir {arguments.dir}: {error}") from error
    loads = {"load_average_before_and_after": [load, os.getloadavg()[0]]}
    write({**header(arguments, f"CPU {platform.machine()}"), **loads, **found}, arguments.json)
    return 0


def saving(arguments: argparse.Namespace) -> int:
    """How long the loop stands still for a checkpoint."""
    if arguments.rounds < 1 or not 0 < arguments.gib < float("inf") or not 0 <= arguments.forward < float("inf"):
        raise UsageError("--rounds and --gib: positive numbers; --forward: seconds")
    deterministic()
    import torch

    from tools.benchmarks import saving as benchmark

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    load = os.getloadavg()[0]
    try:
        arguments.dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bench-saving-", dir=arguments.dir) as name:
            size, device = int(arguments.gib * 2**30), arguments.device
            found = benchmark.measure_stall(size, Path(name), arguments.rounds, device, arguments.forward, print)
    except OSError as error:
        raise UsageError(f"--dir {arguments.dir}: {error}") from error
    print("\n" + benchmark.table(found))
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU {platform.machine()}"
    loads = {"load_average_before_and_after": [load, os.getloadavg()[0]]}
    write({**header(arguments, where), **loads, **found, "device": where}, arguments.json)
    return 0


def data(arguments: argparse.Namespace) -> int:
    """Encoding, indexing, loading."""
    check_steps(arguments)
    if arguments.rounds < 1 or arguments.documents < 1000 or arguments.megabytes <= 0:
        raise UsageError("--rounds and --megabytes: positive numbers; --documents: a thousand at least")
    from tools.benchmarks import data as benchmark
    from tools.preprocess import stdlib_python_files, subset

    load = os.getloadavg()[0]
    try:
        arguments.dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bench-data-", dir=arguments.dir) as name:
            files = subset(stdlib_python_files(), int(arguments.megabytes * 1e6), 1)
            found = {
                "encoding": benchmark.encoding(Path(name), files, arguments.rounds, say),
                "indexing": benchmark.indexing(Path(name), arguments.documents, 2048, say),
                "loading": benchmark.loading(Path(name), 2, arguments.steps, say),
            }
    except OSError as error:
        raise UsageError(f"--dir {arguments.dir}: {error}") from error
    loads = {"load_average_before_and_after": [load, os.getloadavg()[0]], "cores": os.cpu_count()}
    write({**header(arguments, f"CPU {platform.machine()}"), **loads, **found}, arguments.json)
    return 0


def watching(arguments: argparse.Namespace) -> int:
    """What following a run costs, on all ranks of the launch; rank 0 prints."""
    if arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds}: at least one")
    deterministic()
    import torch

    from qeffect_lm.config import load_config
    from qeffect_lm.runtime.launch import LaunchEnv, init_process_group
    from tools.benchmarks import watching as benchmark

    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to measure on CPU")
    env = LaunchEnv.from_mapping(os.environ)
    if cuda:
        torch.cuda.set_device(env.local_rank)
    config = arguments.config or ROOT / "models/configs" / ("bench-s.yaml" if cuda else "demo.yaml")
    known = benchmark.cases(arguments.device, env.world)
    wanted = arguments.cases.split(",") if arguments.cases else list(known)
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise UsageError(f"--cases: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    init_process_group(env, "cpu:gloo,cuda:nccl" if cuda else "gloo", 120.0)
    terminal = sys.stdout  # live lines take it while they are there

    def tell(text: str) -> None:
        if env.rank == 0:
            print(text, file=terminal, flush=True)

    where = torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}, 1 thread"
    load = os.getloadavg()[0]
    report: dict[str, Any] = {
        **header(arguments, f"{env.world} x {where}"),
        "config": config.name,
        "target": benchmark.TARGET,
        "cores": os.cpu_count(),
        "cases": {},
    }
    for case in wanted:
        with tempfile.TemporaryDirectory(prefix="bench-watching-") as folder:
            overrides = [*known[case], f"run.dir={folder}", *arguments.set]
            found = benchmark.measure(load_config(config, overrides), env.rank, arguments.rounds, tell)
        report["cases"][case] = found
        tell("\n" + benchmark.table(case, found))
        if env.rank == 0:
            report["load_average_before_and_after"] = [load, os.getloadavg()[0]]
            write(report, arguments.json)  # after each: a run that is cut short keeps what it measured
    if env.world > 1:
        torch.distributed.destroy_process_group()
    return 0


COMMANDS = (
    Command(
        "data",
        "how fast texts become tokens, corpora are indexed, and steps are read",
        "1. CPU seconds to encode a shard beside the bare tokenizers; 2. seconds and memory to index many documents; "
        "3. ms of the training loop per microbatch, with and without workers.",
        data,
        {
            **steps(20, "timed steps of part 3"),
            "--dir": {"type": Path, "default": Path("runs"), "metavar": "D", "help": "on which disk (default: runs)"},
            "--rounds": {"type": int, "default": 3, "metavar": "N", "help": "of part 1 (default: 3)"},
            "--megabytes": {"type": float, "default": 8.0, "metavar": "N", "help": "of text in part 1 (default: 8)"},
            "--documents": {"type": int, "default": 10_000_000, "metavar": "N", "help": "of part 2 (default: ten million)"},
        },
    ),
    Command(
        "contract",
        "what the contract costs: effects, replayed actions, whole steps",
        "1. ns of host time per effect, enforced and off; 2. us of host time per replayed action at several numbers of layers; "
        "3. whole steps of the demo's model under each mode (CPU), or of a captured stage (--device cuda).",
        contract,
        {
            "--config": {
                "type": Path,
                "default": ROOT / "models/configs/demo.yaml",
                "metavar": "FILE",
                "help": "of the model (default: the demo's)",
            },
            **steps(20),
            "--backend": {"choices": ["host_replay", "eager"], "default": "host_replay", "help": "of the steps on a CPU"},
            "--device": {"choices": ["cpu", "cuda"], "default": "cpu", "help": "of the whole steps (default: cpu)"},
            **listed("--layers", ",".join(map(str, LAYERS)), "for part 2"),
        },
    ),
    Command(
        "plans",
        "how long plans of many ranks take",
        "Each schedule generated, checked, lowered and timed on many ranks, in a process of its own: wall and CPU seconds.",
        plans,
        {"--plans": {"metavar": "LIST", "help": "STAGESxMICROBATCHES, with commas (default: 32x256,64x1024)"}},
    ),
    Command(
        "checkpoint",
        "saving, loading and verifying, beside plain writes and reads of the same disk",
        "GB/s and memory; with --parameters that many instead, generated shard by shard, once: 14 bytes of disk for each.",
        checkpointing,
        {
            **state(2.0),
            "--parameters": {"type": float, "metavar": "N", "help": "write, verify and read back that many once, as 1.3e9"},
        },
    ),
    Command(
        "watching",
        "what following a run costs: metrics, progress, warnings, looks at scales, timelines, wandb, TensorBoard",
        "Each way by itself and all together, over steps that nothing follows; on a GPU (--device cuda) eagerly and captured. "
        "Stages: torchrun --nproc-per-node 2 -m tools.bench watching",
        watching,
        {
            "--config": {"type": Path, "metavar": "FILE", "help": "of the model (default: the demo's; cuda: bench-s)"},
            "--device": {"choices": ["cpu", "cuda"], "default": "cpu", "help": "(default: cpu)"},
            "--cases": {"metavar": "LIST", "help": "of a GPU, with commas: see the table's heads (default: all)"},
            "--rounds": {"type": int, "default": 7, "metavar": "N", "help": "of ten steps for each way (default: 7)"},
            **OVERRIDES,
        },
    ),
    Command(
        "saving",
        "how long training stands still for a checkpoint",
        "A checkpoint in the background beside one that is saved at once; with --device cuda for a state on a GPU.",
        saving,
        {
            **state(2.0),
            "--device": {"choices": ["cpu", "cuda"], "default": "cpu", "help": "where the state lies (default: cpu)"},
            "--forward": {
                "type": float,
                "default": 0.5,
                "metavar": "S",
                "help": "seconds of forward and backward in a step (default: 0.5)",
            },
        },
    ),
)
