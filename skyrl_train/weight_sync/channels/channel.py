"""What carries a sender's buckets to its receivers: the two ends of a channel, and what each is opened with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from skyrl_train.weight_sync.bucket import NamedTensors, TensorSpec
from skyrl_train.weight_sync.control import Check, ControlMessage, Post
from skyrl_train.weight_sync.send_report import SendReport


@dataclass(frozen=True, slots=True)
class SendingEnd:
    """What a sender is opened with."""

    post: Post
    bucket_bytes: int
    num_receivers: int
    """Every worker of every engine."""
    device: torch.device
    timeout_s: float
    """Deadline of each wait for the receivers."""
    host: str
    """This machine's address as they see it."""


@dataclass(frozen=True, slots=True)
class ReceivingEnd:
    """What a receiver is opened with."""

    info: ControlMessage
    """The sender's `init_info` with `weight_sync_timeout_s` and, for a broadcast, `rank_offset`."""
    worker_rank: int
    """Counts the workers of this engine from 0."""
    device: torch.device

    @property
    def timeout_s(self) -> float:
        """Deadline of each wait for the sender."""
        return self.info["weight_sync_timeout_s"]


class WeightSender(Protocol):
    """Sends named tensors, as `transport.Sender` does."""

    @property
    def init_info(self) -> ControlMessage:
        """Message with which every receiver joins, once per connection."""

    def connect(self, check: Check = lambda: None) -> None:
        """Returns when all receivers have joined."""

    def send(self, specs: Sequence[TensorSpec], named_tensors: NamedTensors) -> SendReport:
        """Returns when every receiver has loaded every tensor."""

    def close(self) -> None: ...


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
