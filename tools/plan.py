"""Plan a run before it begins: memory, time, cost and timeline; draw and check pipeline schedules.

    python -m tools.plan models/configs/bench-m.yaml parallel.pp=2 --device h200 --tokens 20e9 --price 2.5
    python -m tools.plan models/configs/llama3.1-8b.yaml --device h200 --sweep --gpus 64 --memory 141GB --batch-tokens 4194304
    python -m tools.plan models/configs/tiny.yaml --measure profile.json

With a configuration (and overrides, as train.py takes them) the page says what will run: layers and memory of every rank by
category and phase, the step's timeline, its bubble, and with --device or a profile its time. docs/plan.md explains it.

    python -m tools.plan --schedule zb-h1 --stages 8 --microbatches 24 --costs 18.522,18.086,9.337,0.601
    python -m tools.plan --schedule auto --stages 8 --microbatches 24 --costs 18.522,18.086,9.337,0.601 --memory-limit 8
    python -m tools.plan --schedule zb-v --stages 4 --microbatches 8 --svg zb-v.svg
    python -m tools.plan --schedule interleaved-1f1b --chunks 3 --stages 4 --microbatches 8 --json
    python -m tools.plan --schedule zb-h1 --stages 4 --microbatches 8 --check
    python -m tools.plan --plan runs/demo/train/checkpoints/step_00000100 --check --mutants 300

Without another choice the step is drawn in the terminal. Times are those of all the layers of a stage (rank); where a
rank has several chunks each takes its share. 1F1B, GPipe and interleaved 1F1B are shown as they were published, with
one undivided backward B = I + W; with ``--w-delay`` as the engine runs them, I and W apart.

``--check`` proves the plan with its effects (slots, scales, cached weights, edges between streams, library workspaces,
messages) for every interleaving, without a GPU: one line for each property. docs/plan-check.md explains it.

Exit code 0: the plan is valid; 1: --check rejects it, with rank, position, action and reason; 2: it cannot be made or read,
with one line that says why.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeline.actions import collector_paused, to_csv
from pipeline.auto import OBJECTIVES, SHAPES, Auto, auto, exact
from pipeline.plan import Plan, build_plan, make_plan
from pipeline.schedules import SCHEDULES, find_schedule, fused
from pipeline.simulate import Simulation, peak_activations, simulate
from pipeline.timeline_picture import IDLE, blocks, svg
from pipeline.timeline_text import MIN_WIDTH, render
from pipeline.validate import WINDOWS
from qeffect_lm.contract.errors import PlanError
from qeffect_lm.errors import UsageError
from qeffect_lm.units import parse_bytes
from tools.common import add_traceback, run_tool

EXACT_OPERATIONS = 40  # up to this many, auto's distance from the optimum is searched
DEFAULTS: dict[str, Any] = {
    "costs": "1,1,1,0",
    "memory": "1,1",
    "objective": "span",
    "placements": ",".join(SHAPES),
    "effort": 1.0,
}
MUTANT_DIGITS = 6  # no plan that can be tested so has more mutants than a million
TIMES = "costs", "memory", "memory_limit"  # what a drawing needs, and auto
Numbers = float | tuple[float, ...]


class _Parser(argparse.ArgumentParser):
    """Errors in the arguments are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


