"""Text from outside: what can be tokenised at all, and what is too long to be tried."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_CHARACTERS = 1_000_000
"""Texts up to this are always tokenised: some tokenizers make one token of any run of blanks or unknown characters. A
character costs up to 360 bytes while it is tokenised, so these take 0.4 GB at most and 60 MB took 21.7 GB."""
SHOWN = 80
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, SHOWN, SHOWN


class TooLong(ValueError):
    """A text of more characters than the tokens allowed can have."""

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        """At least so many."""


@dataclass(frozen=True)
class TextLimit:
    """A limit in tokens, as characters: no token stands for more than the longest of the vocabulary has."""

    max_tokens: int
    longest_token: int
    """Characters."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> TextLimit:
        """The limit for a tokenizer."""
        return cls(max_tokens, max(map(len, tokenizer.get_vocab())))

    def check(self, text: str) -> None:
        """Raises: TooLong."""
        if len(text) > max(MIN_CHARACTERS, self.longest_token * self.max_tokens):
            raise TooLong(
                f"it has {len(text):,} characters, which are more than {self.max_tokens} tokens (none of the tokenizer "
                f"has more than {self.longest_token} characters). Shorten it",
                -(-len(text) // self.longest_token),
            )


def check_text(value: object, name: str) -> str:
    """Return `value` if it is text that can be encoded. Raises: ValueError that begins with the name."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__} {shortened(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has {value[error.start]!r} at character {error.start}, half of a surrogate pair, which cannot be "
            "encoded. Remove it, or write the character that was meant"
        ) from error
    return value


def shortened(value: object) -> str:
    """A value for an error message: one short line of any value, however long or deep."""
    text = _REPR.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
