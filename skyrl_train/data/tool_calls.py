"""Tools of a row and tool calls of messages: whether they are valid, and the form that a chat template renders."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any, TypeVar

from skyrl_train.data.text import from_json, json_text, shortened
from skyrl_train.types import Message

FORMS = [*product((False, True), ("", None))]
"""Whether arguments are JSON text, as in OpenAI's form, and the content of a message without text. Templates that
concatenate the arguments need text; DeepSeek-V3's renders the calls only of messages whose content is none."""
Extra = TypeVar("Extra")


def check_tool_calls(calls: object, name: str) -> None:
    """Raises: ValueError that begins with the name."""
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
            raise ValueError(
                f'{name} must be a list of {{"function": {{"name": ..., "arguments": ...}}}}, got {shortened(calls)}'
            )
    json_text(calls, name)


def tools_text(tools: object) -> str:
    """JSON text of the tools that a chat template lists for a row, given as a list or its JSON text; empty for none.

    Raises: ValueError if they are not descriptions of functions.
    """
    if not (given := from_json(tools)):
        return ""
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise ValueError(
            f'`tools` must be a list of {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, or its '
            f"JSON text, got {shortened(tools)}. Remove another column of this name with data.columns.tools=null"
        )
    return json_text(given, "`tools`")


def rendered(messages: Sequence[Message], render: Callable[[list[Message]], tuple[str, Extra]]) -> tuple[str, Extra]:
    """Return what `render` returns for the first form of the messages in whose text every tool call is.

    A call is in the text if its function's name occurs there more often than without the calls: a system message may
    list the functions.

    Raises: what `render` raises; ValueError if no form has all calls.
    """
    names = Counter(call.get("function", call)["name"] for message in messages for call in _calls(message))
    if not names:
        return render([dict(message) for message in messages])
    without = ""
    with suppress(Exception):  # a template may reject results of tools without the calls
        without, _ = render([_without_calls(message) for message in messages])
    rejections: list[Exception] = []
    missing: list[str] = []
    for as_text, empty in FORMS:
        try:
            text, extra = render([_in_form(message, as_text, empty) for message in messages])
        except Exception as error:  # errors of Jinja and of the template's expressions
            rejections.append(error)
            continue
        missing = [name for name, number in names.items() if text.count(name) < without.count(name) + number]
        if not missing:
            return text, extra
    if len(rejections) == len(FORMS):
        raise rejections[0]
    raise ValueError(
        f"it does not render `tool_calls` of the messages ({', '.join(missing)}). Put a chat_template.jinja that does "
        "into the model folder, or write the calls as text into `content`"
    )


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return message.get("tool_calls") or []


def _without_calls(message: Message) -> Message:
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": message.get("content") or ""}


def _in_form(message: Message, as_text: bool, empty: str | None) -> Message:
    if not _calls(message):
        return dict(message)
    calls = [{**call, "function": _function(call.get("function", call), as_text)} for call in _calls(message)]
    return {**message, "content": message.get("content") or empty, "tool_calls": calls}


def _function(function: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return {**function, "arguments": arguments}
