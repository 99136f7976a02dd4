"""The metrics of a run, and its summary: the top of the report and the end of the console output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_train.tracking.format import duration, number
from skyrl_train.tracking.jsonl import read_json_lines
from skyrl_train.tracking.names import STEP, STEP_TIME
from skyrl_train.tracking.run_dir import read_record

LAG = "eval/lag_steps"
SCORES = {
    "eval/all/avg_score": "held-out score",
    "sft/eval_loss": "held-out loss",
    "reward/avg_raw_reward": "training reward",
    "sft/loss": "training loss",
}
"""Metric -> its name in the summary; a run's score is the first that it has."""


Series = dict[int, float]
"""step -> value, in ascending order."""


@dataclass(frozen=True, slots=True)
class History:
    rows: Mapping[int, Mapping[str, float]]
    """step -> metrics without nulls (NaN), in ascending order."""
    nulls: Mapping[int, Set[str]] = field(default_factory=dict)
    """step -> names of its metrics that are null (NaN or infinite)."""

    def series(self, name: str) -> Series:
        """The finite values of `name`; may be empty."""
        return {step: row[name] for step, row in self.rows.items() if name in row}

    def logged(self, name: str) -> Series:
        """Every value of `name`, NaN for a null; may be empty."""
        steps = (step for step, row in self.rows.items() if name in row or name in self.nulls.get(step, ()))
        return {step: self.rows[step].get(name, math.nan) for step in steps}

    def names(self) -> list[str]:
        """Every metric of any step, sorted."""
        return sorted({name for names in (*self.rows.values(), *self.nulls.values()) for name in names})


def load_history(path: Path) -> History:
    """The metrics of a metrics.jsonl. Of a step that was trained twice the later time counts.

    Raises: ValueError if the file is missing or holds no step.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Name the folder of a run with jsonl in trainer.logger")
    rows: dict[int, dict[str, float | None]] = {}
    for row in without_passed_steps([row for row in read_json_lines(path) if STEP in row], STEP):
        merged = rows.setdefault(int(row[STEP]), {})
        if STEP_TIME in row:  # else the row is of an evaluation that was done after resuming
            merged.clear()
        merged |= {name: value for name, value in row.items() if isinstance(value, int | float | None)}
    _move_evaluations(rows)
    if not rows:
        raise ValueError(f"{path} contains no step: the run ended before its first one")
    return History(
        {step: {name: float(value) for name, value in row.items() if value is not None} for step, row in rows.items()},
        {step: {name for name, value in row.items() if value is None} for step, row in rows.items()},
    )


def _move_evaluations(rows: dict[int, dict[str, float | None]]) -> None:
    """Scores of evaluations beside training belong to the step whose weights they began with."""
    for step, row in rows.items():
        begun = rows.get(step - int(row.get(LAG) or 0), row)
        if begun is not row:
            begun |= {name: row.pop(name) for name in [*row] if name.startswith("eval/") and name != LAG}


def without_passed_steps(rows: Sequence[Mapping[str, Any]], step: str) -> list[Mapping[str, Any]]:
    """Rows without those of steps that a resumed run repeated. Args: step: key of the step."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        while kept and row[step] < kept[-1][step]:
            kept.pop()
        kept.append(row)
    return kept


@dataclass(frozen=True, slots=True)
class Summary:
    run_name: str
    status: str
    """"finished", "interrupted", "failed", or "unfinished" if the run wrote no final status."""
    num_steps: int
    wall_s: float
    """Seconds from the run's first start to its end or last metrics."""
    score_name: str
    """One of SCORES."""
    score: Series
    """Every value, also NaN; empty if the run has no score."""
    changes: Mapping[str, Any]
    """Dotted config key -> value that differs from the base."""
    versions: Mapping[str, str]

    def score_text(self) -> str:
        """`0.41 → 0.94`, one number for a single evaluation, `none` without any."""
        if not self.score:
            return "none"
        first, *rest = map(number, self.score.values())
        return f"{first} → {rest[-1]}" if rest else first

    def line(self) -> str:
        status = "" if self.status == "finished" else f" · {self.status}"
        steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'}"
        return f"{self.score_name} {self.score_text()} · {steps} · {duration(self.wall_s)}{status}"


def summarize(run_dir: Path, history: History) -> Summary:
    record = read_record(run_dir)
    times = history.series("trainer/unix_time_s").values() or (0.0,)
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
        score=history.logged(score),
        changes=record.get("changes", {}),
        versions=record.get("versions", {}),
    )
