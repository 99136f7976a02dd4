"""Short messages between a sender and the receivers on its host: which bucket is ready, which was taken in.

A Unix socket per receiver, so that the death of either end is seen at once and nothing has to be polled. An open file
can go with a frame.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from skyrl_train.weight_sync.control import Check, PeerLostError, WeightSyncError

CHECK_EVERY_S = 0.05
FOLDERS = "/tmp"
"""Not TMPDIR: a socket's path has at most 107 bytes."""
FORGOTTEN_S = 3600.0
ABORTED = -1
"""Instead of a bucket's number: the rest of the update will not come."""


class SignalHub:
    """The sender's end."""

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

    def connect(self, check: Check) -> None:
        """Wait for all receivers."""
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
        self._taken = [0] * len(self._receivers)

    def tell(self, index: int, content: Any = None, file: int | None = None) -> None:
        """Args: file is a descriptor, of which every receiver gets its own."""
        try:
            for receiver in self._receivers:
                receiver.send((index, content, file is not None))
                if file is not None:
                    send_handle(receiver, file, None)
        except OSError as error:
            raise PeerLostError("an engine's worker has ended in the middle of a weight update") from error

    def wait_taken(self, count: int, check: Check) -> None:
        """Return when every receiver has taken in the first `count` buckets of this update."""
        deadline = time.monotonic() + self._timeout_s
        while any(taken < count for taken in self._taken):
            for connection in wait(self._receivers, timeout=CHECK_EVERY_S):
                number = self._receivers.index(connection)  # type: ignore[arg-type]
                self._read(number)
            if any(taken < count for taken in self._taken):
                check()
                if time.monotonic() > deadline:
                    raise PeerLostError(f"a bucket of weights was not taken in within {self._timeout_s:g} s")

    def _read(self, number: int) -> None:
        try:
            self._taken[number] = 1 + self._receivers[number].recv()
        except (EOFError, OSError) as error:
            raise PeerLostError("an engine's worker has ended in the middle of a weight update") from error

    def _stop_listening(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self._stop_listening()
        for receiver in self._receivers:
            receiver.close()
        self._receivers = []


def _remove_forgotten_folders(parent: str, age_s: float) -> None:
    """Of senders that were killed while they waited for their receivers; afterwards there is no folder any more."""
    for folder in Path(parent).glob("skyrl_sync_*"):
        with contextlib.suppress(OSError):  # gone by now, or another user's
            if time.time() - folder.stat().st_mtime > age_s:
                shutil.rmtree(folder)


class SignalPeer:
    """A receiver's end."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(address)
        except OSError as error:
            raise WeightSyncError(
                f"no sender of weights listens at {address} ({error}): it ended, or it runs on another host (then set "
                "generator.weight_sync_backend=broadcast)"
            ) from error
        connection.settimeout(None)
        self._connection = Connection(connection.detach())

    def next(self, expected: int) -> tuple[Any, int | None]:
        """The content of the signal for bucket `expected`, and the descriptor of the file that came with it.

        Raises: WeightSyncError if another one comes, none comes within the deadline, or the sender gives up or dies.
        """
        if not self._connection.poll(self._timeout_s):
            raise WeightSyncError(f"bucket {expected} of the weights did not come within {self._timeout_s:g} s")
        try:
            index, content, has_file = self._connection.recv()
            file = recv_handle(self._connection) if has_file else None
        except (EOFError, OSError) as error:
            raise WeightSyncError("the sender of the weights has ended in the middle of an update") from error
        if index == expected:
            return content, file
        if file is not None:
            os.close(file)
        if index == ABORTED:
            raise WeightSyncError("the sender gave up this weight update")
        raise WeightSyncError(f"bucket {index} arrived where bucket {expected} was due: one was lost")

    def taken(self, index: int) -> None:
        with contextlib.suppress(OSError):  # the sender is gone: the next wait for it says so
            self._connection.send(index)

    def close(self) -> None:
        self._connection.close()
