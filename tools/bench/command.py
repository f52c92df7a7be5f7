"""A benchmark as a command of the terminal, and options that several share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qeffect_lm.errors import UsageError

Options = Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """One benchmark.

    Attributes:
        name, help, text: on the terminal; ``text`` is the longer one of the command's own ``--help``.
        run: measures, prints, writes; returns the exit code.
        options: what ``argparse`` is given for each flag. An option of another command is refused.
    """

    name: str
    help: str
    text: str
    run: Callable[[argparse.Namespace], int]
    options: Options = field(default_factory=dict)


def steps(default: int, of: str = "timed steps per mode") -> Options:
    return {"--steps": {"type": int, "default": default, "metavar": "N", "help": f"{of} (default: {default})"}}


def listed(flag: str, default: str, text: str) -> Options:
    return {flag: {"default": default, "metavar": "LIST", "help": f"{text}, with commas (default: {default})"}}


def state(gib: float) -> Options:
    """Of benchmarks that write checkpoints."""
    return {
        "--gib": {"type": float, "default": gib, "metavar": "N", "help": f"GiB of state (default: {gib:g})"},
        "--dir": {"type": Path, "default": Path("runs"), "metavar": "D", "help": "on which disk (default: runs)"},
        "--rounds": {"type": int, "default": 5, "metavar": "N", "help": "(default: 5)"},
    }


SHAPES: Options = {"--shapes": {"metavar": "LIST", "help": "HIDDENxTOKENS, with commas (default: the seven of the docs)"}}
OVERRIDES: Options = {
    "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE", "help": "override a key of the configuration"}
}


def check_steps(arguments: argparse.Namespace) -> None:
    """Raises: UsageError: no steps."""
    if arguments.steps < 1:
        raise UsageError(f"--steps {arguments.steps}: at least one")


def integers(flag: str, text: str) -> list[int]:
    """A list of positive integers.

    Raises:
        UsageError: it holds something else.
    """
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UsageError(f"{flag} {text}: numbers from 1 on, with commas")
    return found
