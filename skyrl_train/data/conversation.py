"""A conversation -> its tokens, and which of them the assistant wrote."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.encoded_text import EncodedText
from skyrl_train.types import Message

REMEDY = "Set data.assistant_turns=last, use prompt and response columns, or mark the turns with {% generation %}"


class Conversations:
    """Which tokens of a conversation are trained.

    If the chat template marks the assistant's text with `{% generation %}`, that text. Otherwise a turn begins at the
    end of the conversation before it, rendered for generation, and ends with the conversation up to it; both must be
    prefixes of the complete conversation, in text and in tokens. Text after a turn's end-of-sequence token is not
    trained, because it is never sampled.
    """

    def __init__(self, chat: ChatTemplate, eos_token_id: int | None, turns: str) -> None:
        """Args: turns: the trained turns of the assistant, "all" or "last"."""
        self._chat, self._eos_token_id, self._last_only = chat, eos_token_id, turns == "last"

    def tokens(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """[L] token ids up to the assistant's last turn, and which of them are trained.

        Raises: ValueError if no message is the assistant's, the template rejects the messages, or turns cannot be
            separated.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("no message has the role assistant: there is nothing to train on")
        messages = messages[: turns[-1] + 1]
        if self._chat.marks_assistant:
            ids, mask = self._chat.marked_tokens(messages)
            return ids, _last_run(mask) if self._last_only else mask
        return self._between_prefixes(messages, turns[-1:] if self._last_only else turns)

    def _between_prefixes(self, messages: Sequence[Message], turns: Sequence[int]) -> tuple[list[int], list[bool]]:
        text = self._chat.render(messages, add_generation_prompt=False)
        encoded = self._chat.encode_once(text)
        mask = [False] * len(encoded.ids)
        for turn in turns:
            before = self._chat.render(messages[:turn])
            through = text if turn == len(messages) - 1 else self._chat.render(messages[: turn + 1], False)
            start = _length_of_prefix(before, text, encoded, f"the prompt that asks for message {turn}")
            end = _length_of_prefix(through, text, encoded, f"the conversation up to message {turn}")
            end = self._without_closing(encoded.ids, start, end)
            mask[start:end] = [True] * (end - start)
        return encoded.ids, mask

    def _without_closing(self, ids: Sequence[int], start: int, end: int) -> int:
        """The end of a turn, right after its end-of-sequence token if only white space follows."""
        for last in range(end - 1, start - 1, -1):
            if ids[last] == self._eos_token_id:
                return last + 1
            if not self._chat.is_white_space(ids[last]):
                break
        return end


def _length_of_prefix(prefix: str, text: str, encoded: EncodedText, which: str) -> int:
    """Number of tokens of `prefix`, which must be a prefix of the text, also in tokens."""
    if not text.startswith(prefix):
        raise ValueError(
            f"the chat template renders {which} differently once more turns follow, so turns cannot be separated. "
            f"{REMEDY}"
        )
    length = encoded.num_tokens(len(prefix))
    if length is None:
        raise ValueError(
            f"the tokenizer merges the end of {which} with what follows, so the tokens of turns cannot be separated. "
            f"{REMEDY}"
        )
    return length


def _last_run(mask: list[bool]) -> list[bool]:
    """Only the last contiguous run of true values."""
    end = len(mask)
    while end and not mask[end - 1]:
        end -= 1
    start = end
    while start and mask[start - 1]:
        start -= 1
    return [start <= index < end for index in range(len(mask))]
