"""One step of reinforcement learning, the same for every source of groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skyrl_train.algorithms.objective import Objective
from skyrl_train.batching.build import build_experience
from skyrl_train.batching.hinted import with_prompts
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.select import selections_of
from skyrl_train.batching.split import balance_metrics, mini_batches_of, split
from skyrl_train.cluster.ranks.policy_group import NoStepTaken, PolicyGroup, UpdateRefused
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.config import Config
from skyrl_train.data.hints import Hints
from skyrl_train.ranks import LogprobLimit
from skyrl_train.rollout.source import GroupSource, groups_of
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.agreement.logprob_bound import LogprobBound, StalenessWarning, compared_share, is_compared
from skyrl_train.trainer.agreement.sync_check import FirstCheck
from skyrl_train.trainer.credit import Coefficients, Credit, CreditAssignment, LearningSignal
from skyrl_train.trainer.from_config import max_lengths
from skyrl_train.trainer.performance import training_performance
from skyrl_train.trainer.publisher import Publisher
from skyrl_train.trainer.residency import Residency
from skyrl_train.trainer.scorers import Critic, Scorers, Signals
from skyrl_train.types import ExperienceBatch, Group, Metrics, TrainBatch


@dataclass(kw_only=True)
class TrainingStep:
    """From the groups of a source to new weights in the engines."""

    config: Config
    source: GroupSource
    policy: PolicyGroup
    residency: Residency
    scorers: Scorers
    publisher: Publisher
    first_check: FirstCheck
    logprob_bound: LogprobBound
    learning_signal: LearningSignal
    objective: Objective
    limits: MicroBatchLimits
    timers: Timers
    vocab_size: int
    """Tokens of the model."""
    critic: Critic | None = None
    hints: Hints | None = None
    groups: Sequence[Group] = ()
    """Groups of the last step."""
    has_begun: bool = False
    """Whether an optimizer step of the last step has begun, so that the weights may have changed."""
    # Identifies the old logprobs that ranks keep; it is not the global step.
    _step_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self._credit = CreditAssignment(self.config.trainer.algorithm)
        self.coefficients = Coefficients(self.config.trainer.algorithm)
        self._staleness_warning = StalenessWarning(self.objective, self.config.trainer.source)

    async def step(self) -> Metrics:
        """Train on the next groups of the source and publish the new weights. Returns: metrics without the source's.

        If every advantage is zero and no other term has a gradient, the update and the sync are skipped.
        Raises: before any optimizer step ValueError (groups that cannot be split), LogprobsDiffer (samples of another
            policy), SyncCheckFailed (first check), NoStepTaken and errors of the source; after it RemoteFailed, and
            SyncCheckFailed for the published weights.
        """
        self.has_begun = False
        groups = self.groups = await groups_of(self.source)
        with self.timers("convert_to_training_input"):
            batch = build_experience(groups, self.policy.policy_version, self.vocab_size)
            self._staleness_warning.note(batch.staleness)
            shards = Shards(self._split(batch, self._num_mini_batches(groups)))
            credit, has_signal = self._first_credit(batch)
        if credit is not None and not has_signal:
            skipped = {"policy/num_optimizer_steps": 0.0}
            return credit.metrics | skipped | self.residency.metrics()
        with self.timers("sync_weights"):  # engines are still awake here; scoring gives their devices to the trainer
            scores = await self.first_check.scores(groups)
        values, metrics = None, Metrics()
        with self.timers("fwd_logprobs_values_reward"):
            sources = [group.prompt.data_source for group in groups for _ in group.samples]
            scored = await self.scorers.score(shards, sources, self._hinted(shards, groups))
            if self.critic is not None:
                values = await self.critic.values(batch, len(groups), shards.step_id)
        if credit is None and not (self.config.trainer.algorithm.use_kl_in_reward and "ref_logprobs" in scored):
            credit = self._credit(batch, values=values)
            metrics = await self._update_critic(batch, credit)  # now, while it has the devices that it may share
        with self.timers("fwd_logprobs_values_reward"):
            signals = await self.scorers.score_with_policy(shards, scored)
            await self.first_check.judge(scores, groups)
            fetched = {name: shards.merged(each, batch) for name, each in signals.fetched.items()}
        if "kl" in fetched:
            credit = self._penalised(batch, fetched.pop("kl"), values)
            if self.critic is not None:
                metrics = await self._update_critic(batch, credit)
                await self.residency.for_training()
        assert credit is not None
        chosen = selections_of(self.objective, batch, credit.advantages, fetched, self._num_mini_batches(groups))
        metrics |= await self._update(groups, batch, shards, {"advantages": credit.advantages, **chosen}, signals)
        metrics |= await self.publisher.publish(groups)
        return credit.metrics | metrics | self.residency.metrics()

    def _first_credit(self, batch: ExperienceBatch) -> tuple[Credit | None, bool]:
        """Credit without a KL penalty, and whether there is anything to learn; None if it has to wait for values."""
        has_tokens = bool(batch.loss_mask.any())
        if self.critic is not None and has_tokens:
            return None, True
        values = None if self.critic is None else torch.zeros(len(batch.loss_mask))
        credit = self._credit(batch, values=values)
        objective = self.coefficients.objective(self.objective)
        return credit, self.learning_signal.is_in(credit.metrics, objective, has_tokens=has_tokens)

    def _hinted(self, shards: Shards, groups: Sequence[Group]) -> Shards | None:
        """The shards with the prompts that teachers read; None if these are the policy's."""
        if self.hints is None:
            return None
        is_served = self.config.trainer.teacher.is_served  # an engine generates a token after those that it scores
        limits = replace(self.limits, max_sample_tokens=self.limits.max_sample_tokens - is_served)
        return Shards(with_prompts(shards.batches, self.hints.prompts(groups), limits))

    async def _update_critic(self, batch: ExperienceBatch, credit: Credit) -> Metrics:
        if self.critic is None or credit.returns is None:
            return {}
        self.has_begun = True
        with self.timers("critic_train"):
            return await self.critic.update(batch, credit.returns)

    def _penalised(self, batch: ExperienceBatch, kl: Tensor, values: Tensor | None) -> Credit:
        """Credit for rewards with the penalty kl [T]."""
        credit = self._credit(batch, kl, values, kl_coef=self.coefficients.kl)
        return replace(credit, metrics=credit.metrics | self.coefficients.after_penalty(batch, kl))

    def _num_mini_batches(self, groups: Sequence[Group]) -> int:
        return mini_batches_of(len(groups), self.config.trainer.policy_mini_batch_size)

    def _split(self, batch: ExperienceBatch, num_mini_batches: int) -> list[TrainBatch]:
        return split(
            batch,
            self.limits,
            num_mini_batches=num_mini_batches,
            reductions=self.objective.reductions,
            max_lengths=max_lengths(self.config.generator),
            step_id=next(self._step_ids),
        )

    async def _update(
        self,
        groups: Sequence[Group],
        batch: ExperienceBatch,
        shards: Shards,
        tokens: Mapping[str, Tensor],
        signals: Signals,
    ) -> Metrics:
        """Args: tokens: name in TokenInputs -> [T], values that the driver computed. Raises: LogprobsDiffer."""
        version, epochs = self.policy.policy_version, self.config.trainer.update_epochs_per_batch
        with self.timers("policy_train"):
            unused = {"ref_logprobs"} - set(self.objective.needs)  # with a KL penalty in the reward alone
            values = {name: refs for name, refs in signals.refs.items() if name not in unused}
            values |= {name: shards.put(computed, batch) for name, computed in tokens.items()}
            limit = LogprobLimit(
                nats=self.logprob_bound.fail,
                is_compared=is_compared(groups, version),
                of_kept=signals.has_old_logprobs,
            )
            objective = self.coefficients.objective(self.objective)
            had_begun, self.has_begun = self.has_begun, True
            try:
                metrics, reports = await self.policy.update(shards, values, epochs, objective, limit)
            except UpdateRefused as refused:
                self.has_begun = had_begun
                raise self.logprob_bound.error(refused.difference, version) from None
            except NoStepTaken:
                self.has_begun = had_begun
                raise
        self.logprob_bound.report(reports.logprob_difference)
        return (
            balance_metrics(shards.batches, self.limits)
            | metrics
            | self.coefficients.after_update(metrics)
            | {"policy/rollout_train_logprobs_compared": compared_share(groups, version)}
            | training_performance(epochs * len(batch.token_ids), reports, self.timers)
        )
