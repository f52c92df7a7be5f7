"""Plot a run's losses, or the curves of ``bench curves``: ``python -m tools.plot RUN_DIR|FILE.json [--out PNG]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from qeffect_lm.errors import UsageError
from tools.common import add_traceback, run_tool


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.plot", description=__doc__)
    made.add_argument("run", type=Path, help="a run's folder (run.dir), its metrics.jsonl, or a report of bench curves")
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
    if metrics.suffix == ".json":
        print(plot_curves(metrics, arguments.out or metrics.with_suffix(".png"), arguments.title))
        return 0
    held_out = [(m.step, m.eval_loss) for m in read_metrics(metrics) if m.eval_loss is not None]
    out = arguments.out or metrics.parent / "loss.png"
    print(plot_loss(metrics, out, held_out=held_out, title=arguments.title or metrics.resolve().parent.name))
    return 0


def plot_curves(file: Path, out: Path, title: str | None = None) -> Path:
    """The curves of a report of ``bench curves``.

    Raises:
        UsageError: the file holds no curves.
    """
    from qeffect_lm.runtime.plots import plot_spread

    try:
        report = json.loads(file.read_text())
        losses: dict[str, list[list[float]]] = {}
        held_out: dict[str, list[list[tuple[int, float]]]] = {}
        for run in report["runs"]:
            losses.setdefault(run["recipe"], []).append(run["losses"])
            if run["recipe"] != "control":
                points = [(step, loss) for step, loss in run["held_out"] if step > 0]
                held_out.setdefault(run["recipe"], []).append(points)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} holds no loss curves: give what `python -m tools.bench curves --json` wrote") from error
    return plot_spread(losses, held_out, "bf16", out, title=title or f"{report.get('device', '')}, {report['steps']} steps")


if __name__ == "__main__":
    sys.exit(main())
