"""Benchmarks that need a GPU: kernels, layers, captures, placement, training; curves run on a CPU too, slowly."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qeffect_lm.errors import UsageError
from tools.bench.command import OVERRIDES, SHAPES, Command, check_steps, integers, listed, steps
from tools.bench.report import deterministic, header, say, write
from tools.common import ROOT


def kernels(arguments: argparse.Namespace) -> int:
    """Each kernel and product of a layer at several sizes; refuses where there is no GPU."""
    import torch

    from qeffect_lm.kernels import usable

    if not arguments.tune and (arguments.parts or arguments.tune_shapes):
        raise UsageError("--parts and --tune-shapes say what --tune measures: add that, or leave them out")
    if not torch.cuda.is_available():
        raise UsageError("the kernels run on a GPU only, and torch sees none here")
    if not usable(torch.empty(0, device="cuda")):
        raise UsageError("the kernels need Triton, and it is not installed: pip install triton (CUDA builds of torch bring it)")
    if arguments.tune:
        return tuning(arguments)
    from tools.benchmarks import kernels as benchmark

    report = {**header(arguments, torch.cuda.get_device_name()), **benchmark.measure()}
    print(benchmark.table(report))
    write(report, arguments.json)
    return 0


def products(arguments: argparse.Namespace) -> int:
    """Matrix products by shape, for the ceilings of tools.plan; refuses where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("products are measured on a GPU, and torch sees none here")
    from tools.benchmarks import products as benchmark

    kinds = (arguments.kinds or ",".join(benchmark.KINDS)).split(",")
    unknown = [kind for kind in kinds if kind not in benchmark.KINDS]
    if unknown:
        raise UsageError(f"--kinds {','.join(unknown)}: there are {', '.join(benchmark.KINDS)}")
    report = {**header(arguments, torch.cuda.get_device_name()), **benchmark.measure(say, kinds)}
    print(benchmark.table(report))
    write(report, arguments.json)
    return 0


def tuning(arguments: argparse.Namespace) -> int:
    """Measures configurations of kernels and writes the table."""
    from qeffect_lm.kernels import tables
    from tools.benchmarks import tune

    try:
        shapes = [tune.Layer.of(word) for word in (arguments.tune_shapes or ",".join(tune.SHAPES)).split(",")]
    except ValueError:
        raise UsageError(f"--tune-shapes {arguments.tune_shapes}: hidden:MLP:tokens with commas, as 2048:5632:2048") from None
    parts = (arguments.parts or ",".join(tune.PARTS)).split(",")
    unknown = sorted(set(parts) - set(tune.PARTS))
    if unknown:
        raise UsageError(f"--parts: there is no {', '.join(unknown)}; there are {', '.join(tune.PARTS)}")
    write(tune.tune(shapes, parts, say), arguments.json or tables.FILE)
    return 0


def layers(arguments: argparse.Namespace) -> int:
    """Decoder layers beside Transformer Engine's."""
    check_steps(arguments)
    deterministic()
    import torch

    from tools.benchmarks import layers as benchmark

    if not torch.cuda.is_available():
        raise UsageError("the layers are measured on a GPU, and torch sees none here")
    sizes = [benchmark.Size(*shape) for shape in shapes(arguments, benchmark.SHAPES)]
    rows: list[dict[str, Any]] = []
    report = {
        **header(arguments, torch.cuda.get_device_name()),
        "layers": benchmark.LAYERS,
        "microbatches": benchmark.MICROBATCHES,
        "rows": rows,
    }
    for size in sizes:
        rows += benchmark.measure([size], arguments.steps, say)
        write(report, arguments.json)  # kept after each size, should the run be cut off
    print("\n" + benchmark.table(rows))
    return 1 if any("error" in row for row in rows) else 0


def capturing(arguments: argparse.Namespace) -> int:
    """How long a restart waits for its graphs."""
    deterministic()
    import torch

    from tools.benchmarks import recapture as benchmark

    if not torch.cuda.is_available():
        raise UsageError("captures are measured on a GPU, and torch sees none here")
    size = benchmark.StageSize()
    rows = [benchmark.measure(size, scope) for scope in ("action", "step")]
    print(benchmark.table(rows))
    report = {
        **header(arguments, torch.cuda.get_device_name()),
        "hidden": size.hidden,
        "layers": size.layers,
        "tokens": size.tokens,
        "microbatches": benchmark.MICROBATCHES,
        "rows": rows,
    }
    write(report, arguments.json)
    return 0


