"""A whole conversation -> its tokens and which of them the assistant wrote, told apart by tokens."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.encoded_text import EncodedText
from skyrl_train.types import Message

CURE = "set data.assistant_turns=last, give prompt and response columns, or mark the turns with {% generation %}"


class Conversations:
    """Which tokens of a conversation are trained.

    Where the chat template marks the assistant's words with `{% generation %}`, those. Elsewhere a turn begins where
    the conversation before it, rendered for generation, ends (so training sees the tokens that the model will be asked
    with), and ends where the conversation up to it does; both must be a beginning of the whole, in text and in tokens.
    What the template puts behind a turn's end-of-sequence token is not trained: nobody samples it.
    """

    def __init__(self, chat: ChatTemplate, eos_token_id: int | None, turns: str) -> None:
        """Args: turns: "all" or "last", the turns of the assistant that are trained."""
        self._chat, self._eos_token_id, self._last_only = chat, eos_token_id, turns == "last"

    def tokens(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """[L] token ids up to the assistant's last turn, and which of them are trained.

        Raises: ValueError if the assistant says nothing, the template refuses the messages, or turns cannot be told
            apart.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("no message has the role assistant, so there is nothing to train on")
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
        """The end of a turn just behind its end-of-sequence token, where only white space follows that."""
        for last in range(end - 1, start - 1, -1):
            if ids[last] == self._eos_token_id:
                return last + 1
            if not self._chat.is_white_space(ids[last]):
                break
        return end


def _length_of_prefix(prefix: str, text: str, encoded: EncodedText, which: str) -> int:
    """Tokens of `prefix`, which must be the first of the text's."""
    if not text.startswith(prefix):
        raise ValueError(
            f"the chat template writes {which} differently when more follows, so the turns cannot be told apart: {CURE}"
        )
    length = encoded.num_tokens(len(prefix))
    if length is None:
        raise ValueError(
            f"the tokenizer merges the end of {which} with what follows, so the tokens of a turn cannot be told "
            f"apart: {CURE}"
        )
    return length


def _last_run(mask: list[bool]) -> list[bool]:
    """The last unbroken run of true values alone."""
    end = len(mask)
    while end and not mask[end - 1]:
        end -= 1
    start = end
    while start and mask[start - 1]:
        start -= 1
    return [start <= index < end for index in range(len(mask))]
