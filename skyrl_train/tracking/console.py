"""One compact block per step on the console: rewards, update, times."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from skyrl_train.tracking.format import compact, number, percent, seconds
from skyrl_train.tracking.names import STEP_TIME, phases_of

log = logging.getLogger(__name__)
Cell = tuple[str, str]
"""Label and formatted value."""

LABEL_WIDTH, VALUE_WIDTH, GAP = 11, 7, 2
"""Columns of a cell; four cells fit in 80, the width that rich assumes without a terminal."""
SMALL_PHASE = 0.02
"""Fraction of a step below which a phase is not shown."""
MAX_CELLS = 5
"""Cells of a row on a wide terminal."""


@contextlib.contextmanager
def lossy_stdout() -> Iterator[None]:
    """Lose what cannot be printed instead of the run: the reader of a pipe has ended (rich would raise SystemExit), the
    disk of a log file is full, or the terminal is gone.
    """
    with contextlib.redirect_stdout(_Lossy(sys.stdout)):  # type: ignore[type-var]
        yield


class _Lossy:
    def __init__(self, stream: Any) -> None:
        self._stream, self._was_lost = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode("ascii", "backslashreplace").decode())
        except OSError as error:
            self._note(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._note(error)

    def _note(self, error: OSError) -> None:
        if not self._was_lost:
            self._was_lost = True
            log.warning("the output cannot be printed, the run continues without it: %s", error)


class ConsoleSink:
    """Prints the block, with colours on a terminal."""

    def __init__(self, console: Console | None = None, total_steps: int | None = None) -> None:
        self._console = console or Console()
        self._total_steps = total_steps

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        cells_per_row = min(MAX_CELLS, max(1, (self._console.width + GAP) // (LABEL_WIDTH + VALUE_WIDTH + GAP)))
        self._console.print(step_block(step, metrics, self._total_steps, cells_per_row))

    def close(self) -> None:
        """Nothing to release."""


def step_block(
    step: int, metrics: Mapping[str, float], total_steps: int | None = None, cells_per_row: int = 4
) -> RenderableType:
    """The block of one step, with cells in fixed columns."""
    title = f"step {step}" + (f"/{total_steps}" if total_steps else "")
    if STEP_TIME in metrics:
        title += f" · {seconds(metrics[STEP_TIME])}"
    rule = Rule(Text(title, style="bold"), align="left", style="dim")
    sections = [reward_cells(metrics), update_cells(metrics), time_cells(metrics) + speed_cells(metrics)]
    table = cell_table([cells for cells in sections if cells], cells_per_row)
    waits = waiting_line(metrics)
    return Group(rule, table, Text(waits)) if waits else Group(rule, table)


def reward_cells(metrics: Mapping[str, float]) -> list[Cell]:
    """Rewards and response length (mean/longest), or the loss of fine-tuning; held-out values last, because not every
    step has them.
    """
    cells = picked(metrics, [("reward", "reward/avg_raw_reward"), ("loss", "sft/loss")])
    prefix = "reward/avg_pass_at_"
    cells += picked(metrics, [(f"pass@{name[len(prefix) :]}", name) for name in metrics if name.startswith(prefix)])
    if "generate/avg_num_tokens" in metrics:
        longest = metrics.get("generate/max_num_tokens")
        tail = "" if longest is None else f"/{compact(longest)}"
        cells.append(("tokens", f"{metrics['generate/avg_num_tokens']:.1f}{tail}"))
    cells += picked(metrics, [("tokens", "sft/num_tokens"), ("trained", "sft/num_trained_tokens")], compact)
    return cells + picked(metrics, [("held-out", "eval/all/avg_score"), ("held-out", "sft/eval_loss")])


def update_cells(metrics: Mapping[str, float]) -> list[Cell]:
    """Metrics of the optimizer steps, and the logprob difference of engine and trainer."""
    cells = picked(metrics, [("kl", "policy/policy_kl"), ("entropy", "policy/policy_entropy")])
    cells += picked(metrics, [("grad norm", "policy/grad_norm")])
    cells += picked(metrics, [("clipped", "policy/loss_metrics/clip_ratio")], percent)
    cells += picked(metrics, [("loss", "policy/final_loss"), ("lr", "policy/policy_lr")])
    return cells + picked(metrics, [("|Δlogprob|", "policy/rollout_train_logprobs_abs_diff_mean")])


def time_cells(metrics: Mapping[str, float]) -> list[Cell]:
    """Seconds of each phase above SMALL_PHASE of the step."""
    threshold_s = SMALL_PHASE * metrics.get(STEP_TIME, 0.0)
    return [
        (phase.label, seconds(metrics[phase.name]))
        for phase in phases_of(metrics)
        if metrics[phase.name] >= threshold_s
    ]


def speed_cells(metrics: Mapping[str, float]) -> list[Cell]:
    throughputs = [("gen tok/s", "perf/generate_tokens_per_s"), ("train tok/s", "perf/train_tokens_per_s")]
    shares = [("mfu", "perf/mfu"), ("bubble", "perf/pipeline_bubble"), ("imbalance", "balance/dp_imbalance")]
    cells = picked(metrics, throughputs, compact) + picked(metrics, [("sync GB/s", "perf/sync_gb_per_s")])
    return cells + picked(metrics, [*shares, ("driver", "perf/driver_share")], percent)


def waiting_line(metrics: Mapping[str, float]) -> str:
    """Idle time and staleness of a streaming source: `trainer waited 4 %, engines idle 2 %, staleness 0.9 (max 2)`;
    empty for other sources.
    """
    if "async/staleness_mean" not in metrics:
        return ""
    shares = [("trainer waited", "async/trainer_wait_share"), ("engines idle", "async/engine_idle_share")]
    parts = [f"{label} {100 * metrics[name]:.0f} %" for label, name in shares if name in metrics]
    staleness = f"staleness {metrics['async/staleness_mean']:.1f} (max {metrics['async/staleness_max']:.0f})"
    return ", ".join([*parts, staleness])


def picked(
    metrics: Mapping[str, float], labels: Sequence[tuple[str, str]], formatted: Callable[[float], str] = number
) -> list[Cell]:
    """Cells of those (label, metric name) pairs that `metrics` holds."""
    return [(label, formatted(metrics[name])) for label, name in labels if name in metrics]


def cell_table(sections: Sequence[Sequence[Cell]], cells_per_row: int) -> Table:
    """A grid in which every section starts a row; NaN and infinities are highlighted."""
    table = Table.grid()
    for _ in range(cells_per_row):
        table.add_column(min_width=LABEL_WIDTH, no_wrap=True, style="dim")
        table.add_column(min_width=VALUE_WIDTH, no_wrap=True, justify="right")
        table.add_column(width=GAP)
    for cells in sections:
        for start in range(0, len(cells), cells_per_row):
            row: list[Text] = []
            for label, value in cells[start : start + cells_per_row]:
                broken = value.strip("-") in ("nan", "inf")
                row += [Text(label), Text(value, style="bold red" if broken else ""), Text()]
            table.add_row(*row)
    return table
