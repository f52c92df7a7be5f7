"""Measure: what the contract costs, how fast kernels, layers, steps, plans and checkpoints are.

Modes take turns from step to step, so that they share objects, memory and machine: how fast the machine is cancels out.
Each command measures one question and has its own options: ``python -m tools.bench COMMAND --help``.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.bench import gpu, host
from tools.common import add_traceback, run_tool


def parser() -> argparse.ArgumentParser:
    """A parser with one subparser for each command."""
    made = argparse.ArgumentParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="what", metavar="COMMAND", required=True)
    for command in sorted((*host.COMMANDS, *gpu.COMMANDS), key=lambda command: command.name):
        sub = commands.add_parser(command.name, help=command.help, description=command.text)
        for flag, options in command.options.items():
            sub.add_argument(flag, **options)
        sub.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
        add_traceback(sub)
        sub.set_defaults(run=command.run)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(words)
    arguments.command = f"python -m tools.bench {shlex.join(words)}"
    return run_tool(lambda: arguments.run(arguments), arguments.traceback)
