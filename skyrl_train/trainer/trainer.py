"""A step of reinforcement learning. It orders calls and does nothing else: no tensor is touched here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.batching.split import mini_batches_of
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.config import Config
from skyrl_train.rollout.metrics import rollout_metrics
from skyrl_train.rollout.seeds import seed
from skyrl_train.rollout.source import GroupSource
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.tracking.transcripts import TranscriptLog, transcript_of
from skyrl_train.trainer.evaluation import Evaluation
from skyrl_train.trainer.learner import Learner
from skyrl_train.trainer.loop import Loop
from skyrl_train.trainer.performance import rollout_performance
from skyrl_train.types import Group, Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run consists of, built by the entrypoint."""

    source: GroupSource
    evaluation: Evaluation
    learner: Learner
    policy: PolicyGroup
    tracker: Tracker
    transcripts: TranscriptLog
    timers: Timers


class Trainer(Loop):
    """Reinforcement learning on the groups of any source."""

    def __init__(self, config: Config, parts: Parts, num_steps: int) -> None:
        super().__init__(config.trainer, parts.source, parts.policy, parts.tracker, parts.timers, num_steps)
        self._config, self._parts = config, parts

    @property
    def can_evaluate(self) -> bool:
        return self._parts.evaluation.has_prompts

    async def evaluate(self) -> Metrics:
        """Scores of greedy or sampled answers to the held-out prompts."""
        await self._parts.learner.residency.for_rollout()
        metrics, _ = await self._parts.evaluation.run(seed("eval", self._config.trainer.seed, self.global_step))
        return metrics

    async def reach_weights(self) -> None:
        await self._parts.learner.residency.for_saving()

    async def reach_policy(self) -> None:
        await self._parts.learner.residency.for_training()

    async def step(self) -> Metrics:
        """Update the policy on the groups that come next, and move the new weights into the engines."""
        parts = self._parts
        groups = await parts.source.next()
        num_mini_batches = mini_batches_of(len(groups), self._config.trainer.policy_mini_batch_size)
        metrics = await parts.learner.learn(groups, num_mini_batches)
        self._log_samples(groups)
        return parts.source.metrics() | rollout_metrics(groups) | metrics | rollout_performance(groups, parts.timers)

    def _log_samples(self, groups: Sequence[Group]) -> None:
        trainer = self._config.trainer
        interval, count = trainer.log_samples_interval, trainer.num_logged_samples
        if interval > 0 and self.global_step % interval == 0:
            chosen = [group.samples[0] for group in groups[:count]]
            self._parts.transcripts.log([transcript_of(self.global_step + 1, sample) for sample in chosen])
