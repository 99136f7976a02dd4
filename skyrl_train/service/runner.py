"""Execution of jobs, and recovery of the last version after a job that failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.service.job import HealthCheckJob, Job, SaveJob, SftJob, TrainJob
from skyrl_train.service.queue import JobFailed, JobQueue, ServiceBroken
from skyrl_train.service.source import JobSource
from skyrl_train.service.states import STATE_FOLDERS
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.publisher import Publisher
from skyrl_train.trainer.residency import Residency
from skyrl_train.trainer.sft import FineTuning
from skyrl_train.trainer.step import TrainingStep
from skyrl_train.types import Metrics
from skyrl_train.weight_sync.control import SyncCheckFailed

log = logging.getLogger(__name__)

NEEDS_LOGPROBS = "rollout_train_"
"""Part of the names of metrics that compare the engine's logprobs with the trainer's."""


class SavedVersion:
    """The last version that engines serve, with the policy's state in one of two folders.

    An update is written into the other folder, so an intact state exists at any time.
    """

    def __init__(self, policy: PolicyGroup, timers: Timers, state_path: str | None) -> None:
        """Args: state_path: None keeps no state, and a failed update ends the service."""
        self._policy, self._timers = policy, timers
        self._folders = None if state_path is None else [str(Path(state_path, name)) for name in STATE_FOLDERS]
        self._saved: str | None = None
        """State of `policy_version`; None while that is the initial model."""
        self._unfinished: str | None = None
        self.commit()

    async def write(self) -> None:
        """Save the updated policy, before the engines get its weights."""
        if self._folders is not None:
            self._unfinished = next(folder for folder in self._folders if folder != self._saved)
            with self._timers("save_state"):
                await self._policy.save_state(self._unfinished)

    def commit(self) -> None:
        """The engines serve the updated policy."""
        self.policy_version, self._num_steps = self._policy.policy_version, self._policy.num_steps
        self._saved = self._unfinished

    @property
    def is_restorable(self) -> bool:
        return self._folders is not None or self.policy_version == 0

    async def restore(self) -> None:
        """Start new processes of the policy with this version."""
        await self._policy.restart_from(self._saved, self.policy_version, self._num_steps)


@dataclass(slots=True)
class JobRunner:
    """Runs jobs. Between two of them the engines serve `version.policy_version`, and trainers that share devices in
    turns are offloaded.
    """

    policy: PolicyGroup
    engines: EnginePool
    residency: Residency
    version: SavedVersion
    source: JobSource
    """That of the step."""
    step: TrainingStep
    tuning: FineTuning
    publisher: Publisher
    timers: Timers
    _job: Job | None = None
    _updates_before: int = 0
    _coefficients_before: Mapping[str, float] = field(default_factory=dict)
    _failed_syncs: int = 0
    """Consecutive failed syncs of health checks."""

    async def run(self, job: Job) -> Metrics:
        """Returns when the engines serve the result and the trainers' memory is free."""
        self._job, self._updates_before = job, self.policy.num_updates
        if isinstance(job, SaveJob):
            await self.residency.for_saving()
            await self.policy.save_hf(job.folder)
            await self.residency.for_rollout()
            return {}
        if isinstance(job, HealthCheckJob):
            await self._check_engines()
            return {}
        self.timers.reset()
        with self.timers("step"):
            metrics = await self._train(job) if isinstance(job, TrainJob) else await self._fine_tune(job)
            with self.timers("sync_weights"):
                await self.residency.for_rollout()
        self._failed_syncs = 0
        self.version.commit()
        return metrics | self.timers.metrics() | {"service/policy_version": float(self.version.policy_version)}

    async def _train(self, job: TrainJob) -> Metrics:
        self._coefficients_before = self.step.coefficients.state
        self.source.put(job)
        trained = await self.step.step()
        metrics = self.source.metrics() | trained
        if not job.has_logprobs:
            metrics = {name: value for name, value in metrics.items() if NEEDS_LOGPROBS not in name}
        return metrics

    async def _fine_tune(self, job: SftJob) -> Metrics:
        with self.timers("convert_to_training_input"):
            shards = self.tuning.split(job.examples)
        with self.timers("fwd_logprobs_values_reward"):
            await self.residency.for_training()
        metrics = await self.tuning.update(shards, job.examples)
        return metrics | await self.publisher.publish() | self.residency.metrics()

    async def _check_engines(self) -> None:
        """A replacement starts with the initial model and serves after a sync; a failed sync is repeated."""
        await self.engines.drop_dead()
        is_waiting = len(self.engines.updated) < len(self.engines.up)  # one was admitted during a sync
        if not (self.engines.has_replacement or self._failed_syncs or is_waiting):
            return
        before = self.engines.num_changes
        await self.engines.admit_replacements()
        if self.engines.num_changes != before or self._failed_syncs or is_waiting:
            self._failed_syncs += 1
            await self.residency.sync_weights(())
            await self.residency.for_rollout()
            self._failed_syncs = 0

    async def _is_sound(self, error: BaseException) -> bool:
        """Whether the processes can continue after a job that left the weights unchanged.

        A rank that failed in a pass may have left messages in its groups that the next pass would receive. A health
        check makes no pass: if its first sync fails (an engine was late), the next one tries again.
        """
        if isinstance(error, SyncCheckFailed):
            return False
        if not isinstance(error, RemoteFailed):
            return True
        is_health_check = isinstance(self._job, HealthCheckJob) and self._failed_syncs == 1
        return (isinstance(self._job, SaveJob) or is_health_check) and await self.policy.is_idle()

    async def recover(self, error: BaseException) -> str:
        """Serve and train the last version again; return a report. Raises: the reason if that is impossible."""
        version = self.version.policy_version
        if isinstance(self._job, TrainJob):
            self.step.coefficients.resume(self._coefficients_before)
        if self.policy.num_updates == self._updates_before and await self._is_sound(error):
            await self.residency.for_rollout()
            return f"nothing was changed; still serving version {version}"
        if not self.version.is_restorable:
            raise RuntimeError(
                "the trainer processes died or were left with a partial update, and no saved state exists to restore "
                "(keep_state=False). Start a service from the last save"
            )
        await self.engines.drop_dead()
        await self.engines.admit_replacements()
        log.warning("restarting the trainer at version %d", version)
        await self.policy.kill()
        await self.residency.restart_trainers(self.version.restore)
        await self.residency.sync_weights(())
        await self.residency.for_rollout()
        self._failed_syncs = 0
        return f"the trainer was restarted at version {version}, which the engines serve"


async def check_health(queue: JobQueue, interval_s: float) -> None:
    """Submit a HealthCheckJob whenever the queue is idle; returns when the queue accepts no more jobs.

    In a run, requests for samples reveal a dead engine; between the jobs of a service nothing else does.
    """
    while True:
        await asyncio.sleep(interval_s)
        if not queue.is_idle:
            continue
        try:
            await queue.submit(HealthCheckJob())
        except JobFailed as error:
            log.warning("the health check of the engines failed: %s", error)
        except ServiceBroken as error:
            log.error("health checks of the engines stopped: %s", error)
            return
