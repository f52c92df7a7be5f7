"""Measure: what the contract costs, how fast kernels and products are, how long training steps take.

contract   1. ns of host time per effect, enforced and off
           2. us of host time per replayed action, enforced and off, at several numbers of layers
           3. whole steps of the demo's model under each mode (CPU), or of a captured stage (--device cuda)
kernels    each kernel and product of backend native at several sizes (GPU only); with --tune their configurations, measured
           and written to qeffect_lm/kernels/tables.json (or to --json FILE), which is then part of what runs compute
layers     four decoder layers, forward and backward: Transformer Engine alone, eager and with its graphs, beside both of our
           backends, eager and captured (GPU only, with Transformer Engine); --shapes 2048x1024,... for some sizes only
curves     losses of BF16 and of FP8 with both windows on the demo's corpus, 300 steps, three seeds each: do they differ
           by more than the seeds do?
placement  weight gradients straight into the main gradients, beside a temporary for each, one product for all microbatches, and
           Transformer Engine's fuse_wgrad_accumulation on and off (GPU only); results and node lists are compared first
plans      tools.plan on many ranks: each schedule generated, checked, lowered and timed; seconds of wall and CPU time (no GPU)
capture    seconds to capture a stage of 32 layers of 4096, as a restart does, with graphs of actions and of the step (GPU only)
checkpoint saving, loading and verifying a state beside plain writes and reads of the same disk: GB/s and memory (no GPU); with
           --parameters 1.3e9 that many instead, generated shard by shard, once: 14 bytes of disk for each
saving     how long the loop stands still for a checkpoint in the background, beside one that is saved at once; with
           --device cuda for a state on a GPU
train      whole training steps of the presets bench-s and bench-m, measured and predicted bubble (GPUs only); with stages on
           several GPUs:  torchrun --nproc-per-node 2 -m tools.bench train --schedules 1f1b,zb-v

Modes take turns from step to step, so that they share objects, memory and machine: how fast the machine is cancels out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qeffect_lm import __version__
from qeffect_lm.errors import UsageError
from tools.common import ROOT, add_traceback, run_tool

LAYERS = (2, 8, 32)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("what", choices=sorted(COMMANDS), help="see above")
    made.add_argument("--config", type=Path, help="(default: the demo's, of curves the GPU demo's)")
    made.add_argument("--steps", type=int, help="timed steps per mode (default: 20), or of a curve (default: 300)")
    made.add_argument("--backend", choices=["host_replay", "eager"], default="host_replay", help="of the steps on CPU")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the whole steps (default: %(default)s)")
    made.add_argument("--layers", default=",".join(map(str, LAYERS)), metavar="LIST", help="for part 2 (default: %(default)s)")
    made.add_argument(
        "--shapes", metavar="LIST", help="of layers, placement: HIDDENxTOKENS, with commas (default: the seven of the docs)"
    )
    made.add_argument("--main-grads", choices=["float32", "bfloat16"], default="float32", help="of placement")
    made.add_argument("--sizes", default="S,M", metavar="LIST", help="of train (default: %(default)s)")
    made.add_argument("--schedules", default="1f1b", metavar="LIST", help="of train (default: %(default)s)")
    made.add_argument("--microbatches", default="8", metavar="LIST", help="of train (default: %(default)s)")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of train: override a preset's key")
    made.add_argument("--plans", metavar="LIST", help="of plans: STAGESxMICROBATCHES, with commas (default: 32x256,64x1024)")
    made.add_argument("--tune", action="store_true", help="of kernels: choose configurations")
    made.add_argument("--parts", default="products,tiles,norm", metavar="LIST", help="of --tune (default: %(default)s)")
    made.add_argument("--tune-shapes", metavar="LIST", help="of --tune: hidden:MLP:tokens (default: four of the benchmarks)")
    made.add_argument("--corpus", type=Path, default=Path("runs/demo-gpu/corpus/stdlib"), metavar="PREFIX", help="of curves")
    made.add_argument("--seeds", default="1,2,3", metavar="LIST", help="of curves (default: %(default)s)")
    made.add_argument("--gib", type=float, default=2.0, metavar="N", help="of checkpoint, saving (default: %(default)s)")
    made.add_argument("--dir", type=Path, default=Path("runs"), metavar="D", help="of checkpoint, saving (default: runs)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="of checkpoint, saving (default: %(default)s)")
    made.add_argument(
        "--forward", type=float, default=0.5, metavar="S", help="of saving: forward and backward (default: %(default)s)"
    )
    made.add_argument("--parameters", type=float, metavar="N", help="of checkpoint: write, verify and read back that many once")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    add_traceback(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    curved = arguments.what == "curves"
    if arguments.steps is None:
        arguments.steps = 300 if curved else 20
    if arguments.config is None:
        arguments.config = ROOT / f"models/configs/{'demo-gpu' if curved else 'demo'}.yaml"
    return run_tool(lambda: COMMANDS[arguments.what](arguments), arguments.traceback)


def training(arguments: argparse.Namespace) -> int:
    """Cases one after another on all ranks of the launch; rank 0 prints."""
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps}: at least one")
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import torch

    from qeffect_lm.runtime.launch import LaunchEnv, init_process_group
    from tools.benchmarks import training as benchmark

    if not torch.cuda.is_available():
        raise UsageError("train is measured on GPUs only, and torch sees none here")
    env = LaunchEnv.from_mapping(os.environ)
    torch.cuda.set_device(env.local_rank)
    init_process_group(env, "cpu:gloo,cuda:nccl", 120.0)
    leads = env.rank == 0

    def say(text: str) -> None:
        if leads:
            print(text, flush=True)

    command = f"python -m tools.bench {' '.join(sys.argv[1:])}"
    report = {**header("train", command, f"{env.world} x {torch.cuda.get_device_name()}"), "rows": []}
    for case in cases(arguments):
        report["rows"].append(benchmark.measure(case, ROOT / "models/configs", arguments.steps, say))
        say(benchmark.table(report["rows"][-1:]))
        if leads:
            write(report, arguments.json)  # after each: a run that is cut short keeps what it measured
    say("\n" + benchmark.table(report["rows"]))
    if env.world > 1:
        torch.distributed.destroy_process_group()
    return 0


def cases(arguments: argparse.Namespace) -> list[Any]:
    """Every size with every schedule and number of microbatches."""
    from tools.benchmarks.training import Case

    try:
        counts = [int(word) for word in arguments.microbatches.split(",")]
    except ValueError:
        raise UsageError(f"--microbatches {arguments.microbatches}: numbers with commas") from None
    unknown = [size for size in arguments.sizes.split(",") if not (ROOT / f"models/configs/bench-{size.lower()}.yaml").exists()]
    if unknown:
        raise UsageError(f"--sizes: no preset for {', '.join(unknown)}; there are S and M")
    sizes, schedules = arguments.sizes.split(","), arguments.schedules.split(",")
    return [Case(a, b, c, tuple(arguments.set)) for a in sizes for c in counts for b in schedules]


def kernels(arguments: argparse.Namespace) -> int:
    """Each kernel and product of a layer at several sizes; refuses where there is no GPU."""
    import torch

    from qeffect_lm.kernels import usable

    if not torch.cuda.is_available():
        raise UsageError("the kernels run on a GPU only, and torch sees none here")
    if not usable(torch.empty(0, device="cuda")):
        raise UsageError("the kernels need Triton, and it is not installed: pip install triton (CUDA builds of torch bring it)")
    if arguments.tune:
        return tuning(arguments)
    from tools.benchmarks import kernels as benchmark

    report = {**header("kernels", "python -m tools.bench kernels", torch.cuda.get_device_name()), **benchmark.measure()}
    print(benchmark.table(report))
    write(report, arguments.json)
    return 0


def layers(arguments: argparse.Namespace) -> int:
    """Decoder layers beside Transformer Engine's."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import torch

    from tools.benchmarks import layers as benchmark

    if not torch.cuda.is_available():
        raise UsageError("the layers are measured on a GPU, and torch sees none here")
    sizes = [benchmark.Size(*shape) for shape in shapes(arguments, benchmark.SHAPES)]
    command = f"python -m tools.bench {' '.join(sys.argv[1:])}"
    rows: list[dict[str, Any]] = []
    report = {
        **header("layers", command, torch.cuda.get_device_name()),
        "layers": benchmark.LAYERS,
        "microbatches": benchmark.MICROBATCHES,
        "rows": rows,
    }
    for size in sizes:
        rows += benchmark.measure([size], arguments.steps, lambda text: print(text, flush=True))
        write(report, arguments.json)  # kept after each size, should the run be cut off
    print("\n" + benchmark.table(rows))
    return 1 if any("error" in row for row in rows) else 0


