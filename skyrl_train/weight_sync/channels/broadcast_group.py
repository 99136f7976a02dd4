"""A process group that broadcasts from rank 0 and ends when a peer dies.

It is built beside torch's global group (which belongs to the trainer, or to the engine), with gloo for CPU tensors and
NCCL for GPU tensors.

An NCCL broadcast that a peer has left never ends, and neither does anything queued behind it on the device, such as a
copy to the host. So nothing is queued that depends on a broadcast that may not end: both ends wait for it on the host,
where they check each other, and abort a failed group, which ends its kernel and frees the device's queue.

The store of the rendezvous is in the sender's process, so a receiver's query fails if the sender died. The sender
checks the engines' calls (`Check`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.weight_sync.control import Check, PeerLostError, WeightSyncError

POLL_S = 0.0002
SPIN_S = 0.002
"""Seconds for which a GPU is polled without sleeping: a bucket travels in 0.7 ms, and sleeps take longer than asked."""
CHECK_EVERY_S = 0.2
MEETING_POLL_S = 0.02
"""Each poll is a request to the sender's store."""
CONNECT_S = 20.0
"""Timeout for gloo to connect all processes. An engine answers no call during that time, so it is less than the 30 s
after which it counts as dead (`EngineReplica.lives`)."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
Land = Callable[[Check], None]
"""Waits for the end of a broadcast, and checks the other ends during that time."""


class BroadcastGroup:
    """A process group that can broadcast from rank 0, with a deadline on every operation."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float, check: Check
    ) -> None:
        """Block until all have joined.
        Raises: WeightSyncError if they do not within the deadline, or one cannot be connected; what `check` raises.
        """
        self._timeout_s = timeout_s
        self._device = device
        self._backend: Any = None
        store = dist.PrefixStore("weights", store)
        trial = torch.zeros(1, dtype=torch.uint8, device=device)
        meet(store, rank, world_size, timeout_s, check)
        try:
            try:
                self._backend = _connect(store, rank, world_size, device, timeout_s)
                land = self.broadcast(trial)  # NCCL connects here
            except RuntimeError as error:  # one died after all had joined, or is not reachable
                raise PeerLostError(f"not all senders and receivers of weights could be connected: {error}") from error
            land(check)
        except BaseException:
            self.close()
            raise

    def broadcast(self, buffer: Tensor) -> Land:
        """Start a broadcast of rank 0's buffer into all others'. On a GPU it is queued behind earlier work.

        Returns: the wait for its end, which raises WeightSyncError if it fails or is late, and what the check raises.
            `close` the group then: on a GPU the broadcast may continue.
        Raises: WeightSyncError after `close`.
        """
        if self._backend is None:
            raise WeightSyncError("the broadcast group failed in an earlier update; reconnect the weight sync")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        work = self._backend.broadcast([buffer], options)
        return lambda check: self._land(work, check)

    def _land(self, work: dist.Work, check: Check) -> None:
        # Neither backend's `wait` checks the peers: NCCL's returns at once or, like gloo's (torch 2.13), blocks until
        # the group's deadline. It raises the broadcast's error, so it comes last.
        late = f"a broadcast of weights did not end within {self._timeout_s:g} s"
        spin_s = SPIN_S if self._device.type == "cuda" else 0.0  # without a GPU the peer may need this core
        wait_until(work.is_completed, POLL_S, self._timeout_s, late, check, spin_s)
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"a broadcast of weights failed: {error}") from error

    def close(self) -> None:
        """Return at once and end a broadcast that waits for a peer; a second call does nothing."""
        if self._backend is None:
            return
        last_reference, self._backend = [self._backend], None
        if self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                last_reference[0].abort()
        # gloo's destructor (torch 2.13) waits for broadcasts in flight, up to its deadline; its abort has no effect.
        threading.Thread(target=last_reference.clear, daemon=True).start()


def _connect(store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with _no_watchdog():
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
    # Half of a short deadline, because an engine must answer a health check within that deadline.
    return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=min(CONNECT_S, timeout_s / 2)))


@contextlib.contextmanager
def _no_watchdog() -> Iterator[None]:
    """Make NCCL groups without a watchdog in this block.

    torch (2.11) ends the process a minute after a peer of a group died: a dead engine would cost the policy's rank and
    the other engines. A group whose `wait` blocks has no watchdog; here `wait` is called after a broadcast has ended.
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


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float, check: Check) -> None:
    """Wait for all processes before NCCL connects them, because NCCL waits without a deadline.

    Only the sender, whose check notices dead engines, reports that all are there: a process that came may have died.
    Raises: PeerLostError if not all of them come in time, or the sender dies; what `check` raises.
    """

    def wait_for(keys: list[str]) -> None:
        late = f"not all senders and receivers of weights joined within {timeout_s:g} s"
        wait_until(lambda: has(store, keys), MEETING_POLL_S, timeout_s, late, check)

    if rank == 0:
        wait_for([f"came {peer}" for peer in range(1, world_size)])
        check()
        store.set("all came", "")
    else:
        with while_the_sender_lives():
            store.set(f"came {rank}", "")
        wait_for(["all came"])


def wait_until(
    is_over: Callable[[], bool], poll_s: float, timeout_s: float, late: str, check: Check, spin_s: float = 0.0
) -> None:
    """Poll until the end, at first without sleeping. Raises: PeerLostError with the message `late` at the deadline;
    what `check` raises.
    """
    started = time.monotonic()
    next_check = started + CHECK_EVERY_S
    while not is_over():
        now = time.monotonic()
        if now > next_check:
            check()
            next_check = now + CHECK_EVERY_S
        if now > started + timeout_s:
            raise PeerLostError(late)
        time.sleep(poll_s if now > started + spin_s else 0.0)


def join_store(host: str, port: int, timeout_s: float) -> dist.Store:
    """Raises: PeerLostError."""
    # The sender listens before it sends its address; where nothing listens any more torch would retry to the deadline.
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise PeerLostError(
            f"no sender of weights listens at {host}:{port} ({error}): it died, or this host cannot reach it"
        ) from error
    with while_the_sender_lives():
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def has(store: dist.Store, keys: list[str]) -> bool:
    """Raises: PeerLostError."""
    with while_the_sender_lives():
        return store.check(keys)


@contextlib.contextmanager
def while_the_sender_lives() -> Iterator[None]:
    """Wrap requests to the store, which is in the sender's process. Raises: PeerLostError if it does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError("the sender of the weights died during a sync") from error
