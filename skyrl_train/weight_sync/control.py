"""Messages that reach the receivers through the engines' own calls, beside the bytes, and the errors of a sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

ControlMessage = dict[str, Any]
"""JSON-like values only."""
Check = Callable[[], None]
"""Raises what a receiver has raised; called repeatedly while a sender waits."""


class WeightSyncError(RuntimeError):
    """The engine did not get the trainer's weights; it must not generate samples."""


class PeerLostError(WeightSyncError):
    """The other end died or did not answer in time; another channel may report the cause."""


class SyncCheckFailed(RuntimeError):
    """An engine computes other logprobs than the trainer."""


class Pending(Protocol):
    """A message that all receivers are working on."""

    def check(self) -> None:
        """Raise what a receiver has raised, without waiting."""

    def wait(self) -> None:
        """Return when all are done. Raises: what a receiver raised, or TimeoutError."""


Post = Callable[[ControlMessage], Pending]
"""Sends a message to all receivers without waiting."""