@dataclass(frozen=True)
class Sizes:
    """``M_B`` and ``M_W`` of a stage and the limit, in one unit; what one M_B is in that unit."""

    m_b: float
    m_w: float
    limit: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = _parser().parse_intermixed_args(argv)
    return run_tool(lambda: _run(args), args.traceback)


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").partition("\n\n")
    parser = _Parser(
        prog="python -m tools.plan",
        description=lines[0],
        epilog=lines[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run(parser)
    add = parser.add_argument
    add("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)}, or auto: made for these costs and limit")
    add("--stages", type=int, metavar="P", help="pipeline ranks")
    add("--microbatches", type=int, metavar="M", help="per optimizer step")
    add("--chunks", type=int, metavar="V", help="chunks per rank, for interleaved-1f1b (2)")
    add(
        "--costs",
        metavar="F,I,W,COMM",
        help="time of F, I, W of one stage and latency of a message, in any unit (1,1,1,0); for stages that differ, "
        "one number per stage with colons: 1:1:2,1:1:2,1:1:1,0",
    )
    add(
        "--memory",
        metavar="MB,MW",
        help="activation memory of one microbatch of a stage after F and I (1,1); with --sweep the memory of one GPU (141GB)",
    )
    add(
        "--memory-limit",
        metavar="LIMIT",
        help="what a stage may hold: a number of M_B, or bytes (40GB, 40GiB, 4e10B) with --memory in bytes",
    )
    add("--w-delay", metavar="N", help="microbatches by which W trails I, or 'stage': the stage's index; splits B in I and W")
    add("--coalesce-w", type=int, metavar="N", help="W of N microbatches of one weight as one product; splits B in I and W (1)")
    add("--objective", choices=OBJECTIVES, help="what auto makes small: longest stage span, or makespan (span)")
    add("--placements", metavar="LIST", help=f"what auto may use ({','.join(SHAPES)})")
    add("--effort", type=float, help="how long auto searches (1)")
    add("--lowered", action="store_true", help="with --json or --csv: with messages and the step's end")
    checks = parser.add_argument_group("checking a plan")
    check = checks.add_argument
    check("--check", action="store_true", help="prove the plan with its effects, as the engine runs it (I and W apart)")
    check(
        "--plan",
        metavar="FILE",
        type=Path,
        help="with --check, instead of a schedule: a stored plan, a checkpoint (of a run's folder the newest) or its "
        "manifest.json, or a plan with effects of its own (see --effects)",
    )
    check("--window", choices=WINDOWS, help="with --check: when scales are committed (step)")
    check("--effects", metavar="FILE", type=Path, help="with --check: write the plan with its effects to a file, to be edited")
    check(
        "--mutants",
        nargs="?",
        const="300",
        metavar="N",
        help="with --check: break the plan in N ways (300; or all) and print how many are noticed, each judged by a simulator "
        "of all interleavings; for small plans",
    )
    add("--width", type=int, metavar="COLUMNS", help="of the drawing (the terminal's)")
    add("--svg", metavar="FILE", type=Path, help="write the picture to a file")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    form.add_argument("--csv", action="store_true", help="print the actions as CSV, one row per rank")
    add_traceback(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", nargs="?", type=Path, metavar="CONFIG.yaml", help="plan a run; without it --schedule or --check")
    add("overrides", nargs="*", default=[], metavar="section.key=value", help="override single keys")
    group = parser.add_argument_group("planning a run")
    add = group.add_argument
    add(
        "--device",
        metavar="NAME",
        help="plan for this device: h200 has measured ceilings, cpu has none; a YAML file has 'base: h200' and other constants",
    )
    add("--profile", metavar="FILE", type=Path, help="times of the run's own layers, from --measure")
    add("--measure", metavar="FILE", type=Path, help="measure the run's layers on this machine first, into FILE")
    add("--tokens", type=float, metavar="N", help="budget, for days and GPU-hours (the run's train.steps)")
    add("--price", type=float, metavar="X", help="of a GPU's hour, for the cost")
    add("--sweep", action="store_true", help="compare layouts of --gpus GPUs that fit --memory, and rank them")
    add("--gpus", type=int, metavar="N", help="with --sweep; --stages P: most pipeline stages looked at (16)")
    add("--schedules", metavar="LIST", help="with --sweep: schedules to look at (1f1b,zb-h1,zb-h2,zb-v,interleaved-1f1b)")
    add("--batch-tokens", type=float, metavar="N", help="with --sweep: tokens of a step in every layout (the configuration's)")
    add("--context", type=int, metavar="C", help="with --sweep: most context-parallel ranks looked at (16)")
    add("--top", type=int, metavar="N", help="with --sweep: layouts that are ranked for certain (12)")
    add("--html", metavar="FILE", type=Path, help="write the page to a file that needs no other")


RUN = "device", "profile", "measure", "tokens", "price", "sweep", "gpus", "schedules", "html", "batch_tokens", "context", "top"
RUN_TOO = "memory", "stages", "svg", "json", "width", "traceback", "config", "overrides"


def _plan_run(args: argparse.Namespace) -> int:
    from tools import plan_run  # imports torch, which drawing does not need

    given = {name for name, value in vars(args).items() if value not in (None, False, [])}
    for name in sorted(given - {*RUN, *RUN_TOO}):
        raise UsageError(f"--{name.replace('_', '-')} is of a schedule by itself: leave it out, or the configuration")
    for name in ("gpus", "schedules", "memory", "stages", "batch_tokens", "context", "top"):
        if name in given and not args.sweep:
            raise UsageError(f"--{name.replace('_', '-')} goes with --sweep; the configuration says the layout")
    for name in ("gpus", "stages", "context", "top"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: a number from 1 on")
    if args.price is not None and args.price < 0 or args.tokens is not None and args.tokens <= 0:
        raise UsageError("--tokens and --price are numbers above 0")
    if args.price is not None and args.device in (None, "cpu") and args.profile is None and args.measure is None:
        raise UsageError("--price needs times: name a device with ceilings (--device h200), or --profile FILE")
    if args.svg is not None and args.sweep:
        raise UsageError("--svg draws one layout: leave it or --sweep out")
    return plan_run.run(args)


@collector_paused()
def _run(args: argparse.Namespace) -> int:
    if args.config is not None:
        return _plan_run(args)
    _refuse_ignored(args)
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.check:
        return _check(args)
    _require_sizes(args)
    costs = _costs(args.costs, args.stages)
    sizes = _sizes(args.memory, args.memory_limit)
    found: Auto | None = None
    if args.schedule == "auto":
        plan, found = _auto(args, costs, sizes)
    else:
        plan = _named(args)
    share = plan.placement.num_chunks // plan.num_ranks
    per_chunk = (_spread(costs[0], plan, share), _spread(costs[1], plan, share), _spread(costs[2], plan, share))
    simulation = simulate(plan, *per_chunk, T_comm=costs[3])
    peaks = peak_activations(plan.actions, sizes.m_b / share, sizes.m_w / share)
    if sizes.limit is not None:
        _check_limit(plan, peaks, sizes.limit)
    notes = () if found else find_schedule(args.schedule).notes(args.stages, args.microbatches)
    report = _report(plan, simulation, peaks, sizes, notes, found)
    if args.svg is not None:
        _write(args.svg, svg(plan, simulation, _title(plan, report)))
    if args.json:
        rows = plan.actions if args.lowered else _compute(plan)
        print(json.dumps({**report, "actions": [[str(action) for action in row] for row in rows]}))
    elif args.csv:
        print(to_csv(plan.actions if args.lowered else _compute(plan)), end="")
    else:
        width = args.width or max(MIN_WIDTH, shutil.get_terminal_size((100, 24)).columns)
        print(_drawing(plan, simulation, width, per_chunk, costs[3]) + "\n" + "\n".join(_summary(report)))
    return 0


def _refuse_ignored(args: argparse.Namespace) -> None:
    """Raises UsageError for an option that would change nothing: whoever gave it expects something of it."""
    given = {name for name, value in vars(args).items() if value is not None and value is not False}

    def refuse(names: Sequence[str], why: str) -> None:
        for name in names:
            if name in given:
                raise UsageError(f"--{name.replace('_', '-')} {why}")

    refuse(RUN, "is of a run: give its configuration, CONFIG.yaml")
    if not args.check:
        refuse(("plan", "window", "effects", "mutants"), "goes with --check")
        refuse(("lowered",) if not (args.json or args.csv) else (), "goes with --json or --csv")
        refuse(("width",) if args.json or args.csv else (), "is of the drawing, which --json and --csv leave out")
    else:
        for name in ("csv", "svg", "width", "lowered"):
            if name in given:
                raise UsageError(f"--check draws nothing: leave --{name} out")
        if args.plan is not None:
            names = "schedule", "stages", "microbatches", "window", "chunks", "w_delay", "coalesce_w"
            wrong = [f"--{name.replace('_', '-')}" for name in names if name in given]
            if wrong:
                raise UsageError(f"--plan FILE says all that {', '.join(wrong)} would: leave them out")
            refuse(TIMES, "has no meaning for a stored plan: leave it out")
        elif args.schedule != "auto":
            refuse(TIMES, "has no meaning with --check, but for auto: a proof does not depend on times and sizes")
    if args.schedule != "auto":
        refuse(("objective", "placements", "effort"), "goes with --schedule auto")


def _require_sizes(args: argparse.Namespace) -> None:
    missing = [f"--{name}" for name in ("schedule", "stages", "microbatches") if getattr(args, name) is None]
    if missing:
        raise UsageError(f"the following arguments are required: {', '.join(missing)}")


def _check(args: argparse.Namespace) -> int:
    """``--check``: of a file, or of a schedule as the engine runs it."""
    from tools import plan_check  # imports torch, which drawing does not need

    mutants = None
    if args.mutants is not None:
        if args.mutants != "all" and not re.fullmatch(r"[1-9]\d*", args.mutants):
            raise UsageError(f"--mutants {args.mutants}: a number from 1 on, or 'all'")
        if args.mutants != "all" and len(args.mutants) > MUTANT_DIGITS:
            raise UsageError(f"--mutants: a number of at most {MUTANT_DIGITS} digits; 'all' is every one there is")
        mutants = 0 if args.mutants == "all" else int(args.mutants)
    try:
        if args.plan is not None:
            subject = plan_check.load(args.plan)
        else:
            _require_sizes(args)
            subject = _engine_plan(args)
    except PlanError as error:
        return plan_check.rejected(error, args.json)
    return plan_check.check(subject, as_json=args.json, mutants=mutants, effects=args.effects)


def _engine_plan(args: argparse.Namespace) -> Plan:
    """The schedule's plan as a run would have it: I and W apart."""
    if args.schedule == "auto":
        plan, _ = _auto(args, _costs(args.costs, args.stages), _sizes(args.memory, args.memory_limit))
        compute = _compute(plan)
        return make_plan(plan.schedule, compute, plan.placement, plan.microbatches, window=args.window or "step")
    return build_plan(
        _known(args.schedule),
        args.stages,
        args.microbatches,
        _delay(args),
        args.window or "step",
        chunks=args.chunks,
        coalesce_w=_coalesced(args),
    )


def _auto(args: argparse.Namespace, costs: tuple[Any, Any, Any, float], sizes: Sizes) -> tuple[Plan, Auto]:
    if args.chunks is not None or args.w_delay is not None:
        raise UsageError("auto chooses chunks and W itself; leave --chunks and --w-delay out, or choose with --placements")
    if args.coalesce_w is not None:
        raise UsageError("auto itself places each W: leave --coalesce-w out, or choose a named schedule")
    found = auto(
        args.stages,
        args.microbatches,
        *costs,
        limit=sizes.limit,
        M_B=sizes.m_b,
        M_W=sizes.m_w,
        shapes=[shape.strip() for shape in args.placements.split(",")],
        objective=args.objective,
        effort=args.effort,
    )
    return found.plan, found


def _named(args: argparse.Namespace) -> Plan:
    schedule = SCHEDULES[_known(args.schedule)]
    p, m = args.stages, args.microbatches
    if args.w_delay is None and not schedule.own_lag and args.coalesce_w is None:
        return make_plan(schedule.name, fused(schedule(p, m, 0, args.chunks)), schedule.placement(p, args.chunks), m)
    return build_plan(schedule.name, p, m, _delay(args), chunks=args.chunks, coalesce_w=_coalesced(args))


def _known(schedule: str) -> str:
    if schedule not in SCHEDULES:
        raise UsageError(f"unknown schedule {schedule!r}; use one of {', '.join(SCHEDULES)}, auto")
    return schedule


def _delay(args: argparse.Namespace) -> int | None:
    if args.w_delay not in (None, "stage") and not re.fullmatch(r"\d+", args.w_delay):
        raise UsageError(f"--w-delay {args.w_delay}: a number of microbatches from 0 on, or 'stage'")
    return None if args.w_delay == "stage" else int(args.w_delay or 0)


def _coalesced(args: argparse.Namespace) -> int:
    return 1 if args.coalesce_w is None else int(args.coalesce_w)


def _costs(text: str, stages: int) -> tuple[Any, Any, Any, float]:
    """(T_F, T_I, T_W, T_comm); each of the first three one number or one per stage."""
    fields = text.split(",")
    if len(fields) != 4:
        raise UsageError(f"--costs {text}: four times are needed, F,I,W,COMM")
    values = []
    for name, one in zip(("F", "I", "W", "COMM"), fields, strict=True):
        numbers = tuple(_number(f"--costs, {name}", word) for word in one.split(":"))
        if len(numbers) > 1 and (name == "COMM" or len(numbers) != stages):
            wanted = "one number" if name == "COMM" else f"one number, or one for each of the {stages} stages"
            raise UsageError(f"--costs, {name}: {wanted}, not {len(numbers)}")
        values.append(numbers[0] if len(numbers) == 1 else numbers)
    return values[0], values[1], values[2], values[3]  # type: ignore[return-value]


def _number(what: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{what}: a number from 0 on is needed, not {word.strip()!r}")
    return value


def _sizes(memory: str, limit: str | None) -> Sizes:
    fields = memory.split(",")
    if len(fields) != 2:
        raise UsageError(f"--memory {memory}: two sizes are needed, MB,MW")
    sized = [parse_bytes(field) for field in fields]
    m_b, m_w = (_number("--memory", one) if size is None else size for one, size in zip(fields, sized, strict=True))
    if m_w > m_b or m_b <= 0:
        raise UsageError(f"--memory {memory}: 0 < MB and MW ≤ MB are needed")
    if limit is None:
        return Sizes(m_b, m_w, None)
    in_bytes = parse_bytes(limit)
    if in_bytes is not None and (m_b, m_w) == (1.0, 1.0):
        raise UsageError("a --memory-limit in bytes needs --memory MB,MW in bytes")
    return Sizes(m_b, m_w, _number("--memory-limit", limit) * m_b if in_bytes is None else in_bytes)


def _spread(cost: Numbers, plan: Plan, share: int) -> float | tuple[float, ...]:
    """A stage's time over its chunks, evenly."""
    if isinstance(cost, tuple):
        return tuple(cost[rank] / share for rank in plan.placement.ranks)
    return cost / share


def _check_limit(plan: Plan, peaks: Sequence[float], limit: float) -> None:
    for rank, peak in enumerate(peaks):
        if peak > limit * (1 + 1e-9):
            raise UsageError(
                f"schedule {plan.schedule} holds {peak:g} on rank {rank}, above the memory limit {limit:g}; "
                "raise it, or use --schedule auto"
            )


def _compute(plan: Plan) -> list[list]:
    return [[action for action in row if action.is_compute] for row in plan.actions]


def _report(
    plan: Plan, simulation: Simulation, peaks: Sequence[float], sizes: Sizes, notes: Sequence[str], found: Auto | None
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "schedule": plan.schedule,
        "valid": True,  # make_plan has checked it, or there is no plan
        "stages": plan.num_ranks,
        "microbatches": plan.microbatches,
        "placement": list(plan.placement.ranks),
        "bubble_rate": simulation.bubble,
        "cost": simulation.cost,
        "makespan": simulation.makespan,
        "makespan_bubble_rate": simulation.makespan_bubble,
        "peak_activations": [peak / sizes.m_b for peak in peaks],
        "notes": list(notes),
        "fingerprint": plan.fingerprint(),
    }
    if plan.coalesce_w > 1:
        report["coalesce_w"] = plan.coalesce_w
        report["w_slots"] = [sum(slots.w_slots.count.values()) for slots in plan.slots]
    if found is not None:
        report["auto"] = {
            "origin": found.origin,
            "named": {name: 1 - simulation.cost * (1 - simulation.bubble) / cost for name, cost in found.named.items()},
            "lower_bound": found.bound,
            "at_most_above_optimum": found.gap,
        }
        if found.problem.operations <= EXACT_OPERATIONS and found.gap > 1e-9:
            best = exact(found)
            report["auto"]["optimum"] = best.cost
            report["auto"]["optimum_proven"] = best.proven
    return report


def _title(plan: Plan, report: dict[str, Any]) -> str:
    return (
        f"{plan.schedule}: {plan.num_ranks} stages, {plan.microbatches} microbatches, "
        f"bubble rate {100 * report['bubble_rate']:.2f} %, peak {max(report['peak_activations']):g} M_B"
    )


def _drawing(plan: Plan, simulation: Simulation, width: int, per_chunk: Sequence[Any], comm: float) -> str:
    """With a name on every piece of work where that fits in two blocks of lines; else the whole step at once."""
    if width < MIN_WIDTH:
        raise UsageError(f"a timeline needs at least {MIN_WIDTH} columns, not {width}")
    times = [time for time in per_chunk if not isinstance(time, tuple)]
    if len(times) == 3 and min(times) > 0 and simulation.makespan / min(times) * 5 <= 2 * width:
        return render(plan, width, (times[0], times[1], times[2]), comm, idle=IDLE)
    return blocks(plan, simulation, width)


def _summary(report: dict[str, Any]) -> list[str]:
    peaks = report["peak_activations"]
    lines = [
        f"{report['schedule']}: {report['stages']} stages, {report['microbatches']} microbatches: valid, no deadlock",
        f"bubble rate {report['bubble_rate']:.4f} by stage span (cost {report['cost']:g}), "
        f"{report['makespan_bubble_rate']:.4f} by makespan ({report['makespan']:g})",
        f"peak activations per rank, in M_B: {' '.join(f'{peak:g}' for peak in peaks)}",
    ]
    if "coalesce_w" in report:
        slots = " ".join(map(str, report["w_slots"]))
        lines.append(f"W of {report['coalesce_w']} microbatches as one product; W-slots per rank: {slots}")
    if "auto" in report:
        made = report["auto"]
        lines.append(f"made from: {made['origin']}")
        others = ", ".join(f"{name} {bubble:.4f}" for name, bubble in made["named"].items())
        lines.append(f"named schedules within the limit: {others or 'none'}")
        gap = 100 * made["at_most_above_optimum"]
        lines.append(f"at most {gap:.2f} % above the optimum (lower bound {made['lower_bound']:g})")
        if "optimum" in made:
            proven = "the optimum" if made["optimum_proven"] else "the best seen in an exact search that was cut"
            above = 100 * (report["cost"] / made["optimum"] - 1)
            lines.append(f"{above:.2f} % above {proven} of this placement ({made['optimum']:g})")
    return lines + [f"note: {note}" for note in report["notes"]]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
