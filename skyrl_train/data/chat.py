"""Chat messages -> token ids, through the tokenizer's own chat template."""

from __future__ import annotations

import inspect
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from skyrl_train.data.text import (
    ANCHORS,
    TextLimit,
    TooLong,
    check_text,
    encode_after,
    from_json,
    json_text,
    shortened,
)
from skyrl_train.data.tool_calls import check_tool_calls, rendered, tools_text
from skyrl_train.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES = "a list of chat messages"
PROMPT = f"text or {MESSAGES}"
"""Values of a prompt, for errors."""
VARIABLES = "chat_template_kwargs"
"""Column of a row with variables of the template."""
_CACHED_RENDERINGS = 4096
_CACHED_ROWS = 64


def check_messages(messages: object, allowed: str = MESSAGES) -> list[Message]:
    """Return `messages` if it is a list of chat messages.

    A message has text in all fields but `tool_calls`, with which `content` may be absent.

    Args: allowed: everything that the caller accepts, for the error.
    Raises: ValueError for another type, a message without role or content, an unknown role, text that cannot be
        encoded, or tool calls that are not a list of `{"function": {"name": ..., "arguments": ...}}`.
    """
    if not isinstance(messages, list):
        raise ValueError(f"expected {allowed}, got {type(messages).__name__} {shortened(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {index} must be a dict with `role` and `content`, got {shortened(message)}")
        if (role := message.get("role")) not in ROLES:
            raise ValueError(f"message {index} has role {shortened(role)}: it must be one of {', '.join(ROLES)}")
        calls = bool(message.get("tool_calls"))
        if message.get("content") is None and not calls:
            raise ValueError(
                f"message {index} has `content` null or absent, which only a message with `tool_calls` may have, got "
                f"{shortened(message)}. Write text; it may be empty"
            )
        for key, value in message.items():
            check_text(key, f"a field's name in message {index}")
            if key == "tool_calls":
                check_tool_calls(value, f"`tool_calls` of message {index}")
            elif not (calls and key == "content" and value is None):
                check_text(value, f"`{key}` of message {index}")
    return messages


