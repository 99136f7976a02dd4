"""Rows of a data set -> Examples of supervised fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from skyrl_train.data.chat import MESSAGES, PROMPT, ChatTemplate, check_messages
from skyrl_train.data.conversation import Conversations
from skyrl_train.data.mapping import RowMapping
from skyrl_train.data.rows import columns, read_rows, without_empty_fields
from skyrl_train.data.text import TextLimit, TooLong, check_text, encode_after
from skyrl_train.data.tool_calls import tools_text
from skyrl_train.types import Example, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""Label of a token that is not trained, as in transformers."""
FORMATS = "`messages`, or `prompt` and `response`, or `input_ids` with `labels` or `loss_mask`"
Tokens = tuple[list[int], list[bool]]
"""[L] token ids, and which of them are trained."""


@dataclass(frozen=True, slots=True)
class LoadedExamples:
    examples: list[Example]
    num_dropped: int
    num_truncated: int
    num_ended: int
    """Rows with a trained end-of-sequence token, from which the model learns where to stop."""


def load_examples(
    sources: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    max_length: int,
    truncate: bool,
    assistant_turns: str,
    chat_template_kwargs: Mapping[str, Any],
    mapping: RowMapping = RowMapping(),  # noqa: B008 (frozen)
    timeout_s: float = math.inf,
) -> LoadedExamples:
    """The rows of all sources in order; those of more than `max_length` tokens are dropped or truncated.

    A row without a trained token after truncation counts as dropped, and so does one that is too long to be tokenised
    (data/text.py).

    Args: sources, timeout_s: as in `read_rows`; vocab_size: the model's; assistant_turns: "all" or "last".
    Raises: ValueError naming source and row if a source cannot be read, or a row is malformed or trains nothing;
        ValueError if no row is left.
    """
    reader = ExampleReader(tokenizer, assistant_turns, chat_template_kwargs, max_length, mapping)
    eos = tokenizer.eos_token_id
    examples: list[Example] = []
    lengths: list[int] = []
    num_truncated = num_ended = num_rows = 0
    for where, given in read_rows(sources, timeout_s):
        num_rows += 1
        if (row := mapping.row(given, where)) is None:
            continue
        try:
            ids, mask = reader.tokens(row)
            check_tokens(ids, mask, vocab_size)
        except TooLong as error:  # also with truncation: its beginning is not known without tokenising the rest
            lengths.append(error.num_tokens)
            continue
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        lengths.append(len(ids))
        # Nothing predicts the first token.
        mask[0] = False
        if len(ids) > max_length:
            if not truncate or not any(mask[:max_length]):
                continue
            ids, mask = ids[:max_length], mask[:max_length]
            num_truncated += 1
        num_ended += eos in compress(ids, mask)
        examples.append(Example(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask)))
    if not examples:
        mapping.check_some_left(len(lengths), num_rows, sources)
        why = f"data.max_length is {max_length}: no row has a trained token among its first tokens. Raise it"
        if not truncate:
            why = (
                f"data.max_length is {max_length}: the shortest row has {min(lengths)} tokens. Raise it, or set "
                "data.too_long=truncate"
            )
        raise ValueError(f"{', '.join(sources)}: {why}")
    return LoadedExamples(examples, len(lengths) - len(examples), num_truncated, num_ended)


