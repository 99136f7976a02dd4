"""What a misspelt name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, options: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The option that looks most like `name`, or None where none is close."""
    close = difflib.get_close_matches(name, list(options), n=1, cutoff=cutoff)
    return close[0] if close else None
