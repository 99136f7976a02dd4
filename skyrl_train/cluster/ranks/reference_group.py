"""The reference as the trainer sees it: logprobs of a step's shards."""

from __future__ import annotations

from typing import Any

from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.ranks import Moved, ParallelRanks


class ReferenceGroup:
    """The frozen model of the KL term."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._ranks: list[ParallelRanks] = []
        self._method = "logprobs"
        self._kwargs: dict[str, Any] = {}

    async def start(self, kwargs: dict[str, Any]) -> None:
        self._kwargs = kwargs
        self._ranks = await self._group.build("skyrl_train.megatron.reference:MegatronReference", kwargs)

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

    @property
    def is_running(self) -> bool:
        """False from `end` to `restart`."""
        return bool(self._group.actors)

    async def offload(self) -> list[Moved]:
        """Free the device's memory on every rank; done when it returns."""
        return await self._group.all("offload")

    async def reload(self) -> list[Moved]:
        return await self._group.all("reload")

    async def end(self) -> None:
        """End the processes; done when they and their memory are gone."""
        await self._group.end()

    async def restart(self) -> list[Moved]:
        self._group.spawn()
        await self.start(self._kwargs)
        return []

    async def kill(self) -> None:
        """As `end`, for processes that may be dead or hang."""
        await self._group.end()

    async def memory(self) -> list[dict[str, float]]:
        """What each rank holds, as `device.memory_in_use`; empty while it is ended."""
        return await self._group.memory()

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
