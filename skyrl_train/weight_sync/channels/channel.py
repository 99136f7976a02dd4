"""What carries a sender's buckets to its receivers: the two ends of a channel, of whatever kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from skyrl_train.weight_sync.control import Check, ControlMessage


class SendChannel(Protocol):
    """Carries the buckets of one sender to all receivers, in order, at most two at a time."""

    max_bucket_bytes: int
    """Larger buckets than this are slower."""

    @property
    def init_info(self) -> ControlMessage:
        """What the receivers are told once to join."""

    def connect(self, check: Check) -> None:
        """Wait until all receivers have joined; they must be told `init_info` without waiting for them first."""

    def begin(self) -> None: ...

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        """[at least num_bytes] uint8 that nobody reads any more, to be filled; waits for one."""

    def publish(self, num_bytes: int) -> None:
        """Hand over the start of the last buffer. It may be read, but not written, until it comes back."""

    def drain(self, check: Check) -> None:
        """Wait until every receiver has taken in everything."""

    def abort(self) -> None:
        """Tell the receivers, where that is possible, that no more comes."""

    def close(self) -> None: ...


class ReceiveChannel(Protocol):
    """The other end, in one worker of an engine."""

    def begin(self, sizes: Sequence[int]) -> None:
        """Expect buckets of these many bytes."""

    def next(self) -> Tensor:
        """[its bytes] uint8, the next bucket, valid until `release`."""

    def release(self) -> None:
        """The last bucket may be overwritten."""

    def close(self) -> None: ...
