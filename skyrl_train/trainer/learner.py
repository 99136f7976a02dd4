"""From samples to new weights in the engines: the part of a step that does not ask who drew the samples."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from transformers import PretrainedConfig

from skyrl_train.batching.build import Advantage, build_experience, experience_metrics, with_kl_penalty
from skyrl_train.batching.rules import MicroBatchRules
from skyrl_train.batching.split import balance_metrics, split
from skyrl_train.cluster.launch import Processes
from skyrl_train.cluster.policy_group import PolicyGroup
from skyrl_train.cluster.reference_group import ReferenceGroup
from skyrl_train.cluster.shards import Shards
from skyrl_train.cluster.weight_way import SyncResult
from skyrl_train.config import Config
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.memory_report import MemoryReport
from skyrl_train.trainer.performance import sync_performance, training_performance
from skyrl_train.trainer.publish import Publisher
from skyrl_train.trainer.residency import Colocated, Dedicated, Residency
from skyrl_train.trainer.rules import advantage, cross_entropy_objective, micro_batch_rules
from skyrl_train.trainer.sft import train_batches, update_metrics
from skyrl_train.trainer.sync_check import SyncCheck
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
    ) -> None:
        """Args: reference is None without a KL term."""
        self._trainer, self._max_generate_length = config.trainer, config.generator.sampling_params.max_generate_length
        self._advantage, self.rules = advantage, rules
        self._policy, self._reference, self.residency, self._timers = policy, reference, residency, timers
        self._cross_entropy = cross_entropy_objective(config.trainer.policy.megatron_config.logprobs_chunk_size)

    async def learn(
        self,
        groups: Sequence[Group],
        num_mini_batches: int,
        *,
        checked: Sequence[Group] | None = None,
        before_sync: Callable[[], Awaitable[None]] = nothing,
    ) -> Metrics:
        """One pass of updates on the groups, by the configured loss, then a weight sync.

        Args:
            checked: groups whose samples the engines can score, for checks of the sync; None means all.
            before_sync: awaited while the updated policy is on its devices.
        Raises: ValueError for groups that cannot be cut, before anything has changed; RemoteFailed, SyncCheckFailed.
        """
        policy, algorithm, timers = self._policy, self._trainer.algorithm, self._timers
        with timers("convert_to_training_input"):
            experience = build_experience(groups, self._advantage)
            shards = self._shards(experience, num_mini_batches)
        with timers("fwd_logprobs_values_reward"):
            await self.residency.for_reference()
            ref = None if self._reference is None else await self._reference.logprobs(shards)
            await self.residency.for_training()
            if self._needs_old_logprobs(shards):
                kl = await policy.keep_old_logprobs(shards, ref if algorithm.use_kl_in_reward else None)
                if kl is not None:
                    experience = with_kl_penalty(experience, kl, algorithm.kl_loss_coef, self._advantage)
                    shards = self._shards(experience, num_mini_batches)
        with timers("policy_train"):
            update, totals = await policy.update(
                shards, ref if algorithm.use_kl_loss else None, self._trainer.update_epochs_per_batch
            )
        sync = await self._sync(groups if checked is None else checked, before_sync)
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
        """One mini-batch and one epoch: the update's own forward pass is the policy before the update."""
        one_step = self._trainer.update_epochs_per_batch == 1 and len(shards.batches[0].mini_batches) == 1
        return not one_step or (self._trainer.algorithm.use_kl_in_reward and self._reference is not None)


def build_learner(config: Config, model: PretrainedConfig, processes: Processes, timers: Timers) -> Learner:
    """The learner of started processes."""
    trainer = config.trainer
    rules = micro_batch_rules(trainer, model, processes.policy.dp_size)
    return Learner(
        config,
        advantage=advantage(trainer.algorithm),
        rules=rules,
        policy=processes.policy,
        reference=processes.reference,
        residency=_residency(config, processes, rules),
        timers=timers,
    )


def _residency(config: Config, processes: Processes, rules: MicroBatchRules) -> Residency:
    policy, reference, engines = processes.policy, processes.reference, processes.engines
    trainer, dtype_name = config.trainer, config.generator.model_dtype
    coarser_dtype = "bfloat16" if trainer.bf16 else dtype_name
    # Servers that run already were not told otherwise (inference/settings.py).
    tensor_float = processes.cluster.has_gpus and not config.generator.run_engines_locally
    check = SyncCheck(trainer.verify_sync_every, coarser_dtype, rules, tensor_float=tensor_float)
    publisher = Publisher(policy, engines, dtype_name, check)
    report = MemoryReport(policy, reference, engines)
    if not trainer.placement.colocate_all:
        return Dedicated(publisher, report)
    return Colocated(policy, reference, engines, publisher, processes.release, report)
