"""Channel between any processes: buckets broadcast in a process group of its own.

The sender is rank 0, the engines' workers are the others. The group is built beside torch's global group (which
belongs to the trainer, or to the engine), on gloo for tensors of the CPU and on NCCL for those of a GPU. Two buckets
are on their way: while one is loaded, the next one travels.

A broadcast on NCCL that a peer has left never ends, and neither does anything that stands behind it on the device: a
copy to the host would wait there for ever, without a look at who is left. So the device is asked for nothing that
depends on a broadcast which may not end. Both ends wait for it on the host, where they look after each other
(`settle`), and end a group of which nothing more is expected: that ends its kernel, and frees who waits for the device.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.weight_sync.errors import PeerLostError, WeightSyncError
from skyrl_train.weight_sync.transport import Check, ControlMessage

BUFFERS = 2
CHECK_EVERY_S = 0.2
POLL_S = 0.0002
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
GIVEN_UP = "given up"
"""Key in the store by which the receivers learn that no more comes: NCCL tells nobody that a peer has left."""


class BroadcastGroup:
    """A process group that can broadcast from rank 0, with a deadline on every operation."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float, name: str
    ) -> None:
        self._timeout_s = timeout_s
        self._device = device
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore(name, store)
        _meet(store, rank, world_size, timeout)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with _no_watchdog():
                self._backend: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        try:
            self.settle(self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)))
        except WeightSyncError:
            self.close()
            raise

    def broadcast(self, buffer: Tensor) -> dist.Work:
        """Start a broadcast of rank 0's buffer into everybody's. On a GPU it begins when the device has done what was
        asked of it so far.

        Raises: WeightSyncError after `close`.
        """
        if self._backend is None:
            raise WeightSyncError("the broadcast group broke in an earlier update; connect the weight sync anew")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._backend.broadcast([buffer], options)

    def settle(self, work: dist.Work, check: Check = lambda: None) -> None:
        """Wait for the end of a broadcast.

        Raises: WeightSyncError if it fails or does not end within the deadline; what `check` raises. `close` the group
            then: on a GPU the broadcast may go on.
        """
        # Neither backend's own `wait` will do: NCCL's leaves it to the device or, like gloo's (torch 2.13), stays until
        # the group's deadline, and does not look after the peers. It raises what has gone wrong, so it comes last.
        started = time.monotonic()
        next_check = started + CHECK_EVERY_S
        while not work.is_completed():
            now = time.monotonic()
            if now > next_check:
                check()
                next_check = now + CHECK_EVERY_S
            if now > started + self._timeout_s:
                raise PeerLostError(f"a broadcast of weights did not end within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"a broadcast of weights failed: {error}") from error

    def close(self) -> None:
        """Returns at once, also while a broadcast waits for a peer, which ends then. Again, it does nothing."""
        if self._backend is None:
            return
        last_reference, self._backend = [self._backend], None
        if self._device.type == "cuda":
            last_reference[0].abort()
        # gloo's destructor (torch 2.13) waits for what is in flight, up to its deadline; its abort ends nothing.
        threading.Thread(target=last_reference.clear, daemon=True).start()


def _meet(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """NCCL waits without a deadline for the processes with which it connects: so they come here first.

    Raises: PeerLostError if not all of them come in time.
    """
    try:
        store.set(f"came {rank}", "")
        store.wait([f"came {peer}" for peer in range(world_size)], timeout)
    except RuntimeError as error:
        raise PeerLostError(f"not all who send or receive weights came within {timeout.total_seconds():g} s") from error


@contextlib.contextmanager
def _no_watchdog() -> Iterator[None]:
    """For NCCL groups that are made in it: when one fails, that is for its users to hear and no end of the process.

    torch (2.11) has a watchdog for each group, which takes the process down a minute after a peer was lost: a dead
    engine would cost the policy's rank and the other engines. A group whose `wait` blocks has none; here nobody waits
    so before a broadcast is over.
    """
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


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
        self._store = dist.TCPStore(
            self._host, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self._group: BroadcastGroup | None = None
        self._buffers: list[Tensor | None] = [None] * BUFFERS
        self._works: list[dist.Work | None] = [None] * BUFFERS
        self._index = -1

    @property
    def init_info(self) -> ControlMessage:
        """For every engine, with a `rank_offset` added: 1 plus the workers of the engines before it."""
        return {"transport": "broadcast", "host": self._host, "port": self._store.port, "world_size": self._world_size}

    def connect(self) -> None:
        self._group = BroadcastGroup(self._store, 0, self._world_size, self._device, self._timeout_s, "weights")

    def begin(self, update: int) -> None:
        """Raises: WeightSyncError if the group is not connected, or broke."""
        self._open_group()
        self._index = -1

    def _open_group(self) -> BroadcastGroup:
        if self._group is None:
            raise WeightSyncError("the broadcast group is not connected, or broke in the last update; build a new one")
        return self._group

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        self._index += 1
        slot = self._index % BUFFERS
        self._take_back(slot, check)
        buffer = self._buffers[slot]
        if buffer is None or len(buffer) < num_bytes:
            self._buffers[slot] = buffer = None
            buffer = self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return buffer

    def _take_back(self, slot: int, check: Check) -> None:
        work, self._works[slot] = self._works[slot], None
        if work is not None:
            self._open_group().settle(work, check)

    def publish(self, num_bytes: int) -> None:
        slot = self._index % BUFFERS
        buffer = self._buffers[slot]
        assert buffer is not None
        self._works[slot] = self._open_group().broadcast(buffer[:num_bytes])

    def drain(self, check: Check) -> None:
        works, self._works = [work for work in self._works if work is not None], [None] * BUFFERS
        for work in works:
            self._open_group().settle(work, check)

    def abort(self) -> None:
        """The receivers may wait in a broadcast that will not come; nothing but the group's end reaches them."""
        self._works = [None] * BUFFERS
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(GIVEN_UP, "1")
            with contextlib.suppress(RuntimeError):
                group.close()

    def close(self) -> None:
        self.abort()
        self._buffers = [None] * BUFFERS


class BroadcastReceiveChannel:
    """One worker of an engine."""

    def __init__(self, init_info: ControlMessage, worker_rank: int, device: torch.device, timeout_s: float) -> None:
        """Blocks until the sender and all receivers have joined.

        Args: init_info is the sender's, with `rank_offset`; worker_rank counts the workers of this engine from 0.
        """
        self._device = device
        store = dist.TCPStore(
            init_info["host"], init_info["port"], is_master=False, timeout=timedelta(seconds=timeout_s)
        )
        self._store = store
        rank = init_info["rank_offset"] + worker_rank
        self._group = BroadcastGroup(store, rank, init_info["world_size"], device, timeout_s, "weights")
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * BUFFERS
        self._works: list[dist.Work] = []
        self._sizes: list[int] = []
        self._next = 0

    def begin(self, update: int, sizes: Sequence[int]) -> None:
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
        self._settle(self._works[self._next])
        return self._buffers[self._next % BUFFERS][: self._sizes[self._next]]

    def release(self) -> None:
        self._next += 1
        self._start()

    def end(self) -> None:
        for work in self._works[-BUFFERS:]:
            self._settle(work)

    def _settle(self, work: dist.Work) -> None:
        try:
            self._group.settle(work, self._check_sender)
        except WeightSyncError:
            self._group.close()  # on a GPU its kernel would go on waiting, and the engine with it
            raise

    def _check_sender(self) -> None:
        try:
            is_given_up = self._store.check([GIVEN_UP])
        except RuntimeError as error:
            raise PeerLostError("the sender of the weights has ended in the middle of an update") from error
        if is_given_up:
            raise WeightSyncError("the sender gave up this weight update")

    def close(self) -> None:
        self._buffers = []
        self._group.close()
