"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKENESS = 0.7
"""Least similarity of a misspelt name; below it two names are different words (gspo and cispo have 0.67)."""


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option of which `name` may be a misspelling, or None."""
    close = difflib.get_close_matches(name, list(options), n=1, cutoff=LIKENESS)
    return close[0] if close else None
