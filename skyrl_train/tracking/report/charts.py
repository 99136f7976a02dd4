"""The charts of a run, plotted with matplotlib's own objects (no pyplot: nothing global, no window)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import Formatter, FuncFormatter, MaxNLocator, PercentFormatter

from skyrl_train.tracking.format import compact
from skyrl_train.tracking.names import STEP_TIME, phases_of
from skyrl_train.tracking.report.history import History, Series
from skyrl_train.tracking.report.timeline import draw_timeline, shown_steps

BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, GREY = (
    "#2563eb", "#f59e0b", "#16a34a", "#dc2626", "#7c3aed", "#0d9488", "#94a3b8",
)  # fmt: skip
PHASE_COLORS = {
    "timing/generate": BLUE,
    "timing/wait_for_groups": "#fecaca",
    "timing/convert_to_training_input": PURPLE,
    "timing/fwd_logprobs_values_reward": TEAL,
    "timing/policy_train": ORANGE,
    "timing/save_state": "#a16207",
    "timing/sync_weights": RED,
}
MAX_MARKED_POINTS = 40
"""Lines with more points are plotted without markers."""
SMOOTHED_FROM = 90
"""Number of points above which a line is plotted as a moving mean over its faint values."""
SMALL_PHASE = 0.01
"""Fraction of the steps' time below which a phase is part of "other"."""


@dataclass(frozen=True, slots=True)
class Curve:
    metric: str
    """A name that ends with `_` stands for the first metric with that prefix; `{}` in the label for the rest of it."""
    color: str
    label: str = ""
    style: dict[str, Any] = field(default_factory=dict)
    is_held_out: bool = False
    """Large points with the first and last value."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over the steps; a chart without values is omitted."""

    title: str
    curves: tuple[Curve, ...]
    legend: Literal["best", "lower right", "upper right"] = "best"
    axis: Literal["free", "zero", "log"] = "zero"
    """Value axis: free, from 0 (or the least value below it), or logarithmic, without values of 0."""
    formatter: Formatter | None = None
    """Formatter of the value axis."""
    wide: bool = False
    """Two columns of the grid."""
    drawn_as: Literal["curves", "phases", "timeline"] = "curves"
    """`phases`: areas of each step's phases; `timeline`: phases of trainer and engines in the last steps."""


THIN = {"linewidth": 1.2}
CHARTS = (
    Chart(
        "Reward",
        (
            Curve("reward/avg_raw_reward", BLUE, "training samples"),
            Curve("reward/avg_pass_at_", BLUE, "training pass@{}", {**THIN, "alpha": 0.45, "linestyle": (0, (3, 2))}),
            Curve("eval/all/avg_score", ORANGE, "held-out prompts", is_held_out=True),
        ),
        legend="lower right",
        axis="free",
        wide=True,
    ),
    Chart(
        "Loss (nats per token)",
        (Curve("sft/loss", BLUE, "training rows"), Curve("sft/eval_loss", ORANGE, "held-out rows", is_held_out=True)),
        legend="upper right",
        axis="free",
        wide=True,
    ),
    Chart(
        "Response length (tokens)",
        (Curve("generate/max_num_tokens", GREY, "longest", THIN), Curve("generate/avg_num_tokens", BLUE, "mean")),
    ),
    Chart("Entropy (nats per token)", (Curve("policy/policy_entropy", TEAL),)),
    Chart("KL from the reference (nats per token)", (Curve("policy/policy_kl", PURPLE),)),
    Chart(
        "Engine vs. trainer: |Δ logprob|",
        (
            Curve("policy/rollout_train_logprobs_abs_diff_max", GREY, "largest", THIN),
            Curve("policy/rollout_train_logprobs_abs_diff_mean", RED, "mean"),
        ),
        axis="log",
    ),
    Chart("Gradient norm", (Curve("policy/grad_norm", GREEN),)),
    Chart(
        "Clipped tokens (%)",
        (Curve("policy/loss_metrics/clip_ratio", RED),),
        formatter=PercentFormatter(1.0, symbol=""),
    ),
    Chart(
        "Tokens per second",
        (Curve("perf/generate_tokens_per_s", BLUE, "generate"), Curve("perf/train_tokens_per_s", ORANGE, "train")),
        formatter=FuncFormatter(lambda value, _: compact(value)),
    ),
    Chart("Time per step (s)", (Curve(STEP_TIME, GREY),), wide=True, drawn_as="phases"),
    Chart(
        "Staleness of the trained tokens (steps)",
        (Curve("async/staleness_max", GREY, "largest", THIN), Curve("async/staleness_mean", PURPLE, "mean")),
    ),
    Chart("Who waits for whom", (), wide=True, drawn_as="timeline"),
    Chart(
        "Waiting (% of the time)",
        (
            Curve("async/trainer_wait_share", ORANGE, "trainer, for groups"),
            Curve("async/engine_idle_share", BLUE, "engines, for the trainer"),
        ),
        formatter=PercentFormatter(1.0, symbol=""),
    ),
)


def charts_for(history: History) -> list[Chart]:
    """Charts with at least one value in this run, in their fixed order."""
    return [chart for chart in CHARTS if _has_values(chart, history)]


def _has_values(chart: Chart, history: History) -> bool:
    if chart.drawn_as == "timeline":
        return bool(shown_steps(history))
    return any(series for _, _, series in _curves(chart, history))


