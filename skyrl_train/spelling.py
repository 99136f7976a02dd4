"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option most similar to `name`, or None."""
    close = difflib.get_close_matches(name, list(options), n=1)
    return close[0] if close else None
