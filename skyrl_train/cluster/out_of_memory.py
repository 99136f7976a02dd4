"""Explains an out-of-memory error of a device: who holds the memory, and which keys reduce it."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.device.memory import memory_in_use
from skyrl_train.device.nvml import DeviceUse, devices_in_use, gib

FIXES = (
    "Lower trainer.max_tokens_per_microbatch or logprobs_chunk_size of the model's megatron_config, recompute "
    "activations (recompute_granularity=full), split the model (tensor_, pipeline_ or context_parallel_size), or where "
    "engines share the device lower generator.gpu_memory_utilization"
)


class DeviceOutOfMemory(RuntimeError):
    """A GPU has not enough memory for a process's task."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch ran out of GPU memory; by name, because not every process has imported torch."""
    return type(error).__name__ == "OutOfMemoryError"


def explained(error: BaseException, memory: dict[str, float], devices: Sequence[DeviceUse]) -> DeviceOutOfMemory:
    """Error with the holders of the device's memory, the keys that help, and torch's own message.

    Args: memory: `memory_in_use` of this process; devices: those that it sees.
    """
    holders = "; ".join(map(str, devices))
    return DeviceOutOfMemory(
        f"the device is out of memory. This process holds {gib(memory['allocated'])} GiB in tensors, of "
        f"{gib(memory['reserved'])} GiB reserved{f' ({holders})' if holders else ''}. {FIXES}. torch: {error}"
    )


def out_of_memory(error: BaseException) -> DeviceOutOfMemory:
    """`explained` with the current memory use."""
    try:
        devices = devices_in_use(1)
    except OSError:  # without NVML this process alone is known
        devices = []
    return explained(error, memory_in_use(), devices)
