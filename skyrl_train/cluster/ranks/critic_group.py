"""The critic as the trainer sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.ranks import UpdateReport
from skyrl_train.types import Metrics


class CriticGroup(ModelGroup):
    """The trained model that estimates values."""

    entry_point = "skyrl_train.megatron.critic:MegatronCritic"

    async def values(self, shards: Shards) -> list[Tensor]:
        """Values [T] of each shard, which the ranks keep for the next update."""
        return self.reported(await self.group.each("values", [(ref,) for ref in self.of_rank(shards.refs)]))

    async def update(self, shards: Shards, returns: Sequence[Any], epochs: int) -> Metrics:
        """One optimizer step per mini-batch and epoch. Args: returns: a reference to those [T] of each shard."""
        args = zip(self.of_rank(shards.refs), self.of_rank(returns), strict=True)
        reports: list[UpdateReport] = await self.group.each("update", [(ref, epochs, own) for ref, own in args])
        self.num_steps += epochs * len(shards.batches[0].mini_batches)
        return next(report.metrics for report in reports if report.metrics)
