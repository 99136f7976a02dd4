"""A number of bytes with its error, and the parts of the memory of a device in a phase."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30
ALL, ENGINE = "all", "engine"
"""Devices of a phase, beside those of one model."""
EXACT, COUNTED, ESTIMATED, GUESSED = 0.01, 0.1, 0.3, 0.5
"""Relative errors: of counted parameters, counted activations, measured constants, and of what was not measured."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose, in bytes."""

    name: str
    likely: float
    error: float
    """Relative error, in both directions."""
    least: float | None = None
    """Bytes with which the job still works, if it takes what is free, like a KV cache."""

    @property
    def low(self) -> float:
        return self.likely * (1 - self.error) if self.least is None else min(self.least, self.likely)

    @property
    def high(self) -> float:
        """Bytes with which it surely works."""
        return (self.likely if self.least is None else self.low) * (1 + self.error)


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Memory of the fullest rank in a phase."""

    phase: str
    device: str
    """Whose device it is: policy, engine, reference, .., or all."""
    parts: tuple[Part, ...]

    @property
    def likely(self) -> float:
        return sum(part.likely for part in self.parts)

    @property
    def low(self) -> float:
        """Bytes that the phase needs for sure."""
        return sum(part.low for part in self.parts)

    @property
    def high(self) -> float:
        """Bytes with which it fits for sure."""
        return sum(part.high for part in self.parts)

    def within(self, available: float) -> PhaseMemory:
        """With parts that take what is free as large as `available` bytes for all parts allow."""
        fixed = sum(part.likely for part in self.parts if part.least is None)
        parts = []
        for part in self.parts:
            if part.least is not None:
                part = replace(part, likely=max(part.least, min(part.likely, available - fixed)))
                fixed += part.likely
            parts.append(part)
        return replace(self, parts=tuple(parts))

    @property
    def largest(self) -> Part:
        return max(self.parts, key=lambda part: part.high)
