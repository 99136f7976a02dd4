"""Look a name of the configuration up in a table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def choose(table: Mapping[str, T], name: str, key: str) -> T:
    """The entry of `table` called `name`; `key` is the configuration key that the name came from.

    Raises: ValueError naming the key, the valid names and the nearest one.
    """
    if name in table:
        return table[name]
    nearest = difflib.get_close_matches(name, table, n=1)
    hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
    raise ValueError(f'{key} is "{name}"; it must be one of {", ".join(table)}.{hint}')
