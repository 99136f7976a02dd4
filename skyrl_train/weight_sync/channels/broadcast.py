"""Channel between any processes: buckets broadcast in a process group of its own.

The sender is rank 0, the engines' workers are the others. Two buckets are on their way: while one is loaded, the next
one travels. From the moment on in which they wait for each other to come, both ends look after each other: the sender
hears from the engines (`Check`), and the receivers from the store, which is in the sender's process.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.stores import serve_store
from skyrl_train.weight_sync.channels.broadcast_group import BroadcastGroup
from skyrl_train.weight_sync.channels.channel import ReceivingEnd, SendingEnd
from skyrl_train.weight_sync.channels.flight import BUFFERS, Flight
from skyrl_train.weight_sync.channels.meeting import has, join_store
from skyrl_train.weight_sync.control import Check, ControlMessage, WeightSyncError
from skyrl_train.weight_sync.transport import Sender

GIVEN_UP = "given up"
"""Key in the store by which the receivers learn that no more comes: NCCL tells nobody that a peer has left."""


class BroadcastSendChannel:
    """Rank 0. After a failed update the group is of no use: `close` it and build a new one on all sides."""

    max_bucket_bytes = sys.maxsize

    def __init__(self, num_receivers: int, device: torch.device, timeout_s: float, host: str | None = None) -> None:
        """Starts the store at which the receivers join.

        Args: num_receivers counts every worker of every engine; host is this machine's address as the receivers see
            it, None for the one that its name resolves to.
        """
        self._world_size = 1 + num_receivers
        self._device, self._timeout_s = device, timeout_s
        self._host = host or socket.gethostbyname(socket.gethostname())
        self._store = serve_store(self._host, 0, timeout_s)
        self._group: BroadcastGroup | None = None
        self._flight = Flight(device)

    @property
    def init_info(self) -> ControlMessage:
        """For every engine, with a `rank_offset` added: 1 plus the workers of the engines before it."""
        return {"transport": "broadcast", "host": self._host, "port": self._store.port, "world_size": self._world_size}

    def connect(self, check: Check) -> None:
        self._group = BroadcastGroup(self._store, 0, self._world_size, self._device, self._timeout_s, check)

    def begin(self) -> None:
        """Raises: WeightSyncError if the group is not connected, or broke."""
        self._open_group()

    def _open_group(self) -> BroadcastGroup:
        if self._group is None:
            raise WeightSyncError("the broadcast group is not connected, or broke in the last update; build a new one")
        return self._group

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        return self._flight.buffer(num_bytes, check)

    def publish(self, num_bytes: int) -> None:
        group = self._open_group()
        self._flight.send(num_bytes, lambda buffer: partial(group.settle, group.broadcast(buffer)))

    def drain(self, check: Check) -> None:
        self._flight.drain(check)

    def abort(self) -> None:
        """The receivers may wait to meet, or for a broadcast: the store tells them that neither comes, over gloo the
        group's end too."""
        self._flight.forget()
        with contextlib.suppress(RuntimeError):
            self._store.set(GIVEN_UP, "1")
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        self.abort()
        self._flight = Flight(self._device)


class BroadcastReceiveChannel:
    """One worker of an engine."""

    def __init__(self, init_info: ControlMessage, worker_rank: int, device: torch.device, timeout_s: float) -> None:
        """Blocks until the sender and all receivers have joined.

        Args: init_info is the sender's, with `rank_offset`; worker_rank counts the workers of this engine from 0.
        Raises: WeightSyncError if they do not come within the deadline, or the sender gives up or ends.
        """
        self._device = device
        self._store = join_store(init_info["host"], init_info["port"], timeout_s)
        rank, world_size = init_info["rank_offset"] + worker_rank, init_info["world_size"]
        self._group = BroadcastGroup(self._store, rank, world_size, device, timeout_s, self._check_sender)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * BUFFERS
        self._works: list[dist.Work] = []
        self._sizes: list[int] = []
        self._next = 0

    def begin(self, sizes: Sequence[int]) -> None:
        self._sizes, self._works, self._next = list(sizes), [], 0
        for _ in range(BUFFERS):
            self._start()

    def _start(self) -> None:
        index = len(self._works)
        if index < len(self._sizes):
            size, slot = self._sizes[index], index % BUFFERS
            if len(self._buffers[slot]) < size:
                self._buffers[slot] = torch.empty(0, dtype=torch.uint8, device=self._device)
                self._buffers[slot] = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._works.append(self._group.broadcast(self._buffers[slot][:size]))

    def next(self) -> Tensor:
        self._group.settle(self._works[self._next], self._check_sender)
        return self._buffers[self._next % BUFFERS][: self._sizes[self._next]]

    def release(self) -> None:
        self._next += 1
        self._start()

    def _check_sender(self) -> None:
        if has(self._store, [GIVEN_UP]):
            raise WeightSyncError("the sender gave up this weight update")

    def close(self) -> None:
        self._group.close()  # first: on a GPU a broadcast may be writing into the buffers
        self._works, self._buffers = [], []


def send(end: SendingEnd) -> Sender:
    return Sender(
        BroadcastSendChannel(end.num_receivers, end.device, end.timeout_s, end.host), end.bucket_bytes, end.post
    )


def receive(end: ReceivingEnd) -> BroadcastReceiveChannel:
    return BroadcastReceiveChannel(end.info, end.worker_rank, end.device, end.timeout_s)
