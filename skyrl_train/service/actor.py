"""The service's own process: a Ray actor that owns all others of the run and outlives its callers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml
from transformers import PretrainedConfig

from skyrl_train.algorithms.tables import import_modules
from skyrl_train.cluster.pool.settings import served_model_name
from skyrl_train.cluster.process import log_to
from skyrl_train.cluster.ranks.release import remove_states, states_folder
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import Config, to_yaml
from skyrl_train.config.program import secrets_in
from skyrl_train.config.rl import RL
from skyrl_train.service.feed import Feed
from skyrl_train.service.job import Job, SftJob, TrainJob
from skyrl_train.service.job_reader import JobReader
from skyrl_train.service.learning import Learning
from skyrl_train.service.model import checked_model
from skyrl_train.service.queue import JobQueue, ServiceBroken
from skyrl_train.service.watch import watch
from skyrl_train.tracking.changes import changed_values
from skyrl_train.tracking.run_dir import create_run_dir
from skyrl_train.tracking.sinks import build_tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.build import build_learner, launch_training, max_model_len
from skyrl_train.types import Metrics

log = logging.getLogger(__name__)

END_S = 5.0
"""After which a service that could not start, or was stopped, ends its own process: its caller may be gone."""
WATCH_S = 5.0
"""Between two looks at the engines of a service that has nothing to do."""
UNKNOWN_END = 1_000_000_000
"""Optimizer steps of a service, which has no last one; the scheduler's end, which constant_with_warmup never reads."""


@dataclass(frozen=True, slots=True)
class State:
    """What a service says of itself."""

    model_name: str
    """Over HTTP it is this and `this@policy_version`."""
    urls: tuple[str, ...]
    """Of the engines that are up, without `/v1`."""
    has_endpoint: bool
    """generator.enable_http_endpoint."""
    policy_version: int
    num_jobs: int
    """Finished ones."""
    run_dir: str
    broken: str | None = None
    """Why it can train no more, where it cannot; its engines may still serve."""


class ServiceActor:
    """The first call of any method starts the processes, and every call waits until they are up.

    Every method raises what kept them from starting (ValueError, RemoteFailed), after all that was started has ended.
    The constructor starts nothing: of an error in it Ray keeps no more than the text of a stack.
    """

    def __init__(
        self, folder: str, config: Config, cluster: Cluster, keep_state: bool, environment: Mapping[str, str]
    ) -> None:
        """Args:
        folder: the caller's, for relative paths; where this node does not have it they are as on any node.
        environment: the variables that the configuration names, as the caller has them.
        """
        self._folder, self._config, self._cluster, self._keep_state = folder, config, cluster, keep_state
        self._environment = environment
        self._timers, self._feed = Timers(), Feed()
        self._reading = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def _started(self) -> None:
        if self._closing is not None:
            raise ServiceBroken("the service was stopped")
        if self._starting is None:
            self._starting = asyncio.create_task(self._open())
        try:
            await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if self._starting.cancelled():
                raise ServiceBroken("the service was stopped while it started") from None
            raise

    async def _open(self) -> None:
        try:
            await self._start_run()
        except Exception:
            asyncio.get_running_loop().call_later(END_S, self._end)
            raise

    def _end(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor)

    async def _start_run(self) -> None:
        os.environ.update(self._environment)
        if Path(self._folder).is_dir():
            os.chdir(self._folder)
        config = self._config
        config_yaml = to_yaml(config)
        self._run_dir = create_run_dir(
            Path(config.trainer.run_dir),
            config.trainer.run_name,
            config_yaml,
            changed_values(config_yaml, RL.base_yaml()),
            secrets_in(config),
        )
        log_to(str(self._run_dir.logs / "service.log"))
        try:
            await self._start()
        except BaseException:
            self._run_dir.finish("failed")
            raise

    async def _start(self) -> None:
        config = self._config
        import_modules(config.trainer.custom_modules)
        model, tokenizer = checked_model(config)
        self._reader = JobReader(config, tokenizer, model.vocab_size, model.max_position_embeddings)
        self._processes = await launch_training(config, model, self._cluster, UNKNOWN_END, str(self._run_dir.logs))
        try:
            self._build(model)
        except BaseException:
            await self._processes.stop()
            raise

    def _build(self, model: PretrainedConfig) -> None:
        """What works on the started processes."""
        config, trainer = self._config, self._config.trainer
        learner = build_learner(config, model, self._processes, self._timers)
        states = states_folder(trainer) if self._keep_state else None
        self._learning = Learning(
            self._processes, learner, self._timers, state_path=states, max_model_len=max_model_len(config, model)
        )
        values: dict[str, Any] = yaml.safe_load(to_yaml(config))
        self._tracker = build_tracker(
            trainer.logger, self._run_dir.path, trainer.project_name, trainer.run_name, values
        )
        self._queue: JobQueue[Job, Metrics] = JobQueue(self._run_and_log, self._learning.recover)
        self._watch = asyncio.create_task(watch(self._queue, WATCH_S))

    async def state(self) -> State:
        """As it is now."""
        await self._started()
        return State(
            model_name=served_model_name(self._config),
            urls=self._processes.engines.urls,
            has_endpoint=self._config.generator.enable_http_endpoint,
            policy_version=self._learning.policy_version,
            num_jobs=self._feed.last,
            run_dir=str(self._run_dir.path),
            broken=self._queue.broken,
        )

    async def train(self, groups: object) -> Metrics:
        """Raises: ValueError before the job is queued; JobFailed, ServiceBroken."""
        return await self._do("train", groups)

    async def train_sft(self, rows: object) -> Metrics:
        """Raises: as `train`."""
        return await self._do("sft", rows)

    async def save(self, folder: object) -> None:
        """Raises: as `train`."""
        await self._do("save", folder)

    async def _do(self, kind: str, given: object) -> Metrics:
        """Jobs are read one after the other, so that a long one is not overtaken, and beside whatever else goes on."""
        await self._started()
        async with self._reading:
            read: Callable[[object], Job] = getattr(self._reader, kind)
            answer = self._queue.put(await asyncio.to_thread(read, given))
        return await answer

    async def metrics_after(self, number: int, patience_s: float) -> tuple[int, list[Metrics]]:
        """Of the jobs after the one of this number; see Feed.after. Raises: ServiceBroken if there can be none."""
        await self._started()
        if self._queue.broken is not None and self._feed.last <= number:
            raise ServiceBroken(f"the service trains no more: {self._queue.broken}")
        return await self._feed.after(number, patience_s)

    async def close(self) -> None:
        """End every process; this one follows. Returns when that is done, whoever asked first."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.wait({self._starting})
                if not self._starting.cancelled() and self._starting.exception() is None:
                    await self._stop_run()
        finally:
            asyncio.get_running_loop().call_later(END_S, self._end)

    async def _stop_run(self) -> None:
        self._watch.cancel()
        await self._queue.close()
        self._tracker.close()
        await self._processes.stop()
        await remove_states(self._config.trainer)
        self._run_dir.finish("finished")

    async def _run_and_log(self, job: Job) -> Metrics:
        metrics = await self._learning.run(job)
        if isinstance(job, TrainJob | SftJob):
            number = self._feed.last + 1
            metrics |= {"service/job": float(number)}
            self._tracker.log(number, metrics)
            self._feed.add(metrics)
        return metrics
