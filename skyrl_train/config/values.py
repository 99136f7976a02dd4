"""Which values a key of the configuration may have: the types of its fields beyond str, int, float and bool."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Annotated

from skyrl_train.spelling import nearest


@dataclass(frozen=True)
class Bounds:
    """Finite numbers from `low` to `high`, and `-1` where it has a meaning of its own."""

    low: float = 0
    high: float = math.inf
    above: bool = False
    """`low` itself is outside."""
    below: bool = False
    """`high` itself is outside."""
    or_minus_one: bool = False

    def __str__(self) -> str:
        parts = [f"{'above' if self.above else 'at least'} {self.low:g}"]
        if self.high < math.inf:
            parts.append(f"{'below' if self.below else 'at most'} {self.high:.10g}")
        return " and ".join(parts) + (", or -1" if self.or_minus_one else "")

    def problem(self, value: float) -> str | None:
        """The end of a sentence that begins with the key and the value; None where the value is inside."""
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below or self.high == math.inf else value <= self.high
        return None if (low and high) or (self.or_minus_one and value == -1) else f"it must be {self}"


@dataclass(frozen=True)
class OneOf:
    """One of these names. The tables of skyrl_train.algorithms are such rules too."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"

    def problem(self, value: str) -> str | None:
        """As in Bounds."""
        if value in self.names:
            return None
        close = nearest(value, self.names)
        return (f"did you mean {close}? " if close else "") + f"It must be {self}"


@dataclass(frozen=True)
class NotEmpty:
    """Text with something in it."""

    def __str__(self) -> str:
        return "not empty"

    def problem(self, value: str) -> str | None:
        """As in Bounds."""
        return None if value.strip() else f"it must be {self}"


@dataclass(frozen=True)
class FolderName:
    """A name, or a path of names, that leads nowhere but into the folder it is put in."""

    def __str__(self) -> str:
        return "a name for a folder"

    def problem(self, value: str) -> str | None:
        """As in Bounds."""
        if not value.strip():
            return f"it must be {NotEmpty()}"
        outside = value.startswith(("/", "~")) or any(part in (".", "..") for part in value.split("/"))
        return "it must be a name such as my_run, or names as in sweep/1, without . and .." if outside else None


@dataclass(frozen=True)
class Secret:
    """Text that is never written out."""

    def __str__(self) -> str:
        return "never written out"

    def problem(self, value: str) -> str | None:
        """As in Bounds."""
        return None if value.strip() else "it must not be empty"


Text = Annotated[str, NotEmpty()]
FolderText = Annotated[str, FolderName()]
SecretText = Annotated[str, Secret()]
Count = Annotated[int, Bounds(low=1)]
CountOrZero = Annotated[int, Bounds(low=0)]
CountOrNever = Annotated[int, Bounds(low=1, or_minus_one=True)]
NotNegative = Annotated[float, Bounds(low=0)]
AboveZero = Annotated[float, Bounds(low=0, above=True)]
Share = Annotated[float, Bounds(low=0, high=1)]
ShareAboveZero = Annotated[float, Bounds(low=0, high=1, above=True)]
ShareBelowOne = Annotated[float, Bounds(low=0, high=1, below=True)]
Seed = Annotated[int, Bounds(low=0, high=2**31 - 1)]
"""numpy, which the engines seed, takes 32 bits, and engine N has the seed that is N more."""
Port = Annotated[int, Bounds(low=0, high=65535)]
Decay = ShareBelowOne


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
