"""Processes that send or receive weights meet in a store, and look after each other while they wait.

The store is in the sender's process: receivers who ask it hear whether the sender lives. The sender hears from the
engines (`Check`).
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
"""Each look asks the sender's store."""


def meet(store: dist.Store, rank: int, world_size: int, timeout_s: float, check: Check) -> None:
    """NCCL waits without a deadline for the processes with which it connects: so they come here first.

    Only the sender, which hears of all that are lost, says that all are there: who came may have ended since.
    Raises: PeerLostError if not all of them come in time, or the sender ends; what `check` raises.
    """

    def wait_for(keys: list[str]) -> None:
        late = f"not all who send or receive weights came within {timeout_s:g} s"
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


def join_store(host: str, port: int, timeout_s: float) -> dist.Store:
    """Raises: PeerLostError."""
    # It listens before anybody is told of it. Where nobody listens any more torch would go on trying to the deadline.
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise PeerLostError(
            f"no sender of weights listens at {host}:{port} ({error}): it has ended, or this host cannot reach it"
        ) from error
    with while_the_sender_lives():
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def has(store: dist.Store, keys: list[str]) -> bool:
    """Raises: PeerLostError."""
    with while_the_sender_lives():
        return store.check(keys)


@contextlib.contextmanager
def while_the_sender_lives() -> Iterator[None]:
    """For questions to the store, which is in the sender's process. Raises: PeerLostError if it does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError("the sender of the weights has ended in the middle of a sync") from error
