"""Memory of this process's device outside torch's allocator: how much, and which operations take it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.device import device_type, synchronize
from skyrl_train.device.memory import memory_in_use
from skyrl_train.device.nvml import devices_in_use

PROJECT = ("skyrl_train", "megatron", "mbridge", "transformer_engine", "benchmarks")
NUM_FRAMES = 5


class OutsideTorch:
    """Bytes of the device that are used now, were not when this was made, and that torch's allocator does not have.

    Make it before the process uses its device; others must not take or leave memory of the device meanwhile. Without a
    GPU: the process's resident memory.
    """

    def __init__(self, local_rank: int) -> None:
        """Raises: OSError where NVML does not answer."""
        self._free = 0
        if device_type() == "cuda":
            # Asked of CUDA, this would already be without the half GiB of this process's context.
            self._free = devices_in_use(torch.cuda.device_count())[local_rank].free_bytes
            torch.cuda.set_device(local_rank)

    def __call__(self) -> int:
        synchronize()
        now = memory_in_use()
        if device_type() == "cpu":
            return int(now["allocated"])
        return int(self._free - now["free"] - now["reserved"])


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory came or went between two looks."""

    stage: str
    num_bytes: int
    operation: str
    """The operation that ran, or `before` the one that came next."""
    where: str
    """Innermost functions of this project, Megatron, .. first."""


class Watch(TorchDispatchMode):
    """Looks before and after every operation of torch, also those of collectives and of backward.

    What is no such operation (a Triton kernel, a library called past torch) shows up before the next one. Slow: each
    look waits for the device.
    """

    def __init__(self, read: Callable[[], int], least_bytes: int) -> None:
        super().__init__()
        self._read, self._least, self._last = read, least_bytes, read()
        self.stage = ""
        self.growths: list[Growth] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look(f"before {func}")
        result = func(*args, **(kwargs or {}))
        self._look(str(func))
        return result

    def _look(self, operation: str) -> None:
        now = self._read()
        # Small steps add up until they are worth a line.
        if abs(now - self._last) >= self._least:
            self.growths.append(Growth(self.stage, now - self._last, operation, _where()))
            self._last = now


def _where() -> str:
    frames = [frame for frame in traceback.extract_stack()[:-3] if any(name in frame.filename for name in PROJECT)]
    told = [f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames[-NUM_FRAMES:]]
    return " < ".join(reversed(told))
