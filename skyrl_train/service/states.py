"""Files of the trainer state that a service saves after each job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from pathlib import Path

from skyrl_train.cluster.process import alive_nodes, on_node
from skyrl_train.config.rl import TrainerConfig

log = logging.getLogger(__name__)

REMOVE_S = 60
"""Timeout for nodes that remove a service's states."""
STATE_FOLDERS = ("a", "b")
"""Subfolders: a service writes into one while the other is complete."""


def states_folder(config: TrainerConfig) -> str:
    """Folder of a service's states, the same on every node. It differs for each trainer.run_name, and for services of
    one name whose runs have other folders: of those with the same on one machine, only one runs.
    """
    state_path, run_dir = (Path(path).expanduser().resolve() for path in (config.placement.state_path, config.run_dir))
    return str(state_path / f"{config.run_name}-{zlib.crc32(str(run_dir).encode()):08x}")


async def remove_states(config: TrainerConfig) -> None:
    """Delete the states of a service on all nodes, and the empty folders that are left of them.

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
        for states in (Path(folder, name) for name in STATE_FOLDERS):
            for file in (*states.glob("rank_*.pt"), *states.glob("rank_*.tmp")):
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                states.rmdir()
        for empty in (Path(folder), *Path(folder).parents):
            if not empty.is_relative_to(kept) or empty == Path(kept):
                break
            empty.rmdir()
