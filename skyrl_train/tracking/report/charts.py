"""The charts of a run, drawn with matplotlib's own objects (no pyplot: nothing global, no window)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from skyrl_train.tracking.format import compact
from skyrl_train.tracking.names import STEP_TIME, Phase, phases_of
from skyrl_train.tracking.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    MAX_MARKED_POINTS,
    ORANGE,
    PURPLE,
    RED,
    SMOOTHED_FROM,
    TEAL,
    annotate_ends,
    legend,
    line,
    positive,
    smoothing_window,
    stack,
)
from skyrl_train.tracking.report.history import History, Series

PHASE_COLORS = {
    "timing/generate": BLUE,
    "timing/convert_to_training_input": PURPLE,
    "timing/fwd_logprobs_values_reward": TEAL,
    "timing/policy_train": ORANGE,
    "timing/save_state": "#a16207",
    "timing/sync_weights": RED,
}
SMALL_PHASE = 0.01
"""Fraction of the steps' time below which a phase is part of "other"."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart and the metrics that it needs."""

    title: str
    draw: Callable[[Axes, History], None]
    needs: tuple[str, ...]
    """Metrics, at least one of which must exist."""
    wide: bool = False
    """Two columns of the grid."""
    stacked: bool = False
    """Areas instead of lines."""


def charts_for(history: History) -> list[Chart]:
    """The charts for which the run has at least one value, in their fixed order."""
    return [chart for chart in CHARTS if any(len(history.series(name)) for name in chart.needs)]


def draw_reward(axes: Axes, history: History) -> None:
    train, held_out = history.series("reward/avg_raw_reward"), history.series("eval/all/avg_score")
    line(axes, train, BLUE, "training samples")
    passed = history.first_of([name for name in history.names() if name.startswith("reward/avg_pass_at_")])
    if passed:
        label = f"training pass@{passed.rsplit('_', 1)[1]}"
        line(axes, history.series(passed), BLUE, label, linewidth=1.2, alpha=0.45, linestyle=(0, (3, 2)))
    draw_held_out(axes, held_out, "held-out prompts")
    legend(axes, "lower right")


def draw_loss(axes: Axes, history: History) -> None:
    """The loss of fine-tuning, with the held-out loss."""
    line(axes, history.series("sft/loss"), BLUE, "training rows")
    draw_held_out(axes, history.series("sft/eval_loss"), "held-out rows")
    legend(axes, "upper right")


def draw_held_out(axes: Axes, held_out: Series, label: str) -> None:
    """Large points with their first and last value."""
    if not len(held_out):
        return
    marker = "o" if len(held_out) <= MAX_MARKED_POINTS else ""
    style = {
        "linewidth": 2.4,
        "marker": marker,
        "markersize": 6,
        "markeredgecolor": "white",
        "markeredgewidth": 0.8,
    }
    line(axes, held_out, ORANGE, label, **style)
    annotate_ends(axes, held_out)


def draw_lengths(axes: Axes, history: History) -> None:
    mean, longest = history.series("generate/avg_num_tokens"), history.series("generate/max_num_tokens")
    line(axes, longest, GREY, "longest", linewidth=1.2)
    line(axes, mean, BLUE, "mean")
    axes.set_ylim(bottom=0)
    legend(axes)


def draw_entropy(axes: Axes, history: History) -> None:
    line(axes, history.series("policy/policy_entropy"), TEAL, "entropy")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def draw_kl(axes: Axes, history: History) -> None:
    line(axes, history.series("policy/policy_kl"), PURPLE, "policy vs. reference")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))


def draw_logprob_difference(axes: Axes, history: History) -> None:
    """Logarithmic axis, without the steps in which both sides agree exactly."""
    largest = positive(history.series("policy/rollout_train_logprobs_abs_diff_max"))
    mean = positive(history.series("policy/rollout_train_logprobs_abs_diff_mean"))
    line(axes, largest, GREY, "largest", linewidth=1.2)
    line(axes, mean, RED, "mean")
    if len(largest) or len(mean):
        axes.set_yscale("log")
        axes.grid(which="minor", visible=False)
    legend(axes)


