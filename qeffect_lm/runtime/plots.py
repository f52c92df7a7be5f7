"""Loss plots: of a run, with held-out loss and the unigram entropy as a yardstick; and of several runs with different seeds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from qeffect_lm.errors import QEffectError
from qeffect_lm.runtime.metrics import StepMetrics, read_metrics

TRAIN, HELD_OUT, YARDSTICK, INK = "#2a6fbb", "#d1495b", "#6b7280", "#1f2933"


def plot_loss(
    metrics: str | os.PathLike[str] | Iterable[StepMetrics],
    out_png: str | os.PathLike[str],
    *,
    held_out: Sequence[tuple[int, float]] = (),
    unigram_entropy: float | None = None,
    title: str = "Loss",
) -> Path:
    """Draw loss over optimizer steps to a PNG file and return its path.

    ``metrics`` is a metrics.jsonl file or its records. ``held_out`` are (step, nats per token) points; they
    are added to the ``eval_loss`` values of the records. ``unigram_entropy``, in nats per token, is what a
    model that knows only token frequencies would reach. Skipped steps are marked; non-finite losses leave a
    gap.

    Raises QEffectError when matplotlib is not installed, when there is nothing to draw, or when the file
    cannot be written.
    """
    figure = blank_figure((8, 4.8))
    records = read_metrics(metrics) if isinstance(metrics, (str, os.PathLike)) else list(metrics)
    points = {record.step: record.eval_loss for record in records if record.eval_loss is not None} | dict(
        held_out
    )
    points = {step: loss for step, loss in points.items() if math.isfinite(loss)}
    train = [(record.step, record.loss) for record in records if record.loss is not None]
    if not any(math.isfinite(loss) for _, loss in train) and not points:
        raise QEffectError("the loss plot has nothing to draw: no record holds a finite loss")

    axes = figure.add_subplot()
    _draw_train(axes, train)
    skipped = [record.step for record in records if record.skipped]
    if skipped:
        axes.plot(
            skipped,
            [0.015] * len(skipped),
            "|",
            color=HELD_OUT,
            markersize=8,
            label="skipped step",
            transform=axes.get_xaxis_transform(),
        )
    if points:
        steps = sorted(points)
        axes.plot(
            steps,
            [points[step] for step in steps],
            "o-",
            color=HELD_OUT,
            linewidth=1.6,
            markersize=4.5,
            label=f"held-out ({points[steps[-1]]:.2f} at step {steps[-1]})",
            zorder=4,
        )
    if unigram_entropy is not None:
        axes.axhline(
            unigram_entropy,
            color=YARDSTICK,
            linestyle=(0, (5, 4)),
            linewidth=1.2,
            label=f"unigram entropy ({unigram_entropy:.2f})",
        )
    _finish(axes, title)
    return save_figure(figure, Path(out_png))


def plot_spread(
    losses: Mapping[str, Sequence[Sequence[float]]],
    held_out: Mapping[str, Sequence[Sequence[tuple[int, float]]]],
    reference: str,
    out_png: str | os.PathLike[str],
    *,
    title: str = "Loss",
) -> Path:
    """Draw several runs of several recipes to a PNG file and return its path.

    Above, the moving mean of the training loss of every run, one colour a recipe. Below, each run's held-out loss minus the
    mean of ``reference`` at that step, over the band between the least and the largest of ``reference``'s own.

    Args:
        losses: recipe → for each run the loss of every step, in nats per token.
        held_out: recipe → for each run (step, loss) points, the same steps everywhere.

    Raises QEffectError as :func:`plot_loss` does.
    """
    figure = blank_figure((8, 6.6))
    above, below = figure.subplots(2, 1, height_ratios=[3, 2], sharex=True)
    colours = dict(zip(losses, (TRAIN, HELD_OUT, "#2a9d6f", "#8a5fbf", YARDSTICK), strict=False))
    for recipe, curves in losses.items():
        for number, curve in enumerate(curves):
            label = f"{recipe}, {len(curves)} seed{'s' if len(curves) > 1 else ''}" if number == 0 else None
            above.plot(range(1, len(curve) + 1), _moving_mean(list(curve)), color=colours[recipe], linewidth=1.1, label=label)
    steps = [step for step, _ in held_out[reference][0]]
    own = [[dict(run)[step] for run in held_out[reference]] for step in steps]
    means = [sum(values) / len(values) for values in own]
    low, high = ([f(values) - mean for values, mean in zip(own, means, strict=True)] for f in (min, max))
    below.fill_between(steps, low, high, color=TRAIN, alpha=0.18, linewidth=0, label=f"{reference}: spread of its seeds")
    for recipe, points in held_out.items():
        for run in points if recipe != reference else ():
            away = [dict(run)[step] - mean for step, mean in zip(steps, means, strict=True)]
            below.plot(steps, away, "o-", color=colours[recipe], linewidth=1.0, markersize=3)
    below.axhline(0, color=INK, linewidth=0.8)
    _finish(above, title)
    _finish(below, "")
    above.set_xlabel("")
    below.set_ylabel(f"held-out minus\n{reference}'s mean", color=INK)
    return save_figure(figure, Path(out_png))


def blank_figure(size: tuple[float, float], layout: Literal["constrained"] | None = "constrained") -> Any:
    """Figure and canvas, not pyplot: no global state, no display, and no backend chosen for the caller. ``size`` in inches;
    ``layout`` None leaves it to the caller to place axes.

    Raises QEffectError when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise QEffectError(
            "a picture needs matplotlib: install the extra with `pip install 'qeffect-lm[plot]'`"
        ) from error
    figure = Figure(figsize=size, dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def _draw_train(axes: Any, train: list[tuple[int, float]]) -> None:
    """The loss of every step, faint, and its moving mean where there are enough steps to smooth."""
    if not train:
        return
    steps = [step for step, _ in train]
    losses = [loss if math.isfinite(loss) else math.nan for _, loss in train]
    smooth = len(train) >= 50
    axes.plot(
        steps,
        losses,
        color=TRAIN,
        linewidth=0.9 if smooth else 1.6,
        alpha=0.35 if smooth else 1.0,
        marker="o" if len(train) == 1 else None,
        label="train, each step" if smooth else "train",
    )
    if smooth:
        axes.plot(
            steps, _moving_mean(losses), color=TRAIN, linewidth=1.8, label="train, moving mean", zorder=3
        )


def _moving_mean(values: list[float]) -> list[float]:
    """Mean over a window centred on each value, about a twentieth of the run wide; NaN values do not count.

    Centred, because a mean of the past only would lag behind a falling curve and draw it too high; towards
    both ends the window shrinks so that it stays centred.
    """
    widest = max(2, len(values) // 40)
    result = []
    for index in range(len(values)):
        half = min(widest, index, len(values) - 1 - index)
        window = [value for value in values[index - half : index + half + 1] if not math.isnan(value)]
        result.append(sum(window) / len(window) if window else math.nan)
    return result


def _finish(axes: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=10)
    axes.set_xlabel("optimizer step", color=INK)
    axes.set_ylabel("loss (nats per token)", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(True, color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    left, right = axes.get_xlim()
    if right - left < 2:  # a single step: no ticks between whole steps
        axes.set_xlim(left - 1, right + 1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa5b1")
    axes.tick_params(colors=INK, labelsize=9)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def save_figure(figure: Any, path: Path) -> Path:
    """Write beside the target and rename, so that a viewer never sees half a picture; PNG unless its name ends in .svg or
    .pdf.

    Raises QEffectError when the file cannot be written.
    """
    temporary, kind = path.with_name(f".{path.name}.tmp-{os.getpid()}"), path.suffix.lower().removeprefix(".")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, format=kind if kind in ("svg", "pdf") else "png")
        os.replace(temporary, path)
    except OSError as error:
        raise QEffectError(f"cannot write the picture {path}: {error.strerror}") from error
    return path
