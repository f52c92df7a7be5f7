"""``tools.plan --html``: the terminal's page as one file that needs no other, readable on a phone."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;padding:1rem;max-width:75rem}
h1{font-size:1.25rem}h2{font-size:1.05rem;margin-top:1.6rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .55rem;text-align:right;white-space:nowrap;border-bottom:1px solid #8884}
th:first-child,td:first-child{text-align:left}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .9rem;margin:0}
dt{color:#777}dd{margin:0}.bar{display:flex;height:1.1rem;border-radius:3px;overflow:hidden;background:#8882}
.bar span{display:block;height:100%}
.key{line-height:1.7}.key b{font-weight:400;white-space:nowrap}
.key span{display:inline-block;width:.8rem;height:.8rem;margin:0 .3rem 0 .9rem}
svg{max-width:100%;height:auto}li{margin:.15rem 0}
"""
COLOURS = (
    "#4a86e8", "#2f5fb3", "#45b8ac", "#6aa84f", "#e0a030", "#b0894f", "#9a9a9a", "#c27ba0", "#d9679a", "#8e7cc3", "#d0604a",
)  # fmt: skip


def _document(title: str, body: list[str]) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    return "\n".join(
        [f"<!doctype html><html lang=en><head>{head}<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
         f"<h1>{escape(title)}</h1>", *body, "</body></html>", ""]
    )  # fmt: skip


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _list(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _bars(report: dict[str, Any]) -> list[str]:
    """Each rank's memory at the peak of forward and backward, to one scale."""
    ranks = report["memory"]
    most = max(sum(rank["categories"].values()) for rank in ranks)
    names = list(ranks[0]["categories"])
    key = "".join(f'<b><span style="background:{c}"></span>{escape(name)}</b> ' for name, c in zip(names, COLOURS, strict=True))
    lines = [f'<p class="key">{key}</p>']
    for number, rank in enumerate(ranks):
        parts = "".join(
            f'<span title="{escape(name)}: {size / 2**20:,.0f} MiB" style="width:{100 * size / most:.3f}%;background:{colour}">'
            "</span>"
            for (name, size), colour in zip(rank["categories"].items(), COLOURS, strict=True)
        )
        lines.append(f'<div>rank {number}<div class="bar">{parts}</div></div>')
    return lines


def page(report: dict[str, Any], picture: str) -> str:
    """One layout; ``picture`` is the timeline as SVG."""
    from tools.plan_run import facts, memory_rows, turned

    found = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts(report))
    return _document(
        report["title"],
        [
            f"<dl>{found}</dl>",
            "<h2>Memory per pipeline rank</h2>",
            *_bars(report),
            _table(*turned(*memory_rows(report))),
            "<h2>Timeline of a step</h2>",
            f'<div class="wide">{picture}</div>',
            "<h2>Assumptions</h2>",
            _list(report["assumptions"]),
        ],
    )


def sweep_page(report: dict[str, Any]) -> str:
    """All layouts of a sweep that fit."""
    from tools.plan_run import sweep_rows

    left = [f"{count}: {reason}" for reason, count in sorted(report["left_out"].items(), key=lambda one: -one[1])]
    return _document(
        f"{report['name']} on {report['gpus']} GPUs",
        [
            f"<p>{report['looked_at']} layouts looked at, {len(report['ranked'])} fit; fastest first.</p>",
            _table(*sweep_rows(report, 200)),
            "<h2>Left out</h2>",
            _list(left),
            "<h2>Assumptions</h2>",
            _list(report["assumptions"]),
        ],
    )
