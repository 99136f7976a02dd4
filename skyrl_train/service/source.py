"""Groups that clients submit, as a source of the training step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skyrl_train.rollout.admission import Ledger
from skyrl_train.rollout.source import SourceState
from skyrl_train.service.job import TrainJob
from skyrl_train.service.queue import StaleSamples
from skyrl_train.types import Group, Metrics


class JobSource:
    """Gives the groups of one job at a time, in the order of the jobs."""

    def __init__(self, policy_version: Callable[[], int]) -> None:
        """Args: policy_version: version that the next step trains."""
        self.ledger = Ledger()
        self._policy_version = policy_version
        self._jobs: asyncio.Queue[TrainJob] = asyncio.Queue()
        self._last: list[Group] = []

    def put(self, job: TrainJob) -> None:
        """Have `next` return its groups after those of earlier jobs."""
        self.ledger.generated += len(job.groups)
        self.ledger.waiting += len(job.groups)
        self._jobs.put_nowait(job)

    async def next(self) -> list[Group]:
        """Raises: StaleSamples for a job with samples of another version, which earlier jobs may have replaced."""
        job = await self._jobs.get()
        version = self._policy_version()
        for sampled_by, sample in job.sampled_by.items():
            if sampled_by != version:
                self.ledger.leave_out(len(job.groups))
                raise StaleSamples(
                    f"{sample} was sampled by version {sampled_by}, and the policy is version {version}. Sample it "
                    "again, or omit policy_versions to train on it without a correction"
                )
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
        """Empty: clients submit jobs again that were not trained."""
        return {}

    def resume(self, state: SourceState) -> None:
        """Nothing to restore."""
