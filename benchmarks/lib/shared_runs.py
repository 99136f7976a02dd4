"""Runs that differ in the algorithm alone, one after another on the same processes.

Starting Ray, engines and ranks takes as long as twenty steps of the quickstart. Here they start once; each run begins
with the initial weights, optimizer state and step count (`RenewedPolicy.begin`), sends these weights to the engines,
and builds everything else anew. On a CPU a run gives the same numbers, bit for bit, as in processes of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.lib.main_job import environment
from skyrl_train.cluster.launch import Processes
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.session import connect
from skyrl_train.config import Config
from skyrl_train.config.rl import RL
from skyrl_train.entrypoints import command
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.entrypoints.main_base import COMMAND
from skyrl_train.tracking.run_dir import RunDir, run_dir_for
from skyrl_train.trainer.from_config import objective

Name = TypeVar("Name")
Rows = list[dict[str, Any]]
"""metrics.jsonl of a run."""
POLICY = "benchmarks.lib.method_policy:RenewedPolicy"


class SharedRun(Experiment):
    """A run on processes that others use before and after."""

    async def begin(self, processes: Processes, initial: str) -> None:
        """Put the initial weights everywhere. Args: initial: folder of their state."""
        policy, config = processes.policy, self.config
        own = objective(config.trainer.algorithm, config.generator.sampling_params)
        await policy.group.all("begin", own, initial)
        policy.num_steps = 0
        policy.versions.advance(1)  # a number never stands for two sets of weights
        processes.weight_sync.check = None  # that of the run before; `Assembly` sets this run's
        await processes.weight_sync.publish(())

    async def train(self, processes: Processes, run_dir: RunDir) -> Rows:
        status = "failed"
        try:
            await self._train(run_dir, processes)
            status = "finished"
        finally:
            run_dir.finish(status)
        return [json.loads(line) for line in (run_dir.path / "metrics.jsonl").read_text().splitlines()]


def run_all(configs: Mapping[Name, Config], done: Callable[[Name, Rows], None]) -> None:
    """Train with each configuration; they differ in the algorithm, the seed, the source and the environment alone.
    Args: done: called with the name and the rows of each run as it ends."""
    os.environ |= environment()  # ranks import this folder's classes, whatever the working directory is
    for config in configs.values():
        command.prepare(COMMAND, config)
        COMMAND.check(config, None, True)
    asyncio.run(_run_all(configs, done))


async def _run_all(configs: Mapping[Name, Config], done: Callable[[Name, Rows], None]) -> None:
    console, initial = Console(), str(Path("initial_state").resolve())
    PolicyGroup.entry_point = POLICY
    processes: Processes | None = None
    with connect() as cluster:
        try:
            for name, config in configs.items():
                run, run_dir = SharedRun(config, console), run_dir_for(config, RL.base_yaml())
                await run.fit_to_cluster(cluster)
                if processes is None:
                    processes = await run.launch(cluster, str(run_dir.logs))
                    await processes.policy.save_state(initial)
                else:
                    await run.begin(processes, initial)
                done(name, await run.train(processes, run_dir))
        finally:
            if processes is not None:
                await asyncio.shield(processes.stop())
