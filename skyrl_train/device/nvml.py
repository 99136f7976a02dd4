"""Memory use of this process's GPUs, from the driver's management library (NVML). CUDA reports it too, but its context
takes half a GiB of the device for the life of the process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_PROCESSES = 64
MAX_NAME = 96
"""Bytes of the driver's name for a device."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Memory use of one GPU."""

    name: str
    """Number or UUID, as in CUDA_VISIBLE_DEVICES."""
    free_bytes: int
    total_bytes: int
    holders: tuple[tuple[int, int], ...] = ()
    """(process id, bytes) of processes that the driver reports, the largest first; ids of the host, not a container."""
    product: str = ""
    """The driver's name for this kind of GPU."""

    def __str__(self) -> str:
        used = f"GPU {self.name}: {gib(self.free_bytes)} of {gib(self.total_bytes)} GiB are free"
        held = ", ".join(f"process {pid} holds {gib(num_bytes)}" for pid, num_bytes in self.holders)
        return f"{used} ({held})" if held else used


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_UNKNOWN = ctypes.c_ulonglong(-1).value


def devices_in_use(num_devices: int, library: Any = None) -> list[DeviceUse]:
    """Memory use of the first devices that this process sees, in the order of CUDA_VISIBLE_DEVICES.

    Numbers are NVML's, which equal CUDA's if all GPUs of a machine are of one kind.
    Args: library: NVML, for tests.
    Raises: OSError if NVML is missing or does not respond.
    """
    nvml = ctypes.CDLL("libnvidia-ml.so.1") if library is None else library
    _check(nvml.nvmlInit_v2(), "start")
    try:
        return [_use(nvml, name) for name in _visible(num_devices)]
    finally:
        nvml.nvmlShutdown()


def _visible(num_devices: int) -> Sequence[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(num_devices)]
    return [name.strip() for name in visible.split(",")][:num_devices]


def _use(nvml: Any, name: str) -> DeviceUse:
    device = ctypes.c_void_p()
    if name.isdigit():
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(device))
    else:
        code = nvml.nvmlDeviceGetHandleByUUID(ctypes.c_char_p(name.encode()), ctypes.byref(device))
    _check(code, f"find GPU {name!r} of CUDA_VISIBLE_DEVICES")
    memory = _Memory()
    _check(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)), f"say how full GPU {name} is")
    product = ctypes.create_string_buffer(MAX_NAME)
    _check(nvml.nvmlDeviceGetName(device, product, ctypes.c_uint(MAX_NAME)), f"name the kind of GPU {name}")
    return DeviceUse(name, memory.free, memory.total, _holders(nvml, device), product.value.decode())


def _holders(nvml: Any, device: ctypes.c_void_p) -> tuple[tuple[int, int], ...]:
    """Empty if the driver does not report processes, as in some containers."""
    count, processes = ctypes.c_uint(MAX_PROCESSES), (_Process * MAX_PROCESSES)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes) != 0:
        return ()
    known = [(process.pid, process.used) for process in processes[: count.value] if process.used != _UNKNOWN]
    return tuple(sorted(known, key=lambda holder: -holder[1]))


def _check(code: int, what: str) -> None:
    if code != 0:
        raise OSError(f"NVML could not {what} (error {code})")
