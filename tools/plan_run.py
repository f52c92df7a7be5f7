"""The part of ``tools.plan`` that plans a run: memory, time and cost of a configuration's layout, and of others beside it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.plan import Plan
from pipeline.timeline_picture import blocks, svg
from qeffect_lm.errors import UsageError
from qeffect_lm.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from qeffect_lm.app.profile import Profile

GIB = 2**30
ALWAYS = (
    "exchanges of F and I run on the stream that computes: all of their time shows; gradients are reduced beside the work from "
    "a chunk's last W on, which is no slower for it; no exchange slows down another",
    "attention is as fast with few heads as with many; routers, norms' gradients over tp, data and saves take no time",
)


def run(args: argparse.Namespace) -> int:
    """``tools.plan CONFIG.yaml``."""
    from qeffect_lm.app.device import planned_device
    from qeffect_lm.app.layout import Layout
    from qeffect_lm.config import load_config

    config = load_config(args.config, args.overrides)
    if args.measure is not None:
        _measure(config, args.measure)
        args.profile = args.profile or args.measure
    device = "cuda" if args.device not in (None, "cpu") else "cpu" if args.device == "cpu" else planned_device(config)
    given = Given(args, device)
    if args.sweep:
        return _sweep(args, Layout(config), given)
    return _one(args, Layout(config), given)


class Given:
    """Where times come from, and what was assumed."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        from qeffect_lm.app.ceilings import ceilings, read_profile

        self.device = device
        self.profile: Profile | None = None
        about: dict[str, Any] = {}
        if args.profile is not None:
            self.profile, about = read_profile(args.profile)
        self.ceilings = None if args.device in (None, "cpu") else ceilings(args.device)
        self.tokens, self.price = args.tokens, args.price
        self.assumptions: list[str] = []
        if self.profile is not None:
            self.assumptions.append(
                f"times of parts measured: {about.get('device', 'device not named')}, {about.get('shape', 'shape not named')} "
                f"({args.profile})"
            )
        if self.ceilings is not None:
            self.assumptions += self.ceilings.said()
            self.assumptions += ALWAYS
        elif self.profile is not None:
            self.assumptions.append("the optimizer's step, reduction over replicas, data and saves are not in the times")
        self.assumptions.append("memory is what torch's allocator gives out; a GPU's own context (some 500 MiB) is not in it")

    def assume(self, layout: Any) -> None:
        """What was taken as simpler than it is, once every layout was looked at."""
        if layout.config.model.backend == "te":
            self.assumptions.append(
                "Transformer Engine's layers are taken as native ones (times, and what they hold), held whole until W"
            )
        if layout.config.model.moe.num_experts is not None:
            captured = layout.config.graphs.backend != "eager"
            rows = "the most that there could be, as graphs have it" if captured else "those of even routing, as in eager"
            self.assumptions.append(f"rows for other ranks' experts, in memory and on links: {rows}; products: even routing")
        if layout.even:
            replicas = ", ".join(f"{number:,}" for number in sorted(layout.even))
            self.assumptions.append(f"ZeRO over {replicas} replicas: the shares of the optimizer's state are taken as even")

    def clock(self, layout: Any, rehearsed: Any) -> Any:
        """None where there is nothing to tell times by."""
        from qeffect_lm.app.clock import Clock

        timed = self.ceilings is not None or self.profile is not None
        return Clock(layout, rehearsed, self.ceilings, self.profile) if timed else None


def _measure(config: Any, path: Path) -> None:
    """Profile the configuration's parts here, as ``pipeline.schedule: auto`` does, into a file."""
    import torch

    from qeffect_lm.app.ceilings import write_profile
    from qeffect_lm.app.device import device_of
    from qeffect_lm.app.profile import made_up_batch, profile

    device, data = device_of(config), config.data
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    shape = f"{data.microbatch_size} x {data.seq_len} tokens, hidden {config.model.hidden_size}"
    measured = profile(config, made_up_batch(config))
    try:
        write_profile(path, measured, {"device": name, "torch": torch.__version__, "shape": shape})
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _plan(layout: Any, given: Given, rehearsed: Any, clock: Any) -> Plan:
    from qeffect_lm.app.assemble import make_plan
    from qeffect_lm.app.foretold import foretold_plan

    if layout.config.pipeline.schedule != "auto":
        return make_plan(layout.config)
    plan, told = foretold_plan(layout, rehearsed, given.device, clock)
    given.assumptions += told
    return plan


