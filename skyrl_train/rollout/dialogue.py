"""A conversation of policy and environment as the tokens of the requests and of the training samples.

Three forms, chosen by `generator.use_conversation_multi_turn` and `generator.step_wise_trajectories`. In each the
policy is trained on the tokens that it sampled, after the tokens that the engine was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.trace import Trace
from skyrl_train.types import Generation, Message, Sample


class Dialogue(Protocol):
    """A conversation in progress. `begin` and `answer` raise ValueError for messages that cannot be rendered."""

    @property
    def turns(self) -> int:
        """Number of responses."""

    def begin(self, prompt: Sequence[Message]) -> None:
        """Read the first messages."""

    def input_ids(self) -> list[int]:
        """[L] tokens of the next request."""

    def write(self, generation: Generation) -> None:
        """Add the policy's response."""

    def add_reward(self, reward: float, named: Mapping[str, float]) -> None:
        """Reward the last response."""

    def answer(self, observations: Sequence[Message]) -> None:
        """Read the environment's answer to the last response."""

    def cut(self) -> None:
        """End it because the next request would be too long."""

    def samples(self, env_metrics: Mapping[str, Any]) -> list[Sample]:
        """The training samples, without what was read after the last response."""


class ChatDialogue:
    """Each turn is a message of the chat template, appended to the tokens of the turns before it: one sample."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat, self._trace = chat, Trace()
        self._written: Sequence[int] = ()

    @property
    def turns(self) -> int:
        return self._trace.turns

    def begin(self, prompt: Sequence[Message]) -> None:
        self._trace.read(self._chat.prompt_ids(prompt), prompt)

    def input_ids(self) -> list[int]:
        return self._trace.input_ids()

    def write(self, generation: Generation) -> None:
        self._written = generation.token_ids
        self._trace.write(generation)

    def add_reward(self, reward: float, named: Mapping[str, float]) -> None:
        self._trace.add_reward(reward, named)

    def answer(self, observations: Sequence[Message]) -> None:
        self._trace.read(self._chat.reply_ids(self._written, observations), observations)

    def cut(self) -> None:
        self._trace.stop_reason = "length"

    def samples(self, env_metrics: Mapping[str, Any]) -> list[Sample]:
        return [self._trace.to_sample(env_metrics)]


class OneMessageDialogue(ChatDialogue):
    """The complete interaction is one message of the assistant: one sample.

    The text of observations is appended without the template. The token that ended a response which the environment
    answers is dropped: sampled, but not trained, because the next request does not have it.
    """

    def answer(self, observations: Sequence[Message]) -> None:
        if self._written and self._written[-1] in self._chat.tokenizer.all_special_ids:
            self._trace.drop_last()
        texts = [message["content"] for message in observations]
        self._trace.read([token for text in texts for token in self._chat.encode(text)], observations)


class StepWiseDialogue:
    """Each turn is a sample, whose prompt is the chat template over all messages before it, as a server renders it.

    A template may then show earlier turns differently: without their thoughts, or stripped of white space.
    """

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._messages: list[Message] = []
        self._traces: list[Trace] = []

    @property
    def turns(self) -> int:
        return sum(trace.turns for trace in self._traces)

    def begin(self, prompt: Sequence[Message]) -> None:
        self._messages += prompt
        trace = Trace()
        trace.read(self._chat.prompt_ids(self._messages), self._messages)
        self._traces.append(trace)

    def input_ids(self) -> list[int]:
        return self._traces[-1].input_ids()

    def write(self, generation: Generation) -> None:
        self._traces[-1].write(generation)
        self._messages.append({"role": "assistant", "content": generation.text})

    def add_reward(self, reward: float, named: Mapping[str, float]) -> None:
        self._traces[-1].add_reward(reward, named)

    def answer(self, observations: Sequence[Message]) -> None:
        self.begin(observations)

    def cut(self) -> None:
        if len(self._traces) > 1:
            self._traces.pop()
        self._traces[-1].stop_reason = "length"

    def samples(self, env_metrics: Mapping[str, Any]) -> list[Sample]:
        """Metrics of the environment are those of the last."""
        *earlier, last = self._traces
        return [
            *(trace.to_sample(ends_conversation=False) for trace in earlier),
            last.to_sample(env_metrics),
        ]


def dialogue_class(generator: GeneratorConfig) -> Callable[[ChatTemplate], Dialogue]:
    """The form of the conversations of a run."""
    if generator.step_wise_trajectories:
        return StepWiseDialogue
    return ChatDialogue if generator.use_conversation_multi_turn else OneMessageDialogue