def placement(arguments: argparse.Namespace) -> int:
    """Weight gradients in their place beside temporaries; exit code 1 where something is not as promised."""
    check_steps(arguments)
    deterministic()
    import torch

    from tools.benchmarks import placement as benchmark

    wanted = shapes(arguments, benchmark.SHAPES)
    if not torch.cuda.is_available():
        raise UsageError("placement is measured on a GPU, and torch sees none here")
    sizes = [benchmark.Size(*shape, layers=benchmark.LAYERS, main_grads=arguments.main_grads) for shape in wanted]
    rows: list[dict[str, Any]] = []
    for size in sizes:
        rows += benchmark.measure([size], arguments.steps, say)
        found = benchmark.faults(rows)
        report = {
            **header(arguments, torch.cuda.get_device_name()),
            "microbatches": benchmark.MICROBATCHES,
            "bound": "|placed - temporary| <= 2 * microbatches * u * sum of |products|; u = 2^-24 (float32), 2^-8 (bfloat16)",
            "wanted": {f"{hidden}x{tokens}": ratio for (hidden, tokens), ratio in benchmark.WANTED.items()},
            "rows": rows,
            "faults": found,
        }
        write(report, arguments.json)  # after each: a run that is cut short keeps what it measured
    print("\n" + "\n".join([benchmark.table(rows), *(f"not as promised: {fault}" for fault in found)]))
    return 1 if found else 0


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


def curves(arguments: argparse.Namespace) -> int:
    """Loss curves; exit code 1 where FP8 differs by more than the seeds do."""
    check_steps(arguments)
    deterministic()
    import torch

    from tools.benchmarks import curves as benchmark

    seeds = integers("--seeds", arguments.seeds)
    with tempfile.TemporaryDirectory(prefix="qeffect-curves-") as folder:
        wanted = benchmark.Curves(
            arguments.config, arguments.corpus, Path(folder), arguments.steps, seeds, tuple(arguments.set)
        )
        found = benchmark.measure(wanted, say)
    print(benchmark.table(found))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = {**header(arguments, device), **found}
    write(report, arguments.json)
    return 0 if found["verdict"]["ok"] else 1


def training(arguments: argparse.Namespace) -> int:
    """Cases one after another on all ranks of the launch; rank 0 prints."""
    check_steps(arguments)
    deterministic()
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

    report = {**header(arguments, f"{env.world} x {torch.cuda.get_device_name()}"), "rows": []}
    for case in cases(arguments):
        report["rows"].append(benchmark.measure(case, ROOT / "models/configs", arguments.steps, say))
        say(benchmark.table(report["rows"][-1:]))
        if leads:
            write(report, arguments.json)  # after each: a run that is cut short keeps what it measured
    say("\n" + benchmark.table(report["rows"]))
    if env.world > 1:
        torch.distributed.destroy_process_group()
    return 0


