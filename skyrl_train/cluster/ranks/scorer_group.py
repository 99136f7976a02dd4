"""Models that score a step's shards, such as the reference of the KL term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.shards import Shards


class FrozenGroup(ModelGroup):
    entry_point = "skyrl_train.megatron.scorer:MegatronScorer"


@dataclass(frozen=True)
class ScorerGroup:
    """Computes one signal for every token of a step's shards; the results stay on the ranks."""

    name: str
    """Name in metrics and logs."""
    signal: str
    """Field in TokenInputs."""
    model: ModelGroup
    method: str
    """Method of the ranks' worker."""
    data_sources: Sequence[str] | None = None
    """Sources of the samples that it scores; None for all that no other scorer of its method names."""
    arguments: tuple[Any, ...] = ()
    """Further arguments of the method."""

    @property
    def is_teacher(self) -> bool:
        """Whether the policy learns from the signal."""
        return self.signal.startswith("teacher")

    @property
    def is_policy(self) -> bool:
        """Whether the policy's own ranks compute the signal."""
        return isinstance(self.model, PolicyGroup)

    async def score(self, shards: Shards) -> list[Any]:
        """References to the signal [T] of each shard. Shards are assigned to the data-parallel ranks round-robin."""
        model, scored = self.model, list[Any]()
        for start in range(0, len(shards.refs), model.dp_size):
            wave = shards.refs[start : start + model.dp_size]
            # All ranks run when any does: a rank without a shard repeats one, since its expert peers may need it.
            args = [(wave[min(rank.dp_rank, len(wave) - 1)], *self.arguments) for rank in model.ranks]
            scored += model.reported(await model.group.each_kept(self.method, args))[: len(wave)]
        return scored
