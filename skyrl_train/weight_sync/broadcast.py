"""Channel between any processes: buckets broadcast in a process group of its own.

The sender is rank 0, the engines' workers are the others. The group is built beside torch's global group (which
belongs to the trainer, or to the engine), on gloo for tensors of the CPU and on NCCL for those of a GPU. Two buckets
are on their way: while one is loaded, the next one travels.

A broadcast on NCCL that a peer has left never ends, and neither does anything that stands behind it on the device: a
copy to the host would wait there for ever, without a look at who is left. So the device is asked for nothing that
depends on a broadcast which may not end. Both ends wait for it on the host, where they look after each other
(`settle`), and end a group of which nothing more is expected: that ends its kernel, and frees who waits for the device.
They do so from the moment on in which they wait for each other to come: the sender hears from the engines (`Check`),
and the receivers from the store, which is in the sender's process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
MEETING_POLL_S = 0.02
"""Each look asks the sender's store."""
CONNECT_S = 20.0
"""For gloo to connect those that have come. Meanwhile an engine hears nobody: it is less than the 30 s after which one
that does not say that it lives is lost (`EnginePlace.lives`)."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
GIVEN_UP = "given up"
"""Key in the store by which the receivers learn that no more comes: NCCL tells nobody that a peer has left."""


class BroadcastGroup:
    """A process group that can broadcast from rank 0, with a deadline on every operation."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float, check: Check
    ) -> None:
        """Blocks until all have come.

        Raises: WeightSyncError if they do not come within the deadline, or one that came cannot be connected; what
            `check` raises.
        """
        self._timeout_s = timeout_s
        self._device = device
        self._backend: Any = None
        store = dist.PrefixStore("weights", store)
        trial = torch.zeros(1, dtype=torch.uint8, device=device)
        _meet(store, rank, world_size, timeout_s, check)
        try:
            with _while_all_can_be_connected():
                self._backend = _connect(store, rank, world_size, device, timeout_s)
                work = self.broadcast(trial)  # NCCL connects here
            self.settle(work, check)
        except BaseException:
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
        options.timeout = timedelta(seconds=self._timeout_s)
        return self._backend.broadcast([buffer], options)

    def settle(self, work: dist.Work, check: Check) -> None:
        """Wait for the end of a broadcast.

        Raises: WeightSyncError if it fails or does not end within the deadline; what `check` raises. `close` the group
            then: on a GPU the broadcast may go on.
        """
        # Neither backend's own `wait` will do: NCCL's leaves it to the device or, like gloo's (torch 2.13), stays until
        # the group's deadline, and does not look after the peers. It raises what has gone wrong, so it comes last.
        late = f"a broadcast of weights did not end within {self._timeout_s:g} s"
        _wait_until(work.is_completed, POLL_S, self._timeout_s, late, check)
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
            with contextlib.suppress(RuntimeError):
                last_reference[0].abort()
        # gloo's destructor (torch 2.13) waits for what is in flight, up to its deadline; its abort ends nothing.
        threading.Thread(target=last_reference.clear, daemon=True).start()


def _meet(store: dist.Store, rank: int, world_size: int, timeout_s: float, check: Check) -> None:
    """NCCL waits without a deadline for the processes with which it connects: so they come here first.

    Only the sender, which hears of all that are lost, says that all are there: who came may have ended since.
    Raises: PeerLostError if not all of them come in time, or the sender ends; what `check` raises.
    """

    def wait_for(keys: list[str]) -> None:
        late = f"not all who send or receive weights came within {timeout_s:g} s"
        _wait_until(lambda: _has(store, keys), MEETING_POLL_S, timeout_s, late, check)

    if rank == 0:
        wait_for([f"came {peer}" for peer in range(1, world_size)])
        check()
        store.set("all came", "")
    else:
        with _while_the_sender_lives():
            store.set(f"came {rank}", "")
        wait_for(["all came"])


def _connect(store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with _no_watchdog():
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
    # Half of a short deadline, for an engine is given no more than the deadline to say that it lives.
    return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=min(CONNECT_S, timeout_s / 2)))


def _wait_until(is_over: Callable[[], bool], poll_s: float, timeout_s: float, late: str, check: Check) -> None:
    """Raises: PeerLostError with the words `late` at the deadline; what `check` raises."""
    started = time.monotonic()
    next_check = started + CHECK_EVERY_S
    while not is_over():
        now = time.monotonic()
        if now > next_check:
            check()
            next_check = now + CHECK_EVERY_S
        if now > started + timeout_s:
            raise PeerLostError(late)
        time.sleep(poll_s)


def _join_store(host: str, port: int, timeout_s: float) -> dist.Store:
    """Raises: PeerLostError."""
    # It listens before anybody is told of it. Where nobody listens any more torch would go on trying to the deadline.
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise PeerLostError(
            f"no sender of weights listens at {host}:{port} ({error}): it has ended, or this host cannot reach it"
        ) from error
    with _while_the_sender_lives():
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def _has(store: dist.Store, keys: list[str]) -> bool:
    """Raises: PeerLostError."""
    with _while_the_sender_lives():
        return store.check(keys)


@contextlib.contextmanager
def _while_the_sender_lives() -> Iterator[None]:
    """For questions to the store, which is in the sender's process. Raises: PeerLostError if it does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError("the sender of the weights has ended in the middle of a sync") from error


@contextlib.contextmanager
def _while_all_can_be_connected() -> Iterator[None]:
    """Raises: PeerLostError where torch says that one cannot: it ended after all had come, or is not reached."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"not all who send or receive weights could be connected: {error}") from error


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

    def connect(self, check: Check) -> None:
        self._group = BroadcastGroup(self._store, 0, self._world_size, self._device, self._timeout_s, check)

    def begin(self) -> None:
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
        """The receivers may wait to meet, or for a broadcast: the store tells them that neither comes, over gloo the
        group's end too."""
        self._works = [None] * BUFFERS
        with contextlib.suppress(RuntimeError):
            self._store.set(GIVEN_UP, "1")
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def close(self) -> None:
        self.abort()
        self._buffers = [None] * BUFFERS


class BroadcastReceiveChannel:
    """One worker of an engine."""

    def __init__(self, init_info: ControlMessage, worker_rank: int, device: torch.device, timeout_s: float) -> None:
        """Blocks until the sender and all receivers have joined.

        Args: init_info is the sender's, with `rank_offset`; worker_rank counts the workers of this engine from 0.
        Raises: WeightSyncError if they do not come within the deadline, or the sender gives up or ends.
        """
        self._device = device
        self._store = _join_store(init_info["host"], init_info["port"], timeout_s)
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
        if _has(self._store, [GIVEN_UP]):
            raise WeightSyncError("the sender gave up this weight update")

    def close(self) -> None:
        self._group.close()  # first: on a GPU a broadcast may be writing into the buffers
        self._works, self._buffers = [], []
