"""The policy as the trainer sees it: a few calls on a step's shards, and its weights on their way to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from skyrl_train.algorithms.objective import Objective
from skyrl_train.cluster.pool.engine_group import EngineGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.ranks.worker_group import IDLE_S, WorkerGroup
from skyrl_train.cluster.weight_way import SyncResult, WeightWay
from skyrl_train.file_sum import FileSum
from skyrl_train.ranks import LogprobLimit, Moved, ParallelRanks, SavedState, UpdateReport
from skyrl_train.types import Metrics, TrainBatch


@dataclass(frozen=True, slots=True)
class UpdateTotals:
    """Speed of an update over all ranks."""

    bubble: float
    """Share of the time inside Megatron's schedules in which ranks did not compute, mean over ranks."""
    mfu: float | None
    """Model FLOPs of the update over what the devices could have done in its time; None where their peak is not
    known."""
    logprob_difference: float | None = None
    """Mean |engine - trainer| of the compared tokens, before the update; None where none were compared."""


class UpdateRefused(RuntimeError):
    """The samples' logprobs are beyond the limit. No weight, optimizer state or version has changed."""

    def __init__(self, difference: float) -> None:
        super().__init__(f"the logprobs of engine and trainer differ by {difference:.3g} nats in mean")
        self.difference = difference


