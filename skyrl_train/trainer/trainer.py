"""A step of reinforcement learning. It orders calls and does nothing else: no tensor is touched here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.batching.build import Advantage, build_experience, experience_metrics, with_kl_penalty
from skyrl_train.batching.rules import MicroBatchRules
from skyrl_train.batching.split import balance_metrics, split
from skyrl_train.cluster.policy_group import PolicyGroup, ReferenceGroup, Shards
from skyrl_train.config import Config
from skyrl_train.data.order import Order
from skyrl_train.rollout.collect import Collector, Progress
from skyrl_train.rollout.metrics import rollout_metrics
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.tracking.transcripts import TranscriptLog, transcript_of
from skyrl_train.trainer.evaluation import Evaluation
from skyrl_train.trainer.loop import Loop
from skyrl_train.trainer.performance import performance_metrics
from skyrl_train.trainer.residency import Residency
from skyrl_train.trainer.rules import sampling_params
from skyrl_train.types import ExperienceBatch, Group, Metrics, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run consists of, built by the entrypoint."""

    prompts: Order[Prompt]
    collector: Collector
    evaluation: Evaluation
    advantage: Advantage
    rules: MicroBatchRules
    policy: PolicyGroup
    reference: ReferenceGroup | None
    """None without a KL term."""
    residency: Residency
    tracker: Tracker
    transcripts: TranscriptLog
    progress: Progress
    timers: Timers


class Trainer(Loop):
    """Synchronous training: every sample of a step is drawn from the weights that the step then updates."""

    def __init__(self, config: Config, parts: Parts, num_steps: int) -> None:
        super().__init__(config.trainer, parts.prompts, parts.policy, parts.tracker, parts.timers, num_steps)
        self._config, self._parts = config, parts
        self._sampling = sampling_params(config.generator.sampling_params)

    @property
    def can_evaluate(self) -> bool:
        return self._parts.evaluation.has_prompts

    async def evaluate(self) -> Metrics:
        """Scores of greedy or sampled answers to the held-out prompts."""
        await self._parts.residency.for_rollout()
        metrics, _ = await self._parts.evaluation.run()
        return metrics

    async def save_hf(self, folder: str) -> None:
        await self._parts.residency.for_saving()
        await super().save_hf(folder)

    async def step(self) -> Metrics:
        """Draw samples, update the policy on them, and move the new weights into the engines."""
        parts, timers, trainer = self._parts, self._parts.timers, self._config.trainer
        with timers("sync_weights"):
            await parts.residency.for_rollout()
        with timers("generate"):
            groups = await parts.collector.collect(
                parts.prompts.next_batch(), self._config.generator.n_samples_per_prompt, self._sampling, parts.progress
            )
        with timers("convert_to_training_input"):
            experience = build_experience(groups, parts.advantage)
            shards = self._shards(experience)
        with timers("fwd_logprobs_values_reward"):
            await parts.residency.for_reference()
            ref = None if parts.reference is None else await parts.reference.logprobs(shards)
            await parts.residency.for_training()
            if self._needs_old_logprobs(shards):
                kl = await parts.policy.keep_old_logprobs(shards, ref if trainer.algorithm.use_kl_in_reward else None)
                if kl is not None:
                    experience = with_kl_penalty(experience, kl, trainer.algorithm.kl_loss_coef, parts.advantage)
                    shards = self._shards(experience)
        with timers("policy_train"):
            update, totals = await parts.policy.update(
                shards, ref if trainer.algorithm.use_kl_loss else None, trainer.update_epochs_per_batch
            )
        with timers("sync_weights"):
            sync = await parts.residency.sync_weights(groups)
        self._log_samples(groups)
        return (
            rollout_metrics(groups)
            | experience_metrics(experience)
            | balance_metrics(shards.batches, parts.rules)
            | update
            | performance_metrics(groups, totals, sync, timers)
            | parts.residency.metrics()
        )

    def _shards(self, experience: ExperienceBatch) -> Shards:
        trainer = self._config.trainer
        return Shards(
            split(
                experience,
                self._parts.rules,
                num_mini_batches=trainer.train_batch_size // trainer.policy_mini_batch_size,
                reduction=trainer.algorithm.loss_reduction,
                max_generate_length=self._sampling.max_generate_length,
            )
        )

    def _needs_old_logprobs(self, shards: Shards) -> bool:
        """One mini-batch and one epoch: the update's own forward pass is the policy before the update."""
        trainer = self._config.trainer
        one_step = trainer.update_epochs_per_batch == 1 and len(shards.batches[0].mini_batches) == 1
        return not one_step or (trainer.algorithm.use_kl_in_reward and self._parts.reference is not None)

    def _log_samples(self, groups: Sequence[Group]) -> None:
        trainer = self._config.trainer
        interval, count = trainer.log_samples_interval, trainer.num_logged_samples
        if interval > 0 and self.global_step % interval == 0:
            chosen = [group.samples[0] for group in groups[:count]]
            self._parts.transcripts.log([transcript_of(self.global_step + 1, sample) for sample in chosen])
