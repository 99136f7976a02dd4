"""What a job does to the processes, and how they come back to the last version after one that failed."""

from __future__ import annotations

import logging
from pathlib import Path

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.launch import Processes
from skyrl_train.cluster.ranks.release import STATE_FOLDERS
from skyrl_train.service.job import CareJob, Job, SaveJob, SftJob, TrainJob
from skyrl_train.service.source import JobSource
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.learner import Learner
from skyrl_train.types import Metrics
from skyrl_train.weight_sync.control import SyncCheckFailed

log = logging.getLogger(__name__)

NEEDS_LOGPROBS = "policy/rollout_train_logprobs_"


class Learning:
    """Runs jobs; between two of them the engines serve `policy_version` and all borrowed memory is free."""

    def __init__(
        self, processes: Processes, learner: Learner, timers: Timers, *, state_path: str | None, max_model_len: int
    ) -> None:
        """Args:
        state_path: folder of the policy's state after each job; None keeps none, and a failed update ends the service.
        max_model_len: tokens that an engine can score.
        """
        self._processes, self._learner, self._timers = processes, learner, timers
        self._folders = None if state_path is None else [str(Path(state_path, name)) for name in STATE_FOLDERS]
        self._max_model_len = max_model_len
        self._source = JobSource(lambda: self.policy_version)
        self._saved: str | None = None
        """The state of policy_version; None while that is the model as it came."""
        self._unfinished: str | None = None
        self._begun: Job | None = None
        self._updates_before = 0
        self._failed_sends = 0
        """In a row, of the weights to engines that came between two jobs."""
        self.policy_version = processes.policy.policy_version
        self._num_steps = processes.policy.num_steps
        """Optimizer steps in the weights of policy_version."""

    async def run(self, job: Job) -> Metrics:
        """Do it, and return when the engines answer with what came of it and the trainers' memory is free."""
        self._begun, self._updates_before = job, self._processes.policy.num_updates
        if isinstance(job, SaveJob):
            await self._learner.residency.for_saving()
            await self._processes.policy.save_hf(job.folder)
            await self._learner.residency.for_rollout()
            return {}
        if isinstance(job, CareJob):
            await self._care_for_engines()
            return {}
        self._timers.reset()
        with self._timers("step"):
            metrics = await self._train(job) if isinstance(job, TrainJob) else await self._fine_tune(job)
            with self._timers("sync_weights"):
                await self._learner.residency.for_rollout()
        self._failed_sends, policy = 0, self._processes.policy
        self.policy_version, self._num_steps = policy.policy_version, policy.num_steps
        if self._folders is not None:
            self._saved = self._unfinished
        return metrics | self._timers.metrics() | {"service/policy_version": float(self.policy_version)}

    async def _train(self, job: TrainJob) -> Metrics:
        self._source.put(job)
        groups = await self._source.next()
        scored = [group for group in groups if len(group.samples[0].token_ids) <= self._max_model_len]
        metrics = await self._learner.learn(
            groups,
            job.num_mini_batches,
            checked=scored,
            needs_signal=False,  # callers count versions: each job makes at least one
            before_sync=self._save_state,
        )
        if not job.has_logprobs:
            metrics = {name: value for name, value in metrics.items() if not name.startswith(NEEDS_LOGPROBS)}
        return metrics | self._source.metrics()

    async def _fine_tune(self, job: SftJob) -> Metrics:
        return await self._learner.learn_examples(job.examples, before_sync=self._save_state)

    async def _care_for_engines(self) -> None:
        """A replacement holds the weights of the model as it came, and answers after a sync; one that failed is made up
        for."""
        engines = self._processes.engines
        await engines.drop_lost()
        if not engines.has_replacement and not self._failed_sends:
            return
        before = engines.num_changes
        await engines.admit_replacements()
        if engines.num_changes != before or self._failed_sends:
            self._failed_sends += 1
            await self._learner.residency.sync_weights(())
            await self._learner.residency.for_rollout()
            self._failed_sends = 0

    async def _save_state(self) -> None:
        """Into the folder that does not hold the last version's."""
        if self._folders is not None:
            self._unfinished = next(folder for folder in self._folders if folder != self._saved)
            with self._timers("save_state"):
                await self._processes.policy.save_state(self._unfinished)

    async def _is_sound(self, error: Exception) -> bool:
        """Whether the processes can go on after a job that left the weights alone.

        A rank that failed in a pass may have left messages in its groups that the next pass would take for its own. A
        CareJob makes no pass: where its first sync fails (an engine was late), the next one tries again.
        """
        if isinstance(error, SyncCheckFailed):
            return False
        if not isinstance(error, RemoteFailed):
            return True
        harmless = isinstance(self._begun, SaveJob) or (isinstance(self._begun, CareJob) and self._failed_sends == 1)
        return harmless and await self._processes.policy.is_idle()

    async def recover(self, error: Exception) -> str:
        """Serve and train `policy_version` again. Raises: what keeps it from that."""
        policy, residency = self._processes.policy, self._learner.residency
        if policy.num_updates == self._updates_before and await self._is_sound(error):
            await residency.for_rollout()
            return f"nothing was changed, version {self.policy_version} goes on"
        if self._folders is None and self.policy_version > 0:
            raise RuntimeError(
                "the trainer's processes are lost or hold half an update, and without service states "
                "(keep_state=False) there is nothing to start them from. Start a service from the last save"
            )
        await self._processes.engines.drop_lost()
        await self._processes.engines.admit_replacements()
        log.warning("the trainer is started again at version %d", self.policy_version)
        reference = self._processes.reference
        own = reference if reference is not None and not reference.is_policy and reference.is_running else None
        await policy.kill()

        async def start_policy() -> None:
            await policy.restart_from(self._saved, self.policy_version, self._num_steps)

        async def start_reference() -> None:
            if own is not None:
                await own.kill()
                await own.restart()

        await residency.start_again(start_policy, start_reference)
        await residency.sync_weights(())
        await residency.for_rollout()
        self._failed_sends = 0
        return f"the trainer was started again at version {self.policy_version}, which the engines serve"
