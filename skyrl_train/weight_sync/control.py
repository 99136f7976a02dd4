"""What goes to the receivers through the engines' own calls, beside the bytes, and what is heard of them meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

ControlMessage = dict[str, Any]
"""JSON-like values only."""
Check = Callable[[], None]
"""Raises what a receiver has raised; called now and then by whoever waits."""


class Pending(Protocol):
    """A message that all receivers are working on."""

    def check(self) -> None:
        """Raise what one of them has raised; never waits."""

    def wait(self) -> None:
        """Return when all are done. Raises what one raised, or TimeoutError."""


Post = Callable[[ControlMessage], Pending]
"""Hands a message to all receivers without waiting."""
