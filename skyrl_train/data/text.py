"""Input text: whether it can be encoded and is short enough to be tokenised, and templates of columns."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_CHARACTERS = 1_000_000
"""Shorter texts are always tokenised: some tokenizers make one token of any run of blanks or unknown characters.
Tokenising takes up to 360 bytes per character, so these take at most 0.4 GB; a text of 60 MB took 21.7 GB."""
SHOWN = 80
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, SHOWN, SHOWN


ANCHORS = ("zqxj0", "zqxj)", "zqxj")
"""Texts before another one whose tokens are wanted. A tokenizer may merge the end of an anchor with what follows ("0" +
"7"); then the next one is tried."""


class TooLong(ValueError):
    """A text with more characters than the allowed tokens can have."""

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        """Lower bound."""


@dataclass(frozen=True)
class TextLimit:
    """A limit in tokens, converted to characters by the longest token of the vocabulary."""

    max_tokens: int
    longest_token: int
    """Characters."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> TextLimit:
        return cls(max_tokens, max(map(len, tokenizer.get_vocab())))

    def check(self, text: str) -> None:
        """Raises: TooLong."""
        if len(text) > max(MIN_CHARACTERS, self.longest_token * self.max_tokens):
            raise TooLong(
                f"the text has {len(text):,} characters: more than {self.max_tokens} tokens can have (the longest "
                f"token has {self.longest_token} characters). Shorten it",
                -(-len(text) // self.longest_token),
            )


def from_json(given: object) -> Any:
    """What a column holds: a value, or its JSON text. A text that is no JSON is returned without blanks around it."""
    if not isinstance(given, str) or not (text := given.strip()):
        return None if isinstance(given, str) else given
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def json_text(value: object, name: str) -> str:
    """JSON text of a value. Raises: ValueError that begins with the name if JSON or UTF-8 cannot represent it."""
    try:
        return check_text(json.dumps(value, ensure_ascii=False), name)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{name} must have values of JSON, got {shortened(value)}") from error


class Filled(Formatter):
    """Text with columns in place of `{column}` and `{column[field]}`; a null column is a ValueError."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if value is None:
            raise ValueError("a column is null")
        return super().format_field(value, format_spec)


def check_text(value: object, name: str) -> str:
    """Return `value` if it is text that can be encoded. Raises: ValueError that begins with the name."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__} {shortened(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has {value[error.start]!r} at character {error.start}, half of a surrogate pair, which cannot be "
            "encoded. Remove it, or write the intended character"
        ) from error
    return value


def shortened(value: object) -> str:
    """One short line of any value, for an error message."""
    text = _REPR.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def encode_after(encode: Callable[[str], Sequence[int]], text: str) -> Sequence[int]:
    """Token ids of a text that continues another: a SentencePiece tokenizer puts a space before a separate one."""
    for anchor in ANCHORS:
        head, whole = encode(anchor), encode(anchor + text)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    return encode(text)
