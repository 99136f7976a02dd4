"""Supervised fine-tuning: the policy update of reinforcement learning on batches of examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from skyrl_train.algorithms.objective import cross_entropy_objective
from skyrl_train.batching.build import build_examples
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.split import balance_metrics, split
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.config.sft import SftConfig
from skyrl_train.data.order import Order
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.loop import Loop
from skyrl_train.trainer.performance import training_performance
from skyrl_train.types import Example, Metrics

KEPT = (
    "policy/grad_norm",
    "policy/policy_lr",
    "policy/policy_entropy",
    "policy/moe_aux_loss",
    "policy/num_optimizer_steps",
    "policy/num_skipped_steps",
)
"""Metrics of an update that have a meaning without rollouts."""


def update_metrics(update: Metrics, examples: Sequence[Example]) -> Metrics:
    """`sft/*`, and those of an update's own metrics that are in KEPT."""
    return {
        "sft/loss": update["policy/policy_loss"],
        "sft/num_tokens": float(sum(len(example.token_ids) for example in examples)),
        "sft/num_trained_tokens": float(num_trained(examples)),
    } | {name: update[name] for name in KEPT if name in update}


def num_trained(examples: Sequence[Example]) -> int:
    return sum(int(example.loss_mask.sum()) for example in examples)


class FineTuning:
    """Optimizer steps on examples; the loss is the mean over the trained tokens of all data-parallel ranks."""

    def __init__(self, policy: PolicyGroup, limits: MicroBatchLimits, timers: Timers) -> None:
        self._policy, self._limits, self._timers = policy, limits, timers
        self._objective = cross_entropy_objective()

    def split(self, examples: Sequence[Example]) -> Shards:
        """Put one mini-batch of the examples into the object store. Raises: ValueError for one that is too long."""
        return Shards(split(build_examples(examples), self._limits))

    async def update(self, shards: Shards, examples: Sequence[Example]) -> Metrics:
        """One optimizer step; the policy must be on its devices."""
        with self._timers("policy_train"):
            update, reports = await self._policy.update(shards, {}, objective=self._objective)
        metrics = update_metrics(update, examples)
        return (
            metrics
            | balance_metrics(shards.batches, self._limits)
            | training_performance(int(metrics["sft/num_tokens"]), reports, self._timers)
        )


@dataclass(frozen=True, slots=True)
class SftParts:
    """Parts of a run, built by the entrypoint."""

    order: Order[Example]
    held_out: Sequence[Example]
    tuning: FineTuning
    policy: PolicyGroup
    tracker: Tracker
    timers: Timers


class SftTrainer(Loop):
    """One optimizer step per batch of rows."""

    def __init__(self, config: SftConfig, parts: SftParts, num_steps: int) -> None:
        super().__init__(config.trainer, parts.order, parts.policy, parts.tracker, parts.timers, num_steps)
        self._parts = parts
        self._held_out: list[tuple[Shards, int]] | None = None

    async def step(self) -> Metrics:
        parts = self._parts
        with parts.timers("convert_to_training_input"):
            examples = parts.order.next_batch()
            shards = parts.tuning.split(examples)
        metrics = await parts.tuning.update(shards, examples)
        return metrics | {"trainer/epoch": float(parts.order.epoch)}

    @property
    def can_evaluate(self) -> bool:
        return bool(self._parts.held_out)

    async def evaluate(self) -> Metrics:
        """Mean loss over all trained tokens of the held-out rows."""
        if self._held_out is None:
            self._held_out = self._held_out_shards()
        total = 0.0
        for shards, num_tokens in self._held_out:
            total += await self._parts.policy.evaluate(shards) * num_tokens
        return {"sft/eval_loss": total / sum(num_tokens for _, num_tokens in self._held_out)}

    def _held_out_shards(self) -> list[tuple[Shards, int]]:
        """Held-out batches, kept in the object store, with their numbers of trained tokens."""
        rows, size = iter(self._parts.held_out), self._trainer_config.eval_batch_size
        batches = iter(lambda: list(islice(rows, size)), [])
        return [(self._parts.tuning.split(batch), num_trained(batch)) for batch in batches]
