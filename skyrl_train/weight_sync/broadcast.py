"""Transport between any processes: packed buckets, broadcast in a process group of its own.

The sender is rank 0, the engines' workers are the others. The group is built beside torch's global group (which
belongs to the trainer, or to the engine), on gloo for tensors of the CPU and on NCCL for those of a GPU.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.weight_sync.bucket import Bucket, pack, unpack
from skyrl_train.weight_sync.digest import WeightSyncError, bucket_digests
from skyrl_train.weight_sync.transport import (
    ControlMessage,
    Load,
    NamedTensors,
    Post,
    SendClock,
    SendReport,
    bucket_message,
    check_index,
    specs_of,
)

BUFFERS = 2


class BroadcastGroup:
    """A process group that can broadcast from rank 0, with a deadline on every operation."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float, name: str
    ) -> None:
        self._timeout_s = timeout_s
        self._device = device
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore(name, store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._backend: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))()

    def broadcast(self, buffer: Tensor) -> Callable[[], None]:
        """Start a broadcast of rank 0's buffer into everybody's. The returned call waits for its end."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work = self._backend.broadcast([buffer], options)

        def wait() -> None:
            if self._device.type == "cuda":
                self._poll(work)
            try:
                work.wait()
            except RuntimeError as error:
                raise WeightSyncError(f"broadcast of {len(buffer)} bytes of weights failed: {error}") from error

        return wait

    def _poll(self, work: dist.Work) -> None:
        """NCCL only enqueues: without this, `wait` would return at once and a dead peer would never be noticed."""
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._backend.abort()
                raise WeightSyncError(f"a broadcast of weights did not end within {self._timeout_s:g} s")
            time.sleep(0.0005)

    def close(self) -> None:
        if self._device.type == "cuda":
            self._backend.abort()
        del self._backend


class BroadcastSender:
    """Rank 0. After a failed `send` the group is of no use: `close` it and build a new one on all sides."""

    def __init__(
        self,
        bucket_bytes: int,
        post: Post,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        host: str | None = None,
    ) -> None:
        """Starts the store at which the receivers join.

        Args: world_size counts the sender and every worker of every engine; host is this machine's address as the
            receivers see it, None for the one that its name resolves to.
        """
        self._bucket_bytes = bucket_bytes
        self._post = post
        self._world_size = world_size
        self._device = device
        self._timeout_s = timeout_s
        self._host = host or socket.gethostbyname(socket.gethostname())
        self._store = dist.TCPStore(
            self._host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self._group: BroadcastGroup | None = None

    @property
    def init_info(self) -> ControlMessage:
        """For every engine, with a `rank_offset` added: 1 plus the workers of the engines before it."""
        return {
            "transport": "broadcast",
            "host": self._host,
            "port": self._store.port,
            "world_size": self._world_size,
            "timeout_s": self._timeout_s,
        }

    def connect(self) -> None:
        """Blocks until all receivers have joined, so they must be told `init_info` without waiting for them first."""
        self._group = BroadcastGroup(self._store, 0, self._world_size, self._device, self._timeout_s, "weights")

    def send(self, named_tensors: NamedTensors) -> SendReport:
        """Blocks until every receiver has taken in every tensor. Raises WeightSyncError, and what `post` raises."""
        group, self._group = self._group, None
        if group is None:
            raise WeightSyncError("the broadcast group is not connected, or broke in the last send; build a new one")
        clock = SendClock()
        buffers = _Buffers(clock, self._device)
        for index, bucket in enumerate(pack(clock.source(named_tensors), self._bucket_bytes, buffers.allocate)):
            until_taken = self._post(bucket_message("broadcast", index, bucket))
            buffers.in_flight(until_taken, group.broadcast(bucket.data))
            clock.digest(bucket)
        buffers.drain()
        self._group = group
        return clock.report()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class _Buffers:
    """The buffers of one send, handed out in turn."""

    def __init__(self, clock: SendClock, device: torch.device) -> None:
        self._clock = clock
        self._device = device
        self._buffers: list[Tensor | None] = [None] * BUFFERS
        self._waits: list[list[Callable[[], object]]] = [[] for _ in range(BUFFERS)]
        self._current = -1

    def allocate(self, num_bytes: int) -> Tensor:
        self._current = (self._current + 1) % BUFFERS
        self._wait(self._current)
        buffer = self._buffers[self._current]
        if buffer is None or len(buffer) < num_bytes:
            self._buffers[self._current] = None
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._buffers[self._current] = buffer
        return buffer

    def in_flight(self, until_taken: Callable[[], object], until_sent: Callable[[], None]) -> None:
        # The receivers' answer first: where one of them failed, it says why, and the broadcast would only time out.
        self._waits[self._current] = [until_taken, until_sent]

    def drain(self) -> None:
        for step in range(1, BUFFERS + 1):
            self._wait((self._current + step) % BUFFERS)

    def _wait(self, slot: int) -> None:
        waits, self._waits[slot] = self._waits[slot], []
        for wait in waits:
            self._clock.wait(wait)


class BroadcastReceiver:
    """One worker of an engine."""

    def __init__(self, init_info: ControlMessage, worker_rank: int, device: torch.device) -> None:
        """Blocks until the sender and all receivers have joined.

        Args: init_info is the sender's, with `rank_offset`; worker_rank counts the workers of this engine from 0.
        """
        self._device = device
        timeout_s = init_info["timeout_s"]
        store = dist.TCPStore(
            init_info["host"], init_info["port"], is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        rank = init_info["rank_offset"] + worker_rank
        self._group = BroadcastGroup(store, rank, init_info["world_size"], device, timeout_s, "weights")
        self._next = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def begin(self) -> None:
        self._next = 0

    def receive(self, message: ControlMessage, load: Load) -> dict[str, int]:
        """Hands the bucket's tensors to `load`.

        Returns: name -> digest of the bytes that `load` was given.
        Raises: WeightSyncError if a bucket is missing or does not come within the deadline.
        """
        check_index(message, self._next)
        self._next += 1
        num_bytes = message["num_bytes"]
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        data = self._buffer[:num_bytes]
        self._group.broadcast(data)()
        bucket = Bucket(specs_of(message), data)
        digests = bucket_digests(bucket)
        load(list(unpack(bucket)))
        return digests

    def close(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._group.close()
