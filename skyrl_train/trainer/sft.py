"""A step of supervised fine-tuning: the policy update of reinforcement learning on batches of examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

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
from skyrl_train.types import Example, Metrics, TrainBatch

KEPT = (
    "policy/grad_norm",
    "policy/policy_lr",
    "policy/policy_entropy",
    "policy/moe_aux_loss",
    "policy/num_optimizer_steps",
    "policy/num_skipped_steps",
)
"""What an update says that has a meaning without rollouts."""


def train_batches(examples: Sequence[Example], rules: MicroBatchLimits) -> list[TrainBatch]:
    """One mini-batch for each data-parallel rank; the loss is the mean over the trained tokens of all of them."""
    return split(build_examples(examples), rules)


def update_metrics(update: Metrics, examples: Sequence[Example]) -> Metrics:
    """`sft/*` and what is kept of an update's own metrics."""
    return {
        "sft/loss": update["policy/policy_loss"],
        "sft/num_tokens": float(sum(len(example.token_ids) for example in examples)),
        "sft/num_trained_tokens": float(num_trained(examples)),
    } | {name: update[name] for name in KEPT if name in update}


def num_trained(examples: Sequence[Example]) -> int:
    """Tokens that are trained."""
    return sum(int(example.loss_mask.sum()) for example in examples)


@dataclass(frozen=True, slots=True)
class SftParts:
    """What a run consists of, built by the entrypoint."""

    order: Order[Example]
    held_out: Sequence[Example]
    rules: MicroBatchLimits
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
        """Train on the next batch."""
        parts = self._parts
        with parts.timers("convert_to_training_input"):
            examples = parts.order.next_batch()
            shards = Shards(train_batches(examples, parts.rules))
        with parts.timers("policy_train"):
            update, totals = await parts.policy.update(shards, {})
        metrics = update_metrics(update, examples)
        return (
            metrics
            | {"trainer/epoch": float(parts.order.epoch)}
            | balance_metrics(shards.batches, parts.rules)
            | training_performance(int(metrics["sft/num_tokens"]), totals, parts.timers)
        )

    async def reach_policy(self) -> None:
        """It never leaves its devices."""

    async def reach_weights(self) -> None:
        """They never leave their devices."""

    @property
    def can_evaluate(self) -> bool:
        return bool(self._parts.held_out)

    async def evaluate(self) -> Metrics:
        """The mean over all trained tokens of the held-out rows, however they are cut into passes."""
        if self._held_out is None:
            self._held_out = self._held_out_shards()
        total = 0.0
        for shards, num_tokens in self._held_out:
            total += await self._parts.policy.evaluate(shards) * num_tokens
        return {"sft/eval_loss": total / sum(num_tokens for _, num_tokens in self._held_out)}

    def _held_out_shards(self) -> list[tuple[Shards, int]]:
        """What is evaluated, with its trained tokens; it stays in the object store."""
        rows, size = iter(self._parts.held_out), self._trainer_config.eval_batch_size
        passes = []
        while batch := list(islice(rows, size)):
            passes.append((Shards(train_batches(batch, self._parts.rules)), num_trained(batch)))
        return passes
