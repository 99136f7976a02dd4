"""From samples to new weights in the engines: the part of a step that does not ask who drew the samples."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from skyrl_train.algorithms.objective import cross_entropy_objective
from skyrl_train.batching.build import build_experience
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.split import balance_metrics, split
from skyrl_train.cluster.ranks.policy_group import PolicyGroup, UpdateRefused, UpdateReports
from skyrl_train.cluster.ranks.reference_group import ReferenceGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.weight_sync import SyncResult
from skyrl_train.config import Config
from skyrl_train.ranks import LogprobLimit
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.agreement.first_check import FirstCheck
from skyrl_train.trainer.agreement.logprob_bound import LogprobBound, compared_share, is_compared
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.trainer.performance import sync_performance, training_performance
from skyrl_train.trainer.residency import Residency
from skyrl_train.trainer.rules import objective
from skyrl_train.trainer.sft import train_batches, update_metrics
from skyrl_train.trainer.signal import Signal
from skyrl_train.types import Example, ExperienceBatch, Group, Metrics


async def nothing() -> None:
    """Between update and sync, where nobody has anything to do."""


class Learner:
    """Updates the policy on groups or examples and has the engines serve it."""

    def __init__(
        self,
        config: Config,
        *,
        rules: MicroBatchLimits,
        policy: PolicyGroup,
        reference: ReferenceGroup | None,
        residency: Residency,
        timers: Timers,
        bound: LogprobBound,
        first_check: FirstCheck,
        signal: Signal,
    ) -> None:
        """Args: reference is None without a KL term."""
        self._trainer, self._max_generate_length = config.trainer, config.generator.sampling_params.max_generate_length
        self._algorithm, chunk = config.trainer.algorithm, config.trainer.policy.megatron_config.logprobs_chunk_size
        self._objective = objective(self._algorithm, config.generator.sampling_params, chunk)
        self._cross_entropy = cross_entropy_objective(chunk)
        self._credit = CreditAssignment(self._algorithm)
        self._step_ids = itertools.count(1)
        self.rules = rules
        self._policy, self._reference, self.residency, self._timers = policy, reference, residency, timers
        self._bound, self._first_check, self._signal = bound, first_check, signal

    async def learn(
        self,
        groups: Sequence[Group],
        num_mini_batches: int,
        *,
        checked: Sequence[Group] | None = None,
        needs_signal: bool = True,
        before_sync: Callable[[], Awaitable[None]] = nothing,
    ) -> Metrics:
        """One pass of updates on the groups, by the configured loss, then a weight sync.

        Args:
            checked: groups whose samples the engines can score, for checks of the sync; None means all.
            needs_signal: where no group has signal (signal.py), leave weights, version, devices and engines unchanged.
            before_sync: awaited while the updated policy is on its devices.
        Raises: ValueError for groups that cannot be split, LogprobsDiffer for samples that are not the policy's, both
            before anything has changed; RemoteFailed, SyncCheckFailed.
        """
        policy, timers = self._policy, self._timers
        checked = groups if checked is None else checked
        with timers("convert_to_training_input"):
            experience = build_experience(groups, policy.policy_version)
            shards = self._shards(experience, num_mini_batches)
            credit = self._credit(experience)
        if needs_signal and not self._signal.is_in(credit.metrics):
            return credit.metrics | {"policy/num_optimizer_steps": 0.0} | self.residency.metrics()
        with timers("sync_weights"):
            scores = await self._first_check.scores(checked)
        with timers("fwd_logprobs_values_reward"):
            await self.residency.for_reference()
            ref = None if self._reference is None else await self._reference.logprobs(shards)
            await self.residency.for_training()
            await self._first_check.judge(scores, checked)
            keeps_old = self._needs_old_logprobs(shards)
            if keeps_old:
                kl = await policy.keep_old_logprobs(shards, ref if self._algorithm.use_kl_in_reward else None)
                if kl is not None:
                    credit = self._credit(experience, shards.whole(kl, experience))
        with timers("policy_train"):
            signals = {"advantages": shards.put(credit.advantages, experience)}
            if ref is not None and "ref_logprobs" in self._objective.needs:
                signals["ref_logprobs"] = ref
            update, totals = await self._update(groups, shards, signals, keeps_old)
        sync = await self._sync(checked, before_sync)
        return (
            credit.metrics
            | balance_metrics(shards.batches, self.rules)
            | update
            | training_performance(len(experience.token_ids), totals, timers)
            | sync_performance(sync)
            | self.residency.metrics()
        )

    async def learn_examples(
        self, examples: Sequence[Example], *, before_sync: Callable[[], Awaitable[None]] = nothing
    ) -> Metrics:
        """One optimizer step of supervised fine-tuning on the examples, then a weight sync. Raises: as `learn`."""
        with self._timers("convert_to_training_input"):
            shards = Shards(train_batches(examples, self.rules))
        with self._timers("fwd_logprobs_values_reward"):
            await self.residency.for_training()
        with self._timers("policy_train"):
            update, totals = await self._policy.update(shards, {}, 1, self._cross_entropy)
        sync = await self._sync((), before_sync)
        metrics = update_metrics(update, examples)
        return (
            metrics
            | balance_metrics(shards.batches, self.rules)
            | training_performance(int(metrics["sft/num_tokens"]), totals, self._timers)
            | sync_performance(sync)
            | self.residency.metrics()
        )

    async def _update(
        self, groups: Sequence[Group], shards: Shards, signals: Mapping[str, Sequence[Any]], keeps_old: bool
    ) -> tuple[Metrics, UpdateReports]:
        """Raises: LogprobsDiffer."""
        policy, version = self._policy, self._policy.policy_version
        limit = LogprobLimit(self._bound.fail, is_compared(groups, version), of_kept=keeps_old)
        try:
            update, totals = await policy.update(shards, signals, self._trainer.update_epochs_per_batch, limit=limit)
        except UpdateRefused as refused:
            raise self._bound.error(refused.difference, version) from None
        self._bound.look(totals.logprob_difference)
        return update | {"policy/rollout_train_logprobs_compared": compared_share(groups, version)}, totals

    async def _sync(self, groups: Sequence[Group], before_sync: Callable[[], Awaitable[None]]) -> SyncResult:
        await before_sync()
        with self._timers("sync_weights"):
            return await self.residency.sync_weights(groups)

    def _shards(self, experience: ExperienceBatch, num_mini_batches: int) -> Shards:
        return Shards(
            split(
                experience,
                self.rules,
                num_mini_batches=num_mini_batches,
                reductions=self._objective.reductions,
                max_generate_length=self._max_generate_length,
                step_id=next(self._step_ids),
            )
        )

    def _needs_old_logprobs(self, shards: Shards) -> bool:
        """One mini-batch and one epoch: the update's own forward pass is the policy before the update, unless dropout
        makes it another model than the one that sampled."""
        one_step = self._trainer.update_epochs_per_batch == 1 and len(shards.batches[0].mini_batches) == 1
        lora = self._trainer.policy.model.lora
        has_dropout = lora.rank > 0 and lora.dropout > 0
        return not one_step or has_dropout or (self._algorithm.use_kl_in_reward and self._reference is not None)
