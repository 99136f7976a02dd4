"""A conversation of policy and environment as the tokens of the requests and of the training samples.

Three forms, chosen by `generator.use_conversation_multi_turn` and `generator.step_wise_trajectories`. In each the
policy is trained on the tokens that it sampled, after the tokens that the engine was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.trace import Trace
from skyrl_train.types import Generation, Message, Sample


class ChatDialogue:
    """Each turn is a message of the chat template, appended to the tokens of the turns before it: one sample.

    `begin` and `answer` raise ValueError for messages that cannot be rendered.
    """

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat, self._trace = chat, Trace()
        self._written: Sequence[int] = ()

    @property
    def turns(self) -> int:
        """Number of responses."""
        return self._trace.turns

    def begin(self, prompt: Sequence[Message]) -> None:
        self._trace.read(self._chat.prompt_ids(prompt), prompt)

    def input_ids(self) -> list[int]:
        """[L] tokens of the next request."""
        return self._trace.input_ids()

    def write(self, generation: Generation) -> None:
        """Add the policy's response."""
        self._written = generation.token_ids
        self._trace.write(generation)

    def add_reward(self, reward: float, named: Mapping[str, float]) -> None:
        """Reward the last response."""
        self._trace.add_reward(reward, named)

    def answer(self, observations: Sequence[Message]) -> None:
        """Add the environment's answer to the last response."""
        self._trace.read(self._chat.reply_ids(self._written, observations), observations)

    def cut(self, max_length: int) -> None:
        """End it because the next request would be longer than that."""
        self._trace.cut(max_length)

    def samples(self, env_metrics: Mapping[str, Any]) -> list[Sample]:
        """The training samples, without what was read after the last response."""
        return [self._trace.to_sample(env_metrics)]


class OneMessageDialogue(ChatDialogue):
    """The complete interaction is one message of the assistant: one sample.

    The text of observations is appended without the template. The token that ended a response which the environment
    answers is dropped: sampled, but not trained, because the next request does not have it.
    """

    def answer(self, observations: Sequence[Message]) -> None:
        if self._written and self._written[-1] in self._chat.special_ids:
            self._trace.drop_last()
        texts = [message.get("content") or "" for message in observations]
        self._trace.read([token for text in texts for token in self._chat.encode_after(text)], observations)


class StepWiseDialogue(ChatDialogue):
    """Each turn is a sample, whose prompt is the chat template over all messages before it, as a server renders it.

    A template may then show earlier turns differently: without their thoughts, or stripped of white space.
    """

    def __init__(self, chat: ChatTemplate) -> None:
        super().__init__(chat)
        self._messages: list[Message] = []
        self._earlier: list[Trace] = []

    @property
    def turns(self) -> int:
        return len(self._earlier) + self._trace.turns

    def begin(self, prompt: Sequence[Message]) -> None:
        self._messages += prompt
        super().begin(self._messages)

    def write(self, generation: Generation) -> None:
        super().write(generation)
        self._messages.append({"role": "assistant", "content": generation.text})

    def answer(self, observations: Sequence[Message]) -> None:
        self._earlier.append(self._trace)
        self._trace = Trace()
        self.begin(observations)

    def cut(self, max_length: int) -> None:
        if self._earlier:
            self._trace = self._earlier.pop()
        super().cut(max_length)

    def samples(self, env_metrics: Mapping[str, Any]) -> list[Sample]:
        """Metrics of the environment are those of the last."""
        earlier = [trace.to_sample(ends_conversation=False) for trace in self._earlier]
        return earlier + super().samples(env_metrics)


def dialogue_class(generator: GeneratorConfig) -> type[ChatDialogue]:
    """The form of the conversations of a run."""
    if generator.step_wise_trajectories:
        return StepWiseDialogue
    return ChatDialogue if generator.use_conversation_multi_turn else OneMessageDialogue
