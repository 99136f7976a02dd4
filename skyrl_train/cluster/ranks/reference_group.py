"""The reference as the trainer sees it: logprobs of a step's shards."""

from __future__ import annotations

from typing import Any

from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.ranks.worker_group import WorkerGroup


class ReferenceGroup(ModelGroup):
    """The frozen model of the KL term."""

    entry_point = "skyrl_train.megatron.reference:MegatronReference"

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group)
        self._method = "logprobs"

    @classmethod
    def of_policy(cls, policy: PolicyGroup) -> ReferenceGroup:
        """The started policy's own model with its adapters off; it has no process of its own."""
        reference = cls(policy.group)
        reference._ranks, reference._method = policy.ranks, "reference_logprobs"
        return reference

    @property
    def is_policy(self) -> bool:
        """Whether it is the policy's own model."""
        return self._method == "reference_logprobs"

    async def logprobs(self, shards: Shards) -> list[Any]:
        """References to the logprobs [T] of each shard. Shards go to the reference's data-parallel ranks in turn."""
        num = self._ranks[0].dp_size
        kept: list[Any] = []
        for start in range(0, len(shards.refs), num):
            wave = shards.refs[start : start + num]
            # All ranks run when any does: a rank without a shard of its own repeats one, its expert peers may need it.
            args = [(wave[min(place.dp_rank, len(wave) - 1)],) for place in self._ranks]
            results = await self._group.each_kept(self._method, args)
            reporting = {
                place.dp_rank: result for place, result in zip(self._ranks, results, strict=True) if place.reports
            }
            kept += [reporting[index] for index in range(len(wave))]
        return kept
