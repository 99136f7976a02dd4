"""A process group that broadcasts from rank 0 and ends when a peer is lost.

It is built beside torch's global group (which belongs to the trainer, or to the engine), on gloo for tensors of the CPU
and on NCCL for those of a GPU.

A broadcast on NCCL that a peer has left never ends, and neither does anything that stands behind it on the device: a
copy to the host would wait there for ever, without a look at who is left. So the device is asked for nothing that
depends on a broadcast which may not end. Both ends wait for it on the host, where they look after each other
(`settle`), and end a group of which nothing more is expected: that ends its kernel, and frees who waits for the device.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.weight_sync.channels.meeting import meet, wait_until
from skyrl_train.weight_sync.control import Check, PeerLostError, WeightSyncError

POLL_S = 0.0002
CONNECT_S = 20.0
"""For gloo to connect those that have come. Meanwhile an engine hears nobody: it is less than the 30 s after which one
that does not say that it lives is lost (`EngineReplica.lives`)."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


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
        meet(store, rank, world_size, timeout_s, check)
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
        wait_until(work.is_completed, POLL_S, self._timeout_s, late, check)
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


def _connect(store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with _no_watchdog():
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
    # Half of a short deadline, for an engine is given no more than the deadline to say that it lives.
    return dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=min(CONNECT_S, timeout_s / 2)))


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
