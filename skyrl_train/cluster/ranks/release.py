"""How trainers give their devices to the engines out of their turn, and take them again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.ranks import OPTIMIZER, Moved

REMOVE_S = 60
"""Patience with nodes that remove a run's states."""
STATE_FOLDERS = ("a", "b")
"""Of a service, in the folder of its states: it writes into one while the other is whole."""


class Release(Protocol):
    """Moves `parts` of the policy ("weights", "optimizer", or both), or the whole reference.

    A call returns when the memory is free or taken, with the bytes of all ranks and its wall-clock seconds.
    """

    async def leave(self, group: ModelGroup, *parts: str) -> Moved: ...

    async def enter(self, group: ModelGroup, *parts: str) -> Moved: ...

    async def close(self) -> None:
        """The run is over, and its processes have ended."""


class KeepResident:
    """Trainers keep their memory; the engines' share must leave room for it."""

    async def leave(self, group: ModelGroup, *parts: str) -> Moved:
        return Moved(0, 0.0)

    async def enter(self, group: ModelGroup, *parts: str) -> Moved:
        return Moved(0, 0.0)

    async def close(self) -> None:
        """Nothing lies anywhere."""


class Offload:
    """To pinned host memory. What is left is CUDA's context and the buffers of NCCL."""

    async def leave(self, group: ModelGroup, *parts: str) -> Moved:
        started = time.perf_counter()
        return _together(await group.offload(*parts), started)

    async def enter(self, group: ModelGroup, *parts: str) -> Moved:
        started = time.perf_counter()
        return _together(await group.reload(*parts), started)

    async def close(self) -> None:
        """Host memory ends with its processes."""


class Exit:
    """The processes end, so nothing at all is left; the next turn starts new ones with the same state."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config, self._folder = config, states_folder(config)
        self._without_optimizer: set[ModelGroup] = set()

    async def leave(self, group: ModelGroup, *parts: str) -> Moved:
        """The policy's optimizer leaves alone while its weights are still to be sent: its state is written then."""
        started, moved = time.perf_counter(), []
        if not group.is_running:
            return Moved(0, 0.0)
        if group.has_changed:
            moved = await group.save_state(self._folder)
        if parts == (OPTIMIZER,):
            await group.drop(OPTIMIZER)
            self._without_optimizer.add(group)
        else:
            await group.end()
        return _together(moved, started)

    async def enter(self, group: ModelGroup, *parts: str) -> Moved:
        started = time.perf_counter()
        if group.is_running and OPTIMIZER in parts and group in self._without_optimizer:
            await group.end()
        if group.is_running:
            return _together([], started)
        self._without_optimizer.discard(group)
        return _together(await group.restart(), started)

    async def close(self) -> None:
        await remove_states(self._config)


def build_release(config: TrainerConfig) -> Release:
    release = config.placement.release
    if release == "exit":
        return Exit(config)
    return Offload() if release == "offload" else KeepResident()


def states_folder(config: TrainerConfig) -> str:
    """The same on every node. Runs that share trainer.placement.state_path have folders of their names in it."""
    return str(Path(config.placement.state_path).expanduser().resolve() / config.run_name)


async def remove_states(config: TrainerConfig) -> None:
    """Delete the states of a run on all nodes, and the folders that were made for them and are empty then.

    A trainer.placement.state_path outside of the run's folder stays: it may be the user's.
    """
    folder = states_folder(config)
    state_path, run_dir = (Path(one).expanduser().resolve() for one in (config.placement.state_path, config.run_dir))
    kept = str(run_dir if state_path.is_relative_to(run_dir) else state_path)
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    remove = ray.remote(_remove)
    answers = [
        remove.options(  # type: ignore[attr-defined]
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(folder, kept)
        for node in others
    ]
    await asyncio.to_thread(_remove, folder, kept)
    if answers:
        await asyncio.wait([asyncio.wrap_future(one.future()) for one in answers], timeout=REMOVE_S)


def _remove(folder: str, kept: str) -> None:
    """Remove what ranks wrote there and nothing else, then empty folders from `folder` up to that which is kept."""
    with contextlib.suppress(OSError):
        for one in (Path(folder), *(Path(folder, name) for name in STATE_FOLDERS)):
            for file in (*one.glob("rank_*.pt"), *one.glob("rank_*.tmp")):
                file.unlink(missing_ok=True)
        for name in STATE_FOLDERS:
            with contextlib.suppress(OSError):
                Path(folder, name).rmdir()
        for one in (Path(folder), *Path(folder).parents):
            if not one.is_relative_to(kept) or one == Path(kept):
                break
            one.rmdir()


def _together(moved: Sequence[Moved], started: float) -> Moved:
    return Moved(sum(one.num_bytes for one in moved), time.perf_counter() - started)
