"""Which values a key of the configuration may have: the types of its fields beyond str, int, float and bool."""

from __future__ import annotations

import ast
import functools
import ipaddress
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from skyrl_train.config.errors import nearest


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
    """One of these names, or of those in a table of skyrl_train.algorithms."""

    names: tuple[str, ...] = ()
    table: tuple[str, str] | None = None
    """(module, dictionary): the names are its keys, so that there is one list of them."""
    read_by_ranks: bool = False
    """The ranks look the name up, in processes that have the table as its source has it."""

    def __str__(self) -> str:
        return f"one of {', '.join(self.allowed())}"

    def allowed(self) -> tuple[str, ...]:
        if self.table is None:
            return self.names
        return names_in_source(*self.table) if self.read_by_ranks else table_names(*self.table)

    def problem(self, value: str) -> str | None:
        """As in Bounds."""
        if self.table is not None and self.read_by_ranks and value in names_of_this_process(*self.table):
            return (
                f"this program has put it into {self.table[1]}, and the ranks are other processes, which a custom "
                f"entry cannot reach yet. It must be {self} of skyrl_train itself"
            )
        if value in self.allowed():
            return None
        close = nearest(value, self.allowed())
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
Seed = Annotated[int, Bounds(low=0, high=2**31 - 1)]
"""numpy, which the engines seed, takes 32 bits, and engine N has the seed that is N more."""
Port = Annotated[int, Bounds(low=0, high=65535)]
Decay = Annotated[float, Bounds(low=0, high=1, below=True)]


@functools.cache
def names_in_source(module: str, table: str) -> tuple[str, ...]:
    source = Path(__file__).parents[1] / "algorithms" / f"{module}.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == table:
            assert isinstance(node.value, ast.Dict), f"{table} in {source} is no dictionary"
            return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    raise AssertionError(f"{source} has no {table}")


def names_of_this_process(module: str, table: str) -> frozenset[str]:
    """Names that a program has added to a table of skyrl_train.algorithms, or has given another function."""
    loaded = sys.modules.get(f"skyrl_train.algorithms.{module}")
    if loaded is None:
        return frozenset()
    known = names_in_source(module, table)
    own = vars(loaded).values()
    return frozenset(name for name, entry in getattr(loaded, table).items() if name not in known or entry not in own)


def table_names(module: str, table: str) -> tuple[str, ...]:
    """Names in a table of skyrl_train.algorithms.

    Read off the source where the module is not imported yet, because importing it takes a second (torch); a program
    that adds an entry of its own has imported it.
    """
    loaded = sys.modules.get(f"skyrl_train.algorithms.{module}")
    return tuple(getattr(loaded, table)) if loaded is not None else names_in_source(module, table)


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
