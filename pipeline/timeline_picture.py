"""A plan as a picture of the whole step: blocks for the terminal, and SVG, in the colours of the papers.

:mod:`pipeline.timeline_text` names every piece of work and needs room; these two show the shape of a step of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from pipeline.actions import Action, Kind
from pipeline.plan import Plan
from pipeline.simulate import Simulation

BLOCKS = {Kind.F: "█", Kind.I: "▒", Kind.W: "░", Kind.B: "▓"}
IDLE = "·"
NAMES = {Kind.F: "F forward", Kind.I: "I input gradient", Kind.W: "W weight gradient", Kind.B: "B = I and W"}
# First chunk of a rank, and the others: lighter, so that a V is seen at once.
COLOURS = {
    Kind.F: ("#4a86e8", "#a4c2f4"),
    Kind.I: ("#45b8ac", "#a5ded7"),
    Kind.W: ("#6aa84f", "#b6d7a8"),
    Kind.B: ("#57a96c", "#b0d8b9"),
}
ROW, LEFT, TOP = 24, 64, 52  # pixels: height of a rank's row, margins
FONT, SMALLEST = 10, 5  # pixels: size of text, and the least that a number is shrunk to


def _work(plan: Plan, simulation: Simulation, rank: int) -> Iterator[tuple[Action, float, float]]:
    for action, start, end in zip(plan.actions[rank], simulation.start[rank], simulation.end[rank], strict=True):
        if action.is_compute:
            yield action, start, end


def _kinds(plan: Plan) -> list[Kind]:
    present = {action.kind for row in plan.actions for action in row}
    return [kind for kind in NAMES if kind in present]


def blocks(plan: Plan, simulation: Simulation, width: int = 100) -> str:
    """The whole step in ``width`` columns, one line per rank; each column shows what fills most of its time.

    Returns: lines with a final newline. The first says what the blocks mean.
    """
    margin = len(f"rank {plan.num_ranks - 1}") + 2
    columns = max(1, width - margin)
    unit = simulation.makespan / columns
    lines = ["   ".join([*(f"{BLOCKS[kind]} {NAMES[kind]}" for kind in _kinds(plan)), f"{IDLE} idle"])]
    for rank in range(plan.num_ranks):
        filled: list[dict[str, float]] = [{} for _ in range(columns)]
        for action, start, end in _work(plan, simulation, rank):
            for column in range(min(int(start / unit), columns - 1), min(int(end / unit) + 1, columns)):
                part = min(end, (column + 1) * unit) - max(start, column * unit)
                if part > 0:
                    block = BLOCKS[action.kind]
                    filled[column][block] = filled[column].get(block, 0.0) + part
        text = ""
        for shares in filled:
            shares[IDLE] = unit - sum(shares.values())
            text += max(shares, key=lambda block: shares[block])
        lines.append(f"rank {rank}".ljust(margin) + text)
    lines.append(" " * margin + "0" + f"{simulation.makespan:g}".rjust(columns - 1))
    return "\n".join(lines) + "\n"


def svg(plan: Plan, simulation: Simulation, title: str, width: int = 1600) -> str:
    """The picture that schedules are drawn as in the papers: a row per rank, a box per piece of work, time to the right.

    A box carries its microbatch where there is room; hovering over it names the action and its times. Work of a rank's
    first chunk is dark, of its other chunks light.

    Args:
        plan, simulation: a plan and its times.
        title: one line above the picture.
        width: of the picture in pixels; boxes too narrow for a number stay without.
    """
    scale = (width - LEFT - 16) / simulation.makespan
    height = TOP + ROW * plan.num_ranks + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="{FONT}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" fill="#222">{escape(title)}</text>',
        *_legend(plan),
    ]
    for rank in range(plan.num_ranks):
        top = TOP + ROW * rank
        parts.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end" fill="#222">rank {rank}</text>')
        full = simulation.makespan * scale
        parts.append(f'<rect x="{LEFT}" y="{top + 1}" width="{full:.2f}" height="{ROW - 3}" fill="#eeeeee"/>')
        first = plan.placement.chunks(rank)[0]
        for action, start, end in _work(plan, simulation, rank):
            if end > start:
                parts.append(_box(action, start, end, scale, top, first))
    parts += [*_axis(simulation.makespan, scale, TOP + ROW * plan.num_ranks), "</svg>"]
    return "\n".join(parts) + "\n"


def _box(action: Action, start: float, end: float, scale: float, top: int, first: int) -> str:
    chunk, microbatch = action.key
    left, size = LEFT + start * scale, (end - start) * scale
    colour = COLOURS[action.kind][chunk != first]
    box = (
        f'<rect x="{left:.2f}" y="{top + 1}" width="{size:.2f}" height="{ROW - 3}" fill="{colour}" stroke="white" '
        f'stroke-width="{min(0.8, size / 8):.2f}"><title>{action}: {start:g} to {end:g}</title></rect>'
    )
    font = min(FONT, (size - 2) / (0.65 * len(str(microbatch))))
    if font < SMALLEST:
        return box
    ink = "white" if chunk == first else "#222"
    place = f'x="{left + size / 2:.2f}" y="{top + 12 + font / 3:.2f}" text-anchor="middle"'
    return f'{box}<text {place} font-size="{font:.1f}" fill="{ink}">{microbatch}</text>'


def _legend(plan: Plan) -> list[str]:
    several = plan.placement.num_chunks > plan.num_ranks
    parts, left = [], LEFT
    for kind in _kinds(plan):
        for shade in range(1 + several):
            parts.append(f'<rect x="{left}" y="28" width="14" height="12" fill="{COLOURS[kind][shade]}"/>')
            left += 16
        parts.append(f'<text x="{left + 2}" y="38" fill="#222">{NAMES[kind]}</text>')
        left += 116
    if several:
        parts.append(f'<text x="{left}" y="38" fill="#222">dark: first chunk of the rank, light: its others</text>')
    return parts


def _axis(makespan: float, scale: float, top: int) -> list[str]:
    """A line with about ten round times on it."""
    step = 10.0 ** len(str(int(makespan)))
    while makespan / step < 8:
        step /= 2 if str(step).lstrip("0.")[0] in "1" else 2.5 if str(step).lstrip("0.")[0] == "5" else 2
    parts = [f'<line x1="{LEFT}" y1="{top + 4}" x2="{LEFT + makespan * scale:.2f}" y2="{top + 4}" stroke="#888"/>']
    for number in range(int(makespan / step) + 1):
        x = LEFT + number * step * scale
        parts.append(f'<line x1="{x:.2f}" y1="{top + 4}" x2="{x:.2f}" y2="{top + 8}" stroke="#888"/>')
        parts.append(f'<text x="{x:.2f}" y="{top + 20}" text-anchor="middle" fill="#222">{number * step:g}</text>')
    return parts
