"""Kind of a run's GPUs: those of this machine, or those of the Ray cluster that the run has joined."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from skyrl_train.cluster.session import known_device_type
from skyrl_train.device.kinds import DeviceKind, this_device

log = logging.getLogger(__name__)
KIND = "accelerator_type:"
"""Prefix of the resource by which Ray names the accelerators of a node."""
ANSWER_S = 60.0
"""Timeout for the nodes' answers."""


def local_gpu_kind() -> DeviceKind | None:
    """Kind of this machine's GPUs if the run certainly uses them; None without a GPU, and for an unknown kind."""
    return this_device() if known_device_type() == "cuda" else None


async def cluster_gpu_kind(ask: Callable[[], DeviceKind | None] = this_device) -> DeviceKind | None:
    """Kind of the GPUs of the joined cluster, of several the one with the least memory; None without GPUs, for an
    unknown kind, and if a node does not answer (with a warning).

    Args: ask: runs in a task on one node of each kind.
    """
    kinds = [name for name in ray.cluster_resources() if name.startswith(KIND)]
    task = ray.remote(num_cpus=0, max_retries=0)(_answer)
    refs = [task.options(resources={name: 0.001}).remote(ask) for name in kinds]
    try:
        found = await asyncio.wait_for(asyncio.gather(*refs), ANSWER_S)
    except (RayError, TimeoutError) as error:
        for ref in refs:
            ray.cancel(ref, force=True)
        reason = str(error) or f"no answer within {ANSWER_S:g} s"
        log.warning("the nodes did not report their GPUs (%s), so open keys are not chosen for them", reason)
        return None
    if not found or None in found:
        return None
    return min(found, key=lambda kind: kind.memory_gib)


def _answer(ask: Callable[[], DeviceKind | None]) -> DeviceKind | None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # Ray hides a node's GPUs from tasks that reserve none
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return ask()
