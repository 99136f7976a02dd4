"""What every transport offers, so that neither the trainer nor the engine knows which one is used.

Sender: `init_info` (what the receivers are told once), `send(named_tensors)`, `close()`.
Receiver: `begin()` before each update, `receive(message, load)` per bucket, `close()`.
The bytes take the transport's way; the control messages (which bucket, which tensors) go through `post`, that is
through the engine's own update calls, and hold JSON-like values only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from skyrl_train.weight_sync.bucket import Bucket, TensorSpec
from skyrl_train.weight_sync.digest import WeightSyncError, digest_sums, name_digests

ControlMessage = dict[str, Any]
NamedTensors = Iterable[tuple[str, Tensor]]

Post = Callable[[ControlMessage], Callable[[], object]]
"""Hands a message to all receivers without waiting; the returned call waits until all have taken the bucket in and
raises if one has failed or a deadline has passed."""

Load = Callable[[list[tuple[str, Tensor]]], None]
"""Takes the tensors of one bucket. They are views: it keeps none of them beyond the call."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """One finished send. The parts of `seconds` overlap with the receivers' work, not with each other."""

    num_bytes: int
    num_buckets: int
    seconds: float
    convert_s: float
    """Waiting for the source of the tensors."""
    pack_s: float
    digest_s: float
    wait_s: float
    """Waiting for the receivers."""
    digests: dict[str, int]
    """name -> digest of what was sent."""


class Sender(Protocol):
    @property
    def init_info(self) -> ControlMessage: ...
    def send(self, named_tensors: NamedTensors) -> SendReport: ...
    def close(self) -> None: ...


class Receiver(Protocol):
    def begin(self) -> None: ...
    def receive(self, message: ControlMessage, load: Load) -> dict[str, int]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class SendClock:
    """Gathers a SendReport while the buckets go out."""

    started: float = field(default_factory=time.perf_counter)
    convert_s: float = 0.0
    digest_s: float = 0.0
    wait_s: float = 0.0
    num_bytes: int = 0
    _sums: list[tuple[tuple[TensorSpec, ...], Tensor]] = field(default_factory=list)

    def source(self, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """The tensors, once each, with the time that making them takes."""
        seen: set[str] = set()
        iterator = iter(named_tensors)
        while True:
            before = time.perf_counter()
            item = next(iterator, None)
            self.convert_s += time.perf_counter() - before
            if item is None:
                return
            if item[0] in seen:
                raise WeightSyncError(f"the trainer exports tensor {item[0]!r} twice; each name is sent once")
            seen.add(item[0])
            yield item

    def wait(self, until_taken: Callable[[], object]) -> None:
        before = time.perf_counter()
        until_taken()
        self.wait_s += time.perf_counter() - before

    def digest(self, bucket: Bucket) -> None:
        before = time.perf_counter()
        self._sums.append((bucket.specs, digest_sums(bucket)))
        self.num_bytes += sum(spec.num_bytes for spec in bucket.specs)
        self.digest_s += time.perf_counter() - before

    def report(self) -> SendReport:
        digests: dict[str, int] = {}
        for specs, sums in self._sums:
            digests |= name_digests(specs, sums)
        seconds = time.perf_counter() - self.started
        return SendReport(
            num_bytes=self.num_bytes,
            num_buckets=len(self._sums),
            seconds=seconds,
            convert_s=self.convert_s,
            pack_s=seconds - self.convert_s - self.digest_s - self.wait_s,
            digest_s=self.digest_s,
            wait_s=self.wait_s,
            digests=digests,
        )


def bucket_message(transport: str, index: int, bucket: Bucket) -> ControlMessage:
    return {
        "transport": transport,
        "index": index,
        "num_bytes": len(bucket.data),
        "specs": [spec.to_message() for spec in bucket.specs],
    }


def specs_of(message: ControlMessage) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec.from_message(spec) for spec in message["specs"])


def check_index(message: ControlMessage, expected: int) -> None:
    if message["index"] != expected:
        raise WeightSyncError(f"bucket {message['index']} arrived where bucket {expected} was due: one was lost")
