"""The training loop. It orders calls and does nothing else: no tensor is touched here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.batching.build import Advantage, build_experience, experience_metrics, with_kl_penalty
from skyrl_train.batching.rules import MicroBatchRules
from skyrl_train.batching.split import balance_metrics, split
from skyrl_train.cluster.policy_group import PolicyGroup, ReferenceGroup, Shards
from skyrl_train.config import Config
from skyrl_train.data.order import PromptOrder
from skyrl_train.rollout.collect import Collector, Progress
from skyrl_train.rollout.metrics import rollout_metrics
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.tracking.transcripts import TranscriptLog, transcript_of
from skyrl_train.trainer.evaluation import Evaluation
from skyrl_train.trainer.performance import performance_metrics
from skyrl_train.trainer.residency import Dedicated
from skyrl_train.trainer.rules import sampling_params
from skyrl_train.types import ExperienceBatch, Group, Metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run consists of, built by the entrypoint."""

    prompts: PromptOrder
    collector: Collector
    evaluation: Evaluation
    advantage: Advantage
    rules: MicroBatchRules
    policy: PolicyGroup
    reference: ReferenceGroup | None
    """None without a KL term."""
    residency: Dedicated
    tracker: Tracker
    transcripts: TranscriptLog
    progress: Progress
    timers: Timers


class Trainer:
    """Synchronous training: every sample of a step is drawn from the weights that the step then updates."""

    def __init__(self, config: Config, parts: Parts, num_steps: int) -> None:
        self._config, self._parts, self._num_steps = config, parts, num_steps
        self._sampling = sampling_params(config.generator.sampling_params)
        self._stop_requested = False
        self.global_step = 0

    def stop(self) -> None:
        """End the run after the step in flight."""
        self._stop_requested = True

    async def train(self) -> None:
        """Run all steps. Step 0 of the metrics is the model as it came."""
        parts, trainer = self._parts, self._config.trainer
        if trainer.eval_before_train and parts.evaluation.has_prompts and not self._stop_requested:
            parts.tracker.log(0, await self._evaluate() | {"trainer/epoch": 0.0})
        while self.global_step < self._num_steps and not self._stop_requested:
            parts.timers.reset()
            epoch = parts.prompts.epoch
            with parts.timers("step"):
                metrics = await self.step()
            self.global_step += 1
            metrics |= {"trainer/epoch": float(epoch)}
            if self._is_due(trainer.eval_interval, also_last=True) and parts.evaluation.has_prompts:
                metrics |= await self._evaluate()
            if self._is_due(trainer.hf_save_interval, also_last=trainer.hf_save_interval > 0):
                with parts.timers("save_hf_model"):
                    folder = Path(trainer.export_path).expanduser().resolve() / f"global_step_{self.global_step}"
                    await parts.policy.save_hf(str(folder))
            metrics |= parts.timers.metrics() | {"perf/driver_share": parts.timers.driver_share()}
            parts.tracker.log(self.global_step, metrics)

    async def step(self) -> Metrics:
        """Draw samples, update the policy on them, and move the new weights into the engines."""
        parts, timers, trainer = self._parts, self._parts.timers, self._config.trainer
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

    async def _evaluate(self) -> Metrics:
        with self._parts.timers("eval"):
            metrics, _ = await self._parts.evaluation.run()
        return metrics

    def _is_due(self, interval: int, *, also_last: bool) -> bool:
        # A run that was told to stop has no time for more than its step: what stopped it will soon kill it.
        if self._stop_requested:
            return False
        is_last = self.global_step == self._num_steps
        return (interval > 0 and self.global_step % interval == 0) or (also_last and is_last)

    def _log_samples(self, groups: Sequence[Group]) -> None:
        trainer = self._config.trainer
        interval, count = trainer.log_samples_interval, trainer.num_logged_samples
        if interval > 0 and self.global_step % interval == 0:
            chosen = [group.samples[0] for group in groups[:count]]
            self._parts.transcripts.log([transcript_of(self.global_step + 1, sample) for sample in chosen])