def titan(arguments: argparse.Namespace) -> int:
    """TorchTitan's trainer with torch's schedules and ours, one after the other; rank 0 prints."""
    check_steps(arguments)
    from qeffect_lm.integrations.torchtitan.pipeline import required

    required("torchtitan")
    os.environ.setdefault("LOCAL_RANK", "0")
    import torch

    from qeffect_lm.runtime.launch import LaunchEnv, init_process_group
    from tools.benchmarks import titan as benchmark

    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise UsageError("--device cuda, and torch sees no GPU here: --device cpu tries it out, and its times say nothing")
    (microbatches,) = integers("--microbatches", arguments.microbatches)
    (seq_len,) = integers("--seq-len", arguments.seq_len)
    env = LaunchEnv.from_mapping(os.environ)
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if env.world > 1:
        init_process_group(env, "cpu:gloo,cuda:nccl" if cuda else "gloo", 300.0)
    else:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    name = f"{env.world} x {torch.cuda.get_device_name() if cuda else 'CPU'}"
    report: dict[str, Any] = {**header(arguments, name), "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        setting = benchmark.Setting(Path(folder) / "titan", microbatches, seq_len, arguments.model, device, arguments.recompute)
        report["torchtitan"] = benchmark.begin(setting)
        for schedule in arguments.schedules.split(","):
            for ours, fp8 in ((False, False), (True, False), *([(True, True)] if arguments.fp8 else [])):
                report["rows"].append(benchmark.measure(setting, schedule, arguments.steps, ours=ours, fp8=fp8))
    if env.rank == 0:
        say(f"torchtitan {report['torchtitan']}, torch {torch.__version__}, {name}\n{benchmark.table(report['rows'])}")
        write(report, arguments.json)
    torch.distributed.destroy_process_group()
    return 0


def cases(arguments: argparse.Namespace) -> list[Any]:
    """Every size with every schedule and number of microbatches."""
    from tools.benchmarks.training import Case

    counts = integers("--microbatches", arguments.microbatches)
    unknown = [size for size in arguments.sizes.split(",") if not (ROOT / f"models/configs/bench-{size.lower()}.yaml").exists()]
    if unknown:
        raise UsageError(f"--sizes: no preset for {', '.join(unknown)}; there are S, M and MoE")
    sizes, schedules = arguments.sizes.split(","), arguments.schedules.split(",")
    return [Case(a, b, c, tuple(arguments.set)) for a in sizes for c in counts for b in schedules]


COMMANDS = (
    Command(
        "kernels",
        "each kernel and product of backend native",
        "Each kernel and product of backend native at several sizes; with --tune their configurations, measured and written to "
        "qeffect_lm/kernels/tables.json (or to --json FILE), which is then part of what runs compute.",
        kernels,
        {
            "--tune": {"action": "store_true", "help": "choose configurations"},
            "--parts": {"metavar": "LIST", "help": "of --tune: products, tiles, norm, with commas (default: all)"},
            "--tune-shapes": {"metavar": "LIST", "help": "of --tune: hidden:MLP:tokens (default: four of the benchmarks)"},
        },
    ),
    Command(
        "products",
        "matrix products by shape: what tools.plan knows narrow ones by",
        "F, I and W in FP8 of widths from 512 to 16384, the head's in bfloat16, and those of all experts of a layer in both.",
        products,
        {"--kinds": {"metavar": "LIST", "help": "of fp8, bf16, experts, experts-bf16, with commas (default: all)"}},
    ),
    Command(
        "layers",
        "decoder layers beside Transformer Engine's, which has to be installed",
        "Four decoder layers, forward and backward: Transformer Engine alone, eager and with its graphs, beside both of our "
        "backends, eager and captured.",
        layers,
        {**SHAPES, **steps(20)},
    ),
    Command(
        "capture",
        "how long a restart waits for its graphs",
        "Seconds to capture a stage of 32 layers of 4096, with graphs of actions and of the step.",
        capturing,
    ),
    Command(
        "placement",
        "weight gradients straight into the main gradients",
        "Beside a temporary for each, one product for all microbatches, and Transformer Engine's fuse_wgrad_accumulation on "
        "and off. Results and node lists are compared first.",
        placement,
        {
            **SHAPES,
            **steps(20),
            "--main-grads": {"choices": ["float32", "bfloat16"], "default": "float32", "help": "(default: float32)"},
        },
    ),
    Command(
        "curves",
        "losses of BF16 and of FP8 with both windows",
        "Do they differ by more than the seeds do? The corpus is the demo's.",
        curves,
        {
            "--config": {
                "type": Path,
                "default": ROOT / "models/configs/demo-gpu.yaml",
                "metavar": "FILE",
                "help": "(default: the GPU demo's)",
            },
            **steps(300, "steps of a curve"),
            "--corpus": {
                "type": Path,
                "default": Path("runs/demo-gpu/corpus/stdlib"),
                "metavar": "PREFIX",
                "help": "made by a demo (default: runs/demo-gpu/corpus/stdlib)",
            },
            **listed("--seeds", "1,2,3", "one curve each"),
            **OVERRIDES,
        },
    ),
    Command(
        "train",
        "whole training steps of the presets bench-s, bench-m and bench-moe",
        "Step time, measured and predicted bubble. Stages on several GPUs: torchrun --nproc-per-node 2 -m tools.bench train "
        "--schedules 1f1b,zb-v. Layers on several GPUs: the same with --set parallel.tp=2 (or cp, dp); what is left are stages",
        training,
        {
            **listed("--sizes", "S,M", "presets: S, M, MoE"),
            **listed("--schedules", "1f1b", "of the pipeline"),
            **listed("--microbatches", "8", "of a step"),
            **steps(20),
            **OVERRIDES,
        },
    ),
    Command(
        "titan",
        "TorchTitan's trainer with torch's schedules and with ours",
        "Tokens/s and peak memory of its Llama 3 models: torchrun --nproc-per-node 2 -m tools.bench titan --schedules "
        "1F1B,ZBVZeroBubble. One process is a pipeline of one rank.",
        titan,
        {
            "--device": {"choices": ["cuda", "cpu"], "default": "cuda", "help": "cpu only tries it out (default: cuda)"},
            "--model": {"default": "debugmodel", "metavar": "NAME", "help": "of TorchTitan's Llama 3 (default: debugmodel)"},
            **listed("--schedules", "1F1B", "as TorchTitan names them"),
            "--microbatches": {"default": "8", "metavar": "N", "help": "of a step, one sequence each (default: 8)"},
            "--seq-len": {"default": "2048", "metavar": "N", "help": "tokens of a sequence (default: 2048)"},
            "--fp8": {"action": "store_true", "help": "ours with FP8 linears, too"},
            "--recompute": {"action": "store_true", "help": "activations as TorchTitan's configuration has it, not kept"},
            **steps(20, "timed steps"),
        },
    ),
)