class ChatTemplate:
    """Renders prompts and environment replies, and caches them, because the samples of a prompt share them.

    Args: kwargs: variables of the template (`generator.chat_template_kwargs`); limit: longer texts are not tokenised,
        the methods raise TooLong.
    Raises: ValueError if the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any], limit: TextLimit | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template. "
                "Put a chat_template.jinja into the model folder, or use an instruction-tuned model"
            )
        self.tokenizer, self._limit = tokenizer, limit
        self._kwargs = dict(kwargs)
        self._rendering_prompt = threading.Lock()
        self._cached_prompt = lru_cache(_CACHED_RENDERINGS)(self._render_prompt)
        self._cached_reply = lru_cache(_CACHED_RENDERINGS)(self._render_reply)
        self._cached_of_row = lru_cache(_CACHED_ROWS)(self._of_row)

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The template with these variables where it has none of the same name."""
        return ChatTemplate(self.tokenizer, {**variables, **self._kwargs}, self._limit)

    def for_row(self, row: Mapping[str, Any]) -> ChatTemplate:
        """The template with the row's `tools` and `chat_template_kwargs`, in place of its own of the same names.
        Raises: like `tools_text`; ValueError for variables that are no mapping, or no variables of a template.
        """
        tools, variables = tools_text(row.get("tools")), self._variables_text(row.get(VARIABLES))
        return self._cached_of_row(tools, variables) if tools or variables else self

    def warn_if_tools_are_left_out(self, messages: Sequence[Message]) -> None:
        """Args: messages: of a row with `tools`, whose template this is."""
        without = ChatTemplate(self.tokenizer, {**self._kwargs, "tools": None})
        with suppress(ValueError):  # `without` may be rejected
            if self.render(messages, False) == without.render(messages, False):
                log.warning(
                    "the chat template leaves out the rows' `tools`, so the model does not see them. Put a "
                    "chat_template.jinja that renders them into the model folder, or set data.columns.tools=null"
                )

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """[L] token ids of the prompt, with the generation header. Raises: ValueError if the template rejects it."""
        with self._rendering_prompt:  # the samples of a prompt begin together
            return list(self._cached_prompt(_key(messages)))

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """Number of tokens of each rendered text, tokenised together (faster, not cached)."""
        return [len(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def reply_ids(self, written: Sequence[int], observations: Sequence[Message]) -> list[int]:
        """[L] token ids between the policy's turn `written` and its next one: the end of an assistant's turn, the
        environment's `observations`, and the header of the next assistant turn.

        The observations are rendered after a stand-in conversation, whose tokens are then removed. A part of the end of
        turn that `written` already has, such as an end-of-turn token, is not repeated.

        Raises: ValueError if the template rejects the messages or changes the stand-in's text.
        """
        reply, num_closing = self._cached_reply(_key(observations))
        for k in range(min(num_closing, len(written)), 0, -1):
            if tuple(written[-k:]) == reply[:k]:
                return list(reply[k:])
        return list(reply)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. Raises: ValueError if the template rejects the messages."""

        def render(given: list[Message]) -> tuple[str, None]:
            options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **self._kwargs}
            return self.tokenizer.apply_chat_template(given, **options), None

        try:
            return rendered(messages, render)[0]
        except Exception as error:  # errors of Jinja and of the template's expressions
            raise ValueError(f"the chat template rejected {shortened(messages)}: {error}") from error

    @property
    def marks_assistant(self) -> bool:
        """Whether the template marks the assistant's text (`{% generation %}`)."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", str(self.tokenizer.chat_template)) is not None

    def marked_tokens(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """[L] token ids of a conversation, and whether each is marked as the assistant's.

        Raises: ValueError if the template rejects the messages or the tokenizer has no offsets.
        """

        def render(given: list[Message]) -> tuple[str, list[tuple[int, int]]]:
            (text,), (spans,) = render_jinja_template(
                [given],
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
                **self._kwargs,
            )
            return text, spans

        try:
            text, spans = rendered(messages, render)
            encoded = self.tokenizer(self.checked(text), add_special_tokens=False, return_offsets_mapping=True)
        except TooLong:
            raise
        except Exception as error:  # as in `render`; a tokenizer without offsets raises NotImplementedError
            raise ValueError(f"the chat template rejected {shortened(messages)}: {error}") from error
        mask = [any(start < last and first < end for first, last in spans) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], mask

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that decoding skips: also those that the tokenizer has no name for, as `<end_of_turn>` may be."""
        added = (token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return frozenset({*self.tokenizer.all_special_ids, *added})

    def encode(self, text: str) -> tuple[int, ...]:
        """[L] token ids of a rendered text."""
        return tuple(self.tokenizer.encode(self.checked(text), add_special_tokens=False))

    def encode_after(self, text: str) -> tuple[int, ...]:
        """[L] token ids of a text that continues another."""
        return tuple(encode_after(self.encode, text))

    def checked(self, text: str) -> str:
        """Return `text`. Raises: TooLong."""
        if self._limit is not None:
            self._limit.check(text)
        return text

    def _of_row(self, tools: str, variables: str) -> ChatTemplate:
        own = json.loads(variables or "{}") | ({"tools": json.loads(tools)} if tools else {})
        return ChatTemplate(self.tokenizer, {**self._kwargs, **own}, self._limit)

    def _variables_text(self, given: object) -> str:
        """JSON text of a row's variables, given as a mapping or its JSON text; empty for none. Without nulls, which
        Arrow adds for variables of other rows.
        """
        if not (found := from_json(given)):
            return ""
        if not isinstance(found, Mapping):
            raise ValueError(
                f"`{VARIABLES}` must be a mapping of the chat template's variables to values, or its JSON text, got "
                f"{shortened(given)}. Remove another column of this name with data.columns.{VARIABLES}=null"
            )
        # Arguments that decide how a template is used, or which.
        arguments = inspect.signature(self.tokenizer.apply_chat_template).parameters.keys() - {"documents", "kwargs"}
        if taken := sorted(arguments & found.keys()):
            raise ValueError(
                f"`{VARIABLES}` has {', '.join(taken)}: a row can only set variables of the chat template, and list "
                "`tools` in a column of that name"
            )
        known = {name: value for name, value in found.items() if value is not None}
        return json_text(known, f"`{VARIABLES}`") if known else ""

    def _render_prompt(self, key: str) -> tuple[int, ...]:
        return self.encode(self.render(json.loads(key)))

    def _render_reply(self, key: str) -> tuple[tuple[int, ...], int]:
        """The reply's ids, and how many of the first ones close the assistant's turn."""
        observations = json.loads(key)
        for anchor in ANCHORS:  # the assistant's text
            stand_in = [{"role": "user", "content": "u"}, {"role": "assistant", "content": anchor}]
            head = self.encode(anchor)
            # Encoded after the anchor: a SentencePiece tokenizer would put a space before a separate text.
            full = self.encode(anchor + _after(anchor, self.render([*stand_in, *observations])))
            closed = self.encode(anchor + _after(anchor, self.render(stand_in, add_generation_prompt=False)))
            if full[: len(head)] == head and closed[: len(head)] == head:
                reply, closing = full[len(head) :], closed[len(head) :]
                common = takewhile(lambda pair: pair[0] == pair[1], zip(reply, closing, strict=False))
                return reply, len(list(common))
        raise ValueError(
            f"the tokenizer merges each of {', '.join(ANCHORS)} with the text after it in the chat template, so "
            "the tokens of turns cannot be separated. Use a template with an end-of-turn token"
        )


def _after(anchor: str, text: str) -> str:
    position = text.find(anchor)
    if position < 0:
        raise ValueError("the chat template changes the assistant's text. Use another template for several turns")
    return text[position + len(anchor) :]


def _key(messages: Sequence[Message]) -> str:
    """The messages as text, under which their tokens are cached."""
    return json.dumps(list(messages))
