"""Frees the devices of idle trainers for the engines, and takes them back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.cluster.process import alive_nodes, on_node
from skyrl_train.cluster.ranks.critic_group import CriticGroup
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.ranks import OPTIMIZER, Moved

log = logging.getLogger(__name__)

REMOVE_S = 60
"""Timeout for nodes that remove a run's states."""
STATE_FOLDERS = ("a", "b")
"""Subfolders of a service's states: it writes into one while the other is complete."""
SUBFOLDERS = (*STATE_FOLDERS, CriticGroup.state_folder)


class Release:
    """Moves `parts` of the policy ("weights", "optimizer", or both), or another whole model, off the devices and back.

    A call returns when the memory is free or taken, with the bytes of all ranks and its wall-clock seconds. This base
    keeps everything resident: the engines' fraction of the memory must leave room for it.
    """

    restarts = False
    """Whether what enters is a new process, which holds all parts."""

    async def leave(self, group: ModelGroup, *parts: str) -> Moved:
        return Moved(0, 0.0)

    async def enter(self, group: ModelGroup, *parts: str) -> Moved:
        return Moved(0, 0.0)

    async def close(self) -> None:
        """Clean up after the run, when its processes have ended."""


class Offload(Release):
    """To pinned host memory; CUDA's context and the buffers of NCCL stay."""

    async def leave(self, group: ModelGroup, *parts: str) -> Moved:
        started = time.perf_counter()
        return _together(await group.offload(*parts), started)

    async def enter(self, group: ModelGroup, *parts: str) -> Moved:
        started = time.perf_counter()
        return _together(await group.reload(*parts), started)


class Exit(Release):
    """The processes end, so nothing stays; the next phase starts new ones with the same state."""

    restarts = True

    def __init__(self, config: TrainerConfig) -> None:
        self._config, self._folder = config, states_folder(config)
        self._without_optimizer: set[ModelGroup] = set()

    async def leave(self, group: ModelGroup, *parts: str) -> Moved:
        """The policy's optimizer leaves alone while its weights are still to be sent; its state is written then."""
        started, moved = time.perf_counter(), []
        if not group.is_running:
            return Moved(0, 0.0)
        if group.has_changed:
            moved = await group.save_state(str(Path(self._folder, group.state_folder)))
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
    return Offload() if release == "offload" else Release()


def states_folder(config: TrainerConfig) -> str:
    """Folder of a run's states, the same on every node and different for each trainer.run_name."""
    return str(Path(config.placement.state_path).expanduser().resolve() / config.run_name)


async def remove_states(config: TrainerConfig) -> None:
    """Delete the states of a run on all nodes, and the empty folders that are left of them.

    A trainer.placement.state_path outside of the run's folder stays: it may be the user's.
    """
    folder = states_folder(config)
    state_path, run_dir = (Path(path).expanduser().resolve() for path in (config.placement.state_path, config.run_dir))
    kept = str(run_dir if state_path.is_relative_to(run_dir) else state_path)
    removals = (on_node(node, _remove, folder, kept) for node in alive_nodes())
    try:
        await asyncio.wait_for(asyncio.gather(*removals, return_exceptions=True), REMOVE_S)
    except TimeoutError:
        log.warning("%s was not removed on every node within %d s. Remove what is left of it", folder, REMOVE_S)


def _remove(folder: str, kept: str) -> None:
    """Remove the files of ranks and nothing else, then empty folders from `folder` up to `kept`."""
    with contextlib.suppress(OSError):
        for states in (Path(folder), *(Path(folder, name) for name in SUBFOLDERS)):
            for file in (*states.glob("rank_*.pt"), *states.glob("rank_*.tmp")):
                file.unlink(missing_ok=True)
        for name in SUBFOLDERS:
            with contextlib.suppress(OSError):
                Path(folder, name).rmdir()
        for empty in (Path(folder), *Path(folder).parents):
            if not empty.is_relative_to(kept) or empty == Path(kept):
                break
            empty.rmdir()


def _together(moved: Sequence[Moved], started: float) -> Moved:
    return Moved(sum(part.num_bytes for part in moved), time.perf_counter() - started)
