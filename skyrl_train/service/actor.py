"""Ray actor of a service: it owns all processes of the run and outlives its clients."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import ray
from transformers import PretrainedConfig

from skyrl_train.algorithms.tables import import_modules
from skyrl_train.checks.model_folder import require_models_outside
from skyrl_train.checks.staleness import double_weight_warning, quantization_warning, treatment_of_quantization
from skyrl_train.cluster.gpu_kind import cluster_gpu_kind
from skyrl_train.cluster.pool.settings import served_model_name
from skyrl_train.cluster.process import log_to
from skyrl_train.cluster.session import Cluster
from skyrl_train.config import Config
from skyrl_train.config.rl import RL
from skyrl_train.forecast.fit import fitted
from skyrl_train.service.checks import checked_model
from skyrl_train.service.job import Job, SftJob, TrainJob
from skyrl_train.service.job_reader import JobReader
from skyrl_train.service.queue import Feed, JobQueue, ServiceBroken
from skyrl_train.service.runner import JobRunner, SavedVersion, check_health
from skyrl_train.service.source import JobSource
from skyrl_train.service.states import remove_states, states_folder
from skyrl_train.tracking.run_dir import run_dir_for
from skyrl_train.tracking.sinks import build_tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.build import Assembly, launch_training
from skyrl_train.trainer.publisher import Publisher
from skyrl_train.types import Metrics

log = logging.getLogger(__name__)

END_S = 5.0
"""Delay before a service that failed to start, or was stopped, ends its own process; its client may be gone."""
HEALTH_CHECK_S = 5.0
"""Interval between health checks of an idle service."""
UNKNOWN_END = 1_000_000_000
"""Number of optimizer steps for the scheduler; a service has no last one, and constant_with_warmup ignores it."""


@dataclass(frozen=True, slots=True)
class State:
    model_name: str
    """Name over HTTP, also as `NAME@policy_version`."""
    urls: tuple[str, ...]
    """Engines that are up, without `/v1`."""
    has_endpoint: bool
    """generator.enable_http_endpoint."""
    policy_version: int
    run_dir: str
    broken: str | None = None
    """Reason why it can no longer train, or None; its engines may still serve."""


class ServiceActor:
    """The first call of any method starts the processes, and every call waits until they are up.

    If they cannot start, all are ended and every method raises the reason (ValueError, RemoteFailed). The constructor
    starts nothing, since Ray reduces an error in it to the text of its traceback.
    """

    def __init__(
        self, folder: str, config: Config, cluster: Cluster, keep_state: bool, environment: Mapping[str, str]
    ) -> None:
        """Args:
        folder: the client's working directory, for relative paths, if this node has it.
        environment: the client's values of the variables that the configuration names.
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
        require_models_outside(config.trainer)
        self._run_dir = run_dir_for(config, RL.base_yaml())
        log_to(str(self._run_dir.logs / "service.log"))
        async with AsyncExitStack() as undo:
            undo.callback(self._run_dir.finish, "failed")
            import_modules(config.trainer.custom_modules)
            model, tokenizer = checked_model(config)
            if (treatment := treatment_of_quantization(config)) is not None:
                log.info("engines: %s", treatment)
            for doubt in (double_weight_warning(config.trainer.algorithm), quantization_warning(config)):
                if doubt is not None:
                    log.warning("%s", doubt)
            if self._cluster.has_gpus and (kind := await cluster_gpu_kind()) is not None:
                config = self._config = fitted(config, model, kind, log.info, any_samples=True)
            self._reader = JobReader(config, tokenizer, model.vocab_size, model.max_position_embeddings)
            logs = str(self._run_dir.logs)
            self._processes = await launch_training(config, model, self._cluster, UNKNOWN_END, logs)
            undo.push_async_callback(self._processes.stop)
            self._build(model)
            undo.pop_all()

    def _build(self, model: PretrainedConfig) -> None:
        config, trainer, processes, timers = self._config, self._config.trainer, self._processes, self._timers
        assembly = Assembly(config, model, processes, timers)
        version = SavedVersion(processes.policy, timers, states_folder(trainer) if self._keep_state else None)
        publisher = Publisher(assembly.residency, timers, version.write)
        source = JobSource(lambda: version.policy_version)
        # Clients count versions: each job makes at least one, also without a learning signal.
        step, tuning = assembly.step(source, publisher, always_updates=True), assembly.fine_tuning()
        policy, engines, residency = processes.policy, processes.engines, assembly.residency
        self._runner = JobRunner(policy, engines, residency, version, source, step, tuning, publisher, timers)
        self._tracker = build_tracker(config, self._run_dir.path)
        self._queue = JobQueue(self._run_and_log, self._runner.recover)
        self._health_checks = asyncio.create_task(check_health(self._queue, HEALTH_CHECK_S))

    async def state(self) -> State:
        await self._started()
        return State(
            model_name=served_model_name(self._config),
            urls=self._processes.engines.urls,
            has_endpoint=self._config.generator.enable_http_endpoint,
            policy_version=self._runner.version.policy_version,
            run_dir=str(self._run_dir.path),
            broken=self._queue.broken,
        )

    async def train(self, groups: object) -> Metrics:
        """Raises: ValueError before the job is queued; JobFailed, ServiceBroken."""
        return await self._do("train", groups)

    async def train_sft(self, rows: object) -> Metrics:
        """Raises: like `train`."""
        return await self._do("sft", rows)

    async def save(self, folder: object) -> None:
        """Raises: like `train`."""
        await self._do("save", folder)

    async def _do(self, kind: str, given: object) -> Metrics:
        """Jobs are read one at a time, to keep their order, and in a thread, so that the event loop stays free."""
        await self._started()
        async with self._reading:
            read: Callable[[object], Job] = getattr(self._reader, kind)
            answer = self._queue.submit(await asyncio.to_thread(read, given))
        return await answer

    async def metrics_after(self, number: int, timeout_s: float) -> tuple[int, list[Metrics]]:
        """Metrics of the jobs after this number; see Feed.after. Raises: ServiceBroken if there can be none."""
        await self._started()
        if self._queue.broken is not None and self._feed.last <= number:
            raise ServiceBroken(f"the service can no longer train: {self._queue.broken}")
        return await self._feed.after(number, timeout_s)

    async def close(self) -> None:
        """End every process, and then this one. Further calls wait for the first."""
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
        self._health_checks.cancel()
        status = "finished" if self._queue.broken is None else "failed"
        await self._queue.close()
        self._tracker.close()
        await self._processes.stop()
        await remove_states(self._config.trainer)
        self._run_dir.finish(status)

    async def _run_and_log(self, job: Job) -> Metrics:
        metrics = await self._runner.run(job)
        if isinstance(job, TrainJob | SftJob):
            number = self._feed.last + 1
            metrics |= {"service/job": float(number)}
            self._tracker.log(number, metrics)
            self._feed.add(metrics)
        return metrics
