"""Protocols of the two ends of a channel, which carries a sender's buckets to its receivers, and their arguments."""

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
    post: Post
    bucket_bytes: int
    num_receivers: int
    """Number of workers of all engines."""
    device: torch.device
    timeout_s: float
    """Timeout of each wait for the receivers."""
    host: str
    """Address of this machine for the receivers."""


@dataclass(frozen=True, slots=True)
class ReceivingEnd:
    info: ControlMessage
    """The sender's `init_info` with its name as `sender`, the `specs` of what it sends in each update (as messages),
    `weight_sync_timeout_s` and, for a broadcast, `rank_offset`.
    """
    worker_rank: int
    """Counts the workers of this engine from 0."""
    device: torch.device

    @property
    def timeout_s(self) -> float:
        """Timeout of each wait for the sender."""
        return self.info["weight_sync_timeout_s"]


class WeightSender(Protocol):
    """Sends named tensors, like `transport.Sender`."""

    @property
    def init_info(self) -> ControlMessage:
        """Message with which every receiver joins, once per connection."""

    def connect(self, check: Check = lambda: None) -> None:
        """Return when all receivers have joined."""

    def send(self, specs: Sequence[TensorSpec], named_tensors: NamedTensors) -> SendReport:
        """Return when every receiver has loaded every tensor."""

    def close(self) -> None: ...


class SendChannel(Protocol):
    """Carries the buckets of one sender to all receivers, in order, at most two at a time."""

    max_bucket_bytes: int
    """Size above which buckets are slower."""

    @property
    def init_info(self) -> ControlMessage:
        """Message with which every receiver joins."""

    def connect(self, check: Check) -> None:
        """Wait until all receivers have joined; each of them may block with `init_info` until this call."""

    def begin(self) -> None: ...

    def buffer(self, num_bytes: int, check: Check) -> Tensor:
        """Return [at least num_bytes] uint8 to fill; wait until no receiver reads it any more."""

    def publish(self, num_bytes: int) -> None:
        """Send the start of the last buffer. It may be read, but not written, until `buffer` returns it again."""

    def drain(self, check: Check) -> None:
        """Wait until every receiver has loaded everything."""

    def abort(self) -> None:
        """Notify the receivers, where possible, that there are no more tensors."""

    def close(self) -> None: ...


class ReceiveChannel(Protocol):
    """The receiving end, in one worker of an engine."""

    def begin(self, sizes: Sequence[int]) -> None:
        """Expect buckets of these many bytes."""

    def next(self) -> Tensor:
        """Return the next bucket, [its bytes] uint8, valid until `release`."""

    def release(self) -> None:
        """Allow the last bucket to be overwritten."""

    def close(self) -> None: ...