def draw_gradients(axes: Axes, history: History) -> None:
    line(axes, history.series("policy/grad_norm"), GREEN, "gradient norm")
    axes.set_ylim(bottom=0)


def draw_clipping(axes: Axes, history: History) -> None:
    clipped = history.series("policy/loss_metrics/clip_ratio")
    line(axes, Series(clipped.steps, tuple(100 * value for value in clipped.values)), RED, "clipped")
    axes.set_ylim(bottom=0)


def draw_phases(axes: Axes, history: History) -> None:
    """Phases of the step stacked, up to the step's own time ("other" is the rest)."""
    timed = [step for step, row in history.rows.items() if STEP_TIME in row]
    phases = step_phases(history)
    bottoms = [0.0] * len(timed)
    for phase in phases:
        heights = [history.rows[step].get(phase.name, 0.0) for step in timed]
        stack(axes, timed, bottoms, heights, PHASE_COLORS.get(phase.name, GREEN), phase.label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    rest = [max(0.0, history.rows[step][STEP_TIME] - bottom) for step, bottom in zip(timed, bottoms, strict=True)]
    stack(axes, timed, bottoms, rest, GREY, "other")
    axes.set_ylim(bottom=0, top=1.32 * max(map(sum, zip(bottoms, rest, strict=True)), default=1.0) or 1.0)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", ncols=3, columnspacing=1.2, handlelength=1, handleheight=0.8, borderaxespad=0.2)


def draw_throughput(axes: Axes, history: History) -> None:
    line(axes, history.series("perf/generate_tokens_per_s"), BLUE, "generate")
    line(axes, history.series("perf/train_tokens_per_s"), ORANGE, "train")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    legend(axes)


CHARTS = (
    Chart("Reward", draw_reward, ("reward/avg_raw_reward", "eval/all/avg_score"), wide=True),
    Chart("Loss (nats per token)", draw_loss, ("sft/loss", "sft/eval_loss"), wide=True),
    Chart("Response length (tokens)", draw_lengths, ("generate/avg_num_tokens",)),
    Chart("Entropy (nats per token)", draw_entropy, ("policy/policy_entropy",)),
    Chart("KL from the reference (nats per token)", draw_kl, ("policy/policy_kl",)),
    Chart(
        "Engine vs. trainer: |Δ logprob|",
        draw_logprob_difference,
        ("policy/rollout_train_logprobs_abs_diff_mean", "policy/rollout_train_logprobs_abs_diff_max"),
    ),
    Chart("Gradient norm", draw_gradients, ("policy/grad_norm",)),
    Chart("Clipped tokens (%)", draw_clipping, ("policy/loss_metrics/clip_ratio",)),
    Chart("Tokens per second", draw_throughput, ("perf/generate_tokens_per_s", "perf/train_tokens_per_s")),
    Chart("Time per step (s)", draw_phases, (STEP_TIME,), wide=True, stacked=True),
)


def step_phases(history: History) -> list[Phase]:
    """The phases that make up a step and took at least SMALL_PHASE of all steps together."""
    step_s = sum(history.series(STEP_TIME).values)
    phases = phases_of(dict.fromkeys(history.names(), 0.0))
    return [
        phase for phase in phases if phase.in_step and sum(history.series(phase.name).values) >= SMALL_PHASE * step_s
    ]


def draw(chart: Chart, axes: Axes, history: History) -> None:
    """Title, curves, and an x axis of whole steps with room for a single point."""
    chart.draw(axes, history)
    axes.set_title(chart.title)
    smoothed = max((len(history.series(name)) for name in chart.needs), default=0)
    note = (
        f" (thick line: mean over {smoothing_window(smoothed)} steps)"
        if smoothed >= SMOOTHED_FROM and not chart.stacked
        else ""
    )
    axes.set_xlabel("step" + note, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    low, high = min(history.rows), max(history.rows)
    axes.set_xlim(low - 0.6, high + 0.6) if high - low < 10 else axes.set_xlim(low - 0.5, high + 0.5)
    axes.margins(y=0.12)
