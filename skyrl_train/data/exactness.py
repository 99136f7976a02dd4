"""Whether the requests of conversations of several turns are those that a server would make of their messages.

A served model reads, at each turn, its chat template over all messages before it. Appending turns to the tokens of a
conversation gives the same for some templates and some conversations; `probe` finds out which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.types import Message

SHOWN = 40
"""Characters of a difference on each side."""
QUESTION: Message = {"role": "user", "content": "How many?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CALLED: list[Message] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
    },
    {"role": "tool", "content": "3"},
]


class Outcome(Enum):
    """How appended requests relate to the rendering of their messages."""

    EXACT = "exact"
    RETOKENISED = "same text"
    """The tokenizer would merge other tokens of the same text."""
    UNCLOSED = "unclosed"
    """The template ends no turn, so the end-of-sequence token stays in the conversation."""
    REWRITTEN = "rewritten"
    """The template renders earlier turns differently."""
    WRONG = "wrong"
    """The text between the turns differs."""
    REJECTED = "rejected"
    """The template rejects the messages."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A conversation with something that templates treat differently."""

    name: str
    responses: tuple[str, str]
    observations: tuple[Message, ...] = ({"role": "user", "content": "And now?"},)
    before: tuple[Message, ...] = ()
    """Messages before the question."""
    after: tuple[Message, ...] = ()
    """Messages after it, before the policy's first turn."""
    has_tools: bool = False
    ends: bool = True
    """Whether the end-of-sequence token was sampled."""


PLAIN = Feature("plain text", ("one", "two"))
FEATURES = (
    PLAIN,
    Feature("truncated responses", PLAIN.responses, ends=False),
    Feature("system message", PLAIN.responses, before=({"role": "system", "content": "Be brief."},)),
    Feature("white space around responses", ("\n one \n", "\n two \n")),
    Feature("thoughts", ("<think>\nwhat\n</think>\n\none", "<think>\nnow\n</think>\n\ntwo")),
    Feature("several observations", PLAIN.responses, ({"role": "user", "content": "More."},) * 2),
    Feature("tools, and their results", (CALL, CALL), ({"role": "tool", "content": "3"},), has_tools=True),
    Feature("tool calls in the prompt", PLAIN.responses, after=(*CALLED,), has_tools=True),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one feature does in requests that append turns, and whether the template can render it at all."""

    feature: Feature
    outcome: Outcome
    detail: str = ""
    """The difference, or why the template rejects the messages."""
    is_rendered: bool = True
    """Whether the template renders all messages, as step-wise requests need."""
    is_prompt_rendered: bool = True
    """Whether it renders the first prompt, which is all that a conversation in one message needs."""


def probe(
    chat_with: Callable[[bool], ChatTemplate],
    eos_token_ids: Sequence[int],
    features: Sequence[Feature] = FEATURES,
    question: Sequence[Message] = (QUESTION,),
) -> Iterator[Finding]:
    """Play each feature's conversation of three requests.

    Args: chat_with: the template without or with tools; eos_token_ids: tokens at which the engine ends a response;
        question: the messages of the first prompt.
    """
    for feature in features:
        chat = chat_with(feature.has_tools)
        prompt = [*feature.before, *question, *feature.after]
        try:
            chat.prompt_ids(prompt)
        except ValueError as error:
            yield Finding(feature, Outcome.REJECTED, str(error), is_rendered=False, is_prompt_rendered=False)
            continue
        try:
            rendered = [_rendered(chat, feature, prompt, turns) for turns in (1, 2)]
        except ValueError as error:
            yield Finding(feature, Outcome.REJECTED, str(error), is_rendered=False)
            continue
        try:
            yield _compared(chat, feature, prompt, rendered, eos_token_ids)
        except ValueError as error:
            yield Finding(feature, Outcome.REJECTED, str(error))


def _rendered(chat: ChatTemplate, feature: Feature, prompt: Sequence[Message], turns: int) -> list[int]:
    """[L] tokens of the request after some turns, rendered from all messages."""
    messages = list(prompt)
    for response in feature.responses[:turns]:
        messages += [{"role": "assistant", "content": response}, *feature.observations]
    return chat.prompt_ids(messages)


def _compared(
    chat: ChatTemplate,
    feature: Feature,
    prompt: Sequence[Message],
    rendered: Sequence[list[int]],
    eos_token_ids: Sequence[int],
) -> Finding:
    observations, decode = feature.observations, chat.tokenizer.decode
    # The token with which the template ends a turn, if an engine stops at it: trained models sample that one.
    ends = sorted(eos_token_ids, key=lambda end: len(chat.reply_ids([end], observations)))[:1] if feature.ends else []
    appended = chat.prompt_ids(prompt)
    same_tokens = True
    for response, expected in zip(feature.responses, rendered, strict=True):
        text = chat.encode(response)
        appended += text
        end_of_response = len(decode(appended))
        written = [*text, *ends]
        appended += [*ends, *chat.reply_ids(written, observations)]
        found, wanted = decode(appended), decode(expected)
        if found != wanted:
            pairs = zip(found, wanted, strict=False)
            start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(wanted)))
            detail = f"the request has {_around(found, start)}, the template {_around(wanted, start)}"
            if start < end_of_response:
                return Finding(feature, Outcome.REWRITTEN, detail)
            return Finding(feature, Outcome.WRONG if _closes(chat) else Outcome.UNCLOSED, detail)
        same_tokens = same_tokens and appended == expected
    return Finding(feature, Outcome.EXACT if same_tokens else Outcome.RETOKENISED)


def _closes(chat: ChatTemplate) -> bool:
    """Whether the template writes anything after an assistant's text."""
    text = chat.render([QUESTION, {"role": "assistant", "content": "zqxj"}], add_generation_prompt=False)
    return not text.endswith("zqxj")


def _around(text: str, position: int) -> str:
    return repr(text[max(0, position - SHOWN // 2) : position + SHOWN])


def eos_token_ids(chat: ChatTemplate, folder: str) -> list[int]:
    """Tokens at which engines end a response: the tokenizer's, and those of generation_config.json."""
    ids = [] if chat.tokenizer.eos_token_id is None else [chat.tokenizer.eos_token_id]
    file = Path(folder, "generation_config.json")
    given = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return list(dict.fromkeys([*ids, *(given if isinstance(given, list) else [] if given is None else [given])]))
