"""Sums in several turns, each with a reward."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class SecondTryEnv(BaseTextEnv):
    """A wrong answer is asked for again; each turn earns the fraction of characters that are right."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.answer, self.max_turns = extras["reward_spec"]["ground_truth"], extras["max_turns"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        text = action.strip()
        reward = sum(a == b for a, b in zip(text, self.answer, strict=False)) / max(len(text), len(self.answer))
        if reward == 1 or self.turns == self.max_turns:
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        again = [{"role": "user", "content": "again="}]
        return BaseTextEnvStepOutput(observations=again, reward=reward, done=False, metadata={})