def capturing(arguments: argparse.Namespace) -> int:
    """How long a restart waits for its graphs."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import torch

    from tools.benchmarks import recapture as benchmark

    if not torch.cuda.is_available():
        raise UsageError("captures are measured on a GPU, and torch sees none here")
    size = benchmark.StageSize()
    rows = [benchmark.measure(size, scope) for scope in ("action", "step")]
    print(benchmark.table(rows))
    report = {
        **header("capture", "python -m tools.bench capture", torch.cuda.get_device_name()),
        "hidden": size.hidden,
        "layers": size.layers,
        "tokens": size.tokens,
        "microbatches": benchmark.MICROBATCHES,
        "rows": rows,
    }
    write(report, arguments.json)
    return 0


def shapes(arguments: argparse.Namespace, default: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What ``--shapes`` asks for, as (hidden, tokens)."""
    if not arguments.shapes:
        return list(default)
    try:
        found = [(int(h), int(t)) for h, t in (word.split("x") for word in arguments.shapes.split(","))]
    except ValueError:
        found = []
    if not found or min(min(shape) for shape in found) < 1:
        raise UsageError(f"--shapes {arguments.shapes}: HIDDENxTOKENS, with commas, as 2048x1024,4096x1024")
    return found


def placement(arguments: argparse.Namespace) -> int:
    """Weight gradients in their place beside temporaries; exit code 1 where something is not as promised."""
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps}: at least one")
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import torch

    from tools.benchmarks import placement as benchmark

    wanted = shapes(arguments, benchmark.SHAPES)
    if not torch.cuda.is_available():
        raise UsageError("placement is measured on a GPU, and torch sees none here")
    sizes = [benchmark.Size(*shape, layers=benchmark.LAYERS, main_grads=arguments.main_grads) for shape in wanted]
    command = f"python -m tools.bench {' '.join(sys.argv[1:])}"
    rows: list[dict[str, Any]] = []
    for size in sizes:
        rows += benchmark.measure([size], arguments.steps, lambda text: print(text, flush=True))
        found = benchmark.faults(rows)
        report = {
            **header("placement", command, torch.cuda.get_device_name()),
            "microbatches": benchmark.MICROBATCHES,
            "bound": "|placed - temporary| <= 2 * microbatches * u * sum of |products|; u = 2^-24 (float32), 2^-8 (bfloat16)",
            "wanted": {f"{hidden}x{tokens}": ratio for (hidden, tokens), ratio in benchmark.WANTED.items()},
            "rows": rows,
            "faults": found,
        }
        write(report, arguments.json)  # after each: a run that is cut short keeps what it measured
    print("\n" + "\n".join([benchmark.table(rows), *(f"not as promised: {fault}" for fault in found)]))
    return 1 if found else 0


