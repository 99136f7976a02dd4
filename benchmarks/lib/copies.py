"""Copies between a device and its host, timed: what an offload can reach at most."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from skyrl_train.device import device, device_type, synchronize
from skyrl_train.megatron.policy import MegatronPolicy

GIB = 2**30


def timed(work: Callable[[], object]) -> float:
    """Seconds, with what the device was asked."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def pinned_copies() -> tuple[float, float]:
    """Bytes per second between the device and pinned host memory, out and back, each the best of three."""
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=device_type() == "cuda")
    there = torch.empty(GIB, dtype=torch.uint8, device=device())
    out_s = min(timed(lambda: host.copy_(there, non_blocking=True)) for _ in range(3))
    back_s = min(timed(lambda: there.copy_(host, non_blocking=True)) for _ in range(3))
    return GIB / out_s, GIB / back_s


def come_back(policy: MegatronPolicy) -> None:
    """With the optimizer, whose copies `reload` leaves under way."""
    policy.reload()
    policy._memory.settle()
