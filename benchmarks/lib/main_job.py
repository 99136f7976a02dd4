"""Runs the main job in a process of its own and reads back what it measured."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.tracking.report.history import load_history

REPOSITORY = Path(__file__).resolve().parents[2]
READY_LINE = "policy and engines are up"
WALL_TIME = "trainer/unix_time_s"


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """One run."""

    ready_s: float
    """From starting the process to the moment in which the first rollout begins."""
    total_s: float
    rows: Mapping[int, Mapping[str, float]]
    """step -> metrics; step 0 is the evaluation before training."""

    def steps(self, first: int = 1) -> list[Mapping[str, float]]:
        return [row for step, row in self.rows.items() if step >= first]

    def step_walls_s(self, first: int) -> list[float]:
        """Seconds from one step's line of metrics to the next, everything included, for steps from `first` on."""
        return [row[WALL_TIME] - self.rows[step - 1][WALL_TIME] for step, row in self.rows.items() if step >= first]

    def median_share(self, phases: Sequence[str], first: int) -> float:
        """What the phases are of a step, everything included; median of the steps from `first` on."""
        spent = [sum(row.get(f"timing/{name}", 0.0) for name in phases) for row in self.steps(first)]
        return statistics.median(s / wall for s, wall in zip(spent, self.step_walls_s(first), strict=True))

    def median_phases_s(self, first: int) -> dict[str, float]:
        """Phase of a step -> median seconds, for steps from `first` on."""
        rows = self.steps(first)
        names = [name for name in rows[-1] if name.startswith("timing/") and all(name in row for row in rows)]
        return {name.removeprefix("timing/"): statistics.median(row[name] for row in rows) for name in names}


def run_main_job(folder: Path, overrides: Sequence[str]) -> FinishedJob:
    """`python -m skyrl_train.entrypoints.main_base OVERRIDES trainer.run_dir=run` in `folder`.

    Raises: RuntimeError with the end of the output if the job fails; all of it is in `folder`/output.log.
    """
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_base", *overrides, "trainer.run_dir=run"]
    started, ready_s = time.perf_counter(), 0.0
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / "output.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job,
    ):
        assert job.stdout is not None
        for line in job.stdout:
            log.write(line)
            if READY_LINE in line:
                ready_s = time.perf_counter() - started
    if job.returncode != 0:
        tail = "".join((folder / "output.log").read_text().splitlines(keepends=True)[-15:])
        raise RuntimeError(f"the main job ended with exit code {job.returncode}:\n{tail}")
    return FinishedJob(ready_s, time.perf_counter() - started, load_history(folder / "run" / "metrics.jsonl").rows)


def environment() -> dict[str, str]:
    """This process's environment, in which this repository's package is found first."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def machine() -> dict[str, object]:
    """What the numbers depend on, read before anything is started."""
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
