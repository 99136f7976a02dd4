"""An environment of your own, for the default rollout: `environment.env_class=own_environment:Digits`."""

from __future__ import annotations

from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Digits(BaseTextEnv):
    """Rewards digits, in one turn."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self._wanted = env_config.extra["wanted_digits"]

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = min(1.0, sum(map(str.isdigit, action)) / self._wanted)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
