"""What rollouts of a user need and return, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.data.chat import ChatTemplate
from skyrl_train.rollout.contract import Engines
from skyrl_train.rollout.trace import Trace
from skyrl_train.types import Generation, Prompt, Sample
from tests.support.tiny import tiny_tokenizer

CHAT = ChatTemplate(tiny_tokenizer(), {})


class Quiet:
    def __init__(self) -> None:
        self.rewards: list[float] = []

    def start(self, total: int) -> None:
        self.total = total

    def advance(self, samples: Sequence[Sample]) -> None:
        self.rewards.append(samples[-1].reward)

    def stop(self) -> None:
        self.total = -1


def engines_of(generate: Any, max_input_length: int = 8) -> Engines:
    return Engines(generate, None, CHAT, max_input_length=max_input_length, max_turns=1)  # type: ignore[arg-type]


def prompt(uid: str) -> Prompt:
    return Prompt(uid, [{"role": "user", "content": uid}], "addition", {}, "unknown")


def sample(reward: float) -> Sample:
    trace = Trace()
    trace.read([4, 5])
    trace.write(Generation([6], [-1.0], "6", "stop", 0))
    trace.add_reward(reward)
    return trace.to_sample()
