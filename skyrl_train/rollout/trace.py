"""Tokens of a conversation in progress, and its conversion to a Sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from skyrl_train.types import Generation, Message, Sample, VersionSpans


@dataclass(slots=True)
class Trace:
    """Tokens that the policy read and wrote so far.

    Tokens read after the last response are not part of the sample, unless nothing was written.
    """

    stop_reason: str = "length"
    """Stop reason of the last generation."""
    turns: int = 0
    """Number of generations."""
    token_ids: list[int] = field(default_factory=list)
    """[L] up to the end of the last response."""
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    transcript: list[Message] = field(default_factory=list)
    _unanswered: list[int] = field(default_factory=list)
    _unanswered_messages: list[Message] = field(default_factory=list)
    _prompt_length: int = 0
    _rewards: dict[int, float] = field(default_factory=dict)
    _named_rewards: dict[str, float] = field(default_factory=dict)
    _spans: list[tuple[int, int]] = field(default_factory=list)

    def read(self, token_ids: Sequence[int], messages: Sequence[Message] = ()) -> None:
        """Add tokens that the policy reads: the prompt, later observations. Args: messages: their text."""
        self._unanswered += token_ids
        self._unanswered_messages += messages

    def input_ids(self) -> list[int]:
        """[L] tokens before the policy's next turn."""
        return self.token_ids + self._unanswered

    def write(self, generation: Generation) -> None:
        assert len(generation.token_ids) == len(generation.logprobs), "an engine returns one logprob per token"
        self._append_unanswered()
        self.token_ids += generation.token_ids
        self.loss_mask += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.transcript.append({"role": "assistant", "content": generation.text})
        self.turns += 1
        self.stop_reason = generation.stop_reason
        self._spans += generation.version_spans or ((generation.policy_version, len(generation.token_ids)),)

    def cut(self, max_length: int) -> None:
        """End it because the next request would be longer than that. Of a prompt that is longer itself the rest is
        dropped: none of it is trained, and passes take no longer sample.
        """
        self.stop_reason = "length"
        if self.turns == 0:
            del self._unanswered[max_length:]

    def drop_last(self) -> None:
        """Forget the last token of the last response; its reward moves to the token before it."""
        last = len(self.token_ids) - 1
        for values in (self.token_ids, self.loss_mask, self.logprobs):
            values.pop()
        version, count = self._spans.pop()
        self._spans += [(version, count - 1)] if count > 1 else []
        if last in self._rewards:
            self._rewards[last - 1] = self._rewards.get(last - 1, 0.0) + self._rewards.pop(last)

    def add_reward(self, reward: float, named: Mapping[str, float] | None = None) -> None:
        """Reward the last response. Args: named: several rewards by their names, which turns add up."""
        for name, value in (named or {}).items():
            self._named_rewards[name] = self._named_rewards.get(name, 0.0) + value
        last = len(self.token_ids) - 1
        self._rewards[last] = self._rewards.get(last, 0.0) + reward

    def to_sample(self, env_metrics: Mapping[str, Any] | None = None, *, ends_conversation: bool = True) -> Sample:
        """Convert to a sample; its version is 0 if nothing was written."""
        if self.turns == 0:
            self._append_unanswered()
        rewards = np.zeros(len(self.token_ids))  # torch would start threads for each thread that has a long sample
        for token, reward in self._rewards.items():
            rewards[token] = reward
        return Sample(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            loss_mask=torch.tensor(self.loss_mask, dtype=torch.bool),
            rollout_logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            prompt_length=self._prompt_length,
            rewards=torch.from_numpy(rewards),
            stop_reason=self.stop_reason,
            turns=self.turns,
            policy_version=min((version for version, _ in self._spans), default=0),
            version_spans=_merged(self._spans),
            env_metrics=dict(env_metrics or {}),
            transcript=self.transcript,
            named_rewards=self._named_rewards,
            ends_conversation=ends_conversation,
        )

    def _append_unanswered(self) -> None:
        if self.turns == 0:
            self._prompt_length = len(self._unanswered)
        self.token_ids += self._unanswered
        self.loss_mask += [False] * len(self._unanswered)
        self.logprobs += [0.0] * len(self._unanswered)
        self.transcript += self._unanswered_messages
        self._unanswered, self._unanswered_messages = [], []


def _merged(spans: Sequence[tuple[int, int]]) -> VersionSpans:
    """Merge adjacent spans of one version."""
    merged: list[tuple[int, int]] = []
    for version, num_tokens in spans:
        if merged and merged[-1][0] == version:
            num_tokens += merged.pop()[1]
        merged.append((version, num_tokens))
    return tuple(merged)
