"""The policy as the trainer sees it: calls on a step's shards, and the version of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from torch import Tensor

from skyrl_train.algorithms.objective import Objective
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.ranks import LogprobLimit, SavedState, UpdateReport
from skyrl_train.types import Metrics, TrainBatch


@dataclass(frozen=True, slots=True)
class UpdateReports:
    ranks: tuple[UpdateReport, ...]
    flops: float
    """Model FLOPs of the update, all ranks together."""

    @property
    def logprob_difference(self) -> float | None:
        """Mean |engine - trainer| of the compared tokens, before the update; None where none were compared."""
        return self.ranks[0].logprob_difference


class UpdateRefused(RuntimeError):
    """The samples' logprobs are beyond the limit. No weight, optimizer state or version has changed."""

    def __init__(self, difference: float) -> None:
        super().__init__(f"the logprobs of engine and trainer differ by {difference:.3g} nats in mean")
        self.difference = difference


class NoStepTaken(RemoteFailed):
    """An update failed on a rank before the first optimizer step of any rank. All ranks answer, with the weights and
    optimizer state of before; they cannot train further.
    """


@dataclass(slots=True)
class Versions:
    """Numbers under which engines serve the policy's weights; none is ever given to other weights."""

    current: int = 0
    """Version of the policy's weights: optimizer steps so far, plus skipped numbers."""
    last_given: int = 0
    """Highest version that engines may have served."""

    def advance(self, num_steps: int) -> None:
        self.current = max(self.current, self.last_given) + num_steps

    def give(self) -> int:
        """Return the current version, for engines that are about to serve it."""
        self.last_given = max(self.last_given, self.current)
        return self.current


class PolicyGroup(ModelGroup):
    """The trained model: logprobs and updates."""

    entry_point = "skyrl_train.megatron.policy:MegatronPolicy"

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group)
        self.versions = Versions()
        self.weights_lock = asyncio.Lock()
        """Held while the weights change, or while they must not."""
        self.sync_lock = asyncio.Lock()
        """Held while the ranks send weights to engines."""
        self.num_updates = 0
        """Number of updates that were begun, including failed ones."""

    async def start(self, kwargs: dict[str, Any], saved: SavedState | None = None) -> None:
        if saved is not None:
            self.versions.current = saved.num_steps
        await super().start(kwargs, saved)

    async def restart_from(self, folder: str | None, policy_version: int, num_steps: int) -> None:
        """Like `restart`, from the state of this version in `folder`, or from the initial model if None."""
        self._state_folder = folder
        self.versions.current, self.num_steps = policy_version, num_steps
        await self.restart()

    @property
    def policy_version(self) -> int:
        return self.versions.current

    async def keep_old_logprobs(
        self, shards: Shards, ref_logprobs: Sequence[Any] | None = None
    ) -> dict[str, list[Tensor]]:
        """Compute the logprobs that the next update compares with, and keep them on the ranks.

        Returns: name -> [T] of each shard, what `MegatronPolicy.keep_old_logprobs` reports.
        """
        refs = [None] * self.dp_size if ref_logprobs is None else ref_logprobs
        args = list(zip(self.of_rank(shards.refs), self.of_rank(refs), strict=True))
        reports = self.reported(await self.group.each("keep_old_logprobs", args))
        return {name: [report[name] for report in reports] for name in reports[0]}

    async def prompt_logprobs(self, batch: TrainBatch) -> Tensor:
        """Logprobs [T] of one batch at temperature 1; all data-parallel ranks compute the same."""
        return self.reported(await self.group.all("prompt_logprobs", ray.put(batch)))[0]

    async def evaluate(self, shards: Shards) -> float:
        """The objective over all shards, under the current weights."""
        args = [(ref,) for ref in self.of_rank(shards.refs)]
        return sum(self.reported(await self.group.each("evaluate", args)))

    async def update(
        self,
        shards: Shards,
        signals: Mapping[str, Sequence[Any]],
        epochs: int = 1,
        objective: Objective | None = None,
        limit: LogprobLimit | None = None,
    ) -> tuple[Metrics, UpdateReports]:
        """One optimizer step per mini-batch and epoch on all ranks, of the given objective or else the policy's own.

        Args: signals: name in TokenInputs -> a reference to the values [T] of each shard.
        Raises: UpdateRefused beyond the limit; the ranks are then as before. RemoteFailed: NoStepTaken if they can
            still be saved.
        """
        args = [(shard, epochs, objective, limit) for shard in self.of_rank(shards.refs)]
        own = [{name: refs[place.dp_rank] for name, refs in signals.items()} for place in self.ranks]
        async with self.weights_lock:
            self.num_updates += 1
            try:
                reports: list[UpdateReport] = await self.group.each("update", args, own)
            except RemoteFailed as error:
                if await self.have_taken(self.num_steps):
                    raise NoStepTaken(str(error)) from error
                raise
            difference = reports[0].logprob_difference
            if reports[0].is_refused:
                assert difference is not None
                self.num_updates -= 1
                raise UpdateRefused(difference)
            steps = epochs * len(shards.batches[0].mini_batches)
            self.num_steps += steps
            self.versions.advance(steps)
        metrics = next(report.metrics for report in reports if report.metrics)
        flops = sum(report.train_flops for report in self.reported(reports))
        return metrics, UpdateReports(tuple(reports), flops)

    async def save_hf(self, folder: str) -> None:
        await self.group.all("save_hf", folder)
