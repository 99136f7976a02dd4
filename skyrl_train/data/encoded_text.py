"""A text encoded once, and how many of its tokens each of its beginnings has."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EncodedText:
    """The tokens of a text, without the tokens that a tokenizer puts around one.

    A beginning of the text is encoded alone only from its last token in which a tokenizer splits any text before it
    does anything else (`<|im_end|>` and the like): what stands before that has the same tokens in both. Where there is
    none, or the tokenizer cannot say where its tokens begin, the whole beginning is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        self._tokenizer, self._text = tokenizer, text
        self._splits: list[tuple[int, int, int]] = []
        """Of each token that splits the text: where it ends, where it begins, and which token it is."""
        if not tokenizer.is_fast:
            self.ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        self.ids = list(encoded["input_ids"])
        # A token that is looked for in the normalised text does not split: the normalised text depends on all of it.
        marks = {token_id: mark for token_id, mark in tokenizer.added_tokens_decoder.items() if not mark.normalized}
        for index, (token_id, (begin, end)) in enumerate(zip(self.ids, encoded["offset_mapping"], strict=True)):
            # "<unk>" stands also for text that is something else. A mark may swallow the white space beside it.
            if token_id in marks and text[begin:end].strip() == marks[token_id].content.strip():
                self._splits.append((end, begin, index))

    def num_tokens(self, num_chars: int) -> int | None:
        """How many tokens the first `num_chars` characters have; None if alone they are not encoded as the first tokens
        of the text, because the tokenizer merges their end with what follows."""
        last = bisect_right(self._splits, num_chars, key=lambda split: split[0]) - 1
        _, begin, first = self._splits[last] if last >= 0 else (0, 0, 0)
        alone = self._tokenizer.encode(self._text[begin:num_chars], add_special_tokens=False)
        end = first + len(alone)
        return end if self.ids[first:end] == alone else None
