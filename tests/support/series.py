"""Several runs in one process, which imports once and starts Ray once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.support.jobs import Job, running

# Ray's threads (2.60) may abort the interpreter while it ends, after the last run.
MAIN = """\
import json
import os
import sys
from pathlib import Path

import skyrl_train
from skyrl_train.checks import engines
from skyrl_train.cluster.session import start

if __name__ == "__main__":
    if {greedy}:
        engines.ALL_TOKENS.clear()
    start()
    for name, (experiment, overrides) in json.loads(Path("series.json").read_text()).items():
        named = [*overrides, f"trainer.run_name={name}"]
        skyrl_train.run(skyrl_train.load_config(named, experiment=experiment))
    sys.stdout.flush()
    os._exit(0)
"""


def run_series(
    world: Path, runs: Mapping[str, tuple[str, Sequence[str]]], timeout_s: float, *, greedy: bool = False
) -> dict[str, Job]:
    """The job of each run. Args: runs: name -> experiment and overrides, of which a later one replaces an earlier;
    greedy: like GREEDY_MAIN.
    """
    (world / "series.py").write_text(MAIN.replace("{greedy}", str(greedy)))
    merged = {name: (experiment, _merged(overrides)) for name, (experiment, overrides) in runs.items()}
    (world / "series.json").write_text(json.dumps(merged))
    with running(world, main="series") as job:
        assert job.wait(timeout_s) == 0, "\n".join(replace(job, run_name=name).story() for name in runs)
        assert not (left := job.left_behind()), left
    return {name: replace(job, run_name=name) for name in runs}


def _merged(overrides: Sequence[str]) -> list[str]:
    values = dict(override.split("=", 1) for override in overrides)
    return [f"{key}={value}" for key, value in values.items()]
