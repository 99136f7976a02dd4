"""The one place that asks "is there a GPU". `memory`: the allocator and what it holds; `nvml`: who holds a device.
torch is imported inside the functions, because the driver and the configuration use this folder without it.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PEAK_FLOPS = {
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "L40S": 362e12,
}
"""Dense bf16 peak in FLOP/s by a part of the device's name (NVIDIA data sheets, without sparsity)."""


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
    """Dense bf16 FLOP/s of the device, None if unknown."""
    if device_type() == "cpu":
        return None
    import torch

    return peak_flops_of(torch.cuda.get_device_name())


def peak_flops_of(name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the driver's name for it; None if unknown, and for a part of a device (MIG)."""
    known = [part for part in PEAK_FLOPS if re.search(rf"\b{part}\b", name) and "MIG" not in name]
    return PEAK_FLOPS[max(known, key=len)] if known else None
