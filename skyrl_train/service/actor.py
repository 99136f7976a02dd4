"""The service's own process: a Ray actor that owns all others of the run and outlives its callers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig, AutoTokenizer

from skyrl_train import adapter_file
from skyrl_train.cluster.launch import launch, served_model_name
from skyrl_train.cluster.process import log_to
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import RL, Config, to_yaml
from skyrl_train.hub import local_folder
from skyrl_train.model_checks import longest_conversation
from skyrl_train.service.feed import Feed
from skyrl_train.service.job import Job, JobReader, SaveJob
from skyrl_train.service.learning import Learning
from skyrl_train.service.queue import JobQueue
from skyrl_train.tracking.changes import changed_values
from skyrl_train.tracking.run_dir import create_run_dir
from skyrl_train.tracking.sinks import build_tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.learner import build_learner
from skyrl_train.trainer.rules import objective
from skyrl_train.types import Metrics

UNKNOWN_END = 1_000_000_000
"""Optimizer steps of a service, which has no last one; the scheduler's end, which constant_with_warmup never reads."""


@dataclass(frozen=True, slots=True)
class State:
    """What a service says of itself."""

    model_name: str
    """Over HTTP it is this and `this@policy_version`."""
    urls: tuple[str, ...]
    """Of the engines, without `/v1`; empty without generator.enable_http_endpoint."""
    policy_version: int
    num_jobs: int
    """Finished ones."""
    run_dir: str


class ServiceActor:
    """It is built by `open`: of an error in an actor's constructor Ray keeps no more than the text of a stack."""

    async def open(self, folder: str, config: Config, cluster: Cluster, keep_state: bool) -> State:
        """Start the processes.

        Args: folder is the caller's, for relative paths; where this node does not have it they are as on any node.
        Raises: ValueError, RemoteFailed, after ending what was started.
        """
        if Path(folder).is_dir():
            os.chdir(folder)
        self._config, self._timers, self._feed = config, Timers(), Feed()
        config_yaml = to_yaml(config)
        self._run_dir = create_run_dir(
            Path(config.trainer.run_dir),
            config.trainer.run_name,
            config_yaml,
            changed_values(config_yaml, RL.base_yaml()),
        )
        log_to(str(self._run_dir.logs / "service.log"))
        try:
            return await self._start(cluster, keep_state)
        except BaseException:
            self._run_dir.finish("failed")
            raise

    async def _start(self, cluster: Cluster, keep_state: bool) -> State:
        config, trainer = self._config, self._config.trainer
        folder = local_folder(trainer.policy.model.path)
        model = AutoConfig.from_pretrained(folder)
        adapter_file.check(folder, trainer.policy.model.lora)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        positions = model.max_position_embeddings
        self._reader = JobReader(config, tokenizer, model.vocab_size, positions)
        goal = objective(
            trainer.algorithm, config.generator.sampling_params, trainer.policy.megatron_config.logprobs_chunk_size
        )
        max_model_len = min(longest_conversation(config.generator), positions)
        self._processes = await launch(config, cluster, max_model_len, goal, UNKNOWN_END, str(self._run_dir.logs))
        learner = build_learner(config, model, self._processes, self._timers)
        states = str(Path(trainer.placement.state_path).expanduser().resolve() / "service") if keep_state else None
        self._learning = Learning(
            self._processes, learner, self._timers, state_path=states, max_model_len=max_model_len
        )
        values: dict[str, Any] = yaml.safe_load(to_yaml(config))
        self._tracker = build_tracker(
            trainer.logger, self._run_dir.path, trainer.project_name, trainer.run_name, values
        )
        self._queue: JobQueue[Job, Metrics] = JobQueue(self._run_and_log, self._learning.recover)
        return self.state()

    def state(self) -> State:
        """As it is now."""
        return State(
            model_name=served_model_name(self._config),
            urls=self._processes.engines.urls,
            policy_version=self._learning.policy_version,
            num_jobs=self._feed.last,
            run_dir=str(self._run_dir.path),
        )

    async def train(self, groups: object) -> Metrics:
        """Raises: ValueError before the job is queued; JobFailed, ServiceBroken."""
        return await self._queue.submit(self._reader.train(groups))

    async def train_sft(self, rows: object) -> Metrics:
        """Raises: as `train`."""
        return await self._queue.submit(self._reader.sft(rows))

    async def save(self, folder: object) -> None:
        """Raises: as `train`."""
        await self._queue.submit(self._reader.save(folder))

    async def metrics_after(self, number: int, patience_s: float) -> tuple[int, list[Metrics]]:
        """Of the jobs after the one of this number; see Feed.after."""
        return await self._feed.after(number, patience_s)

    async def close(self) -> None:
        """End every process but this one."""
        await self._queue.close()
        self._tracker.close()
        await self._processes.stop()
        self._run_dir.finish("finished")

    async def _run_and_log(self, job: Job) -> Metrics:
        metrics = await self._learning.run(job)
        if not isinstance(job, SaveJob):
            number = self._feed.last + 1
            metrics |= {"service/job": float(number)}
            self._tracker.log(number, metrics)
            self._feed.add(metrics)
        return metrics
