"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKENESS = 0.7
"""Least similarity of a misspelt name; below it two names are different words (gspo and cispo have 0.67)."""
LIKENESS_OF_WORDS = 0.6
"""Least similarity of the words in which two names differ (func and fn have 0.67)."""


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option of which `name` may be a misspelling, or None."""
    possible = [option for option in options if is_misspelling(name, option)]
    close = difflib.get_close_matches(name, possible, n=1, cutoff=LIKENESS)
    return close[0] if close else None


def is_misspelling(name: str, option: str) -> bool:
    """Whether the words in which two names differ are similar. With a word more or fewer a name means something else
    (micro_train_batch_size, train_batch_size).
    """
    words, others = name.split("_"), option.split("_")
    first = "".join(word for word in words if word not in others)
    second = "".join(word for word in others if word not in words)
    if not first or not second:
        return first == second
    is_short_form = first.startswith(second) or second.startswith(first)
    return is_short_form or difflib.SequenceMatcher(None, first, second).ratio() >= LIKENESS_OF_WORDS
