"""Rules for the values of keys: the types of fields beyond str, int, float and bool.

`problem(value)` of a rule is the end of a sentence that begins with the key and the value, or None.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Annotated

from skyrl_train.spelling import nearest


@dataclass(frozen=True)
class Bounds:
    """Finite numbers from `low` to `high`, and -1 if it has its own meaning."""

    low: float = 0
    high: float = math.inf
    above: bool = False
    """Exclude `low`."""
    below: bool = False
    """Exclude `high`."""
    or_minus_one: bool = False

    def __str__(self) -> str:
        parts = [f"{'above' if self.above else 'at least'} {self.low:g}"]
        if self.high < math.inf:
            parts.append(f"{'below' if self.below else 'at most'} {self.high:.10g}")
        return " and ".join(parts) + (", or -1" if self.or_minus_one else "")

    def problem(self, value: float) -> str | None:
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below or self.high == math.inf else value <= self.high
        return None if (low and high) or (self.or_minus_one and value == -1) else f"it must be {self}"


@dataclass(frozen=True)
class OneOf:
    """One of these names; the tables of skyrl_train.algorithms are such rules too."""

    names: tuple[str, ...]
    own: str = ""
    """Form of a user's own name, `module:Class`; empty if there are no others."""

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}" + (f", or your own {self.own}" if self.own else "")

    def problem(self, value: str) -> str | None:
        if value in self.names or (self.own and ":" in value):
            return None
        close = nearest(value, self.names)
        return (f"did you mean {close}? " if close else "") + f"It must be {self}"


@dataclass(frozen=True)
class NotEmpty:
    """Text with a character that is not white space."""

    description: str = "not empty"

    def __str__(self) -> str:
        return self.description

    def problem(self, value: str) -> str | None:
        return None if value.strip() else "it must not be empty"


@dataclass(frozen=True)
class FolderName:
    """A name or relative path that stays inside its parent folder."""

    def __str__(self) -> str:
        return "a name for a folder"

    def problem(self, value: str) -> str | None:
        outside = value.startswith(("/", "~")) or any(part in (".", "..") for part in value.split("/"))
        if outside:
            return "it must be a relative path such as my_run or sweep/1, without . and .."
        return NotEmpty().problem(value)


Text = Annotated[str, NotEmpty()]
FolderText = Annotated[str, FolderName()]
SecretText = Annotated[str, NotEmpty("never written out")]
Count = Annotated[int, Bounds(low=1)]
CountOrZero = Annotated[int, Bounds(low=0)]
CountOrNever = Annotated[int, Bounds(low=1, or_minus_one=True)]
NotNegative = Annotated[float, Bounds(low=0)]
AboveZero = Annotated[float, Bounds(low=0, above=True)]
Share = Annotated[float, Bounds(low=0, high=1)]
ShareAboveZero = Annotated[float, Bounds(low=0, high=1, above=True)]
ShareBelowOne = Annotated[float, Bounds(low=0, high=1, below=True)]
Seed = Annotated[int, Bounds(low=0, high=2**31 - 1)]
"""numpy, which the engines seed, takes 32 bits; engine N uses seed + N."""
Port = Annotated[int, Bounds(low=0, high=65535)]
Decay = ShareBelowOne


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
