"""Multiplication in one turn."""

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class MultiplyEnv(BaseTextEnv):
    """The product earns 1; other responses earn up to `format_reward`, for the fraction of digits."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.format_reward = env_config.format_reward
        self.product = extras["reward_spec"]["ground_truth"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        answer = action.strip()
        digits = sum(map(str.isdigit, answer)) / max(len(answer), 1)
        reward = 1.0 if answer == self.product else self.format_reward * digits
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
