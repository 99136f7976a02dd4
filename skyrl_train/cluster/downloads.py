"""What nodes must have before a run trains on them: models of the hub, and folders that they share with the driver."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import ray
from ray.exceptions import RayError, RayTaskError

from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.process import on_node
from skyrl_train.config.training import TrainingConfig
from skyrl_train.hf.download import TIMEOUT, download
from skyrl_train.hf.hub import seen_from_anywhere

log = logging.getLogger(__name__)
GRACE_S = 60.0
"""Seconds for a node to start a process; added to a timeout of its own, so that its more specific error comes first."""


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


async def require_shared(trainer: TrainingConfig, ranks: Sequence[Slot]) -> None:
    """Raises: ValueError if ranks on other nodes would write checkpoints or exports that this node does not see, or if
    a node does not answer.
    """
    nodes = list({slot.node for slot in ranks} - {ray.get_runtime_context().get_node_id()})
    written = {"trainer.ckpt_path": trainer.ckpt_path} if trainer.ckpt_interval > 0 else {}
    written |= {"trainer.export_path": trainer.export_path} if trainer.hf_save_interval != 0 else {}
    if not nodes or not written:
        return
    with ExitStack() as stack:
        probes = {key: stack.enter_context(_probe(path)).name for key, path in written.items()}
        answers = await asyncio.gather(*(_missing_on(node, probes) for node in nodes))
    for node, missing in zip(nodes, answers, strict=True):
        if missing:
            raise ValueError(
                f"{missing[0]} is {written[missing[0]]}: ranks on node {_address(node)} would write there, and do not "
                "see this node's folder. Set trainer.run_dir to a folder that all nodes share, or write neither "
                "checkpoints nor exports (trainer.ckpt_interval=-1 trainer.hf_save_interval=0)"
            )


def _probe(path: str) -> IO[bytes]:
    """A file in the nearest folder that exists."""
    folder = Path(path).expanduser().resolve()
    return tempfile.NamedTemporaryFile(dir=next(each for each in (folder, *folder.parents) if each.is_dir()))


async def _missing_on(node: str, probes: Mapping[str, str]) -> list[str]:
    try:
        return await asyncio.wait_for(on_node(node, _missing, probes), GRACE_S)
    except (TimeoutError, RayError) as error:
        is_late = isinstance(error, TimeoutError)
        reason = f"no answer within {GRACE_S:g} s" if is_late else getattr(error, "cause", error)
        raise ValueError(f"node {_address(node)} cannot say if it sees {', '.join(probes)}: {reason}") from error


def _missing(probes: Mapping[str, str]) -> list[str]:
    return [key for key, probe in probes.items() if not Path(probe).exists()]


def _address(node: str) -> str:
    return next((str(each["NodeManagerAddress"]) for each in ray.nodes() if each["NodeID"] == node), node)
