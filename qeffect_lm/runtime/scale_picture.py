"""A picture of FP8 scale histories: per layer and window how large the values were, and how much room the scale leaves them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qeffect_lm.runtime.plots import INK, blank_figure, save_figure

Entry = tuple[str, str, Sequence[float], float | None]
"""(layer, what of it is quantised, amax of the windows with the newest first, headroom in bits)"""

UNSEEN = "#d7dbe0"
ROOM = 4.0  # bits at which the strip of headroom has its last colour
# Inches: height of a row, space above and below the maps, between them, the strip, the colour bar of the strips.
ROW, ABOVE, BELOW, GAP, STRIP, BAR = 0.15, 0.72, 0.75, 0.3, 0.16, 0.1


def draw(entries: Sequence[Entry], out: str | os.PathLike[str], *, title: str) -> Path:
    """Draw a heat map for each kind of tensor (inputs, weights, output gradients) to a .png, .svg or .pdf file.

    A row is a layer, a column a window, the newest on the right; the colour is log2 of the amax; windows without an amax are
    grey. The strip beside it is the headroom of the newest amax: red where it saturates.

    Raises QEffectError when matplotlib is not installed or the file cannot be written.
    """
    kinds = list(dict.fromkeys(kind for _, kind, _, _ in entries))
    layers = list(dict.fromkeys(layer for layer, _, _, _ in entries))
    windows = max(len(history) for _, _, history, _ in entries)
    places = {(layer, kind): (history, headroom) for layer, kind, history, headroom in entries}

    names = 0.25 + 0.068 * max(len(layer) for layer in layers)
    width = min(max(1.7, 0.13 * windows), 5.0)
    height = max(0.8, ROW * len(layers))
    step = width + 0.06 + STRIP + GAP
    size = names + step * len(kinds) + BAR + 0.55, ABOVE + height + BELOW
    figure = blank_figure(size, layout=None)

    def place(left: float, bottom: float, wide: float, high: float) -> Any:
        return figure.add_axes((left / size[0], bottom / size[1], wide / size[0], high / size[1]))

    figure.text(0.12 / size[0], 1 - 0.2 / size[1], title, va="center", color=INK, fontsize=12, fontweight="bold")
    said = "grey: no amax seen" + ("; room: bits from the newest amax to the format's largest value" if len(kinds) > 1 else "")
    figure.text(0.12 / size[0], 1 - 0.41 / size[1], said, va="center", color=INK, fontsize=7.5)
    strip: Any = None
    for number, kind in enumerate(kinds):
        rows = [places.get((layer, kind), ((), None)) for layer in layers]
        left = names + number * step
        axes = place(left, BELOW, width, height)
        image = _histories(axes, [row[0] for row in rows], windows, kind)
        axes.set_yticks(range(len(layers)), layers if number == 0 else [""] * len(layers))
        _bar(figure, image, place(left, 0.36, width, 0.08), "log2 of amax", "horizontal")
        beside = place(left + width + 0.06, BELOW, STRIP, height)
        strip = _headrooms(beside, [row[1] for row in rows])
        for edge in _edges(layers):
            for one in (axes, beside):
                one.axhline(edge, color="white", linewidth=1.6)
    high = min(height, 2.2)
    _bar(figure, strip, place(names + step * len(kinds), BELOW + (height - high) / 2, BAR, high), "room (bits)", "vertical")
    return save_figure(figure, Path(out))


def _histories(axes: Any, histories: Sequence[Sequence[float]], windows: int, kind: str) -> Any:
    import numpy as np

    grid = np.full((len(histories), windows), math.nan)
    for row, history in enumerate(histories):
        for age, amax in enumerate(history):
            if 0 < amax < math.inf:
                grid[row, windows - 1 - age] = math.log2(amax)
    axes.set_facecolor(UNSEEN)
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap="viridis")
    if np.isnan(grid).all():
        image.set_clim(-1, 1)
    axes.set_title(kind, loc="left", color=INK, fontsize=9, pad=4)
    axes.set_xticks([0, windows - 1] if windows > 1 else [0], [f"−{windows - 1}", "newest"] if windows > 1 else ["newest"])
    for label, side in zip(axes.get_xticklabels(), ("left", "right") if windows > 1 else ("center",), strict=True):
        label.set_horizontalalignment(side)
    _plain(axes)
    return image


def _headrooms(axes: Any, headrooms: Sequence[float | None]) -> Any:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("room", [(0, "#b3202c"), (0.5, "#f7f7f7"), (1, "#2a6fbb")])
    grid = np.array([[math.nan if room is None else room] for room in headrooms])
    axes.set_facecolor(UNSEEN)
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap=colours, vmin=-ROOM, vmax=ROOM)
    axes.set_title("room", color=INK, fontsize=7, pad=4)
    axes.set_xticks([])
    axes.set_yticks([])
    _plain(axes)
    return image


def _edges(layers: Sequence[str]) -> list[float]:
    """Where, between two rows, another block of the model begins (``layers.3`` after ``layers.2``)."""
    blocks = [".".join(layer.split(".")[:2]) for layer in layers]
    return [row - 0.5 for row in range(1, len(blocks)) if blocks[row] != blocks[row - 1]]


def _bar(figure: Any, image: Any, axes: Any, label: str, orientation: str) -> None:
    from matplotlib.ticker import MaxNLocator

    beside = orientation == "horizontal"  # where more numbers would overlap
    ticks = MaxNLocator(5, steps=[1, 2, 5, 10]) if beside else None
    bar = figure.colorbar(image, cax=axes, orientation=orientation, ticks=ticks)
    bar.set_label(label, color=INK, fontsize=7.5, labelpad=2)
    bar.ax.tick_params(labelsize=7, colors=INK, length=2)
    bar.outline.set_visible(False)


def _plain(axes: Any) -> None:
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(colors=INK, labelsize=7, length=0)
