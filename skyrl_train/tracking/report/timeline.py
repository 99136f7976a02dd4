"""Timeline of an asynchronous run: phases of trainer and engines in the last steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from skyrl_train.tracking.names import STEP_TIME, phases_of
from skyrl_train.tracking.report.history import LAG, History

END_TIME = "trainer/unix_time_s"
WAIT = "timing/wait_for_groups"
MAX_STEPS = 6
TRAINER, ENGINES = 1.0, 0.0
"""Lanes, on the y axis."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Phase of a lane; `start_s` is in seconds since the first bar."""

    lane: float
    start_s: float
    seconds: float
    phase: str


def bars(rows: Mapping[int, Mapping[str, float]]) -> tuple[list[Bar], dict[int, float]]:
    """The bars of consecutive steps, later ones over earlier ones, and when each step began.

    Within a step, phases are laid end to end in the order of the loop: metrics hold their lengths alone. Engines idle
    when all groups in flight are finished, until the next step begins.
    """
    begun = {step: row[END_TIME] - row[STEP_TIME] - _aside_s(row) for step, row in rows.items()}
    first, last = min(begun.values()), max(rows)
    begun = {step: start_s - first for step, start_s in begun.items()}
    found, syncs = [Bar(ENGINES, 0.0, begun[last] + rows[last][STEP_TIME], "timing/generate")], list[Bar]()
    for step, row in rows.items():
        at, end_s = begun[step], begun[step] + row[STEP_TIME]
        phases = [(phase.name, row[phase.name]) for phase in phases_of(row) if phase.in_step]
        rest_s = max(0.0, row[STEP_TIME] - sum(seconds for _, seconds in phases))
        aside_s = _aside_s(row) if step != last else 0.0
        for name, seconds in (*phases, (STEP_TIME, rest_s + aside_s)):
            found.append(Bar(TRAINER, at, seconds, name))
            at += seconds
        since_last_s = begun[step] - begun.get(step - 1, begun[step])
        idle_s = row.get("async/engine_idle_share", 0.0) * since_last_s
        found.append(Bar(ENGINES, begun[step] - idle_s, idle_s, WAIT))
        sync_s = row.get("timing/sync_weights", 0.0)
        syncs.append(Bar(ENGINES, end_s - sync_s, sync_s, "timing/sync_weights"))
    return found + syncs, begun


def _aside_s(row: Mapping[str, float]) -> float:
    """Seconds after the step during which training waited."""
    beside = "timing/eval" if LAG in row else ""
    return sum(row[phase.name] for phase in phases_of(row) if not phase.in_step and phase.name != beside)


def shown_steps(history: History) -> dict[int, Mapping[str, float]]:
    """At most MAX_STEPS consecutive steps, the last ones without a gap: a restart leaves one in time, and a row can be
    missing.
    """
    chosen: dict[int, Mapping[str, float]] = {}
    for step in sorted(history.rows, reverse=True):
        row = history.rows[step]
        complete = END_TIME in row and STEP_TIME in row and "async/running" in row
        if not complete or len(chosen) == MAX_STEPS:
            break
        if chosen and (step + 1 not in chosen or _gap_s(row, chosen[step + 1]) > row[STEP_TIME]):
            break
        chosen[step] = row
    return dict(sorted(chosen.items()))


def _gap_s(row: Mapping[str, float], after: Mapping[str, float]) -> float:
    return after[END_TIME] - _aside_s(after) - after[STEP_TIME] - row[END_TIME]


def draw_timeline(axes: Axes, history: History, colors: Mapping[str, str], other: str) -> None:
    """Args: colors: of phases; other: colour of the rest."""
    found, begun = bars(shown_steps(history))
    labels = {phase.name: phase.label for phase in phases_of({bar.phase: 0.0 for bar in found})}
    labels |= {STEP_TIME: "other"}
    total_s = max(bar.start_s + bar.seconds for bar in found)
    used = dict[str, str]()
    for bar in found:
        if bar.seconds > 0.002 * total_s:
            used[labels[bar.phase]] = color = colors.get(bar.phase, other)
            axes.barh(bar.lane, bar.seconds, 0.62, bar.start_s, color=color, linewidth=0)
    for step, start_s in begun.items():
        axes.vlines(start_s, -0.5, 1.6, color="#475569", linewidth=0.8, linestyle=(0, (2, 2)))
        axes.annotate(f"{step}", (start_s, 1.36), (2, 0), textcoords="offset points", fontsize=8, color="#475569")
    axes.set_yticks([TRAINER, ENGINES], ["trainer", "engines"])
    axes.set_ylim(-0.5, 2.15)
    axes.set_xlim(0, total_s)
    axes.set_xlabel(f"seconds of steps {min(begun)} to {max(begun)}", labelpad=2)
    axes.grid(visible=False)
    handles = [Patch(color=color, label=label) for label, color in used.items()]
    axes.legend(
        handles=handles, loc="upper left", ncols=len(handles), columnspacing=1.0, handlelength=1, handleheight=0.8
    )
