"""Process of a rank or an engine: a Ray actor that makes one object and forwards calls to it.

The object's constructor must not fail: Ray keeps only the stack's text of an error in an actor's constructor.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pkgutil import resolve_name
from typing import Any

from skyrl_train.cluster.process import log_to, talk_through_node_address
from skyrl_train.device.memory import memory_in_use
from skyrl_train.device.nvml import DeviceUse, devices_in_use, gib

FIXES = (
    "Lower trainer.max_tokens_per_microbatch or logprobs_chunk_size of the model's megatron_config, recompute "
    "activations (recompute_granularity=full), split the model (tensor_, pipeline_ or context_parallel_size), or where "
    "engines share the device lower generator.gpu_memory_utilization"
)


class DeviceOutOfMemory(RuntimeError):
    """A GPU has not enough memory for a process's task."""


class Host:
    """Runs one call at a time."""

    def __init__(self, entry_point: str, log_path: str, visible_devices: str | None, *args: Any) -> None:
        """Args: entry_point: `module:Class`, called with args; visible_devices: None for Ray's choice."""
        if visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        log_to(log_path)
        talk_through_node_address()
        self._object: Any = resolve_name(entry_point)(*args)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._object, method)(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's; not every process has imported torch
                raise explained(error, memory_in_use(), _devices()) from error
            raise

    def call_and_keep(self, method: str, *args: Any) -> tuple[None, Any]:
        """Like `call`; the driver waits for the first result and passes a reference to the second on."""
        return None, self.call(method, *args)


class AsyncHost(Host):
    """Runs many calls at once, of an object whose methods are coroutines."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await super().call(method, *args, **kwargs)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        items = super().call(method, *args)
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()


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
