"""From samples to new weights in the engines: the part of a step that does not ask who drew the samples."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from transformers import PretrainedConfig

from skyrl_train.batching.build import Advantage, build_experience, experience_metrics, with_kl_penalty
from skyrl_train.batching.rules import MicroBatchRules
from skyrl_train.batching.split import balance_metrics, split
from skyrl_train.cluster.launch import Processes
from skyrl_train.cluster.ranks.policy_group import PolicyGroup, UpdateRefused, UpdateTotals
from skyrl_train.cluster.ranks.reference_group import ReferenceGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.weight_way import SyncResult
from skyrl_train.config import Config
from skyrl_train.megatron.model.flops import num_experts
from skyrl_train.ranks import LogprobLimit
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.agreement.first_check import FirstCheck
from skyrl_train.trainer.agreement.logprob_bound import LogprobBound, compared_share, is_compared
from skyrl_train.trainer.agreement.sync_check import SyncCheck
from skyrl_train.trainer.memory_report import MemoryReport
from skyrl_train.trainer.performance import sync_performance, training_performance
from skyrl_train.trainer.publish import Publisher
from skyrl_train.trainer.residency import Colocated, Dedicated, Residency
from skyrl_train.trainer.rules import advantage, cross_entropy_objective, micro_batch_rules, objective
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
        advantage: Advantage,
        rules: MicroBatchRules,
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
        self._advantage, self.rules = advantage, rules
        self._policy, self._reference, self.residency, self._timers = policy, reference, residency, timers
        self._bound, self._first_check, self._signal = bound, first_check, signal
        self._cross_entropy = cross_entropy_objective(config.trainer.policy.megatron_config.logprobs_chunk_size)

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
        Raises: ValueError for groups that cannot be cut, LogprobsDiffer for samples that are not the policy's, both
            before anything has changed; RemoteFailed, SyncCheckFailed.
        """
        policy, algorithm, timers = self._policy, self._trainer.algorithm, self._timers
        checked = groups if checked is None else checked
        with timers("convert_to_training_input"):
            experience = build_experience(groups, self._advantage)
            shards = self._shards(experience, num_mini_batches)
        if needs_signal and not self._signal.is_in(metrics := experience_metrics(experience)):
            return metrics | {"policy/num_optimizer_steps": 0.0} | self.residency.metrics()
        with timers("sync_weights"):
            scores = await self._first_check.scores(checked)
        with timers("fwd_logprobs_values_reward"):
            await self.residency.for_reference()
            ref = None if self._reference is None else await self._reference.logprobs(shards)
            await self.residency.for_training()
            await self._first_check.judge(scores, checked)
            keeps_old = self._needs_old_logprobs(shards)
            if keeps_old:
                kl = await policy.keep_old_logprobs(shards, ref if algorithm.use_kl_in_reward else None)
                if kl is not None:
                    experience = with_kl_penalty(experience, kl, algorithm.kl_loss_coef, self._advantage)
                    shards = self._shards(experience, num_mini_batches)
        with timers("policy_train"):
            update, totals = await self._update(groups, shards, ref if algorithm.use_kl_loss else None, keeps_old)
        sync = await self._sync(checked, before_sync)
        return (
            experience_metrics(experience)
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
            update, totals = await self._policy.update(shards, None, 1, self._cross_entropy)
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
        self, groups: Sequence[Group], shards: Shards, ref: Sequence[Any] | None, keeps_old: bool
    ) -> tuple[Metrics, UpdateTotals]:
        """Raises: LogprobsDiffer."""
        policy, version = self._policy, self._policy.policy_version
        limit = LogprobLimit(self._bound.fail, is_compared(groups, version), of_kept=keeps_old)
        try:
            update, totals = await policy.update(shards, ref, self._trainer.update_epochs_per_batch, limit=limit)
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
                reduction=self._trainer.algorithm.loss_reduction,
                max_generate_length=self._max_generate_length,
            )
        )

    def _needs_old_logprobs(self, shards: Shards) -> bool:
        """One mini-batch and one epoch: the update's own forward pass is the policy before the update, unless dropout
        makes it another model than the one that sampled."""
        one_step = self._trainer.update_epochs_per_batch == 1 and len(shards.batches[0].mini_batches) == 1
        lora = self._trainer.policy.model.lora
        has_dropout = lora.rank > 0 and lora.dropout > 0
        return not one_step or has_dropout or (self._trainer.algorithm.use_kl_in_reward and self._reference is not None)


def build_learner(config: Config, model: PretrainedConfig, processes: Processes, timers: Timers) -> Learner:
    """The learner of started processes."""
    trainer, dtype_name = config.trainer, config.generator.model_dtype
    rules = micro_batch_rules(trainer, model, processes.policy.dp_size)
    coarser_dtype = "bfloat16" if trainer.bf16 else dtype_name
    # Servers that run already were not told otherwise (engines/settings.py).
    tensor_float = processes.cluster.has_gpus and not config.generator.run_engines_locally
    check = SyncCheck(trainer.verify_sync_every, coarser_dtype, rules, tensor_float=tensor_float)
    return Learner(
        config,
        advantage=advantage(trainer.algorithm),
        rules=rules,
        policy=processes.policy,
        reference=processes.reference,
        residency=_residency(config, processes, check),
        timers=timers,
        bound=LogprobBound(
            trainer.logprob_difference,
            coarser_dtype,
            tensor_float=tensor_float,
            has_experts=num_experts(model) > 0,
        ),
        first_check=FirstCheck(check, processes.policy, processes.engines),
        signal=_signal(config, model),
    )


def _signal(config: Config, model: PretrainedConfig) -> Signal:
    algorithm, megatron = config.trainer.algorithm, config.trainer.policy.megatron_config
    has_balancing = megatron.moe_aux_loss_coeff > 0 and num_experts(model) > 0
    has_penalty = algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0
    return Signal(
        objective(algorithm, config.generator.sampling_params, megatron.logprobs_chunk_size),
        has_other_terms=has_balancing or has_penalty,
    )


def _residency(config: Config, processes: Processes, check: SyncCheck) -> Residency:
    policy, reference, engines = processes.policy, processes.reference, processes.engines
    publisher = Publisher(policy, engines, config.generator.model_dtype, check)
    report = MemoryReport(policy, reference, engines)
    if not config.trainer.placement.colocate_all:
        return Dedicated(publisher, report)
    return Colocated(policy, reference, engines, publisher, processes.release, report)
