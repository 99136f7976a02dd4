"""An environment in which every response gets some reward, so that groups have a gradient."""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class DigitShare(BaseTextEnv):
    """One turn; the reward is the share of digits in the response."""

    def __init__(self, env_config: Any, extras: Any) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = sum(character.isdigit() for character in action) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
