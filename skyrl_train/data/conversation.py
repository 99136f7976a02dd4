"""A conversation -> its tokens, and which of them the assistant wrote."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEDY_OF_LAST = "Mark the turns with {% generation %} in the chat template, or use prompt and response columns of text"
REMEDY = f"Set data.assistant_turns=last, or m{REMEDY_OF_LAST[1:]}"


class Conversations:
    """Which tokens of a conversation are trained.

    If the chat template marks the assistant's text with `{% generation %}`, that text. Otherwise a turn begins at the
    end of the conversation before it, rendered for generation, and ends with the conversation up to it; both must be
    prefixes of the complete conversation, in text and in tokens. Text after a turn's end-of-sequence token is not
    trained, because it is never sampled.
    """

    def __init__(self, chat: ChatTemplate, eos_token_id: int | None, turns: str) -> None:
        """Args: turns: the trained turns of the assistant, "all" or "last"."""
        self._chat, self._last_only = chat, turns == "last"
        self._ends = chat.special_ids | {eos_token_id}

    def tokens(self, messages: Sequence[Message], is_cut: bool = False) -> tuple[list[int], list[bool]]:
        """[L] token ids up to the assistant's last turn, and which of them are trained.

        Args: is_cut: whether the last turn was cut off, so that the token which ends it was not sampled.
        Raises: ValueError if no message is the assistant's, the template rejects the messages, or turns cannot be
            separated.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("no message has the role assistant: there is nothing to train on")
        messages = messages[: turns[-1] + 1]
        if self._chat.marks_assistant:
            ids, mask = self._chat.marked_tokens(messages)
            mask = self._last_turn(mask, messages) if self._last_only else mask
        else:
            ids, mask = self._between_prefixes(messages, turns[-1:] if self._last_only else turns)
        if not is_cut:
            return ids, mask
        length = self._num_before_end(ids, self._last_turn(mask, messages) if self._chat.marks_assistant else mask)
        return ids[:length], mask[:length]

    def _num_before_end(self, ids: list[int], mask: list[bool]) -> int:
        """Number of tokens before the trained one that ends the last turn; all if the template ends turns otherwise."""
        if not any(mask):
            return len(ids)
        last = self._without_closing(ids, 0, len(mask) - mask[::-1].index(True)) - 1
        return last if ids[last] in self._ends else len(ids)

    def _last_turn(self, mask: list[bool], messages: Sequence[Message]) -> list[bool]:
        """Only the runs of true values of the last turn, which a template may mark in several pieces."""
        before = self._chat.marked_tokens(messages[:-1])[1] if len(messages) > 1 else []
        runs, num_before = _runs(mask), sum(value for value, _ in _runs(before))
        marked = [index for index, (value, _) in enumerate(runs) if value]
        last = set(marked[num_before:])
        return [index in last for index, (_, length) in enumerate(runs) for _ in range(length)]

    def _between_prefixes(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[list[int], list[bool]]:
        text = self._chat.render(messages, add_generation_prompt=False)
        encoded = EncodedText(self._chat.tokenizer, self._chat.checked(text))
        mask = [False] * len(encoded.ids)
        for turn in turns:
            is_last = turn == len(messages) - 1
            if turn == 0:
                other = "drop the row with data.row_fn" if is_last else "set data.assistant_turns=last"
                raise ValueError(
                    "message 0 is the assistant's: no prompt asks for it. Put a message before it, as "
                    f"data.system_prompt does, or {other}"
                )
            remedy = REMEDY_OF_LAST if is_last else REMEDY
            before = self._chat.render(messages[:turn])
            through = text if is_last else self._chat.render(messages[: turn + 1], False)
            start = _length_of_prefix(before, text, encoded, f"the prompt that asks for message {turn}", remedy)
            end = _length_of_prefix(through, text, encoded, f"the conversation up to message {turn}", remedy)
            end = self._without_closing(encoded.ids, start, end)
            mask[start:end] = [True] * (end - start)
        return encoded.ids, mask

    def _without_closing(self, ids: Sequence[int], start: int, end: int) -> int:
        """The end of a turn, right after the token that ends it if only white space follows."""
        for last in range(end - 1, start - 1, -1):
            if ids[last] in self._ends:
                return last + 1
            if str(self._chat.tokenizer.decode([ids[last]])).strip():  # not only white space
                break
        return end


def _length_of_prefix(prefix: str, text: str, encoded: EncodedText, which: str, remedy: str) -> int:
    """Number of tokens of `prefix`, which must be a prefix of the text, also in tokens."""
    if not text.startswith(prefix):
        raise ValueError(
            f"the chat template renders {which} differently when more turns follow, so turns cannot be separated. "
            f"{remedy}"
        )
    length = encoded.num_tokens(len(prefix))
    if length is None:
        raise ValueError(
            f"the tokenizer merges the end of {which} with what follows, so the tokens of turns cannot be separated. "
            f"{remedy}"
        )
    return length


def _runs(mask: list[bool]) -> list[tuple[bool, int]]:
    """Values and lengths of the contiguous runs."""
    return [(value, len(list(run))) for value, run in groupby(mask)]


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
        follows.
        """
        last = bisect_right(self._splits, num_chars, key=lambda split: split[0]) - 1
        _, begin, first = self._splits[last] if last >= 0 else (0, 0, 0)
        alone = self._tokenizer.encode(self._text[begin:num_chars], add_special_tokens=False)
        end = first + len(alone)
        return end if self.ids[first:end] == alone else None
