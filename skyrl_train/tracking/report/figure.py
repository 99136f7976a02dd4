"""The charts as one picture (report.png) and one by one as SVG (report.html)."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from skyrl_train.tracking.report.charts import Chart, charts_for, draw
from skyrl_train.tracking.report.history import History, Summary

STYLE = Path(__file__).with_name("style.mplstyle")
COLUMNS = 3
CHART_SIZE = (4.3, 2.75)
"""Inches of one cell of the grid."""
HEADER_HEIGHT = 0.85
DPI = 110


def save_png(path: Path, history: History, summary: Summary) -> None:
    """All charts in a grid under the run's name and result."""
    with matplotlib.rc_context(fname=STYLE):
        charts = charts_for(history)
        positions = grid_positions(charts)
        rows = max(row for row, _, _ in positions) + 1
        width, height = COLUMNS * CHART_SIZE[0], rows * CHART_SIZE[1] + HEADER_HEIGHT
        left = 0.3 / width
        layout = ConstrainedLayoutEngine(rect=(left, 0, 1 - 2 * left, 1 - HEADER_HEIGHT / height), h_pad=0.08)
        figure = Figure((width, height), dpi=DPI, facecolor="white", layout=layout)
        grid = figure.add_gridspec(rows, COLUMNS)
        for chart, (row, column, span) in zip(charts, positions, strict=True):
            draw(chart, figure.add_subplot(grid[row, column : column + span]), history)
        muted, ink = matplotlib.rcParams["axes.labelcolor"], matplotlib.rcParams["axes.titlecolor"]
        versions = textwrap.fill(
            " · ".join(f"{package} {version}" for package, version in summary.versions.items()), 75
        )
        figure.text(left, 1 - 0.42 / height, summary.run_name, fontsize=17, fontweight="bold", color=ink)
        figure.text(left, 1 - 0.72 / height, summary.line(), fontsize=11, color=muted)
        figure.text(1 - left, 1 - 0.4 / height, versions, fontsize=7.5, color=muted, ha="right", va="center")
        figure.savefig(path, format="png")


def grid_positions(charts: list[Chart]) -> list[tuple[int, int, int]]:
    """(row, first column, columns) of each chart, row by row; the last of a row takes the remaining columns."""
    positions: list[tuple[int, int, int]] = []
    row = column = 0
    for chart in charts:
        span = 2 if chart.wide else 1
        if column + span > COLUMNS:
            positions[-1] = (row, positions[-1][1], COLUMNS - positions[-1][1])
            row, column = row + 1, 0
        positions.append((row, column, span))
        column += span
    last_column = positions[-1][1]
    return [*positions[:-1], (row, last_column, COLUMNS - last_column)]


def chart_svgs(history: History) -> list[tuple[str, int]]:
    """Each chart as an `<svg>` element that scales with its container and needs no fonts or files, and its columns."""
    charts = charts_for(history)
    svgs = []
    for chart, (_, _, span) in zip(charts, grid_positions(charts), strict=True):
        with matplotlib.rc_context(fname=STYLE):
            size = CHART_SIZE[0] * (1.07 * span - 0.07), CHART_SIZE[1]
            figure = Figure(size, facecolor="none", layout="constrained")
            draw(chart, figure.add_subplot(), history)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        svg = buffer.getvalue()
        svgs.append((svg[svg.index("<svg") :], span))
    return svgs
