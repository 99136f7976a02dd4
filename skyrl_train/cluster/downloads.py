"""Models of the hub on every node that loads them, before its ranks and engines start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError, RayTaskError

from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.process import on_node
from skyrl_train.config.training import TrainingConfig
from skyrl_train.hf.download import TIMEOUT, download
from skyrl_train.hf.hub import seen_from_anywhere

log = logging.getLogger(__name__)
GRACE_S = 60.0
"""Additional seconds for a node to start the process and report its own, more specific timeout."""


@dataclass(frozen=True, slots=True)
class Load:
    """A model and the positions of the processes that load it."""

    key: str
    """Key of the path, for errors."""
    path: str
    slots: Sequence[Slot]


def policy_load(trainer: TrainingConfig, *slots: Slot) -> Load:
    """The policy's model. Connections to servers read its tokenizer."""
    return Load("trainer.policy.model.path", trainer.policy.model.path, slots)


async def download_to_nodes(loads: Iterable[Load], timeout_s: float) -> None:
    """Download each model once to each node, all at the same time. This node has them: the driver has checked them.

    Raises: ValueError that names the node if it cannot download, or not within timeout_s.
    """
    here = ray.get_runtime_context().get_node_id()
    wanted: dict[tuple[str, str], str] = {}
    for load in loads:
        path = seen_from_anywhere(load.path)
        if not path.startswith("/"):
            wanted |= {(slot.node, path): load.key for slot in load.slots if slot.node != here}
    if not wanted:
        return
    started = time.monotonic()
    nodes, models = len({node for node, _ in wanted}), ", ".join(sorted({path for _, path in wanted}))
    log.info("downloading %s to %d other node(s)", models, nodes)
    await asyncio.gather(*(_download(node, key, path, timeout_s) for (node, path), key in wanted.items()))
    log.info("%d other node(s) have %s after %.0f s", nodes, models, time.monotonic() - started)


async def _download(node: str, key: str, path: str, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(on_node(node, download, key, path, timeout_s), timeout_s + GRACE_S)
    except TimeoutError:
        raise ValueError(f"{TIMEOUT} is {timeout_s:g}: node {_address(node)} did not answer within it") from None
    except RayTaskError as error:
        raise ValueError(f"node {_address(node)}: {error.cause}") from error
    except RayError as error:
        raise ValueError(f"node {_address(node)} failed while it downloaded {path}: {error}") from error


def _address(node: str) -> str:
    return next((str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node), node)