class PolicyGroup:
    """The trained model: logprobs, updates and its weights on their way to the engines."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._ranks: list[ParallelRanks] = []
        self._kwargs: dict[str, Any] = {}
        self._way: WeightWay | None = None
        """To the engines."""
        self._state_folder: str | None = None
        self.policy_version = 0
        """Under which the weights are served: optimizer steps, and numbers left out since they were other weights'."""
        self.num_steps = 0
        """Optimizer steps in the weights."""
        self._last_given = 0
        """The highest version under which engines may have served weights."""
        self.has_changed = False
        """Whether there were updates since the last `save_state`."""
        self.num_updates = 0
        """Updates that were begun, also those that failed."""

    async def start(self, kwargs: dict[str, Any], saved: SavedState | None = None) -> None:
        """Build the ranks and, if there is one, have them go on from a saved state."""
        self._kwargs = kwargs
        if saved is not None:
            self._state_folder = saved.folder
            self.policy_version = self.num_steps = saved.policy_version
        await self._build()

    async def _build(self) -> list[Moved]:
        self._ranks = await self._group.build("skyrl_train.megatron.policy:MegatronPolicy", self._kwargs)
        if self._state_folder is None:
            return []
        return await self._group.all("load_state", self._state_folder, self.num_steps)

    @property
    def group(self) -> WorkerGroup:
        return self._group

    @property
    def ranks(self) -> list[ParallelRanks]:
        """Where each rank stands, once started."""
        return self._ranks

    @property
    def is_running(self) -> bool:
        """False from `end` to `restart`."""
        return bool(self._group.actors)

    async def offload(self, *parts: str) -> list[Moved]:
        """Free the device's memory of "weights", "optimizer" or both on every rank; done when it returns."""
        return await self._group.all("offload", *parts)

    async def reload(self, *parts: str) -> list[Moved]:
        return await self._group.all("reload", *parts)

    async def drop(self, *parts: str) -> None:
        """As `offload` without a copy, for processes that will end."""
        await self._group.all("drop", *parts)

    async def save_state(self, folder: str) -> list[Moved]:
        """Write what `restart` goes on with."""
        moved = await self._group.all("save_state", folder)
        self._state_folder, self.has_changed = folder, False
        return moved

    async def copy_state(self, folder: str) -> list[FileSum]:
        """Write the same for a checkpoint, which survives this run and a loss of power; `restart` still uses what it
        had. Returns size and digest of the file of each rank."""
        return await self._group.all("copy_state", folder)

    async def end(self) -> None:
        """End the processes; done when they and their memory are gone."""
        assert not self.has_changed, "updates would be lost: save_state first"
        await self._group.end()

    async def restart(self) -> list[Moved]:
        """New processes with the saved state."""
        if self._way is not None:
            self._way.forget()
        self._group.spawn()
        return await self._build()

    async def kill(self) -> None:
        """As `end`, for processes that may be dead or hang; updates since the last `save_state` are lost."""
        await self._group.end()

    async def restart_from(self, folder: str | None, policy_version: int, num_steps: int) -> None:
        """As `restart`, from the state in `folder`, which is of this version and so many optimizer steps; None means
        the model as it came. Versions that engines were given since are given to no other weights."""
        self._state_folder, self.has_changed = folder, False
        self.policy_version, self.num_steps = policy_version, num_steps
        await self.restart()

    async def memory(self) -> list[dict[str, float]]:
        """What each rank holds, as `device.memory_in_use`; empty while it is ended."""
        return await self._group.memory()

    async def is_idle(self, timeout_s: float = IDLE_S) -> bool:
        """Whether every rank answers by then: none is dead, or waits in a collective for one that failed."""
        return await self._group.is_idle(timeout_s)

    @property
    def dp_size(self) -> int:
        return self._ranks[0].dp_size

    def _of_rank(self, per_shard: Sequence[Any]) -> list[Any]:
        return [per_shard[place.dp_rank] for place in self._ranks]

    async def keep_old_logprobs(self, shards: Shards, ref_logprobs: Sequence[Any] | None = None) -> Tensor | None:
        """Have every rank compute and keep the logprobs that the next update compares with.

        Returns: with reference logprobs, the KL of each sample [B] (the estimator summed over the policy's tokens).
        """
        refs = [None] * self.dp_size if ref_logprobs is None else ref_logprobs
        args = list(zip(self._of_rank(shards.refs), self._of_rank(refs), strict=True))
        results = await self._group.each("keep_old_logprobs", args)
        if ref_logprobs is None:
            return None
        kl = torch.zeros(sum(len(batch.sample_ids) for batch in shards.batches))
        for place, result in zip(self._ranks, results, strict=True):
            if place.reports:
                kl[shards.batches[place.dp_rank].sample_ids] = result
        return kl

    async def logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [T] of one batch at temperature 1; all data-parallel ranks compute the same."""
        ref = ray.put(batch)
        results = await self._group.each("logprobs", [(ref,)] * len(self._ranks))
        return next(result for place, result in zip(self._ranks, results, strict=True) if place.reports)

    async def evaluate(self, shards: Shards) -> float:
        """The objective's policy term over all shards, under the current weights."""
        args = [(ref,) for ref in self._of_rank(shards.refs)]
        results = await self._group.each("evaluate", args)
        return sum(result for place, result in zip(self._ranks, results, strict=True) if place.reports)

    async def update(
        self,
        shards: Shards,
        ref_logprobs: Sequence[Any] | None,
        epochs: int,
        objective: Objective | None = None,
        limit: LogprobLimit | None = None,
    ) -> tuple[Metrics, UpdateTotals]:
        """One optimizer step per mini-batch and epoch on all ranks, of the given objective or else the policy's own.

        Raises: UpdateRefused beyond the limit; the ranks are then as before.
        """
        refs = [None] * self.dp_size if ref_logprobs is None else ref_logprobs
        given = zip(self._of_rank(shards.refs), self._of_rank(refs), strict=True)
        args = [(s, r, epochs, objective, limit) for s, r in given]
        had_changed, self.has_changed = self.has_changed, True
        self.num_updates += 1
        reports: list[UpdateReport] = await self._group.each("update", args)
        difference = reports[0].logprob_difference
        if reports[0].is_refused:
            assert difference is not None
            self.has_changed = had_changed
            self.num_updates -= 1
            raise UpdateRefused(difference)
        steps = epochs * len(shards.batches[0].mini_batches)
        self.num_steps += steps
        self.policy_version = max(self.policy_version, self._last_given) + steps
        metrics = next(report.metrics for report in reports if report.metrics)
        flops = sum(r.train_flops for place, r in zip(self._ranks, reports, strict=True) if place.reports)
        schedule = sum(report.schedule_seconds for report in reports)
        bubble = 1 - sum(report.busy_seconds for report in reports) / schedule if schedule else 0.0
        seconds = max(report.seconds for report in reports)
        peaks = [report.peak_flops for report in reports]
        mfu = None if None in peaks else flops / (seconds * sum(peak for peak in peaks if peak is not None))
        return metrics, UpdateTotals(max(0.0, bubble), mfu, difference)

    async def connect_engines(self, engines: EngineGroup, backend: str, bucket_bytes: int, timeout_s: float) -> None:
        """Open the way for weights; `send_weights` does it for processes that are started later. Args: as WeightWay."""
        self._way = WeightWay(self._group, self._ranks, engines, backend, bucket_bytes, timeout_s)
        if self.is_running:
            await self._way.connect()

    async def send_weights(self, dtype_name: str) -> SyncResult:
        """Move the current weights into the running engines and have them served as the current version.

        Raises: as WeightWay.send.
        """
        assert self._way is not None, "call connect_engines first"
        self._last_given = max(self._last_given, self.policy_version)
        return await self._way.send(dtype_name, self.policy_version)

    async def save_hf(self, folder: str) -> None:
        """Write a Hugging Face checkpoint of the current weights."""
        await self._group.all("save_hf", folder)
