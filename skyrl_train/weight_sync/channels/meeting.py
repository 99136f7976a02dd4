"""Rendezvous in a store of the processes that send or receive weights, which check each other while they wait.

The store is in the sender's process, so a receiver's query fails if the sender died. The sender checks the engines'
calls (`Check`).
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from skyrl_train.weight_sync.control import Check, PeerLostError

CHECK_EVERY_S = 0.2
MEETING_POLL_S = 0.02
"""Each poll is a request to the sender's store."""


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


def wait_until(is_over: Callable[[], bool], poll_s: float, timeout_s: float, late: str, check: Check) -> None:
    """Poll until the end. Raises: PeerLostError with the message `late` at the deadline; what `check` raises."""
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