def tuning(arguments: argparse.Namespace) -> int:
    """Measures configurations of kernels and writes the table."""
    from qeffect_lm.kernels import tables
    from tools.benchmarks import tune

    try:
        shapes = [tune.Layer.of(word) for word in (arguments.tune_shapes or ",".join(tune.SHAPES)).split(",")]
    except ValueError:
        raise UsageError(f"--tune-shapes {arguments.tune_shapes}: hidden:MLP:tokens with commas, as 2048:5632:2048") from None
    parts = arguments.parts.split(",")
    unknown = sorted(set(parts) - set(tune.PARTS))
    if unknown:
        raise UsageError(f"--parts: there is no {', '.join(unknown)}; there are {', '.join(tune.PARTS)}")
    write(tune.tune(shapes, parts, lambda text: print(text, flush=True)), arguments.json or tables.FILE)
    return 0


def contract(arguments: argparse.Namespace) -> int:
    """Effects, actions, steps; prints tables, and writes the figures if asked to."""
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps}: at least one")
    try:
        layers = [int(word) for word in arguments.layers.split(",")]
    except ValueError:
        layers = [0]
    if min(layers) < 1:
        raise UsageError(f"--layers {arguments.layers}: numbers of layers from 1 on, with commas")

    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; leave it out to measure on CPU")
    from tools.benchmarks import actions, cuda_step, effects, steps

    report = described(arguments)
    report["ns_per_effect"] = effects.measure()
    print(effects_table(report["ns_per_effect"]), flush=True)
    report["us_per_replayed_action"] = {str(count): actions.measure(arguments.config, count) for count in layers}
    print(actions_table(report["us_per_replayed_action"]), flush=True)
    if arguments.device == "cuda":
        report["captured_steps"] = [cuda_step.measure(size, arguments.steps) for size in cuda_step.SIZES]
        print(captured_table(report["captured_steps"]))
    else:
        report.update(steps.measure(arguments.config, arguments.backend, arguments.steps))
        print(steps_table(report))
    write(report, arguments.json)
    return 0