def _one(args: argparse.Namespace, layout: Any, given: Given) -> int:
    from qeffect_lm.app.forecast import forecast
    from qeffect_lm.app.rehearsal import rehearse

    rehearsed = rehearse(layout.config, given.device)
    if not rehearsed.kernels:
        given.assumptions.append("Triton is not installed here, so torch's own operations were counted: kernels hold less")
    clock = given.clock(layout, rehearsed)
    seen = forecast(layout, _plan(layout, given, rehearsed, clock), rehearsed, given.device, clock)
    given.assume(layout)
    report = _report(layout, seen, given)
    picture = svg(seen.plan, seen.simulation or _unit(seen.plan), report["title"])
    if args.svg is not None:
        _write(args.svg, picture)
    if args.html is not None:
        from tools.plan_page import page

        _write(args.html, page(report, picture))
    if args.json:
        print(json.dumps(report))
    else:
        _show(report, seen, args.width)
    return 0


def _unit(plan: Plan) -> Any:
    from pipeline.simulate import simulate

    return simulate(plan, 1.0, 1.0, 1.0, 0.0)


def _report(layout: Any, seen: Any, given: Given) -> dict[str, Any]:
    """Everything that the page shows, as JSON."""
    from qeffect_lm.app.counts import active_parameters, flop_per_token
    from qeffect_lm.app.forecast import uneven

    config, plan, specs = layout.config, seen.plan, layout.specs.values()
    simulation = seen.simulation or _unit(plan)
    numbers = plan.placement.num_chunks
    report: dict[str, Any] = {
        "name": config.run.name,
        "title": f"{config.run.name}: {plan.schedule}, {axes_of(config.parallel.sizes)}, "
        f"{plan.microbatches} microbatches, bubble {100 * simulation.makespan_bubble:.1f} %",
        "layout": {
            "gpus": seen.gpus,
            **config.parallel.sizes,
            "schedule": plan.schedule,
            "placement": list(plan.placement.ranks),
            "microbatches": plan.microbatches,
            "microbatch_size": config.data.microbatch_size,
            "seq_len": config.data.seq_len,
            "recompute": config.model.recompute,
            "zero": config.optim.zero,
            "graphs": config.graphs.backend,
            "layers_per_chunk": config.chunk_layers(numbers),
            "uneven": uneven(config, numbers),
        },
        "parameters": layout.total,
        "active_parameters": active_parameters(specs),
        "model_flop_per_token": flop_per_token(config, specs),
        "tokens_per_step": seen.tokens,
        "device": given.device if given.ceilings is None else given.ceilings.name,
        "memory": [{"categories": rank.categories, "phases": rank.phases, "peak": rank.peak} for rank in seen.memory],
        "host_bytes": max(rank.host for rank in seen.memory),
        "bubble": simulation.makespan_bubble,
        "assumptions": given.assumptions,
    }
    if seen.seconds is None:
        report["time"] = None
        report["bubble_of"] = "T_F = T_I = T_W, messages free"
    else:
        flops = seen.flops(layout)
        report["bubble_of"] = "predicted times"
        report["time"] = {
            "step_seconds": seen.seconds,
            "pipeline_seconds": seen.simulation.makespan,
            "end_seconds": seen.end,
            "message_seconds": seen.message,
            "exposed_seconds": seen.exposed,
            "hidden_seconds": seen.hidden,
            "chunks": [dict(zip(("F", "I", "W"), times, strict=True)) for times in seen.times],
            "tokens_per_second": seen.tokens_per_second,
            "tokens_per_day": 86400 * seen.tokens_per_second,
            "model_tflops_per_gpu": flops / 1e12,
        }
        steps = config.train.steps * seen.tokens
        report["budget"] = seen.budget(given.tokens or steps, given.price)
    return report


