"""Log file, devices, network and end of the processes of Ray actors."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")


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


async def on_node(node: str, function: Callable[..., T], *args: Any) -> T:
    """Run a function on a node. Raises: RayError if that is another node, and dead."""
    if node == ray.get_runtime_context().get_node_id():  # a task would start a process of 2 s for it
        return await asyncio.to_thread(function, *args)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(function)
    task = task.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return await asyncio.wrap_future(task.remote(*args).future())


async def wait_ended_on_nodes(pids: Mapping[str, list[int]], timeout_s: float) -> list[int]:
    """Like `wait_ended`, for processes by node. Processes of a dead node have ended."""

    async def wait(node: str) -> list[int]:
        try:
            return await asyncio.wait_for(on_node(node, wait_ended, pids[node], timeout_s), 2 * timeout_s)
        except (RayError, TimeoutError):
            return pids[node] if node in alive_nodes() else []

    return [pid for remaining in await asyncio.gather(*map(wait, pids)) for pid in remaining]


def alive_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


def _is_alive(pid: int) -> bool:
    """False for a zombie without threads too: it has freed everything, but its parent has not reaped it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
