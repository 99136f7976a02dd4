"""Channel between processes of one host: buckets in shared memory files, mapped by the receivers.

Two files are in flight, so that packing the next bucket overlaps with loading the last. They stay for the next update:
the first touch of a fresh page costs more than copying into a warm one. A sender holds a lock on its files for as long
as it lives, which tells `sweep` a dead sender's files from a living one's (also across containers that share /dev/shm,
where process ids lie).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from skyrl_train.weight_sync.errors import WeightSyncError
from skyrl_train.weight_sync.signals import ABORTED, SignalHub, SignalPeer
from skyrl_train.weight_sync.transport import Check, ControlMessage

FOLDER = Path("/dev/shm")
PREFIX = "skyrl_sync_"
SLOTS = 2
MAX_BUCKET_BYTES = 32 << 20
"""Packing, loading and the core's cache like small buckets: 290 MB took 0.08 s in buckets of 16 MiB, 0.09 s of 32,
0.12 s of 64 and 0.45 s in one piece (two cores, fresh pages, digests included)."""


class _Mapping:
    """A shared file as a uint8 tensor that knows whether somebody else still holds a view of it."""

    def __init__(self, path: Path, num_bytes: int, create: bool) -> None:
        self.path = path
        self.num_bytes = num_bytes
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor = os.open(path, flags, 0o600)
        if create:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(self._descriptor, 0, num_bytes)
        self._map = mmap.mmap(self._descriptor, num_bytes)

    def tensor(self) -> tuple[Tensor, Callable[[], bool]]:
        """[num_bytes] uint8, and a function that says whether it or any view of it is alive."""
        owner = (ctypes.c_ubyte * self.num_bytes).from_buffer(self._map)
        alive = weakref.ref(owner)
        return torch.frombuffer(owner, dtype=torch.uint8), lambda: alive() is not None

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is alive while an error is on its way: it frees the memory
            self._map.close()
        os.close(self._descriptor)


class ShmSendChannel:
    """The sender's end."""

    max_bucket_bytes = MAX_BUCKET_BYTES

    def __init__(self, num_receivers: int, timeout_s: float) -> None:
        sweep()
        self._hub = SignalHub(num_receivers, timeout_s)
        self._slots: list[_Mapping | None] = [None] * SLOTS
        self._index = -1

    @property
    def init_info(self) -> ControlMessage:
        return {"transport": "shm", "address": self._hub.address}

    def connect(self) -> None:
        self._hub.connect()

    def begin(self, update: int) -> None:
        self._hub.begin(update)
        self._index = -1

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        self._index += 1
        self._hub.wait_taken(self._index + 1 - SLOTS, check)
        slot = self._index % SLOTS
        mapping = self._slots[slot]
        if mapping is None or mapping.num_bytes < num_bytes:
            self._drop(slot)
            path = FOLDER / f"{PREFIX}{os.getpid()}_{secrets.token_hex(6)}"
            mapping = self._slots[slot] = _create(path, num_bytes)
        return mapping.tensor()[0]

    def publish(self, num_bytes: int) -> None:
        mapping = self._slots[self._index % SLOTS]
        assert mapping is not None
        self._hub.tell(self._index, str(mapping.path))

    def drain(self, check: Check) -> None:
        self._hub.wait_taken(self._index + 1, check)

    def abort(self) -> None:
        with contextlib.suppress(WeightSyncError):
            self._hub.tell(ABORTED)

    def _drop(self, slot: int) -> None:
        mapping, self._slots[slot] = self._slots[slot], None
        if mapping is not None:
            mapping.path.unlink(missing_ok=True)
            mapping.close()

    def close(self) -> None:
        self._hub.close()
        for slot in range(SLOTS):
            self._drop(slot)


def _create(path: Path, num_bytes: int) -> _Mapping:
    try:
        return _Mapping(path, num_bytes, create=True)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise WeightSyncError(
            f"no room for a weight bucket of {num_bytes} bytes in {FOLDER} ({error.strerror}); free space there, "
            "lower generator.weight_sync_bucket_mb, or set generator.weight_sync_backend=broadcast"
        ) from error


class ShmReceiveChannel:
    """A receiver's end."""

    def __init__(self, init_info: ControlMessage, timeout_s: float) -> None:
        self._peer = SignalPeer(init_info["address"], timeout_s)
        self._mappings: dict[int, _Mapping] = {}
        self._sizes: list[int] = []
        self._next = 0
        self._is_viewed: Callable[[], bool] = lambda: False

    def begin(self, update: int, sizes: Sequence[int]) -> None:
        self._peer.begin(update)
        self._sizes, self._next = list(sizes), 0

    def next(self) -> Tensor:
        path = self._peer.next(self._next)
        buffer, self._is_viewed = self._map(self._next % SLOTS, path).tensor()
        return buffer[: self._sizes[self._next]]

    def release(self) -> None:
        """Raises: WeightSyncError if somebody kept a view of the bucket, which the sender is about to overwrite."""
        if self._is_viewed():
            gc.collect()  # a view in a reference cycle is nobody's
        if self._is_viewed():
            raise WeightSyncError(
                f"the engine's loader keeps views of bucket {self._next} after loading it; it must clone what it keeps"
            )
        self._peer.taken(self._next)
        self._next += 1

    def end(self) -> None:
        """Loading is over when `release` was called."""

    def _map(self, slot: int, path: str) -> _Mapping:
        mapping = self._mappings.get(slot)
        if mapping is None or str(mapping.path) != path:
            if not path.startswith(f"{FOLDER}/{PREFIX}"):
                raise WeightSyncError(f"{path!r} is no weight bucket; their names start with {FOLDER}/{PREFIX}")
            if mapping is not None:
                mapping.close()
            mapping = self._mappings[slot] = _open(Path(path))
        return mapping

    def close(self) -> None:
        self._peer.close()
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()


def _open(path: Path) -> _Mapping:
    try:
        return _Mapping(path, os.stat(path).st_size, create=False)
    except FileNotFoundError as error:
        raise WeightSyncError(
            f"weight bucket {path} is not there: the sender ended, or it runs in a container with another {FOLDER} "
            "(then set generator.weight_sync_backend=broadcast)"
        ) from error


def sweep(min_age_s: float = 10.0) -> list[str]:
    """Remove the files of senders that were killed. Returns: their names.

    A file younger than `min_age_s` is left alone: its sender may be between creating and locking it.
    """
    removed = []
    for path in FOLDER.glob(f"{PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime >= min_age_s and not _is_locked(path):
                path.unlink()
                removed.append(path.name)
        except (FileNotFoundError, PermissionError):
            continue  # another process swept it first, or it belongs to another user
    return sorted(removed)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
