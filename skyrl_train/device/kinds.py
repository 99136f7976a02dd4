"""Kinds of GPUs and what their data sheets say (kinds.yaml)."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from skyrl_train.device.nvml import devices_in_use


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """A kind of GPU. Units are those of the fields' names; G is 1e9, Gi 2**30."""

    name: str
    memory_gib: float
    tflops: float
    """Dense bfloat16 peak."""
    float32_tflops: float
    memory_gb_s: float
    capability: float
    """CUDA compute capability."""

    def in_dtype(self, width: int) -> DeviceKind:
        """Computing with elements of this many bytes: 2 or 4."""
        return self if width == 2 else replace(self, tflops=self.float32_tflops)


@functools.cache
def device_kinds() -> dict[str, DeviceKind]:
    """Part of the driver's name -> kind."""
    table = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text())
    return {name: DeviceKind(name=name, **values) for name, values in table.items()}


def device_kind(name: str) -> DeviceKind | None:
    """The kind by the driver's name, in any case; None if unknown, and for a part of a device (MIG)."""
    known = [part for part in device_kinds() if re.search(rf"\b{part}\b", name, re.IGNORECASE) and "MIG" not in name]
    return device_kinds()[max(known, key=len)] if known else None


def this_device() -> DeviceKind | None:
    """Kind of this machine's first GPU, with its own amount of memory; None if there is none or it is unknown."""
    try:
        first = devices_in_use(1)[0]
    except OSError:
        return None
    kind = device_kind(first.product)
    return None if kind is None else replace(kind, memory_gib=round(first.total_bytes / 2**30, 1))
