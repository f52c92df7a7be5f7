"""``tools.plan --html``: the terminal's page as one file that needs no other, readable on a phone."""

from __future__ import annotations

from html import escape
from typing import Any

from qeffect_lm import __version__
from qeffect_lm.units import format_bytes
from tools import pages

STYLE = """
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 16px; margin: 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.rank { display: grid; grid-template-columns: 4.2em minmax(0, 1fr) 5.4em; gap: 0 8px; align-items: center; margin-top: 4px;
  font-size: 12.5px; font-variant-numeric: tabular-nums; }
.rank b { font-weight: 500; text-align: right; }
table { width: auto; min-width: min(100%, 560px); } td.key { min-width: 0; }
.stack { display: flex; height: 16px; border-radius: 4px; overflow: hidden; background: var(--lane); }
.legend i { background: var(--c); width: 11px; height: 11px; border-radius: 3px; display: inline-block; flex: none; }
.stack i { display: block; height: 100%; background: var(--c); }
.stack i, .legend i { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.picture svg { display: block; width: 100%; min-width: 1100px; height: auto; print-color-adjust: exact; }
.picture svg > rect:first-of-type { fill: var(--paper); } .picture text[fill="#222"] { fill: var(--ink); }
.picture rect[fill="#eeeeee"] { fill: var(--lane); } .picture rect[stroke="white"] { stroke: var(--paper); }
@media print { .picture svg { min-width: 0; } table { font-size: 9px; } th, td { padding-right: 5px; } }
"""
COLOURS = (
    "#4a86e8", "#2f5fb3", "#45b8ac", "#6aa84f", "#e0a030", "#b0894f", "#9a9a9a", "#c27ba0", "#d9679a", "#8e7cc3", "#d0604a",
)  # fmt: skip


def _bars(report: dict[str, Any]) -> list[str]:
    """Each rank's memory at the peak of forward and backward, to one scale."""
    ranks = report["memory"]
    most = max(sum(rank["categories"].values()) for rank in ranks)
    hues = dict(zip(ranks[0]["categories"], COLOURS, strict=True))
    shown = [name for name in hues if any(rank["categories"][name] for rank in ranks)]
    key = "".join(f'<span><i style="--c:{hues[name]}"></i>{escape(name)}</span>' for name in shown)
    lines = []
    for number, rank in enumerate(ranks):
        parts = "".join(
            f'<i title="{escape(name)}: {format_bytes(size)}" style="width:{100 * size / most:.3f}%;--c:{hues[name]}"></i>'
            for name, size in rank["categories"].items()
            if size
        )
        total = format_bytes(sum(rank["categories"].values()))
        lines.append(f'<div class="rank"><span>rank {number}</span><div class="stack">{parts}</div><b>{total}</b></div>')
    return [*lines, f'<div class="legend">{key}</div>']


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{escape(title)}</h2>", *parts, "</section>"])


def page(report: dict[str, Any], picture: str) -> str:
    """One layout; ``picture`` is the timeline as SVG."""
    from tools.plan_run import facts, memory_rows, turned

    found = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts(report))
    return pages.document(
        report["title"],
        f"plan of a run · QEffect LM {__version__}",
        [
            f'<section><dl class="facts">{found}</dl></section>',
            _section("Memory per pipeline rank, at the peak of forward and backward", *_bars(report)),
            _section("Memory by category and phase", pages.table(*turned(*memory_rows(report)))),
            _section("Timeline of a step", f'<div class="wide picture">{picture}</div>'),
            _section("Assumptions", pages.listed(report["assumptions"])),
        ],
        STYLE,
    )


def sweep_page(report: dict[str, Any]) -> str:
    """All layouts of a sweep that fit."""
    from tools.plan_run import sweep_rows

    left = [f"{count}: {reason}" for reason, count in sorted(report["left_out"].items(), key=lambda one: -one[1])]
    return pages.document(
        f"{report['name']} on {report['gpus']} GPUs",
        f"{report['looked_at']} layouts looked at, {len(report['ranked'])} fit; fastest first · QEffect LM {__version__}",
        [
            _section("Layouts", pages.table(*sweep_rows(report, 200))),
            _section("Left out", pages.listed(left)),
            _section("Assumptions", pages.listed(report["assumptions"])),
        ],
        STYLE,
    )
