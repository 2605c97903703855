"""The panels of :func:`rlprims.reports.curves.draw_curves`: the metrics of each, and how they are drawn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlprims._json import beside, finite_number

INK, FAINT = "#333333", "#858585"
_SMOOTHED = 20  # a series with fewer points is drawn as it is
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, 2008


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Mapping[str, str]  # metric: its name in a panel with two; the first is drawn strong
    kind: str = "train"
    x: str = "step"
    share: bool = False


PANELS = tuple(Panel(**panel) for panel in beside(__file__, "_metrics.json")["panels"])


def series(rows: Sequence[Mapping[str, Any]], kind: str, key: str, x: str = "step") -> tuple[list[float], list[float]]:
    """The x and y values of the lines of this kind that have both."""
    pairs = ((finite_number(row.get(x)), finite_number(row.get(key))) for row in rows if row.get("kind") == kind)
    points = [(at, value) for at, value in pairs if at is not None and value is not None]
    return [at for at, _ in points], [value for _, value in points]


def has_data(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> bool:
    return any(series(rows, panel.kind, key, panel.x)[0] for key in panel.lines)


def colours_of(count: int) -> list[Any]:
    """Colours that colour-blind readers can distinguish; for more than seven runs even steps of lightness."""
    if count <= len(_COLOURS):
        return list(_COLOURS[:count])
    from matplotlib import colormaps

    return [colormaps["viridis"](0.92 * at / (count - 1)) for at in range(count)]


def draw(axes: Any, panel: Panel, rows: Sequence[Mapping[str, Any]], colour: Any, *, faint: float) -> bool:
    """Draw one run's lines of the panel; returns whether any is smoothed."""
    smoothed = False
    for rank, key in enumerate(panel.lines):
        x, y = series(rows, panel.kind, key, panel.x)
        style: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.8} if rank else {"linewidth": 1.8}
        if panel.kind == "eval" or len(x) == 1:
            style |= {"marker": "o", "markersize": 2 if rank else 3.5}
        if panel.kind == "train" and len(x) >= _SMOOTHED:
            smoothed = True
            axes.plot(x, y, color=colour, linewidth=0.7, alpha=faint * (0.6 if rank else 1.0))
            # Centred means with Gaussian weights: their standard deviation is a sixtieth of the series, or one step.
            width = max(1.0, len(y) / 60)
            reach = min(math.ceil(3 * width), (len(y) - 1) // 2)
            weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
            counts = np.convolve(np.ones(len(y)), weights, mode="same")
            y = list(np.convolve(y, weights, mode="same") / counts)
        axes.plot(x, y, color=colour, solid_capstyle="round", **style)
    return smoothed


def decorate(axes: Any, panel: Panel, *, lowest: bool) -> None:
    """Set title, ticks and limits after all runs are drawn."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    axes.set_title(panel.title, loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(labelsize=9, length=3, color="#bbbbbb", labelcolor=INK)
    axes.grid(axis="y", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    _fit_height(axes, panel)
    by_step = panel.x == "step"
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=by_step))
    if not by_step:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    if lowest or not by_step:
        axes.set_xlabel("step" if by_step else "tokens generated", fontsize=9, color=FAINT)
    if len(panel.lines) > 1:
        strong, thin = (Line2D([], [], color=INK, linewidth=width) for width in (1.8, 0.9))
        key = axes.legend([strong, thin], list(panel.lines.values()), fontsize=8.5, labelcolor=INK)
        key.get_frame().set(edgecolor="none", facecolor="white", alpha=0.8)


def _fit_height(axes: Any, panel: Panel) -> None:
    """Begin the axis at 0 unless a value is negative; use a logarithmic scale for a gradient norm with outliers."""
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    heights = sorted(y for line in axes.get_lines() for y in line.get_ydata())
    middle, top = heights[len(heights) // 2], heights[-1]
    if "grad_norm" in panel.lines and heights[0] > 0 and top > 5 * middle:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif heights[0] >= 0:
        axes.set_ylim(0, 1.08 * top if top > 0 else 0.1 if panel.share else 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