def _sweep(args: argparse.Namespace, layout: Any, given: Given) -> int:
    from qeffect_lm.app.forecast import batch_of
    from qeffect_lm.app.rehearsal import rehearse
    from qeffect_lm.app.sweep import CONTEXT, SCHEDULES, STAGES, TOP, Limits, Sweep, batch_sequences

    if args.gpus is None or args.memory is None:
        raise UsageError("--sweep needs --gpus N and --memory SIZE of one GPU (141GB)")
    memory = parse_bytes(args.memory)
    if memory is None:
        raise UsageError(f"--memory {args.memory}: a size with its unit is needed, as 80GB or 75GiB")
    if given.ceilings is None:
        raise UsageError("--sweep ranks by time, and a profile is of one microbatch size: name the device (--device h200)")
    if given.profile is not None:
        raise UsageError("--sweep looks at many microbatch sizes, a profile is of one: leave --profile out")
    config, first = layout.config, list[Any]()

    def rehearsal(config: Any) -> Any:
        found = rehearse(config, given.device, first[0] if first else None)
        first.append(found)
        return found

    limits = Limits(
        gpus=args.gpus,
        memory=memory,
        batch=batch_sequences(config, args.batch_tokens),
        schedules=SCHEDULES if args.schedules is None else tuple(args.schedules.split(",")),
        stages=args.stages or STAGES,
        context=args.context or CONTEXT,
        node=given.ceilings.gpus_per_node,
        top=args.top or TOP,
    )
    found = Sweep(config, limits, given.device, rehearsal, given.clock).run()
    given.assume(layout)
    rows = [
        {
            **vars(choice),
            "peak_bytes": seen.peak,
            "step_seconds": seen.seconds,
            "tokens_per_second": seen.tokens_per_second,
            "bubble": 0.0 if seen.simulation is None else seen.simulation.makespan_bubble,
            "exposed_seconds": seen.exposed,
            "hidden_seconds": seen.hidden,
            "model_tflops_per_gpu": (seen.flops(layout) or 0.0) / 1e12,
            **seen.budget(given.tokens or config.train.steps * seen.tokens, given.price),
        }
        for choice, seen in found.ranked
    ]
    report = {
        "name": config.run.name,
        "gpus": args.gpus,
        "memory_limit": memory,
        "batch_tokens": limits.batch * config.data.seq_len,
        "top": limits.top,
        "looked_at": found.looked_at,
        "left_out": dict(found.refused),
        "ranked": rows,
        "assumptions": [
            *given.assumptions,
            "the batch is the configuration's" if limits.batch == batch_of(config) else "the batch is --batch-tokens'",
            "once full, a pipeline repeats itself",
        ],
    }
    if args.html is not None:
        from tools.plan_page import sweep_page

        _write(args.html, sweep_page(report))
    if args.json:
        print(json.dumps(report))
    else:
        _show_sweep(report, args.width)
    return 0


# ---- the terminal page -------------------------------------------------------------------------------------------------


def _console(width: int | None) -> Any:
    from rich.console import Console

    return Console(width=width, highlight=False, soft_wrap=False)


