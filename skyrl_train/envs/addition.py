"""`addition`: the answer is right or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class AdditionEnv(BaseTextEnv):
    """One turn; reward 1 if the response, without spaces around it, is `reward_spec.ground_truth`, else 0."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.ground_truth = str(extras["reward_spec"]["ground_truth"])

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = 1.0 if action.strip() == self.ground_truth else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
