"""Transport between processes of one host: packed buckets in shared memory files, mapped by the receivers.

Two files are in flight, so that packing the next bucket overlaps with loading the last. A sender holds a lock on its
files for as long as it lives, which tells `sweep` a dead sender's files from a living one's (also across containers
that share /dev/shm, where process ids lie).
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
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from skyrl_train.weight_sync.bucket import Bucket, pack, unpack
from skyrl_train.weight_sync.digest import WeightSyncError, bucket_digests
from skyrl_train.weight_sync.transport import (
    ControlMessage,
    Load,
    NamedTensors,
    Post,
    SendClock,
    SendReport,
    bucket_message,
    check_index,
    specs_of,
)

FOLDER = Path("/dev/shm")
PREFIX = "skyrl_sync_"
SLOTS = 2
MAX_BUCKET_BYTES = 32 << 20
"""The first touch of a fresh page costs more than copying into a warm one: 290 MB took 0.08 s in buckets of 16 MiB,
0.09 s of 32, 0.12 s of 64 and 0.45 s in one piece (two cores, digests included)."""


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


class ShmSender:
    """Sends from one process to any number of receivers on the same host."""

    def __init__(self, bucket_bytes: int, post: Post) -> None:
        self._bucket_bytes = min(bucket_bytes, MAX_BUCKET_BYTES)
        self._post = post
        sweep()

    @property
    def init_info(self) -> ControlMessage:
        return {"transport": "shm"}

    def send(self, named_tensors: NamedTensors) -> SendReport:
        """Blocks until every receiver has taken in every tensor. Raises what `post` raises."""
        clock = SendClock()
        slots = _Slots(clock)
        try:
            for index, bucket in enumerate(pack(clock.source(named_tensors), self._bucket_bytes, slots.allocate)):
                message = bucket_message("shm", index, bucket) | {"path": str(slots.path)}
                slots.in_flight(self._post(message))
                clock.digest(bucket)
            slots.drain()
            return clock.report()
        finally:
            slots.close()

    def close(self) -> None:
        """Nothing outlives a `send`."""


class _Slots:
    """The files of one send, handed out in turn."""

    def __init__(self, clock: SendClock) -> None:
        self._clock = clock
        self._mappings: list[_Mapping | None] = [None] * SLOTS
        self._waits: list[Callable[[], object] | None] = [None] * SLOTS
        self._current = -1

    @property
    def path(self) -> Path:
        mapping = self._mappings[self._current]
        assert mapping is not None
        return mapping.path

    def allocate(self, num_bytes: int) -> Tensor:
        self._current = (self._current + 1) % SLOTS
        self._wait(self._current)
        mapping = self._mappings[self._current]
        if mapping is None or mapping.num_bytes < num_bytes:
            self._drop(self._current)
            path = FOLDER / f"{PREFIX}{os.getpid()}_{secrets.token_hex(6)}"
            mapping = self._mappings[self._current] = _create(path, num_bytes)
        return mapping.tensor()[0]

    def in_flight(self, until_taken: Callable[[], object]) -> None:
        self._waits[self._current] = until_taken

    def drain(self) -> None:
        for step in range(1, SLOTS + 1):
            self._wait((self._current + step) % SLOTS)

    def _wait(self, slot: int) -> None:
        until_taken, self._waits[slot] = self._waits[slot], None
        if until_taken is not None:
            self._clock.wait(until_taken)

    def _drop(self, slot: int) -> None:
        mapping, self._mappings[slot] = self._mappings[slot], None
        if mapping is not None:
            mapping.path.unlink(missing_ok=True)
            mapping.close()

    def close(self) -> None:
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


class ShmReceiver:
    """Maps the sender's files; `receive` is called once per bucket, in order."""

    def __init__(self) -> None:
        self._next = 0
        self._mappings: dict[str, _Mapping] = {}

    def begin(self) -> None:
        self.close()
        self._next = 0

    def receive(self, message: ControlMessage, load: Load) -> dict[str, int]:
        """Hands the bucket's tensors to `load`.

        Returns: name -> digest of the bytes that `load` was given.
        Raises: WeightSyncError if a bucket is missing, or if `load` keeps a view (the sender overwrites it).
        """
        check_index(message, self._next)
        self._next += 1
        buffer, is_alive = self._map(message["path"]).tensor()
        bucket = Bucket(specs_of(message), buffer[: message["num_bytes"]])
        digests = bucket_digests(bucket)
        load(list(unpack(bucket)))
        del buffer, bucket
        if is_alive():
            gc.collect()  # a view in a reference cycle is nobody's
        if is_alive():
            raise WeightSyncError(
                f"the engine's loader keeps views of bucket {message['index']} after loading it "
                f"(tensors {message['specs'][0][0]} to {message['specs'][-1][0]}); it must clone what it keeps"
            )
        return digests

    def _map(self, path: str) -> _Mapping:
        if path not in self._mappings:
            if not path.startswith(f"{FOLDER}/{PREFIX}"):
                raise WeightSyncError(f"{path!r} is no weight bucket; their names start with {FOLDER}/{PREFIX}")
            try:
                size = os.stat(path).st_size
            except FileNotFoundError as error:
                raise WeightSyncError(
                    f"weight bucket {path} is not there: the sender ended, or it runs on another host "
                    "(then set generator.weight_sync_backend=broadcast)"
                ) from error
            self._mappings[path] = _Mapping(Path(path), size, create=False)
        return self._mappings[path]

    def close(self) -> None:
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings.clear()


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
