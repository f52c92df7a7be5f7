"""Plot a run's losses: ``python -m tools.plot RUN_DIR [--out PNG]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from qeffect_lm.errors import UsageError
from tools.common import add_traceback, run_tool


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.plot", description=__doc__)
    made.add_argument("run", type=Path, help="a run's folder (run.dir), or its metrics.jsonl")
    made.add_argument("--out", type=Path, help="the PNG to write (default: loss.png beside the metrics)")
    made.add_argument("--title", help="(default: the folder's name)")
    add_traceback(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return run_tool(lambda: plot(arguments), arguments.traceback)


def plot(arguments: argparse.Namespace) -> int:
    """Training loss of each step and the held-out losses, as the metrics hold them."""
    from qeffect_lm.runtime.metrics import read_metrics
    from qeffect_lm.runtime.plots import plot_loss

    metrics = arguments.run / "metrics.jsonl" if arguments.run.is_dir() else arguments.run
    if not metrics.exists():
        raise UsageError(f"{metrics} does not exist: give a run's folder (run.dir of its configuration)")
    held_out = [(m.step, m.eval_loss) for m in read_metrics(metrics) if m.eval_loss is not None]
    out = arguments.out or metrics.parent / "loss.png"
    print(plot_loss(metrics, out, held_out=held_out, title=arguments.title or metrics.resolve().parent.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
