"""Summary of a run, at the top of its report and the end of its console output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.tracking.format import duration, number
from skyrl_train.tracking.report.history import History, Series
from skyrl_train.tracking.run_dir import read_record

SCORES = {
    "eval/all/avg_score": "held-out score",
    "sft/eval_loss": "held-out loss",
    "reward/avg_raw_reward": "training reward",
    "sft/loss": "training loss",
}
"""Metric -> its name in the summary; a run's score is the first that it has."""


@dataclass(frozen=True, slots=True)
class Summary:
    run_name: str
    status: str
    """"finished", "interrupted", "failed", or "unfinished" if the run did not write its end."""
    num_steps: int
    wall_s: float
    """Seconds from the run's first start to its end or last metrics."""
    score_name: str
    """One of SCORES."""
    score: Series
    """Empty if the run has no score."""
    changes: Mapping[str, Any]
    """Dotted config key -> value that differs from the base."""
    versions: Mapping[str, str]

    def score_text(self) -> str:
        """`0.41 → 0.94`, one number for a single evaluation, `none` without any."""
        if not len(self.score):
            return "none"
        first, last = number(self.score.values[0]), number(self.score.values[-1])
        return first if len(self.score) == 1 else f"{first} → {last}"

    def line(self) -> str:
        status = "" if self.status == "finished" else f" · {self.status}"
        steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'}"
        return f"{self.score_name} {self.score_text()} · {steps} · {duration(self.wall_s)}{status}"


def summarize(run_dir: Path, history: History) -> Summary:
    record = read_record(run_dir)
    times = history.series("trainer/unix_time_s").values or (0.0,)
    end = record.get("ended_unix_s", max(times))
    first = record["earlier"][0] if record.get("earlier") else record
    score = next((name for name in SCORES if name in history.names()), "reward/avg_raw_reward")
    status = record.get("status", "running")
    return Summary(
        run_name=record.get("run_name", run_dir.name),
        status="unfinished" if status == "running" else status,
        num_steps=max(history.rows),
        wall_s=max(0.0, end - first.get("started_unix_s", min(times))),
        score_name=SCORES[score],
        score=history.series(score),
        changes=record.get("changes", {}),
        versions=record.get("versions", {}),
    )
