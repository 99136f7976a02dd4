"""Pinned host memory, which holds offloaded storages, and the stream that copies them."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from skyrl_train.device import device_type
from skyrl_train.megatron.residency.storages import StorageBlock, padded

THREADS = 8
"""Threads that touch new host memory. Pinning maps missing pages too, but one after the other."""


class CopyStream:
    """A stream for copies that run while the device computes; without a GPU they are synchronous."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._is_busy = False

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Copies issued inside begin when the device's earlier work has finished."""
        if device_type() == "cpu":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._is_busy = True
        with torch.cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        """Have later work of the device begin after the copies. The host does not wait."""
        if self._stream is not None and self._is_busy:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._is_busy = False


class PinnedMemory:
    """Host memory that devices copy from and to at the speed of the bus; freed with this object."""

    def __init__(self) -> None:
        self._registered: list[int] = []
        weakref.finalize(self, _unregister, self._registered)

    def allocate(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, zeros. torch's own pinned memory would be rounded up to a power of two."""
        if device_type() == "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8)
        region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)
        arena = torch.frombuffer(region, dtype=torch.uint8)
        with ThreadPoolExecutor(THREADS) as pool:
            # One byte of each page.
            list(pool.map(Tensor.zero_, arena[:: mmap.PAGESIZE].chunk(THREADS)))
        runtime: Any = torch.cuda.cudart()
        error = runtime.cudaHostRegister(arena.data_ptr(), num_bytes, 0)
        if int(error) != 0:
            raise MemoryError(
                f"{num_bytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(error)}): the "
                "machine has too little free memory, or `ulimit -l` forbids it. Free host memory, raise the limit, or "
                "keep more on the device: trainer.placement.release=none, megatron_config.optimizer_cpu_offload=false"
            )
        self._registered.append(arena.data_ptr())
        return arena


class HostMemory:
    """A host buffer for each storage block, allocated at its first offload and reused."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        """By the key of a storage."""
        self._offloaded: dict[StorageBlock, Tensor] = {}
        """Buffers of the blocks that are on the host now."""
        self._current: set[int] = set()
        """Keys of frozen storages whose buffer holds their contents."""
        self._copies = CopyStream()
        self._memory = PinnedMemory()

    def save(self, blocks: Sequence[StorageBlock]) -> int:
        """Start copying the blocks to the host; returns the bytes. Free none before the device has finished."""
        self._allocate(blocks)
        moving = [block for block in blocks if not (block.is_frozen and block.key in self._current)]
        with self._copies.copying():
            for block in moving:
                for offset, data in block.parts():
                    self._offloaded[block][offset : offset + len(data)].copy_(data, non_blocking=True)
        return sum(block.num_bytes for block in moving)

    def restore(self, blocks: Sequence[StorageBlock]) -> int:
        """Allocate the blocks and start copying their contents back; returns the bytes. `settle` ends the copies. The
        next block is allocated while one is copied.
        """
        for block in blocks:
            block.allocate()
            buffer = self._offloaded[block]
            ((_, data),) = block.parts()
            with self._copies.copying():
                data.copy_(buffer, non_blocking=True)
            assert block.key is not None
            self._buffers[block.key] = buffer
            if block.is_frozen:
                self._current.add(block.key)
        for block in blocks:
            del self._offloaded[block]
        return sum(block.num_bytes for block in blocks)

    def settle(self) -> None:
        """Have later work of the device begin after the copies."""
        self._copies.settle()

    def forget_frozen(self) -> None:
        self._current.clear()

    def _allocate(self, blocks: Sequence[StorageBlock]) -> None:
        missing = []
        for block in blocks:
            buffer = None if block.key is None else self._buffers.get(block.key)
            if buffer is None or len(buffer) != block.num_bytes:
                missing.append(block)
            else:
                self._offloaded[block] = buffer
        if missing:
            sizes = [padded(block.num_bytes) for block in missing]
            buffers = self._memory.allocate(sum(sizes)).split(sizes)
            self._offloaded |= {b: buffer[: b.num_bytes] for b, buffer in zip(missing, buffers, strict=True)}


def _unregister(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[attr-defined]
