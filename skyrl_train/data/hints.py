"""Prompts with a hint for teachers, in place of those that the policy answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from skyrl_train.data.chat import VARIABLES, ChatTemplate, check_messages
from skyrl_train.data.text import Filled, shortened
from skyrl_train.types import Group, Message, Prompt, Sample, TeacherPrompt

KEY = "trainer.algorithm.distillation.distillation_hint"
Hint = Callable[[Group, Sample], list[Message] | None]
"""Messages of the prompt with which the teacher scores a sample of the group; None: the sample's own."""


def hinted_messages(template: str, prompt: Prompt) -> list[Message]:
    """The messages of a row with `template` as the last user message; `{prompt}` is what this said before, other fields
    are columns: `{answer}`, `{reward_spec[ground_truth]}`.

    Raises: ValueError naming the row if it lacks a column or has no user message.
    """
    last = max((i for i, message in enumerate(prompt.messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"{KEY}: {prompt.name} has no user message. Use a `module:function`")
    given = prompt.messages[last]
    try:
        content = Filled().vformat(template, (), {**prompt.extras, "prompt": given.get("content") or ""})
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        columns = ", ".join(["prompt", *prompt.extras])
        raise ValueError(
            f"{KEY} is {shortened(template)}: it cannot be filled from {prompt.name} ({type(error).__name__}: "
            f"{error}). The fields are {columns}"
        ) from error
    return [*prompt.messages[:last], {**given, "content": content}, *prompt.messages[last + 1 :]]


def hint_of_template(template: str) -> Hint:
    """The hint that fills a template with the columns of each row."""

    def hint(group: Group, sample: Sample) -> list[Message]:
        return hinted_messages(template, group.prompt)

    return hint


class Hints:
    """Renders the prompts of teachers."""

    def __init__(self, hint: Hint, chat: ChatTemplate, max_tokens: int | None = None) -> None:
        """Args: max_tokens: of the longest sample with its hint; None if unknown."""
        self._hint, self._chat, self.max_tokens = hint, chat, max_tokens

    def prompts(self, groups: Sequence[Group]) -> list[TeacherPrompt]:
        """The teacher's prompt for every sample of the groups, in order.

        Raises: ValueError for a sample that does not begin with its row's prompt, because an environment or a rollout
            changed it, and for messages that cannot be rendered.
        """
        return [self._prompt(group, sample) for group in groups for sample in group.samples]

    def _prompt(self, group: Group, sample: Sample) -> TeacherPrompt:
        prompt = group.prompt
        chat = self._chat.for_row(prompt.extras)
        own = torch.tensor(chat.prompt_ids(prompt.messages), dtype=torch.int64)
        length = len(own)
        if not torch.equal(sample.token_ids[:length], own) or bool(sample.loss_mask[:length].any()):
            raise ValueError(
                f"{KEY} is set: a sample of {prompt.name} does not begin with the prompt of its row as the chat "
                "template renders it, so the hint cannot be inserted. Use an environment and a rollout that keep "
                "the row's prompt unchanged"
            )
        messages = self._hint(group, sample)
        if messages is None:
            return TeacherPrompt(length, own)
        try:
            token_ids = chat.prompt_ids(check_messages(messages))
        except ValueError as error:
            raise ValueError(f"{KEY}: {prompt.name} with its hint: {error}") from error
        return TeacherPrompt(length, torch.tensor(token_ids, dtype=torch.int64))


def check_template(
    template: str, prompts: Sequence[Prompt], chat: ChatTemplate, *, max_tokens: int, max_response: int | None
) -> int:
    """Fill the template with every row. Returns: tokens of the longest prompt with its hint.

    Args: max_tokens: positions of the model; max_response: tokens that may follow a prompt, None if that depends on the
        conversation. Raises: ValueError naming the first row that lacks a column, or the longest one if it is too long.
    """
    filled = [hinted_messages(template, prompt) for prompt in prompts]
    # The one with the most characters stands for all: rendering takes most of the time.
    own = [sum(len(str(prompt.extras.get(name) or "")) for name in ("tools", VARIABLES)) for prompt in prompts]
    sizes = [sum(map(_num_characters, messages)) + extra for messages, extra in zip(filled, own, strict=True)]
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    length = len(chat.for_row(prompts[longest].extras).prompt_ids(filled[longest]))
    if length + (max_response or 1) > max_tokens:
        response = "" if max_response is None else f" and a response of up to {max_response} tokens"
        raise ValueError(
            f"{KEY}: {prompts[longest].name} with its hint has {length} tokens{response}, more than "
            f"the {max_tokens} positions of the model. Shorten the hint, or lower max_generate_length"
        )
    return length


def _num_characters(message: Message) -> int:
    return len(message.get("content") or "") + len(str(message.get("tool_calls") or ""))
