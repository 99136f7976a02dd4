"""The built-in environments: `addition` and `yes_no_maybe` of one turn, `guess_number` of two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

HEEDED_HINTS_REWARD = 0.2
ANSWER_REWARDS = {"maybe": 1.0, "no": 0.75, "yes": 0.5}


class AdditionEnv(BaseTextEnv):
    """One turn; reward 1 if the response, without spaces around it, is `reward_spec.ground_truth`, else 0."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.ground_truth = str(extras["reward_spec"]["ground_truth"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = 1.0 if action.strip() == self.ground_truth else 0.0
        return _output(reward=reward, done=True)


class YesNoMaybeEnv(BaseTextEnv):
    """One turn; reward 1 for `maybe`, 0.75 for `no`, 0.5 for `yes`, ignoring surrounding spaces, otherwise 0."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return _output(reward=ANSWER_REWARDS.get(action.strip(), 0.0), done=True)


class GuessNumberEnv(BaseTextEnv):
    """Guess the number `reward_spec.ground_truth`; after a wrong guess the reply is "higher" or "lower".

    Reward 1 for the number; on the last turn (`max_turns`, 2 by default) 0.2 for a wrong guess that agrees with all
    hints; otherwise 0. A response that is not a whole number ends the episode.
    """

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.number = int(extras["reward_spec"]["ground_truth"])
        self.max_turns = int(extras.get("max_turns", 2))
        self.above, self.below = float("-inf"), float("inf")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        try:
            guess = int(action.strip())
        except ValueError:
            return _output(reward=0.0, done=True)
        if guess == self.number:
            return _output(reward=1.0, done=True)
        if self.turns >= self.max_turns:
            heeded = self.turns > 1 and self.above < guess < self.below
            return _output(reward=HEEDED_HINTS_REWARD if heeded else 0.0, done=True)
        if guess < self.number:
            self.above = max(self.above, guess)
            return _output(reward=0.0, done=False, reply="higher")
        self.below = min(self.below, guess)
        return _output(reward=0.0, done=False, reply="lower")

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns}


def _output(*, reward: float, done: bool, reply: str = "") -> BaseTextEnvStepOutput:
    observations = [{"role": "user", "content": reply}] if reply else []
    return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})
