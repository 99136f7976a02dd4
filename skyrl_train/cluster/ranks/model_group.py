"""The processes of one model: started, killed, and restarted from the state that they saved."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.file_sum import FileSum
from skyrl_train.ranks import Moved, ParallelRanks, SavedState

IDLE_S = 20
"""Longest time in which an idle rank answers."""


class ModelGroup:
    """Life of the ranks of one model; subclasses add what they compute."""

    entry_point: str
    """`module:Class` of each rank's worker."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.ranks: list[ParallelRanks] = []
        """Position of each rank in the layout, once started."""
        self._kwargs: dict[str, Any] = {}
        self._state_folder: str | None = None
        """Source of the state after a restart; None for the initial model."""
        self.num_starts = 0
        """Number of times the processes were started; each start invalidates the connections of the last."""
        self.num_steps = 0
        """Optimizer steps in the weights."""

    async def start(self, kwargs: dict[str, Any], saved: SavedState | None = None) -> None:
        if saved is not None:
            # A later checkpoint may remove the folder.
            self._state_folder, self.num_steps = saved.folder, saved.num_steps
        self._kwargs = kwargs
        await self._build()

    async def _build(self) -> None:
        self.num_starts += 1
        self.ranks = await self.group.build(self.entry_point, self._kwargs)
        if self._state_folder is not None:
            await self.group.all("load_state", self._state_folder, self.num_steps)

    def reported(self, results: Sequence[Any]) -> list[Any]:
        """The results of those ranks that report, one per data-parallel shard, of the results of all ranks."""
        of_shard = {place.dp_rank: result for place, result in zip(self.ranks, results, strict=True) if place.reports}
        return [of_shard[shard] for shard in sorted(of_shard)]

    @property
    def dp_size(self) -> int:
        return self.ranks[0].dp_size

    def of_rank(self, per_shard: Sequence[Any]) -> list[Any]:
        """The element of each rank's data-parallel shard."""
        return [per_shard[place.dp_rank] for place in self.ranks]

    async def offload(self, *parts: str) -> Moved:
        """Free the device memory of every rank. Args: parts: "weights", "optimizer" or both, for a policy; none: all.

        Returns: bytes of all ranks and wall-clock seconds.
        """
        return await self._move("offload", parts)

    async def reload(self, *parts: str) -> Moved:
        """Restore what was offloaded. Args, Returns: like `offload`."""
        return await self._move("reload", parts)

    async def _move(self, method: str, parts: Sequence[str]) -> Moved:
        started = time.perf_counter()
        moved: list[Moved] = await self.group.all(method, *parts)
        return Moved(sum(part.num_bytes for part in moved), time.perf_counter() - started)

    async def save_state(self, folder: str) -> None:
        """Write the state that `restart` loads."""
        await self.group.all("save_state", folder)
        self._state_folder = folder

    async def copy_state(self, folder: str) -> list[FileSum]:
        """Write the state durably for a checkpoint, which `restart` does not use. Returns: sum of each rank's file."""
        return await self.group.all("copy_state", folder)

    async def kill(self) -> None:
        """End the processes, which may be dead or hang; return when they and their memory are gone. Updates since the
        last `save_state` are lost.
        """
        await self.group.end()

    async def restart(self) -> None:
        """Start new processes with the saved state."""
        self.group.spawn()
        await self._build()

    async def memory(self) -> list[dict[str, float]]:
        """`device.memory_in_use` of each rank; empty from `kill` to `restart`."""
        return await self.group.all("memory") if self.group.actors else []

    async def is_idle(self, timeout_s: float = IDLE_S) -> bool:
        """Whether every rank answers in time: none is dead, computes, or waits in a collective for one that failed."""
        try:
            await self.group.places(timeout_s)
        except RemoteFailed:
            return False
        return True

    async def have_taken(self, num_steps: int) -> bool:
        """Whether every rank answers like in `is_idle`, and has begun this number of optimizer steps."""
        try:
            return set(await self.group.all("steps_begun", timeout_s=IDLE_S)) == {num_steps}
        except RemoteFailed:
            return False
