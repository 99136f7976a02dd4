"""Chat messages -> token ids, through the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from skyrl_train.data.encoded_text import EncodedText
from skyrl_train.data.text import TextLimit, TooLong, check_text, shortened
from skyrl_train.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")
# What the assistant said in the stand-in conversation of `reply_ids`. Only its end matters: a tokenizer may merge it
# with what follows ("0" + "7"), then the next one is tried.
_ANCHORS = ("zqxj0", "zqxj)", "zqxj")
_CACHED_RENDERINGS = 4096

_Key = tuple[tuple[tuple[str, str], ...], ...]


def check_messages(messages: object) -> list[Message]:
    """Returns `messages` as it is if it is a list of chat messages.

    Raises: ValueError saying what is wrong: not a list, a message without role or content, an unknown role, a content
        that is not text or cannot be encoded.
    """
    if not isinstance(messages, list):
        raise ValueError(f"expected a list of chat messages, got {type(messages).__name__} {shortened(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"message {index} must be a dict with `role` and `content`, got {shortened(message)}")
        if message["role"] not in ROLES:
            raise ValueError(f"message {index} has role {shortened(message['role'])}; roles are {', '.join(ROLES)}")
        for key, value in message.items():
            check_text(key, f"a field's name in message {index}")
            check_text(value, f"`{key}` of message {index}")
    return messages


class ChatTemplate:
    """Renders prompts and environment replies; remembers what it rendered, as the samples of a prompt ask the same.

    Args: kwargs are the variables handed to the template (`generator.chat_template_kwargs`); a text beyond the limit is
        not tokenised, the methods raise TooLong.
    Raises: ValueError if the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], limit: TextLimit | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template; "
                "put a chat_template.jinja into the model folder or take an instruction-tuned model"
            )
        self._tokenizer, self._limit = tokenizer, limit
        self._kwargs = dict(kwargs)
        self._cached_prompt = lru_cache(_CACHED_RENDERINGS)(self._render_prompt)
        self._cached_reply = lru_cache(_CACHED_RENDERINGS)(self._render_reply)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """[L] token ids up to where the policy speaks.

        Raises: ValueError if the template refuses the messages.
        """
        return list(self._cached_prompt(_key(messages)))

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each of the texts that `render` made, tokenised together (faster, nothing is remembered)."""
        return [len(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def reply_ids(self, written: Sequence[int], observations: Sequence[Message]) -> list[int]:
        """[L] token ids between the policy's turn `written` and its next one: what the template puts after an
        assistant's text, the environment's `observations`, and the header of the next assistant turn.

        The text of the conversation so far is not rendered again: the observations are rendered behind a stand-in
        conversation and its tokens are cut off. Where `written` already ends with (a part of) what the template puts
        after an assistant's text, such as an end-of-turn token, that part is not repeated.

        Raises: ValueError if the template refuses the messages or rewrites the stand-in's text.
        """
        reply, num_closing = self._cached_reply(_key(observations))
        for k in range(min(num_closing, len(written)), 0, -1):
            if tuple(written[-k:]) == reply[:k]:
                return list(reply[k:])
        return list(reply)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises: ValueError if the template refuses the messages."""
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self._kwargs
            )
        except Exception as error:  # Jinja raises its own errors and whatever the template's expressions raise
            raise ValueError(f"the chat template refused {shortened(messages)}: {error}") from error

    @property
    def marks_assistant(self) -> bool:
        """Whether the template says what the assistant writes (`{% generation %}`)."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", str(self._tokenizer.chat_template)) is not None

    def marked_tokens(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """[L] token ids of a conversation, and which of them belong to what the template marks as the assistant's.

        Raises: ValueError if the template refuses the messages or the tokenizer cannot tell where its tokens begin.
        """
        try:
            (text,), (spans,) = render_jinja_template(
                [list(messages)],
                chat_template=self._tokenizer.chat_template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
                **self._kwargs,
            )
            self._check_length(text)
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        except TooLong:
            raise
        except Exception as error:  # as in `render`; a tokenizer without offsets raises NotImplementedError
            raise ValueError(f"the chat template refused {shortened(messages)}: {error}") from error
        mask = [any(start < last and first < end for first, last in spans) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], mask

    def encode(self, text: str) -> tuple[int, ...]:
        """[L] token ids of a text that the template rendered."""
        self._check_length(text)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_once(self, text: str) -> EncodedText:
        """The same of a text of which beginnings will be asked for."""
        self._check_length(text)
        return EncodedText(self._tokenizer, text)

    def is_white_space(self, token_id: int) -> bool:
        """Whether a token is nothing but white space."""
        return not str(self._tokenizer.decode([token_id])).strip()

    def _check_length(self, text: str) -> None:
        if self._limit is not None:
            self._limit.check(text)

    def _render_prompt(self, key: _Key) -> tuple[int, ...]:
        return self.encode(self.render([dict(items) for items in key]))

    def _render_reply(self, key: _Key) -> tuple[tuple[int, ...], int]:
        """Returns the reply's ids and how many of the first close the assistant's turn."""
        observations = [dict(items) for items in key]
        for anchor in _ANCHORS:
            stand_in = [{"role": "user", "content": "u"}, {"role": "assistant", "content": anchor}]
            head = self.encode(anchor)
            # Encoded behind the anchor: a SentencePiece tokenizer would put a space before a text that stands alone.
            full = self.encode(anchor + _after(anchor, self.render([*stand_in, *observations])))
            closed = self.encode(anchor + _after(anchor, self.render(stand_in, add_generation_prompt=False)))
            if full[: len(head)] == head and closed[: len(head)] == head:
                reply, closing = full[len(head) :], closed[len(head) :]
                return reply, _common_prefix(reply, closing)
        raise ValueError(
            f"the tokenizer merges each of {', '.join(_ANCHORS)} with what the chat template puts after it, so the "
            "tokens of several turns cannot be told apart; use a template with an end-of-turn token"
        )


def _after(anchor: str, text: str) -> str:
    position = text.find(anchor)
    if position < 0:
        raise ValueError("the chat template does not show the assistant's text unchanged; it cannot be used for turns")
    return text[position + len(anchor) :]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def _key(messages: Sequence[Message]) -> _Key:
    return tuple([tuple(message.items()) for message in messages])
