"""Groups that callers submit, as a source of the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skyrl_train.rollout.admission import Ledger
from skyrl_train.rollout.source import SourceState
from skyrl_train.service.job import TrainJob
from skyrl_train.service.queue import StaleSamples
from skyrl_train.types import Group, Metrics


class JobSource:
    """Gives the trainer the groups of one job at a time, in the order of the jobs."""

    def __init__(self, policy_version: Callable[[], int]) -> None:
        """Args: policy_version: the version that is trained now."""
        self.ledger = Ledger()
        self._policy_version = policy_version
        self._jobs: asyncio.Queue[TrainJob] = asyncio.Queue()
        self._last: list[Group] = []

    def put(self, job: TrainJob) -> None:
        """Have `next` give its groups after those of earlier jobs."""
        self.ledger.generated += len(job.groups)
        self.ledger.waiting += len(job.groups)
        self._jobs.put_nowait(job)

    async def next(self) -> list[Group]:
        """Raises: StaleSamples for a job with samples of another version: jobs before it may have moved the version."""
        job = await self._jobs.get()
        try:
            self._require_fresh(job)
        except StaleSamples:
            self.ledger.leave_out(len(job.groups))
            raise
        self.ledger.train(len(job.groups))
        self._last = list(job.groups)
        return self._last

    def metrics(self) -> Metrics:
        samples = [sample for group in self._last for sample in group.samples]
        written = sum(int(sample.loss_mask.sum()) for sample in samples)
        return {
            "reward/avg_raw_reward": sum(sample.reward for sample in samples) / len(samples),
            "generate/batch_num_seq": float(len(samples)),
            "generate/avg_num_tokens": written / len(samples),
        }

    @property
    def state(self) -> SourceState:
        """Nothing: a job that was not trained is its caller's to submit again."""
        return {}

    def resume(self, state: SourceState) -> None:
        """Nothing to continue."""

    def _require_fresh(self, job: TrainJob) -> None:
        version = self._policy_version()
        for sampled_by, where in job.drawn_by.items():
            if sampled_by != version:
                raise StaleSamples(
                    f"{where} was drawn by version {sampled_by}, and the policy is version {version}: draw "
                    "it again, or leave out policy_versions to train on it without a correction"
                )
