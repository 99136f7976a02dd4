"""How trainers give their devices to the engines out of their turn, and take them again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from skyrl_train.cluster.policy_group import PolicyGroup, ReferenceGroup
from skyrl_train.config import PlacementConfig
from skyrl_train.ranks import Moved

WEIGHTS, OPTIMIZER = "weights", "optimizer"


class Release(Protocol):
    """Moves `parts` of the policy ("weights", "optimizer", or both), or the whole reference.

    A call returns when the memory is free or taken, with the bytes of all ranks and its wall-clock seconds.
    """

    async def leave(self, group: PolicyGroup | ReferenceGroup, *parts: str) -> Moved: ...

    async def enter(self, group: PolicyGroup | ReferenceGroup, *parts: str) -> Moved: ...

    def close(self) -> None:
        """The run is over."""


class Stay:
    """Trainers keep their memory; the engines' share must leave room for it."""

    async def leave(self, group: PolicyGroup | ReferenceGroup, *parts: str) -> Moved:
        return Moved(0, 0.0)

    async def enter(self, group: PolicyGroup | ReferenceGroup, *parts: str) -> Moved:
        return Moved(0, 0.0)

    def close(self) -> None:
        """Nothing lies anywhere."""


class Offload:
    """To pinned host memory. What is left is CUDA's context and the buffers of NCCL."""

    async def leave(self, group: PolicyGroup | ReferenceGroup, *parts: str) -> Moved:
        started = time.perf_counter()
        return _together(await group.offload(*parts), started)

    async def enter(self, group: PolicyGroup | ReferenceGroup, *parts: str) -> Moved:
        started = time.perf_counter()
        return _together(await group.reload(*parts), started)

    def close(self) -> None:
        """Host memory ends with its processes."""


class Exit:
    """The processes end, so nothing at all is left; the next turn starts new ones with the same state."""

    def __init__(self, state_path: str) -> None:
        """Args: state_path of a folder that this run alone uses, on every node."""
        self._state_path = str(Path(state_path).expanduser().resolve())
        self._optimizer_is_gone = False

    async def leave(self, group: PolicyGroup | ReferenceGroup, *parts: str) -> Moved:
        """The policy's optimizer leaves alone while its weights are still to be sent: its state is written then."""
        started, moved = time.perf_counter(), []
        if not group.is_running:
            return Moved(0, 0.0)
        if isinstance(group, PolicyGroup) and group.has_changed:
            moved = await group.save_state(self._state_path)
        if parts == (OPTIMIZER,) and isinstance(group, PolicyGroup):
            await group.drop(OPTIMIZER)
            self._optimizer_is_gone = True
        else:
            await group.end()
        return _together(moved, started)

    async def enter(self, group: PolicyGroup | ReferenceGroup, *parts: str) -> Moved:
        started = time.perf_counter()
        if isinstance(group, PolicyGroup):
            if group.is_running and OPTIMIZER in parts and self._optimizer_is_gone:
                await group.end()
            self._optimizer_is_gone &= group.is_running
        return _together([] if group.is_running else await group.restart(), started)

    def close(self) -> None:
        """Remove the state, on this node."""
        shutil.rmtree(self._state_path, ignore_errors=True)


def build_release(config: PlacementConfig) -> Release:
    if config.release == "exit":
        return Exit(config.state_path)
    return Offload() if config.release == "offload" else Stay()


def _together(moved: Sequence[Moved], started: float) -> Moved:
    return Moved(sum(one.num_bytes for one in moved), time.perf_counter() - started)