def curves(arguments: argparse.Namespace) -> int:
    """Loss curves; exit code 1 where FP8 differs by more than the seeds do."""
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import torch

    from tools.benchmarks import curves as benchmark

    try:
        seeds = [int(word) for word in arguments.seeds.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {arguments.seeds}: numbers with commas") from None
    with tempfile.TemporaryDirectory(prefix="qeffect-curves-") as folder:
        wanted = benchmark.Curves(
            arguments.config, arguments.corpus, Path(folder), arguments.steps, seeds, tuple(arguments.set)
        )
        found = benchmark.measure(wanted, lambda text: print(text, flush=True))
    print(benchmark.table(found))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = {**header("curves", f"python -m tools.bench {' '.join(sys.argv[1:])}", device), **found}
    write(report, arguments.json)
    return 0 if found["verdict"]["ok"] else 1


def plans(arguments: argparse.Namespace) -> int:
    """Large plans, one process each."""
    from tools.benchmarks import plans as benchmark

    text = arguments.plans or benchmark.SIZES
    try:
        sizes = [(int(p), int(m)) for p, m in (word.split("x") for word in text.split(","))]
    except ValueError:
        raise UsageError(f"--plans {text}: STAGESxMICROBATCHES, with commas, as 32x256,64x1024") from None
    load = os.getloadavg()[0]
    rows = benchmark.measure(sizes, ROOT, lambda line: print(line, flush=True))
    print("\n" + benchmark.table(rows))
    report = {
        "benchmark": "plans",
        "command": " ".join(["python -m tools.bench plans", *([f"--plans {arguments.plans}"] if arguments.plans else [])]),
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

    def say(text: str) -> None:
        print(text, flush=True)

    command = f"python -m tools.bench {' '.join(sys.argv[1:])}"
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
    write({**header("checkpoint", command, f"CPU {platform.machine()}"), **loads, **found}, arguments.json)
    return 0


def saving(arguments: argparse.Namespace) -> int:
    """How long the loop stands still for a checkpoint."""
    if arguments.rounds < 1 or not 0 < arguments.gib < float("inf") or not 0 <= arguments.forward < float("inf"):
        raise UsageError("--rounds and --gib: positive numbers; --forward: seconds")
    from qeffect_lm.runtime.determinism import apply_before_torch, apply_to_torch

    apply_before_torch(os.environ, threads=1)
    apply_to_torch(threads=1)
    import torch

    from tools.benchmarks import saving as benchmark

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")
    load = os.getloadavg()[0]
    command = f"python -m tools.bench {' '.join(sys.argv[1:])}"
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
    write({**header("saving", command, where), **loads, **found}, arguments.json)
    return 0


def write(report: dict[str, Any], path: Path | None) -> None:
    """The figures as JSON, if a file was named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def header(benchmark: str, command: str, device: str) -> dict[str, Any]:
    """What a report begins with: what ran, how to run it again, on what."""
    import torch

    return {
        "benchmark": benchmark,
        "command": command,
        "qeffect_lm": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
    }


def described(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the figures are measured on."""
    import torch

    command = f"python -m tools.bench contract --device {arguments.device} --steps {arguments.steps}"
    command += f" --layers {arguments.layers}"
    cuda = arguments.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}, 1 thread"
    return {
        **header("contract", command if cuda else f"{command} --backend {arguments.backend}", device),
        "backend": "cuda graphs" if cuda else arguments.backend,
    }


def commit() -> str:
    """The commit of the source tree, of a repository or of an archive made from one; else "unknown"."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    archived = ROOT / ".git_archival.txt"  # git fills it in when it writes an archive of the tree
    text = archived.read_text().strip() if archived.exists() else ""
    return text.removeprefix("node: ") if re.fullmatch(r"node: [0-9a-f]{40,64}", text) else "unknown"


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


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "capture": capturing,
    "checkpoint": checkpointing,
    "contract": contract,
    "curves": curves,
    "kernels": kernels,
    "layers": layers,
    "placement": placement,
    "plans": plans,
    "saving": saving,
    "train": training,
}


if __name__ == "__main__":
    sys.exit(main())
