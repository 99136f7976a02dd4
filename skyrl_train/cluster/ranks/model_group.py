"""The processes of one model: started, ended, and started again from the state that they saved."""

from __future__ import annotations

from typing import Any

from skyrl_train.cluster.ranks.worker_group import IDLE_S, WorkerGroup
from skyrl_train.file_sum import FileSum
from skyrl_train.ranks import Moved, ParallelRanks


class ModelGroup:
    """What policy and reference have in common; they say what is computed."""

    entry_point: str
    """`module:Class` of each rank's worker."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._ranks: list[ParallelRanks] = []
        self._kwargs: dict[str, Any] = {}
        self._state_folder: str | None = None
        """Where a restart finds the state; None means the model as it came."""
        self.num_starts = 0
        """Times that processes were started: whatever was connected with earlier ones is gone."""
        self.num_steps = 0
        """Optimizer steps in the weights."""
        self.has_changed = False
        """Whether there were updates since the last `save_state`."""

    async def start(self, kwargs: dict[str, Any]) -> None:
        """Build the ranks."""
        self._kwargs = kwargs
        await self._build()

    async def _build(self) -> list[Moved]:
        self.num_starts += 1
        self._ranks = await self._group.build(self.entry_point, self._kwargs)
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
        """Free the device's memory on every rank; done when it returns. Args: parts: "weights", "optimizer" or both, of
        a policy."""
        return await self._group.all("offload", *parts)

    async def reload(self, *parts: str) -> list[Moved]:
        return await self._group.all("reload", *parts)

    async def drop(self, *parts: str) -> None:
        """As `offload` without a copy, for processes that will end."""
        await self._group.all("drop", *parts)

    async def save_state(self, folder: str) -> list[Moved]:
        """Write what `restart` starts from."""
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

    async def kill(self) -> None:
        """As `end`, for processes that may be dead or hang; updates since the last `save_state` are lost."""
        await self._group.end()

    async def restart(self) -> list[Moved]:
        """New processes with the saved state."""
        self._group.spawn()
        return await self._build()

    async def memory(self) -> list[dict[str, float]]:
        """What each rank holds, as `device.memory_in_use`; empty while it is ended."""
        return await self._group.memory()

    async def is_idle(self, timeout_s: float = IDLE_S) -> bool:
        """Whether every rank answers by then: none is dead, or waits in a collective for one that failed."""
        return await self._group.is_idle(timeout_s)
