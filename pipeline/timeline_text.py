"""A plan as a picture for the terminal: one line per rank, time from left to right.

    rank 0  F0 F1 ..... I0 W0
    rank 1  .. F0 I0 W0 F1 ...

Each piece of work reaches up to the next one or to the dots, which are idle time. Commits, messages and the
step's end are left out. A picture wider than the terminal goes on below; of a very long one the middle is
left out.
"""

from __future__ import annotations

from pipeline.actions import Action, Kind
from pipeline.plan import Plan
from pipeline.simulate import Simulation, simulate
from qeffect_lm.errors import UsageError

MIN_WIDTH = 72
MAX_PANELS = 4  # blocks of lines shown before the middle is left out
TABLE = ("I-slots", "W-slots", "inputs", "outputs", "grad-ins", "dX")


def render(
    plan: Plan,
    width: int = 100,
    durations: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    idle: str = ".",
) -> str:
    """Draw a plan, its slots per rank, and its bubble rate by :func:`pipeline.simulate.simulate`.

    Args:
        plan: a valid plan.
        width: columns of the terminal, at least 72.
        durations: time of one F, I, W, in any unit.
        comm: latency of a message, in the same unit.
        idle: the character that idle time is drawn with.

    Returns: lines of at most ``width`` columns, with a final newline.

    Raises:
        UsageError: ``width`` below 72, or durations that cannot be simulated.
    """
    if width < MIN_WIDTH:
        raise UsageError(f"a timeline needs at least {MIN_WIDTH} columns, not {width}")
    simulation = simulate(plan, *durations, comm)
    placement = plan.placement
    head = (
        f"{plan.schedule}: {_count(placement.num_chunks, 'chunk')} on {_count(plan.num_ranks, 'rank')}, "
        f"{_count(plan.microbatches, 'microbatch', 'es')}, window {plan.window}"
    )
    fused = "B I and W, " if any(action.kind is Kind.B for row in plan.actions for action in row) else ""
    legend = [f"F forward, I input gradient, W weight gradient, {fused}{idle} idle"]
    if placement.num_chunks > plan.num_ranks:
        legend.append("2F0: chunk 2, F, microbatch 0")
    sections = [[head, *legend], *_panels(plan, simulation, width, durations, idle), _table(plan, simulation)]
    times = ", ".join(f"T_{name} {value:g}" for name, value in zip("FIW", durations, strict=True))
    work = max(simulation.busy)
    sections.append(
        [
            f"{times}, T_comm {comm:g}",
            f"cost {simulation.cost:g}, of which work {work:g}: bubble rate {100 * simulation.bubble:.1f} %",
        ]
    )
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _label(action: Action, several_chunks: bool) -> str:
    return str(action) if several_chunks else f"{action.kind}{action.key[1]}"


def _panels(
    plan: Plan, simulation: Simulation, width: int, durations: tuple[float, float, float], idle: str
) -> list[list[str]]:
    """The picture, cut into blocks of lines that fit the width."""
    several = plan.placement.num_chunks > plan.num_ranks
    labels = [_label(action, several) for row in plan.actions for action in row if action.is_compute]
    cell = max(map(len, labels)) + 1
    scale = cell / min(value for value in durations if value > 0)  # columns per unit of time
    names = [f"rank {rank}" for rank in range(plan.num_ranks)]
    margin = len(names[-1]) + 2
    lines = [_line(plan, simulation, rank, several, scale, idle) for rank in range(plan.num_ranks)]
    panel = max(1, (width - margin) // cell) * cell
    starts = list(range(0, max(map(len, lines)), panel))
    panels = []
    for start in starts:
        ruler = "time".ljust(margin) + _ruler(start, min(panel, max(map(len, lines)) - start), scale, cell)
        rows = [
            name.ljust(margin) + line[start : start + panel] for name, line in zip(names, lines, strict=True)
        ]
        panels.append([row.rstrip() for row in (ruler, *rows)])
    if len(panels) > MAX_PANELS:
        left_out = len(panels) - MAX_PANELS
        kept = MAX_PANELS - 1
        note = f"... {_count(left_out, 'block')} of {panel / scale:g} time units left out ..."
        panels = [*panels[:kept], [note], panels[-1]]
    return panels


def _line(plan: Plan, simulation: Simulation, rank: int, several: bool, scale: float, idle: str) -> str:
    """One rank's whole line: a cell for each piece of work, dots for idle time."""
    total = round(max(max(ends) for ends in simulation.end) * scale)
    columns = [" "] * total
    free = 0
    for position, action in enumerate(plan.actions[rank]):
        if not action.is_compute:
            continue
        left = round(simulation.start[rank][position] * scale)
        right = round(simulation.end[rank][position] * scale)
        columns[free:left] = _idle(left - free, idle)
        size = right - left
        text = _label(action, several)
        columns[left:right] = text[:size].ljust(size)
        free = right
    columns[free:total] = _idle(total - free, idle)
    return "".join(columns)


def _idle(size: int, mark: str) -> str:
    return (mark * (size - 1) + " ") if size > 1 else mark * size


def _ruler(start: int, size: int, scale: float, cell: int) -> str:
    """Times over a block of ``size`` columns that begins at column ``start``, one about every five cells."""
    text = [" "] * size
    for column in range(0, size, 5 * cell):
        mark = f"{(start + column) / scale:.4g}"
        if column + len(mark) <= size:
            text[column : column + len(mark)] = mark
    return "".join(text)


def _table(plan: Plan, simulation: Simulation) -> list[str]:
    """Per rank its idle share of the cost, its slots and buffers (all chunks together) and its graphs."""
    rows: list[tuple[str, ...]] = [("", "idle", *TABLE, "graphs")]
    for rank, slots in enumerate(plan.slots):
        idle = 1 - simulation.busy[rank] / simulation.cost
        resources = (slots.i_slots, slots.w_slots, slots.inputs, slots.outputs, slots.grad_ins, slots.dxs)
        counts = (str(sum(resource.count.values())) for resource in resources)
        rows.append((f"rank {rank}", f"{100 * idle:.1f} %", *counts, str(len(plan.graph_keys(rank)))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(size) if place else cell.ljust(size)
            for place, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
