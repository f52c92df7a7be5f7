"""Make one HTML page of what runs left in their folders: curves, times, pipeline, FP8 scales, events, configuration.

    python -m tools.report RUN                              RUN/report.html
    python -m tools.report RUN RUN … --output both.html     several runs over each other, and what differs between them
    python -m tools.report RUN --step 400                   the timeline of step 400 (default: the last one recorded)

RUN is a run's folder (run.dir), of a finished run or of one that still trains. The page needs no other file and no network.
What a folder lacks, the page says in its place. Exit code 0: written, 2: no run there, damaged metrics, a wrong request.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from qeffect_lm.errors import UsageError
from tools import pages
from tools.common import add_traceback, printable, run_tool
from tools.report.content import content
from tools.report.reading import read_runs

MOST_RUNS = 16  # beyond that, nobody tells the curves apart
TEMPLATE = Path(__file__).with_name("page.html")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    arguments = _parser().parse_args(argv)
    return run_tool(lambda: _report(arguments), arguments.traceback, os_error=2)


def _report(arguments: argparse.Namespace) -> int:
    folders = [path.parent if path.name == "metrics.jsonl" else path for path in arguments.run]
    output: Path = arguments.output or folders[0] / "report.html"
    if output.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--output {output}: the name has to end in .html")
    if len(folders) > MOST_RUNS:
        raise UsageError(f"{len(folders)} runs: a report shows at most {MOST_RUNS}")
    runs = read_runs(folders, arguments.step)
    for run in runs:
        for remark in run.damaged:
            print(printable(f"note: {remark}"), file=sys.stderr)
    pages.write(output, pages.fill(TEMPLATE, content(runs)))
    print(printable(f"{output}: {', '.join(run.label for run in runs)}; {output.stat().st_size / 1024:.0f} KiB"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, nargs="+", help="a run's folder, or its metrics.jsonl")
    parser.add_argument("--output", metavar="FILE.html", type=Path, help="the page to write (default: RUN/report.html)")
    parser.add_argument("--step", metavar="N", type=int, help="whose timeline to draw (default: the last one recorded)")
    add_traceback(parser)
    return parser