def _curves(chart: Chart, history: History) -> list[tuple[Curve, str, Series]]:
    found = []
    for curve in chart.curves:
        name = curve.metric
        if name.endswith("_"):
            name = next((known for known in history.names() if known.startswith(name)), name)
        found.append((curve, curve.label.format(name.removeprefix(curve.metric)), history.series(name)))
    return found


def draw(chart: Chart, axes: Axes, history: History) -> None:
    """Title, curves, and an x axis of integer steps, wide enough for a single point."""
    curves = _curves(chart, history)
    axes.set_title(chart.title)
    if chart.drawn_as == "timeline":
        draw_timeline(axes, history, PHASE_COLORS, GREY)
        return
    if chart.drawn_as == "phases":
        draw_phases(axes, history)
    else:
        draw_curves(chart, axes, curves)
    longest = max(len(series) for _, _, series in curves)
    smoothed = longest >= SMOOTHED_FROM and chart.drawn_as == "curves"
    note = f" (thick line: mean over {smoothing_window(longest)} steps)" if smoothed else ""
    axes.set_xlabel("step" + note, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlim(min(history.rows) - 0.6, max(history.rows) + 0.6)
    axes.margins(y=0.12)


def draw_curves(chart: Chart, axes: Axes, curves: list[tuple[Curve, str, Series]]) -> None:
    for curve, label, series in curves:
        plotted, style = series, curve.style
        if chart.axis == "log":
            plotted = {step: value for step, value in series.items() if value > 0}
        if curve.is_held_out:
            marker = "o" if len(plotted) <= MAX_MARKED_POINTS else ""
            style = {"linewidth": 2.4, "marker": marker, "markersize": 6, "markeredgecolor": "white"}
            style |= {"markeredgewidth": 0.8}
            annotate_ends(axes, plotted)
        if plotted:
            line(axes, plotted, curve.color, label, **style)
    if chart.axis == "log" and axes.lines:
        axes.set_yscale("log")
        axes.grid(which="minor", visible=False)
    if chart.axis == "zero":
        negative = any(value < 0 for _, _, series in curves for value in series.values())
        axes.set_ylim(bottom=axes.get_ylim()[0] if negative else 0.0)
    if chart.formatter is not None:
        axes.yaxis.set_major_formatter(chart.formatter)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(loc=chart.legend)


def draw_phases(axes: Axes, history: History) -> None:
    """Phases that took at least SMALL_PHASE of all steps, stacked up to the step's own time ("other" is the rest)."""
    step_s = history.series(STEP_TIME)
    bottoms = np.zeros(len(step_s))

    def stack(heights: np.ndarray, color: str, label: str) -> None:
        """One layer: bars for few steps, a filled area for many."""
        if len(step_s) <= MAX_MARKED_POINTS:
            axes.bar(list(step_s), heights, 0.8 if len(step_s) > 4 else 0.4, bottoms, color=color, label=label)
        else:
            tops = bottoms + heights
            axes.fill_between(list(step_s), bottoms, tops, color=color, label=label, linewidth=0, step="mid")

    for phase in phases_of(dict.fromkeys(history.names(), 0.0)):
        heights = np.array([history.rows[step].get(phase.name, 0.0) for step in step_s])
        if phase.in_step and heights.sum() >= SMALL_PHASE * sum(step_s.values()):
            stack(heights, PHASE_COLORS.get(phase.name, GREEN), phase.label)
            bottoms = bottoms + heights
    rest = np.maximum(0.0, np.array([*step_s.values()]) - bottoms)
    stack(rest, GREY, "other")
    axes.set_ylim(bottom=0, top=1.32 * max(bottoms + rest, default=1.0) or 1.0)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", ncols=3, columnspacing=1.2, handlelength=1, handleheight=0.8, borderaxespad=0.2)


def line(axes: Axes, series: Series, color: str, label: str, **style: Any) -> None:
    """A labelled curve; few points get markers, many a moving mean over the faint values."""
    steps, values = [*series], [*series.values()]
    if len(series) >= SMOOTHED_FROM:
        axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.3, zorder=2.5)
        values = moving_mean(values, smoothing_window(len(series)))
    if len(series) <= MAX_MARKED_POINTS:
        style = {"marker": "o", "markersize": 6 if len(series) == 1 else 3, "markeredgewidth": 0, **style}
    axes.plot(steps, values, color=color, label=label, clip_on=False, zorder=3, **style)


def annotate_ends(axes: Axes, series: Series) -> None:
    """Label the first and last point with their values."""
    for step in {min(series), max(series)} if series else ():
        axes.annotate(
            f"{series[step]:.3g}", (step, series[step]), (0, 9),
            textcoords="offset points", ha="center", color="#b45309", fontweight="bold", fontsize=9.5,
            annotation_clip=False, zorder=4,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred mean of `window` points (odd); the window shrinks towards both ends, where the curve keeps its values."""
    halves = [min(window // 2, index, len(values) - 1 - index) for index in range(len(values))]
    return [fmean(values[index - half : index + half + 1]) for index, half in enumerate(halves)]


def smoothing_window(num_points: int) -> int:
    """Points of a moving mean, an odd number."""
    return num_points // 60 * 2 + 1
