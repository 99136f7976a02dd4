"""What to say where a device has no memory left."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.device.memory import memory_in_use
from skyrl_train.device.nvml import DeviceUse, devices_in_use, gib

CURES = (
    "lower trainer.max_tokens_per_microbatch or logprobs_chunk_size of the model's megatron_config, recompute "
    "activations (recompute_granularity=full), split the model (tensor_, pipeline_ or context_parallel_size), or where "
    "engines share the device lower generator.gpu_memory_utilization"
)


class DeviceOutOfMemory(RuntimeError):
    """A GPU has no memory for what a process was asked to do."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory on a GPU. By name: not every process has imported torch."""
    return type(error).__name__ == "OutOfMemoryError"


def explained(error: BaseException, memory: dict[str, float], devices: Sequence[DeviceUse]) -> DeviceOutOfMemory:
    """Who holds the device's memory, which keys help, and torch's own words.

    Args: memory: as `memory_in_use` of this process; devices: those that it sees.
    """
    holders = "; ".join(map(str, devices))
    return DeviceOutOfMemory(
        f"the device has no memory left. This process holds {gib(memory['allocated'])} GiB in tensors, of "
        f"{gib(memory['reserved'])} GiB that it has reserved{f' ({holders})' if holders else ''}. "
        f"To need less: {CURES}. torch: {error}"
    )


def out_of_memory(error: BaseException) -> DeviceOutOfMemory:
    """`explained` by what holds memory now."""
    try:
        devices = devices_in_use(1)
    except OSError:  # without NVML this process alone is known
        devices = []
    return explained(error, memory_in_use(), devices)
