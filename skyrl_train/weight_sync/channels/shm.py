"""Channel between processes of one host: buckets in shared memory, mapped by the receivers.

The memory has no name: its descriptor goes through the socket with every bucket. So the kernel frees it when the last
process that uses it ends, however it ends, and neither a full `/dev/shm` nor a container with another one matters.

Both slots stay for the next update: the first touch of a fresh page costs more than copying into a warm one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.weight_sync.channels.channel import ReceivingEnd, SendingEnd
from skyrl_train.weight_sync.channels.signals import SLOTS, LocalReceiveChannel, LocalSendChannel
from skyrl_train.weight_sync.control import Check, ControlMessage, WeightSyncError
from skyrl_train.weight_sync.transport import Sender

MAX_BUCKET_BYTES = 32 << 20
"""Small buckets are faster: 290 MB took 0.08 s in buckets of 16 MiB, 0.09 s of 32, 0.12 s of 64 and 0.45 s in one (two
cores, fresh pages, digests included)."""


class _Memory:
    """Shared memory as a uint8 tensor, with a check whether views of it are alive."""

    def __init__(self, descriptor: int) -> None:
        """Args: descriptor: owned by this object, and closed on failure. Raises: OSError if it cannot be mapped."""
        self.descriptor = descriptor
        status = os.fstat(descriptor)
        self.inode, self.num_bytes = status.st_ino, status.st_size
        try:
            self._map = mmap.mmap(descriptor, self.num_bytes)
        except OSError:
            os.close(descriptor)
            raise

    @staticmethod
    def new(num_bytes: int) -> _Memory:
        """Raises: WeightSyncError if there is not enough memory."""
        descriptor = os.memfd_create("skyrl_sync", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            os.close(descriptor)
            raise WeightSyncError(
                f"no memory for a weight bucket of {num_bytes} bytes ({error.strerror}). Lower "
                "generator.weight_sync_bucket_mb"
            ) from error
        return _Memory(descriptor)

    def tensor(self) -> tuple[Tensor, Callable[[], bool]]:
        """[num_bytes] uint8, and a function that returns whether it or any view of it is alive."""
        owner = (ctypes.c_ubyte * self.num_bytes).from_buffer(self._map)
        alive = weakref.ref(owner)
        return torch.frombuffer(owner, dtype=torch.uint8), lambda: alive() is not None

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view that a raised error keeps alive frees the memory later
            self._map.close()
        os.close(self.descriptor)


class ShmSendChannel(LocalSendChannel):
    max_bucket_bytes = MAX_BUCKET_BYTES

    def __init__(self, num_receivers: int, timeout_s: float) -> None:
        super().__init__(num_receivers, timeout_s)
        self._slots: list[_Memory | None] = [None] * SLOTS

    @property
    def init_info(self) -> ControlMessage:
        return {"transport": "shm", "address": self.address}

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        slot = self.next_slot(check)
        memory = self._slots[slot]
        if memory is None or memory.num_bytes < num_bytes:
            self._drop(slot)
            memory = self._slots[slot] = _Memory.new(num_bytes)
        return memory.tensor()[0]

    def publish(self, num_bytes: int) -> None:
        memory = self._slots[self.slot]
        assert memory is not None
        self.notify(self.bucket, file=memory.descriptor)

    def _drop(self, slot: int) -> None:
        memory, self._slots[slot] = self._slots[slot], None
        if memory is not None:
            memory.close()

    def close(self) -> None:
        super().close()
        for slot in range(SLOTS):
            self._drop(slot)


class ShmReceiveChannel(LocalReceiveChannel):
    def __init__(self, init_info: ControlMessage, timeout_s: float) -> None:
        super().__init__(init_info["address"], timeout_s)
        self._mapped: dict[int, _Memory] = {}
        self._is_viewed: Callable[[], bool] = lambda: False

    def next(self) -> Tensor:
        _, descriptor = self.wait_ready()
        assert descriptor is not None
        buffer, self._is_viewed = self._map(self.slot, descriptor).tensor()
        return buffer[: self.num_bytes]

    def release(self) -> None:
        """Raises: WeightSyncError if the loader kept a view of the bucket, which the sender is about to overwrite."""
        if self._is_viewed():
            gc.collect()  # of views in reference cycles
        if self._is_viewed():
            raise WeightSyncError(
                f"the engine's loader keeps views of bucket {self.bucket} after loading it. It must clone what it keeps"
            )
        super().release()

    def _map(self, slot: int, descriptor: int) -> _Memory:
        memory = self._mapped.get(slot)
        if memory is not None and memory.inode == os.fstat(descriptor).st_ino:
            os.close(descriptor)
            return memory
        if memory is not None:
            self._mapped.pop(slot).close()  # removed first: `close` must not find it if the next one fails
        memory = self._mapped[slot] = _Memory(descriptor)
        return memory

    def close(self) -> None:
        super().close()
        for memory in self._mapped.values():
            memory.close()
        self._mapped.clear()


def send(end: SendingEnd) -> Sender:
    return Sender(ShmSendChannel(end.num_receivers, end.timeout_s), end.bucket_bytes, end.post)


def receive(end: ReceivingEnd) -> ShmReceiveChannel:
    return ShmReceiveChannel(end.info, end.timeout_s)
