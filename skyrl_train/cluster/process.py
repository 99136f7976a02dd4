"""Processes of ranks and engines: the Ray actor that runs in each, its log file, network, devices and end."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.cancellation import in_thread
from skyrl_train.device.memory import memory_in_use
from skyrl_train.device.nvml import DeviceUse, devices_in_use, gib

T = TypeVar("T")
FIXES = (
    "Lower trainer.max_tokens_per_microbatch or logprobs_chunk_size of the model's megatron_config, recompute "
    "activations (recompute_granularity=full), keep Adam's moments on the host (optimizer_cpu_offload=true), split the "
    "model (tensor_, pipeline_ or context_parallel_size), or where engines share the device lower "
    "generator.gpu_memory_utilization"
)


class DeviceOutOfMemory(RuntimeError):
    """A GPU has not enough memory for a process's task."""


class Host:
    """A Ray actor that makes one object and forwards calls to it, one at a time. The object's constructor must not
    fail: Ray keeps only the stack's text of an error in an actor's constructor.
    """

    _name = "starting"

    def __init__(self, entry_point: str, log_path: str, visible_devices: str | None, *args: Any) -> None:
        """Args: entry_point: `module:Class`, called with args; visible_devices: None for Ray's choice."""
        self._name = Path(log_path).stem
        if visible_devices is None and (own := ray.get_runtime_context().get_accelerator_ids().get("GPU")):
            visible_devices = ",".join(own)  # Ray did it, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set
        if visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        log_to(log_path)
        talk_through_node_address()
        self._object: Any = resolve_name(entry_point)(*args)

    def __repr__(self) -> str:
        """Name in Ray's dashboard, `ray list actors` and logs, such as policy-0 or engine-1."""
        return self._name

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with _logged():
            return getattr(self._object, method)(*args, **kwargs)

    def call_and_keep(self, method: str, *args: Any) -> tuple[None, Any]:
        """Like `call`; the driver waits for the first result and passes a reference to the second on."""
        return None, self.call(method, *args)


class AsyncHost(Host):
    """Runs many calls at once, of an object whose methods are coroutines."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with _logged():
            return await getattr(self._object, method)(*args, **kwargs)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        with _logged():
            items = getattr(self._object, method)(*args)
            try:
                async for item in items:
                    yield item
            finally:
                await items.aclose()


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Print an error's traceback, because the driver's message names this process's log, and explain a full device."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        kind = type(error)  # torch's, which not every process has imported; Ray has one of the host
        if kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch"):
            raise explained(error, memory_in_use(), _devices()) from error
        raise


def explained(error: BaseException, memory: dict[str, float], devices: Sequence[DeviceUse]) -> DeviceOutOfMemory:
    """Error with the holders of the device's memory, the keys that help, and torch's own message.
    Args: memory: `memory_in_use` of this process; devices: those that it sees.
    """
    holders = "; ".join(map(str, devices))
    return DeviceOutOfMemory(
        f"the device is out of memory. This process holds {gib(memory['allocated'])} GiB in tensors, of "
        f"{gib(memory['reserved'])} GiB reserved{f' ({holders})' if holders else ''}. {FIXES}. torch: {error}"
    )


def _devices() -> Sequence[DeviceUse]:
    try:
        return devices_in_use(1)
    except OSError:  # without NVML only this process's memory is known
        return []


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
    """Have gloo, also in child processes, use the network that connects the nodes of the cluster. By default it takes
    the address of the host's name, which on many systems only the host can reach.
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
        return await in_thread(function, *args)
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
