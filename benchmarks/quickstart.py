"""Does the quickstart reach its numbers? Runs `+experiment=quickstart` for several seeds, each from an empty folder.

    python -m benchmarks.quickstart [--experiment NAME] [--seeds 1 2 3] [--json FILE] [-- OVERRIDES ...]

Every seed warm-starts a model of its own (before the clock of the start begins) and then runs the main job as a user
does. Rows: held-out score before and after; GRPO, from the first step's beginning to the last step's end,
evaluations included; start, from starting Python to the first rollout; the driver's share of a step, mean and
largest; the mean difference between the logprobs of engine and trainer on the same tokens before an update, mean over
steps. Red misses its target; the exit code is then 1. The targets for times are the quickstart's on two cores: on a
GPU, and for another experiment that learns sums (`long_addition`), there are none. On a machine that is busy with other
things the times are those of that machine: the load is in the result.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.lib.main_job import WALL_TIME, environment, machine, run_main_job
from benchmarks.lib.results import write_json
from skyrl_train.device import device_type

PREPARE = (
    "import pkgutil, sys; from skyrl_train.config import main_config; config = main_config(sys.argv[1:]); "
    "pkgutil.resolve_name(config.trainer.prepare)(config)"
)
SCORE, DRIVER = "eval/all/avg_score", "perf/driver_share"
DIFFERENCE = "policy/rollout_train_logprobs_abs_diff_mean"


@dataclass(frozen=True, slots=True)
class Result:
    """What one seed measured."""

    seed: int
    first_score: float
    last_score: float
    steps: int
    grpo_s: float
    start_s: float
    warm_start_s: float
    driver_mean: float
    driver_max: float
    logprob_difference: float
    step_median_s: float


Measure = tuple[str, str, str, Callable[[float], bool]]
"""Heading, format, target in words, whether a value reaches it."""
MEASURES: dict[str, Measure] = {
    "first_score": ("held-out score before", ".3f", "< 0.6", lambda value: value < 0.6),
    "last_score": ("held-out score after", ".3f", "> 0.9", lambda value: value > 0.9),
    "grpo_s": ("GRPO (s)", ".0f", "<= 180", lambda value: value <= 180),
    "start_s": ("start to first rollout (s)", ".1f", "<= 40", lambda value: value <= 40),
    "driver_mean": ("driver share, mean", ".2%", "<= 5 %", lambda value: value <= 0.05),
    "driver_max": ("driver share, largest", ".2%", "", lambda value: True),
    "logprob_difference": ("|logprob difference|, mean", ".1e", "< 1e-5", lambda value: value < 1e-5),
    "steps": ("steps", ".0f", "", lambda value: True),
    "step_median_s": ("step, median (s)", ".2f", "", lambda value: True),
    "warm_start_s": ("warm start (s)", ".0f", "", lambda value: True),
}
"""Of the quickstart, by field of Result."""
TIMES = ("grpo_s", "start_s")


def measures_of(experiment: str) -> dict[str, Measure]:
    """MEASURES, whose times are meant for the quickstart without a GPU and have no target elsewhere."""
    if experiment == "quickstart" and device_type() == "cpu":
        return MEASURES
    return {
        name: (heading, form, "", lambda value: True) if name in TIMES else (heading, form, target, reached)
        for name, (heading, form, target, reached) in MEASURES.items()
    }


def run_seed(folder: Path, experiment: str, seed: int, overrides: Sequence[str]) -> Result:
    """Raises: RuntimeError if the run fails."""
    arguments = [f"+experiment={experiment}", f"trainer.seed={seed}", *overrides]
    folder.mkdir()
    began = time.perf_counter()
    with (folder / "prepare.log").open("w") as log:
        prepared = subprocess.run(
            [sys.executable, "-c", PREPARE, *arguments], cwd=folder, env=environment(), stdout=log, stderr=log
        )
    if prepared.returncode != 0:
        raise RuntimeError(f"the warm start failed:\n{(folder / 'prepare.log').read_text()[-3000:]}")
    warm_start_s = time.perf_counter() - began
    job = run_main_job(folder, arguments)
    steps = job.steps()
    scores = [row[SCORE] for row in job.rows.values() if SCORE in row]
    return Result(
        seed=seed,
        first_score=scores[0],
        last_score=scores[-1],
        steps=len(steps),
        grpo_s=steps[-1][WALL_TIME] - job.rows[0][WALL_TIME],
        start_s=job.ready_s,
        warm_start_s=warm_start_s,
        driver_mean=statistics.mean(row[DRIVER] for row in steps),
        driver_max=max(row[DRIVER] for row in steps),
        logprob_difference=statistics.mean(row[DIFFERENCE] for row in steps),
        step_median_s=statistics.median(row["timing/step"] for row in steps),
    )


def missed(result: Result, measures: Mapping[str, Measure]) -> list[str]:
    """The targets that a seed misses, in words."""
    return [
        f"seed {result.seed}: {heading} is {format(getattr(result, name), form)}, wanted {target}"
        for name, (heading, form, target, reached) in measures.items()
        if not reached(getattr(result, name))
    ]


def result_table(
    experiment: str, results: Sequence[Result], measures: Mapping[str, Measure], before: Mapping[str, object]
) -> Table:
    table = Table(title=f"{experiment}, {before['cores']} cores, load before {before['load_before']}")
    table.add_column("")
    for result in results:
        table.add_column(f"seed {result.seed}", justify="right")
    table.add_column("target")
    for name, (heading, form, target, reached) in measures.items():
        values = [getattr(result, name) for result in results]
        cells = [format(value, form) if reached(value) else f"[red]{format(value, form)}[/]" for value in values]
        table.add_row(heading, *cells, target)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("overrides", nargs="*", help="of the configuration, after --")
    arguments = parser.parse_args()
    console, before = Console(), machine()
    experiment, measures = arguments.experiment, measures_of(arguments.experiment)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            results.append(run_seed(Path(folder, f"seed-{seed}"), experiment, seed, arguments.overrides))
            console.print(
                f"seed {seed}: {results[-1].first_score:.3f} to {results[-1].last_score:.3f}", highlight=False
            )
    console.print(result_table(experiment, results, measures, before))
    failures = [line for result in results for line in missed(result, measures)]
    for line in failures:
        console.print(f"[red]missed[/] {line}", highlight=False)
    seeds = [asdict(result) for result in results]
    document = {"experiment": experiment, "machine": before, "seeds": seeds, "missed": failures}
    write_json(arguments.json, document)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
