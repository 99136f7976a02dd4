"""Log file, devices, network and end of the processes of Ray actors."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError


def log_to(path: str) -> None:
    """Send everything that this process and its children print to a file; `kill -USR1 PID` adds all threads' stacks."""
    import signal

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    context = ray.get_runtime_context()
    print(f"{Path(path).stem}: process {os.getpid()} on node {context.get_node_id()} ({host()})", flush=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def host() -> str:
    """Address of this node as the other nodes of the cluster see it."""
    return ray.util.get_node_ip_address()


def talk_through_node_address() -> None:
    """Have gloo, also in child processes, use the network that connects the nodes of the cluster.

    By default it takes the address of the host's name, which on many systems only the host can reach.
    """
    address = host()
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == address for known in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def wait_ended(pids: list[int], timeout_s: float) -> list[int]:
    """Wait until processes of this node have ended and freed their device memory. Returns: those that have not."""
    deadline = time.monotonic() + timeout_s
    while (alive := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive


async def wait_ended_on_nodes(
    pids: Mapping[str, list[int]], tasks_on: Mapping[str, Any], timeout_s: float
) -> list[int]:
    """Like `wait_ended`, for processes by node. Processes of a dead node have ended.

    Args: tasks_on: node -> Ray's scheduling strategy for a task there.
    """
    here = ray.get_runtime_context().get_node_id()
    waits = [
        asyncio.to_thread(wait_ended, some, timeout_s)
        if node == here
        else _wait_on_node(node, some, tasks_on[node], timeout_s)
        for node, some in pids.items()
    ]
    return [pid for some in await asyncio.gather(*waits) for pid in some]


async def _wait_on_node(node: str, pids: list[int], strategy: Any, timeout_s: float) -> list[int]:
    wait = ray.remote(wait_ended).options(num_cpus=0, scheduling_strategy=strategy)  # type: ignore[attr-defined]
    try:
        return await asyncio.wait_for(asyncio.wrap_future(wait.remote(pids, timeout_s).future()), 2 * timeout_s)
    except (RayError, TimeoutError):
        return pids if any(known["NodeID"] == node and known["Alive"] for known in ray.nodes()) else []


def _is_alive(pid: int) -> bool:
    """False for a zombie without threads too: it has freed everything, but its parent has not reaped it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