def _table(title: str, head: list[str], rows: list[list[str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    return table


def _print_table(console: Any, table: Any) -> None:
    """As wide as its cells: fitted into fewer columns, as a file or a pipe has, rich would cut figures off."""
    wide = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    if wide <= console.width:
        console.print(table)
    else:
        _console(wide).print(table)


def axes_of(sizes: Any) -> str:
    """The axes of a layout in words; pp and dp always, others where they are."""
    named = [axis for axis in ("pp", "dp", "ep", "cp", "tp") if axis in ("pp", "dp") or sizes[axis] > 1]
    return ", ".join(f"{axis} {sizes[axis]}" for axis in named)


def facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of the page's head."""
    layout, time = report["layout"], report["time"]
    active = report["active_parameters"]
    used = "" if active == report["parameters"] else f", {active:,} of them for a token"
    one = "GPU" if report["device"] != "cpu" else "CPU rank"
    recompute = "" if layout["recompute"] == "none" else f", recompute {layout['recompute']}"
    lines = [
        ("model", f"{report['parameters']:,} parameters{used}; {report['model_flop_per_token']:.4g} FLOP a token"),
        (
            "layout",
            f"{layout['gpus']} {one}{'s' * (layout['gpus'] != 1)}: {axes_of(layout)}, "
            f"ZeRO {layout['zero']}, {layout['schedule']}, {layout['graphs']}{recompute}",
        ),
        (
            "step",
            f"{layout['microbatches']} microbatches of {layout['microbatch_size']} x {layout['seq_len']} tokens a replica, "
            f"{report['tokens_per_step']:,} tokens in all",
        ),
        ("layers", f"per chunk {' '.join(map(str, layout['layers_per_chunk']))}"),
    ]
    if layout["uneven"]:
        lines.append(("", layout["uneven"]))
    peak = max(rank["peak"] for rank in report["memory"])
    lines.append(("memory", f"{format_bytes(peak)} on the fullest rank"))
    if report["host_bytes"]:
        lines.append(("", f"{format_bytes(report['host_bytes'])} of host memory for saves in the background"))
    lines.append(("bubble", f"{100 * report['bubble']:.1f} % of the step, with {report['bubble_of']}"))
    if time is None:
        lines.append(("time", "not predicted: no ceilings; name a device (--device h200), or measure (--measure FILE)"))
        return lines
    lines.append(
        (
            "time",
            f"{1000 * time['step_seconds']:.4g} ms a step ({1000 * time['pipeline_seconds']:.4g} pipeline, "
            f"{1000 * time['end_seconds']:.4g} its end); {time['model_tflops_per_gpu']:.4g} model TFLOP/s a {one}",
        )
    )
    lines += [("exposed" if n == 0 else "", line) for n, line in enumerate(exposed_lines(time))]
    lines.append(("speed", f"{time['tokens_per_second']:,.0f} tokens/s, {time['tokens_per_day'] / 1e9:,.4g} billion a day"))
    budget = report["budget"]
    cost = f", cost {budget['cost']:,.0f}" if "cost" in budget else ""
    lines.append(
        ("budget", f"{budget['tokens']:,.4g} tokens: {budget['days']:,.4g} days, {budget['gpu_hours']:,.4g} {one}-hours{cost}")
    )
    return lines


def memory_rows(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """GiB (MiB where that is little) by category, and the peak of each phase; ranks of equal numbers in one row."""
    from qeffect_lm.app.memory import CATEGORIES

    phases = list(report["memory"][0]["phases"])
    unit, name = (GIB, "GiB") if max(rank["peak"] for rank in report["memory"]) > 4 * GIB else (2**20, "MiB")
    rows: list[tuple[list[str], list[int]]] = []
    for number, rank in enumerate(report["memory"]):
        cells = [f"{size / unit:.2f}" for size in [rank["categories"][c] for c in CATEGORIES]]
        cells += [f"{rank['phases'][phase] / unit:.2f}" for phase in phases]
        if rows and rows[-1][0] == cells:
            rows[-1][1].append(number)
        else:
            rows.append((cells, [number]))
    named = [[f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}", *cells] for cells, ranks in rows]
    return [f"rank, {name}", *CATEGORIES, *(f"peak: {phase}" for phase in phases)], named


def turned(head: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A table's rows as its columns."""
    columns = [list(column) for column in zip(head, *rows, strict=True)]
    return columns[0], columns[1:]


def _show(report: dict[str, Any], seen: Any, width: int | None) -> None:
    console = _console(width)
    console.rule(report["title"])
    wide = max(len(name) for name, _ in facts(report))
    for name, value in facts(report):
        console.print(f"{name:<{wide}}  {value}", markup=False)
    head, rows = memory_rows(report)
    shown = rows if len(rows) <= 9 else [*rows[:5], *rows[-3:]]
    _print_table(console, _table("memory per pipeline rank", *turned(head, shown)))
    if len(shown) < len(rows):
        console.print(f"({len(rows) - len(shown)} ranks between them left out; --json has all)", markup=False)
    if seen.plan.num_ranks <= 32:
        console.print(blocks(seen.plan, seen.simulation or _unit(seen.plan), console.width), markup=False)
    console.print("assumptions", style="bold")
    for line in report["assumptions"]:
        console.print(f"- {line}", markup=False)


def sweep_rows(report: dict[str, Any], most: int | None = None) -> tuple[list[str], list[list[str]]]:
    """The first layouts of a sweep."""
    axes = [axis for axis in ("tp", "pp", "dp", "ep", "cp") if any(row[axis] > 1 for row in report["ranked"])] or ["dp"]
    head = ["", *axes, "schedule", "microbatches", "ZeRO", "recompute", "GiB", "ms", "bubble %", "exposed %", "tokens/s"]
    head += ["TFLOP/s", "days"]
    rows = [
        [
            str(number),
            *(str(row[axis]) for axis in axes),
            row["schedule"] + ("" if row["chunks"] is None else f" x{row['chunks']}"),
            f"{row['microbatches']} of {row['microbatch_size']}",
            str(row["zero"]),
            row["recompute"],
            f"{row['peak_bytes'] / GIB:.1f}",
            f"{1000 * row['step_seconds']:.4g}",
            f"{100 * row['bubble']:.1f}",
            f"{100 * sum(row['exposed_seconds'].values()) / row['step_seconds']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['model_tflops_per_gpu']:.0f}",
            f"{row['days']:.4g}",
        ]
        for number, row in enumerate(report["ranked"][: report["top"] if most is None else most], 1)
    ]
    if report["ranked"] and "cost" in report["ranked"][0]:
        head.append("cost")
        rows = [[*cells, f"{row['cost']:,.0f}"] for cells, row in zip(rows, report["ranked"], strict=False)]
    return head, rows


def exposed_lines(row: dict[str, Any]) -> list[str]:
    """A layout's exchanges that nothing hides, each in milliseconds and as a share of the step."""
    step = row["step_seconds"]
    lines = [f"{kind}: {1000 * took:.4g} ms, {100 * took / step:.1f} %" for kind, took in row["exposed_seconds"].items()]
    if row["hidden_seconds"] > 1e-6:
        lines.append(f"beside the work: {1000 * row['hidden_seconds']:.4g} ms of gradients over replicas")
    return lines or ["none"]


def _show_sweep(report: dict[str, Any], width: int | None) -> None:
    console = _console(width)
    console.rule(f"{report['name']} on {report['gpus']} GPUs of {format_bytes(report['memory_limit'])}: predictions")
    fit, top = len(report["ranked"]), report["top"]
    shown = f", the first {top} of them:" if fit > top else ":"
    looked = f"{report['looked_at']} layouts, {fit} planned and fit{shown if fit else ''}"
    console.print(f"{report['batch_tokens']:,} tokens a step; {looked}", markup=False)
    if fit:
        _print_table(console, _table("", *sweep_rows(report)))
        console.print("exchanges that show, of the first", style="bold")
        for line in exposed_lines(report["ranked"][0]):
            console.print(f"- {line}", markup=False)
    console.print("left out", style="bold")
    for reason, count in sorted(report["left_out"].items(), key=lambda one: -one[1]):
        console.print(f"- {count:4} {reason}", markup=False)
    console.print("assumptions", style="bold")
    for line in report["assumptions"]:
        console.print(f"- {line}", markup=False)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None

