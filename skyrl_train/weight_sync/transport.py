"""One sender, many receivers, and the protocol between them, which neither end looks into.

    Sender.send(specs, tensors) -- control message (the plan) --> Receiver.receive(message, load)
              bucket, bucket, ... -- a Channel (shared memory, CUDA IPC, broadcast) --> load

Both ends assign the same specs to the same buckets, so one message per sender and update is enough. It goes through
`post`, the engine's own update call, and holds JSON-like values only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from skyrl_train.device import device
from skyrl_train.weight_sync.bucket import (
    Bucket,
    NamedTensors,
    Specs,
    TensorSpec,
    fill,
    finish,
    next_tensors,
    num_bytes,
    plan_buckets,
    unpack,
)
from skyrl_train.weight_sync.channels.channel import ReceiveChannel, SendChannel
from skyrl_train.weight_sync.control import Check, ControlMessage, PeerLostError, Pending, Post, WeightSyncError
from skyrl_train.weight_sync.digest import digests, row_hashes, warm_up
from skyrl_train.weight_sync.send_report import SendClock, SendReport

Load = Callable[[list[tuple[str, Tensor]]], None]
"""Loads the tensors of one bucket. They are views: it keeps none of them beyond the call."""
FIRST_CAUSE_S = 2.0
"""Seconds that a sender with a broken channel waits for a receiver to report the cause."""


class Sender:
    """Sends named tensors over a channel. After a failed `send` neither it nor its receivers can be used again."""

    def __init__(self, channel: SendChannel, bucket_bytes: int, post: Post) -> None:
        self._channel, self._post = channel, post
        self._bucket_bytes = min(bucket_bytes, channel.max_bucket_bytes)

    @property
    def init_info(self) -> ControlMessage:
        return self._channel.init_info

    def connect(self, check: Check = lambda: None) -> None:
        """Return when all receivers have joined; after an error none of them waits any more.
        Raises: WeightSyncError if they do not within the deadline; what `check` raises.
        """
        try:
            self._channel.connect(check)
            warm_up(device())
        except BaseException:
            self._channel.abort()
            raise

    def send(self, specs: Sequence[TensorSpec], named_tensors: NamedTensors) -> SendReport:
        """Return when every receiver has loaded every tensor.
        Args: specs: of all `named_tensors`, in order. A bucket is copied before a tensor of the next is requested.
        Raises: WeightSyncError if the tensors are not those, or the channel breaks; what a receiver raised.
        """
        clock = SendClock()
        with clock.timed("plan_s"):
            _require_each_once(specs)
            message = {"bucket_bytes": self._bucket_bytes, "specs": [spec.to_message() for spec in specs]}
            plans = plan_buckets(specs, self._bucket_bytes)
            try:
                pending = self._post(message)
            except BaseException:
                self._channel.abort()  # some receivers may have the message already
                raise
        try:
            self._send_buckets(clock, plans, named_tensors, pending.check)
            with clock.timed("wait_s"):
                pending.wait()
        except BaseException as error:
            try:
                if isinstance(error, PeerLostError):
                    _raise_first_cause(pending)
                raise
            finally:
                self._channel.abort()
        return clock.report()

    def _send_buckets(
        self, clock: SendClock, plans: Sequence[Specs], named_tensors: NamedTensors, check: Check
    ) -> None:
        self._channel.begin()
        tensors = iter(named_tensors)
        for plan in plans:
            self._send_bucket(clock, plan, tensors, check)
        with clock.timed("convert_s"):
            finish(tensors)
        with clock.timed("wait_s"):
            self._channel.drain(check)
        clock.end_digests()  # while the receivers compute theirs

    def _send_bucket(
        self, clock: SendClock, plan: Specs, named_tensors: Iterator[tuple[str, Tensor]], check: Check
    ) -> None:
        with clock.timed("convert_s"):
            tensors = next_tensors(plan, named_tensors)
        size = num_bytes(plan)
        with clock.timed("wait_s"):
            buffer = self._channel.buffer(size, check)
        bucket = fill(plan, tensors, buffer)
        self._channel.publish(size)
        clock.digest(bucket)
        clock.count(plan)

    def close(self) -> None:
        self._channel.close()


def _require_each_once(specs: Sequence[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise WeightSyncError(f"the trainer exports tensor {twice!r} twice; each name is sent once")


def _raise_first_cause(pending: Pending) -> None:
    """Raise the error of the receiver that broke the channel, if it arrives in time; the channel does not know it."""
    deadline = time.monotonic() + FIRST_CAUSE_S
    while time.monotonic() < deadline:
        pending.check()
        time.sleep(0.02)


class Receiver:
    """Loads one sender's updates, in one worker of an engine. A failure ends the connection and all that the update
    has begun; the next sender needs a new receiver.
    """

    def __init__(self, channel: ReceiveChannel) -> None:
        self._channel: ReceiveChannel | None = channel
        self._planned: tuple[ControlMessage, list[TensorSpec], list[Specs]] | None = None
        """The last message and what follows from it."""
        warm_up(device())  # like the sender's: here, where no engine is paused for it

    def receive(self, message: ControlMessage, load: Load) -> dict[str, int]:
        """Pass all tensors of an update to `load`, bucket by bucket.

        Returns: name -> digest of the bytes that `load` was given.
        Raises: WeightSyncError if a bucket does not come within the deadline, or an earlier update failed; what `load`
            raises.
        """
        if self._channel is None:
            raise WeightSyncError("the connection was closed by a failed update; reconnect before the next one")
        try:
            return self._receive(self._channel, message, load)
        except BaseException:
            self.close()
            raise

    def _receive(self, channel: ReceiveChannel, message: ControlMessage, load: Load) -> dict[str, int]:
        if self._planned is None or self._planned[0] != message:
            specs = [TensorSpec.from_message(spec) for spec in message["specs"]]
            self._planned = message, specs, plan_buckets(specs, message["bucket_bytes"])
        _, specs, plans = self._planned
        hashes: list[Tensor] = []
        channel.begin([num_bytes(plan) for plan in plans])
        for plan in plans:
            hashes.append(_load_bucket(Bucket(plan, channel.next()), load))
            channel.release()
        return digests(specs, hashes)

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _load_bucket(bucket: Bucket, load: Load) -> Tensor:
    """Returns: its row hashes. No reference to the bucket is left, unless `load` keeps one."""
    hashes = row_hashes(bucket.data)
    load(list(unpack(bucket)))
    return hashes
