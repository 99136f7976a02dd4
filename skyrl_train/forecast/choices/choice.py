"""What was chosen, and why."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config.training import RunConfig


@dataclass(frozen=True, slots=True)
class Choice:
    """Values of keys that were chosen together."""

    values: tuple[tuple[str, object], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Choices:
    """A configuration without open keys, and how it was chosen."""

    config: RunConfig
    made: tuple[Choice, ...]
    device: str
    """Kind of GPU."""
