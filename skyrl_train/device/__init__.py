"""The one place that asks "is there a GPU". `memory`: the allocator and what it holds; `nvml`: who holds a device;
`kinds`: data sheets. torch is imported inside the functions, because the driver and the configuration use this folder
without it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from skyrl_train.device.kinds import device_kind

if TYPE_CHECKING:
    import torch


@functools.cache
def device_type() -> str:
    """ "cuda" or "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device() -> torch.device:
    """The device of this process; a GPU worker sees its own GPU as number 0 of CUDA_VISIBLE_DEVICES."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if device_type() == "cuda" else torch.device("cpu")


def synchronize() -> None:
    """Wait until the device has finished all its work."""
    if device_type() == "cuda":
        import torch

        torch.cuda.synchronize()


def peak_flops() -> float | None:
    """Dense bf16 FLOP/s of the device; None if unknown, and for a part of a device (MIG)."""
    if device_type() == "cpu":
        return None
    import torch

    kind = device_kind(torch.cuda.get_device_name())
    return None if kind is None else kind.tflops * 1e12
