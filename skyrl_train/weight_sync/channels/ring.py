"""Two slots that the buckets of an update take in turn: one is filled while the receivers empty the other.

Both ends count the buckets, from 0 in each update, so one that is lost on the way is noticed at the next. What a slot
is, and how its bytes get to the other end, is the channel's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from skyrl_train.weight_sync.channels.signals import ABORTED, SignalHub, SignalPeer
from skyrl_train.weight_sync.control import Check, WeightSyncError

SLOTS = 2


class SendRing:
    """The sender's end."""

    def __init__(self, hub: SignalHub) -> None:
        self._hub = hub
        self._bucket = -1

    @property
    def slot(self) -> int:
        """Of the bucket whose turn it is."""
        return self._bucket % SLOTS

    def begin(self) -> None:
        """An update; the hub is connected."""
        self._hub.begin()
        self._bucket = -1

    def next(self, check: Check) -> int:
        """The slot of the next bucket, when every receiver has emptied it. Raises: as `SignalHub.wait_taken`."""
        self._bucket += 1
        self._hub.wait_taken(self._bucket + 1 - SLOTS, check)
        return self.slot

    def tell(self, content: Any = None, file: int | None = None) -> None:
        """The bucket is in its slot. Args, Raises: as `SignalHub.tell`."""
        self._hub.tell(self._bucket, content=content, file=file)

    def drain(self, check: Check) -> None:
        """Wait until every slot is empty. Raises: as `SignalHub.wait_taken`."""
        self._hub.wait_taken(self._bucket + 1, check)

    def abort(self) -> None:
        """Tell the receivers, those that are there, that no more comes."""
        with contextlib.suppress(WeightSyncError):
            self._hub.tell(ABORTED)


class ReceiveRing:
    """A receiver's end."""

    def __init__(self, peer: SignalPeer) -> None:
        self._peer = peer
        self._sizes: list[int] = []
        self.bucket = 0
        """The one whose turn it is."""

    @property
    def slot(self) -> int:
        """Of the bucket whose turn it is."""
        return self.bucket % SLOTS

    @property
    def num_bytes(self) -> int:
        """Of the bucket whose turn it is."""
        return self._sizes[self.bucket]

    @property
    def is_last(self) -> bool:
        """Whether no bucket of the update comes after it."""
        return self.bucket + 1 == len(self._sizes)

    def begin(self, sizes: Sequence[int]) -> None:
        """Expect buckets of these many bytes."""
        self._sizes, self.bucket = list(sizes), 0

    def next(self) -> tuple[Any, int | None]:
        """Wait until the bucket is in its slot. Returns: what the sender told of it. Raises: as `SignalPeer.next`."""
        return self._peer.next(self.bucket)

    def release(self) -> None:
        """The slot is empty, and it is the next bucket's turn."""
        self._peer.taken(self.bucket)
        self.bucket += 1
