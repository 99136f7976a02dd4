"""Channel between any processes: buckets broadcast in a dedicated process group.

The sender is rank 0, the engines' workers are the others. Two buckets are in flight: while one is loaded, the next one
travels. From the start of the rendezvous both ends check each other: the sender through the engines' calls (`Check`),
the receivers through the store, which is in the sender's process.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from skyrl_train.stores import listen, serve_store
from skyrl_train.weight_sync.channels.broadcast_group import BroadcastGroup, Land, has, join_store
from skyrl_train.weight_sync.channels.channel import ReceivingEnd, SendingEnd
from skyrl_train.weight_sync.control import Check, ControlMessage, WeightSyncError
from skyrl_train.weight_sync.transport import Sender

GIVEN_UP = "given up"
"""Key in the store that ends the receivers' waits: NCCL does not report that a peer has left."""
BUFFERS = 2


class Flight:
    """Two buffers of one end: while one is in flight, the other is filled or loaded. They stay for the next update."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * BUFFERS
        self._in_flight: deque[tuple[Tensor, Land]] = deque()
        self._num_sent = 0

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        """[num_bytes] uint8 that is not in flight; waits for one."""
        if len(self._in_flight) == BUFFERS:
            self.receive(check)
        slot = self._num_sent % BUFFERS
        if len(self._buffers[slot]) < num_bytes:
            self._buffers[slot] = self._buffers[slot].new_empty(0)  # freed before the larger one is made
            self._buffers[slot] = self._buffers[slot].new_empty(num_bytes)
        self._next = self._buffers[slot][:num_bytes]
        return self._next

    def send(self, broadcast: Callable[[Tensor], Land]) -> None:
        """Broadcast the last buffer."""
        self._in_flight.append((self._next, broadcast(self._next)))
        self._num_sent += 1

    def receive(self, check: Check) -> Tensor:
        """Wait for the oldest broadcast in flight. Returns: its buffer."""
        buffer, land = self._in_flight.popleft()
        land(check)
        return buffer

    def drain(self, check: Check) -> None:
        while self._in_flight:
            self.receive(check)


class BroadcastSendChannel:
    """Rank 0. After a failed update the group is unusable: `close` it and build a new one on all sides."""

    max_bucket_bytes = sys.maxsize

    def __init__(self, num_receivers: int, device: torch.device, timeout_s: float, host: str | None = None) -> None:
        """Start the store at which the receivers join.

        Args: num_receivers: workers of all engines; host: this machine's address for the receivers, None to resolve
            its name.
        """
        self._world_size = 1 + num_receivers
        self._device, self._timeout_s = device, timeout_s
        self._host = host or socket.gethostbyname(socket.gethostname())
        self._store = serve_store(listen(self._host), self._host, timeout_s)
        self._group: BroadcastGroup | None = None
        self._flight = Flight(device)

    @property
    def init_info(self) -> ControlMessage:
        """Message for every engine, to which a `rank_offset` is added: 1 plus the workers of the engines before it."""
        return {"transport": "broadcast", "host": self._host, "port": self._store.port, "world_size": self._world_size}

    def connect(self, check: Check) -> None:
        self._group = BroadcastGroup(self._store, 0, self._world_size, self._device, self._timeout_s, check)

    def begin(self) -> None:
        self._open_group()

    def _open_group(self) -> BroadcastGroup:
        if self._group is None:
            raise WeightSyncError("the broadcast group is not connected, or failed in the last update; build a new one")
        return self._group

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        return self._flight.buffer(num_bytes, check)

    def publish(self, num_bytes: int) -> None:
        self._flight.send(self._open_group().broadcast)

    def drain(self, check: Check) -> None:
        self._flight.drain(check)

    def abort(self) -> None:
        """End the receivers' waits for the rendezvous or a broadcast, through the store; over gloo the group's end does
        it too.
        """
        with contextlib.suppress(RuntimeError):
            self._store.set(GIVEN_UP, "1")
        group, self._group = self._group, None
        if group is not None:
            group.close()
        self._flight = Flight(self._device)

    def close(self) -> None:
        self.abort()


class BroadcastReceiveChannel:
    """One worker of an engine."""

    def __init__(self, init_info: ControlMessage, worker_rank: int, device: torch.device, timeout_s: float) -> None:
        """Block until the sender and all receivers have joined.
        Args: init_info: of the sender, with `rank_offset`; worker_rank: counts the workers of this engine from 0.
        Raises: WeightSyncError if they do not come within the deadline, or the sender gives up or dies.
        """
        self._store = join_store(init_info["host"], init_info["port"], timeout_s)
        rank, world_size = init_info["rank_offset"] + worker_rank, init_info["world_size"]
        self._group = BroadcastGroup(self._store, rank, world_size, device, timeout_s, self._check_sender)
        self._device, self._flight = device, Flight(device)
        self._sizes: Iterator[int] = iter(())

    def begin(self, sizes: Sequence[int]) -> None:
        self._sizes = iter(sizes)
        for _ in range(BUFFERS):
            self.release()

    def next(self) -> Tensor:
        return self._flight.receive(self._check_sender)

    def release(self) -> None:
        """Begin to receive one more bucket, if there is one."""
        size = next(self._sizes, None)
        if size is not None:
            self._flight.buffer(size, self._check_sender)
            self._flight.send(self._group.broadcast)

    def _check_sender(self) -> None:
        if has(self._store, [GIVEN_UP]):
            raise WeightSyncError("the sender gave up this weight update")

    def close(self) -> None:
        self._group.close()  # first: on a GPU a broadcast may be writing into the buffers
        self._flight = Flight(self._device)


def send(end: SendingEnd) -> Sender:
    return Sender(
        BroadcastSendChannel(end.num_receivers, end.device, end.timeout_s, end.host), end.bucket_bytes, end.post
    )


def receive(end: ReceivingEnd) -> BroadcastReceiveChannel:
    return BroadcastReceiveChannel(end.info, end.worker_rank, end.device, end.timeout_s)
