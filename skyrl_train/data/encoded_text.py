"""A text encoded once, and the number of tokens of its prefixes."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EncodedText:
    """The tokens of a text, without added special tokens.

    A prefix is encoded only from its last splitting token on (`<|im_end|>` and the like, at which a tokenizer first
    splits any text): before it, prefix and text have the same tokens. Without such a token or without offsets, the
    complete prefix is encoded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        self._splits: list[tuple[int, int, int]] = []
        """End, start (characters) and index of each splitting token."""
        if not tokenizer.is_fast:
            self.ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        self.ids = list(encoded["input_ids"])
        # A token that is matched in the normalised text does not split: normalisation depends on the complete text.
        marks = {token_id: mark for token_id, mark in tokenizer.added_tokens_decoder.items() if not mark.normalized}
        for index, (token_id, (begin, end)) in enumerate(zip(self.ids, encoded["offset_mapping"], strict=True)):
            # "<unk>" also replaces other text. A mark may include the white space beside it.
            if token_id in marks and text[begin:end].strip() == marks[token_id].content.strip():
                self._splits.append((end, begin, index))

    def num_tokens(self, num_chars: int) -> int | None:
        """Number of tokens of the first `num_chars` characters; None if the tokenizer merges their end with what
        follows."""
        last = bisect_right(self._splits, num_chars, key=lambda split: split[0]) - 1
        _, begin, first = self._splits[last] if last >= 0 else (0, 0, 0)
        alone = self._tokenizer.encode(self._text[begin:num_chars], add_special_tokens=False)
        end = first + len(alone)
        return end if self.ids[first:end] == alone else None
