"""The numbers under which engines serve the policy's weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Versions:
    """A number that engines may have served is never given to other weights."""

    current: int = 0
    """Number of the policy's weights: optimizer steps so far, and numbers left out since they were other weights'."""
    last_given: int = 0
    """The highest number under which engines may have served weights."""

    def advance(self, num_steps: int) -> None:
        """After so many optimizer steps."""
        self.current = max(self.current, self.last_given) + num_steps

    def give(self) -> int:
        """The current number, for engines that are about to serve it."""
        self.last_given = max(self.last_given, self.current)
        return self.current