class ExampleReader:
    """Rows of any format -> tokens. A chat template is required for conversations only."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        turns: str,
        chat_template_kwargs: Mapping[str, Any],
        max_tokens: int,
        mapping: RowMapping = RowMapping(),  # noqa: B008 (frozen)
    ) -> None:
        """Args: turns: "all" or "last"; max_tokens: limit above which texts raise TooLong."""
        self._tokenizer, self._turns, self._kwargs = tokenizer, turns, chat_template_kwargs
        self._mapping = mapping
        self._limit = TextLimit.of(tokenizer, max_tokens)
        self._has_rendered_tools = False

    def tokens(self, row: dict[str, Any], is_cut: bool = False) -> Tokens:
        """Args: is_cut: like `Conversations.tokens`. Raises: ValueError without the row's location."""
        if row.get("messages") is not None:
            return self._conversation(row, row["messages"], "messages", self._turns, is_cut)
        if row.get("input_ids") is not None:
            return _given_tokens(row)
        if row.get("prompt") is not None and row.get("response") is not None:
            return self._prompt_and_response(row, row["prompt"], row["response"])
        raise ValueError(f"the columns are {columns(row)}: a row needs {FORMATS}")

    def _conversation(
        self, row: Mapping[str, Any], value: Any, column: str, turns: str, is_cut: bool = False
    ) -> Tokens:
        try:
            given = self._mapping.with_system_prompt(without_empty_fields(value))
            messages: list[Message] = check_messages(given, PROMPT if column == "prompt" else MESSAGES)
        except ValueError as error:
            raise ValueError(f"invalid `{column}`: {error}") from error
        chat = self._chat.for_row(row)
        if not self._has_rendered_tools and tools_text(row.get("tools")):
            self._has_rendered_tools = True
            chat.warn_if_tools_are_left_out(messages)
        return Conversations(chat, self._tokenizer.eos_token_id, turns).tokens(messages, is_cut)

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._kwargs, self._limit)

    def _prompt_and_response(self, row: Mapping[str, Any], prompt: Any, response: Any) -> Tokens:
        """Only the response is trained. A prompt of messages uses the chat template; a text is used as is, with the
        end-of-sequence token after the response.
        """
        check_text(response, "`response`")
        if isinstance(prompt, str) and self._mapping.writes_messages:
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, str):
            answer = {"role": "assistant", "content": response}
            messages = [*prompt, answer] if isinstance(prompt, list) else prompt
            return self._conversation(row, messages, "prompt", "last")
        self._limit.check(check_text(prompt, "`prompt`") + response)
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, which ends the response to a text prompt. Use messages"
            )
        asked, answered = self._asked(prompt), [*encode_after(self._plain, response)]
        if answered[-1:] != [eos]:
            answered.append(eos)
        return [*asked, *answered], [False] * len(asked) + [True] * len(answered)

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _asked(self, prompt: str) -> list[int]:
        """Tokens of the beginning of a sequence: with what the tokenizer adds there, once, and not what it adds at the
        end.
        """
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        ids, plain = self._tokenizer.encode(prompt), self._plain(prompt)
        if ids[-1:] == [eos] and ids[-len(plain) - 1 : -1] == plain:
            ids = ids[:-1]
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] and plain[:1] == [bos] else ids


def _given_tokens(row: dict[str, Any]) -> Tokens:
    ids, labels, mask = _numbers(row, "input_ids"), _numbers(row, "labels"), _numbers(row, "loss_mask")
    if ids is None or (labels is None) == (mask is None):
        raise ValueError("a row with `input_ids` needs either `labels` or `loss_mask`")
    name, given = ("labels", labels) if labels is not None else ("loss_mask", mask)
    assert given is not None
    attended = _numbers(row, "attention_mask") or [1] * len(ids)
    for other, values in ((name, given), ("attention_mask", attended)):
        if len(values) != len(ids):
            raise ValueError(
                f"`input_ids` has {len(ids)} entries and `{other}` {len(values)}: the numbers must be equal"
            )
    # Padding is not part of the sequence.
    ids, given = list(compress(ids, attended)), list(compress(given, attended))
    if name == "loss_mask":
        if wrong := [value for value in given if value not in (0, 1)]:
            raise ValueError(f"`loss_mask` contains {wrong[0]}: it must be 1 for trained tokens and 0 for others")
        return ids, [bool(value) for value in given]
    for index, (token, label) in enumerate(zip(ids, given, strict=True)):
        if label not in (token, IGNORED):
            raise ValueError(
                f"`labels` has {label} where `input_ids` has {token} (entry {index}): a label is the token of its own "
                f"position, not of the next one, or {IGNORED}"
            )
    return ids, [label != IGNORED for label in given]


def _numbers(row: dict[str, Any], column: str) -> list[int] | None:
    value = row.get(column)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ValueError(f"`{column}` must be a list of whole numbers")
    if column != "loss_mask" and any(isinstance(item, bool) for item in value):
        raise ValueError(f"`{column}` must be a list of whole numbers, not of true and false")
    return value


def check_tokens(ids: list[int], mask: list[bool], vocab_size: int, *, may_be_empty: bool = False) -> None:
    """Raises: ValueError for a token that the model does not have, or if none would be trained, unless may_be_empty."""
    if outside := [token for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(f"token {outside[0]} is outside the model's vocabulary of {vocab_size} tokens")
    if not (may_be_empty or any(mask[1:])):
        raise ValueError("no token would be trained (nothing predicts the first token of a row)")
