"""Channel ends on one host: messages about which bucket is ready and which was loaded.

A Unix socket per receiver, so that the death of either end is seen at once and nothing is polled; an open file can
travel with a message. Buckets alternate between two slots: one is filled while the receivers load the other. Both ends
count the buckets of an update from 0, so a lost one is noticed at the next. Subclasses add what a slot holds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from skyrl_train.weight_sync.control import Check, PeerLostError, WeightSyncError

SLOTS = 2
CHECK_EVERY_S = 0.05
FOLDERS = "/tmp"
"""Not TMPDIR: a socket's path has at most 107 bytes."""
FORGOTTEN_S = 3600.0
ABORTED = -1
"""Sent instead of a bucket's number: the rest of the update will not come."""


class LocalSendChannel:
    """The sender's end, without the memory."""

    def __init__(self, num_receivers: int, timeout_s: float) -> None:
        self._num_receivers, self._timeout_s = num_receivers, timeout_s
        _remove_forgotten_folders(FOLDERS, FORGOTTEN_S + timeout_s)
        self._folder = tempfile.mkdtemp(prefix="skyrl_sync_", dir=FOLDERS)
        self.address = f"{self._folder}/socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(num_receivers)
        self._receivers: list[Connection] = []
        self._taken: list[int] = []
        self.bucket = -1

    def connect(self, check: Check) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            while missing := self._num_receivers - len(self._receivers):
                if wait([self._listener], timeout=CHECK_EVERY_S):
                    self._receivers.append(Connection(self._listener.accept()[0].detach()))
                    continue
                check()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"{missing} of {self._num_receivers} workers of the engines did not connect within "
                        f"{self._timeout_s:g} s"
                    )
        finally:
            self._stop_listening()

    def begin(self) -> None:
        self._taken, self.bucket = [0] * len(self._receivers), -1

    @property
    def slot(self) -> int:
        return self.bucket % SLOTS

    def next_slot(self, check: Check) -> int:
        """Return the slot of the next bucket when every receiver has emptied it. Raises: like `wait_taken`."""
        self.bucket += 1
        self.wait_taken(self.bucket + 1 - SLOTS, check)
        return self.slot

    def drain(self, check: Check) -> None:
        """Wait until every slot is empty. Raises: like `wait_taken`."""
        self.wait_taken(self.bucket + 1, check)

    def abort(self) -> None:
        """Notify the receivers that there are no more tensors."""
        with contextlib.suppress(WeightSyncError):
            self.notify(ABORTED)

    def notify(self, bucket: int, content: Any = None, file: int | None = None) -> None:
        """Report a bucket as ready. Raises: PeerLostError. Args: file: a descriptor, copied to each receiver."""
        with _worker_alive():
            for receiver in self._receivers:
                receiver.send((bucket, content, file is not None))
                if file is not None:
                    send_handle(receiver, file, None)

    def wait_taken(self, count: int, check: Check) -> None:
        """Return when every receiver has loaded the first `count` buckets of this update.
        Raises: PeerLostError if one died or is late; what `check` raises.
        """
        deadline = time.monotonic() + self._timeout_s
        while any(number < count for number in self._taken):
            for connection in wait(self._receivers, timeout=CHECK_EVERY_S):
                number = self._receivers.index(connection)  # type: ignore[arg-type]
                with _worker_alive():
                    self._taken[number] = 1 + self._receivers[number].recv()
            if any(number < count for number in self._taken):
                check()
                if time.monotonic() > deadline:
                    raise PeerLostError(f"a bucket of weights was not loaded within {self._timeout_s:g} s")

    def _stop_listening(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self._stop_listening()
        for receiver in self._receivers:
            receiver.close()
        self._receivers = []


@contextlib.contextmanager
def _worker_alive() -> Iterator[None]:
    """Turns errors of the socket into PeerLostError."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise PeerLostError("an engine's worker died during a weight update") from error


def _remove_forgotten_folders(parent: str, age_s: float) -> None:
    """Remove folders of senders that were killed before their receivers connected; later the folder is gone."""
    for folder in Path(parent).glob("skyrl_sync_*"):
        with contextlib.suppress(OSError):  # gone by now, or another user's
            if time.time() - folder.stat().st_mtime > age_s:
                shutil.rmtree(folder)


class LocalReceiveChannel:
    """A receiver's end, without the memory."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
        except OSError as error:
            raise WeightSyncError(
                f"no sender of weights listens at {address} ({error}): it ended, or it runs on another host. In that "
                "case set generator.weight_sync_backend=broadcast"
            ) from error
        connection.settimeout(None)
        self._connection = Connection(connection.detach())
        self._sizes: list[int] = []
        self.bucket = 0
        """Number of the current bucket."""

    @property
    def slot(self) -> int:
        return self.bucket % SLOTS

    @property
    def num_bytes(self) -> int:
        return self._sizes[self.bucket]

    @property
    def is_last(self) -> bool:
        """Whether the current bucket is the last one of the update."""
        return self.bucket + 1 == len(self._sizes)

    def begin(self, sizes: Sequence[int]) -> None:
        self._sizes, self.bucket = list(sizes), 0

    def wait_ready(self) -> tuple[Any, int | None]:
        """Wait until the bucket is in its slot. Returns: content and file descriptor that the sender sent with it.
        Raises: WeightSyncError if another one comes, none comes within the deadline, or the sender gives up or dies.
        """
        if not self._connection.poll(self._timeout_s):
            raise WeightSyncError(f"bucket {self.bucket} of the weights did not come within {self._timeout_s:g} s")
        try:
            index, content, has_file = self._connection.recv()
            file = recv_handle(self._connection) if has_file else None
        except (EOFError, OSError) as error:
            raise WeightSyncError("the sender of the weights died during an update") from error
        if index == self.bucket:
            return content, file
        if file is not None:
            os.close(file)
        if index == ABORTED:
            raise WeightSyncError("the sender gave up this weight update")
        raise WeightSyncError(f"received bucket {index}, expected {self.bucket}: a bucket was lost")

    def release(self) -> None:
        """Report the slot as empty, and go to the next bucket."""
        self.taken(self.bucket)
        self.bucket += 1

    def taken(self, bucket: int) -> None:
        """Report a bucket as loaded."""
        with contextlib.suppress(OSError):  # the sender died: the next wait for it raises
            self._connection.send(bucket)

    def close(self) -> None:
        self._connection.close()
