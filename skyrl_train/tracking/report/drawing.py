"""What every chart is drawn with: colours, curves, stacked areas, values at points, legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from skyrl_train.tracking.report.history import Series

BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, GREY = (
    "#2563eb", "#f59e0b", "#16a34a", "#dc2626", "#7c3aed", "#0d9488", "#94a3b8",
)  # fmt: skip
INK, MUTED, GRID = "#0f172a", "#64748b", "#e2e8f0"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "path",
    "svg.hashsalt": "skyrl-train",
}
"""rcParams under which every chart is drawn."""

MAX_MARKED_POINTS = 40
"""Lines with more points are drawn without markers."""
SMOOTHED_FROM = 90
"""Points from which on a line is drawn as a moving mean over its faint values."""


def line(axes: Axes, series: Series, color: str, label: str, **style: Any) -> None:
    """A labelled curve; few points get markers, many a moving mean over the faint values; an empty series nothing."""
    if not len(series):
        return
    if len(series) >= SMOOTHED_FROM:
        axes.plot(*points(series), color=color, linewidth=0.8, alpha=0.3, zorder=2.5)
        series = moving_mean(series, smoothing_window(len(series)))
    marked = len(series) <= MAX_MARKED_POINTS
    markers: dict[str, Any] = (
        {"marker": "o", "markersize": 6 if len(series) == 1 else 3, "markeredgewidth": 0} if marked else {}
    )
    axes.plot(*points(series), color=color, label=label, clip_on=False, zorder=3, **{**markers, **style})


def stack(
    axes: Axes, steps: Sequence[int], bottoms: Sequence[float], heights: Sequence[float], color: str, label: str
) -> None:
    """One layer of a stacked chart: bars for few steps, a filled area for many."""
    if len(steps) <= MAX_MARKED_POINTS:
        axes.bar(steps, heights, 0.8 if len(steps) > 4 else 0.4, bottoms, color=color, label=label, linewidth=0)
    else:
        tops = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axes.fill_between(steps, bottoms, tops, color=color, label=label, linewidth=0, step="mid")


def annotate_ends(axes: Axes, series: Series) -> None:
    """Writes the first and last value at their points."""
    for index in {0, len(series) - 1}:
        axes.annotate(
            f"{series.values[index]:.3g}", (series.steps[index], series.values[index]), (0, 9),
            textcoords="offset points", ha="center", color="#b45309", fontweight="bold", fontsize=9.5,
            annotation_clip=False, zorder=4,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


def legend(axes: Axes, location: Literal["best", "lower right", "upper right"] = "best") -> None:
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(loc=location)


def positive(series: Series) -> Series:
    """The points above 0."""
    kept = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if value > 0]
    return Series(tuple(step for step, _ in kept), tuple(value for _, value in kept))


def moving_mean(series: Series, window: int) -> Series:
    """Centred mean of `window` points (odd); the window shrinks towards both ends, where the curve keeps its values."""
    last = len(series) - 1
    means = []
    for index in range(len(series)):
        half = min(window // 2, index, last - index)
        near = series.values[index - half : index + half + 1]
        means.append(sum(near) / len(near))
    return Series(series.steps, tuple(means))


def smoothing_window(num_points: int) -> int:
    """Points of a moving mean, an odd number."""
    return num_points // 60 * 2 + 1


def points(series: Series) -> tuple[Sequence[int], Sequence[float]]:
    return series.steps, series.values
