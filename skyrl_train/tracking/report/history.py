"""The metrics of a run, read for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.tracking.jsonl import read_json_lines

STEP = "trainer/global_step"


@dataclass(frozen=True, slots=True)
class Series:
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Series:
        steps, values = zip(*points, strict=True) if (points := list(points)) else ((), ())
        return cls(steps, values)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def points(self) -> list[tuple[int, float]]:
        return list(zip(self.steps, self.values, strict=True))


@dataclass(frozen=True, slots=True)
class History:
    rows: Mapping[int, Mapping[str, float]]
    """step -> metrics without nulls (NaN), in ascending order."""

    def series(self, name: str) -> Series:
        """The finite values of `name`; may be empty."""
        return Series.of((step, row[name]) for step, row in self.rows.items() if name in row)

    def names(self) -> list[str]:
        """Every metric of any step, sorted."""
        return sorted({name for row in self.rows.values() for name in row})


def load_history(path: Path) -> History:
    """The metrics of a metrics.jsonl; lines of one step are merged, the later value of a name counts.

    Raises: ValueError if the file is missing or holds no step.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Name the folder of a run with jsonl in trainer.logger")
    rows: dict[int, dict[str, float]] = {}
    for row in without_passed_steps([row for row in read_json_lines(path) if STEP in row], STEP):
        merged = rows.setdefault(int(row[STEP]), {})
        merged |= {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    if not rows:
        raise ValueError(f"{path} contains no step: the run ended before its first one")
    return History(rows)


def without_passed_steps(rows: Sequence[Mapping[str, Any]], step: str) -> list[Mapping[str, Any]]:
    """Rows without steps that were repeated after resuming from a checkpoint. Args: step: key of the step."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        while kept and row[step] < kept[-1][step]:
            kept.pop()
        kept.append(row)
    return kept
