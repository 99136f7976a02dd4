"""Rows of a data set -> Prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_train.config import Config
from skyrl_train.data.chat import PROMPT, ChatTemplate, check_messages
from skyrl_train.data.location import Location
from skyrl_train.data.mapping import RowMapping
from skyrl_train.data.rows import columns, read_rows, without_empty_fields
from skyrl_train.data.text import MIN_CHARACTERS, TextLimit, TooLong, shortened
from skyrl_train.data.tool_calls import tools_text
from skyrl_train.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

TOKENISED_TOGETHER = 256
"""Prompts that the tokenizer processes in parallel."""


@dataclass(frozen=True, slots=True)
class LoadedPrompts:
    prompts: list[Prompt]
    num_dropped: int
    """Rows whose prompt has more than `max_prompt_length` tokens."""


def load_prompts(
    sources: Sequence[str],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    default_env_class: str,
    allowed_env_classes: Sequence[str] = (),
    chat_template_kwargs: Mapping[str, Any],
    mapping: RowMapping = RowMapping(),  # noqa: B008 (frozen)
    timeout_s: float = math.inf,
) -> LoadedPrompts:
    """The rows of all sources in order, without those whose prompt is too long.

    A row's uid is its index over all sources, dropped rows included. A prompt given as text becomes a user message, and
    stays in `extras["prompt"]`.

    Args: sources, timeout_s: as in `read_rows`. allowed_env_classes: `module:Class` names that rows may have besides
        the default; a data set must not decide which code is imported.
    Raises: ValueError naming source and row if a source cannot be read, a row is malformed, or no row is left.
    """
    prompts = list[Prompt]()
    index = -1
    for index, (where, given) in enumerate(read_rows(sources, timeout_s)):
        if (row := mapping.row(given, where)) is None:
            continue
        prompts.append(_prompt(row, where, str(index), mapping, default_env_class, allowed_env_classes))
    mapping.check_some_left(len(prompts), index + 1, sources)
    limit = TextLimit.of(tokenizer, max_prompt_length)
    lengths = _lengths(prompts, ChatTemplate(tokenizer, chat_template_kwargs), limit)
    kept = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= max_prompt_length]
    if not kept:
        raise ValueError(
            f"trainer.max_prompt_length is {max_prompt_length}: no prompt of {', '.join(sources)} is that short "
            f"(the shortest prompt has {min(lengths)}). Raise it"
        )
    return LoadedPrompts(prompts=kept, num_dropped=len(prompts) - len(kept))


def configured_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str]) -> list[Prompt]:
    """The rows of sources as the configuration reads them. Raises: like `load_prompts`."""
    longest = config.trainer.max_prompt_length
    loaded = load_prompts(
        sources,
        tokenizer=tokenizer,
        max_prompt_length=longest,
        default_env_class=config.environment.env_class,
        allowed_env_classes=config.environment.allowed_env_classes,
        chat_template_kwargs=config.generator.chat_template_kwargs,
        mapping=RowMapping.of(config.data),
        timeout_s=config.trainer.download_timeout_s,
    )
    if loaded.num_dropped:
        log.warning(
            "%s: dropped %d of %d prompts with more than trainer.max_prompt_length=%d tokens",
            ", ".join(sources), loaded.num_dropped, loaded.num_dropped + len(loaded.prompts), longest,
        )  # fmt: skip
    if answered := [prompt for prompt in loaded.prompts if prompt.messages[-1]["role"] == "assistant"]:
        log.warning(
            "%d of %d prompts end with a message of the assistant, the first one is %s: the response is the turn after "
            "it, not its continuation. Remove the message with data.row_fn if it is the answer",
            len(answered), len(loaded.prompts), answered[0].name,
        )  # fmt: skip
    return loaded.prompts


def _lengths(prompts: Sequence[Prompt], chat: ChatTemplate, limit: TextLimit) -> list[int]:
    """Number of tokens of each prompt; a lower bound for one that is too long to be tokenised.

    Raises: ValueError naming source and row if the template rejects a prompt or renders it to no token.
    """
    lengths, has_tools = [0] * len(prompts), False
    together: dict[int, str] = {}

    def tokenise() -> None:
        if not together:
            return
        for index, length in zip(together, chat.num_tokens([*together.values()]), strict=True):
            lengths[index] = length
        together.clear()

    for index, prompt in enumerate(prompts):
        try:
            own = chat.for_row(prompt.extras)
            text = own.render(prompt.messages)
            limit.check(text)
        except TooLong as error:
            lengths[index] = error.num_tokens
            continue
        except ValueError as error:
            raise ValueError(f"{prompt.location}: {error}") from error
        if not has_tools and tools_text(prompt.extras.get("tools")):
            has_tools = True
            own.warn_if_tools_are_left_out(prompt.messages)
        if len(together) == TOKENISED_TOGETHER or sum(map(len, together.values())) + len(text) > MIN_CHARACTERS:
            tokenise()
        together[index] = text
    tokenise()
    if 0 in lengths:
        raise ValueError(
            f"{prompts[lengths.index(0)].location}: `prompt` is empty: the chat template renders it to no token"
        )
    return lengths


def _prompt(
    row: dict[str, Any], where: Location, uid: str, mapping: RowMapping, default_env_class: str, allowed: Sequence[str]
) -> Prompt:
    if (given := row.get("prompt")) is None:
        raise ValueError(
            f"{where}: `prompt` is missing. The columns are {columns(row)}. Name one in data.columns, as in "
            "data.columns.prompt=question"
        )
    try:
        messages = check_messages(mapping.messages(without_empty_fields(given)), PROMPT)
    except ValueError as error:
        raise ValueError(f"{where}: invalid `prompt`: {error}") from error
    if not messages:
        raise ValueError(f"{where}: `prompt` has no messages")
    for column, kind in (("env_class", str), ("data_source", str), ("reward_spec", dict)):
        value = row.get(column)
        if value is not None and not isinstance(value, kind):
            got = f"{type(value).__name__} {shortened(value)}"
            raise ValueError(f"{where}: `{column}` must be a {kind.__name__}, got {got}")
    env_class = row.get("env_class") or default_env_class
    if ":" in env_class and env_class != default_env_class and env_class not in allowed:
        raise ValueError(
            f"{where}: `env_class` is {env_class!r}: rows may import only what the configuration names. Add it to "
            "environment.allowed_env_classes, or set environment.env_class to it"
        )
    return Prompt(
        uid=uid,
        messages=messages,
        env_class=env_class,
        extras={
            key: value
            for key, value in row.items()
            if key != "env_class" and (key != "prompt" or isinstance(value, str))
        },
        data_source=row.get("data_source") or "unknown",
        location=where,
    )
