"""`yes_no_maybe`: rewards depend on the answer alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

REWARDS = {"maybe": 1.0, "no": 0.75, "yes": 0.5}


class YesNoMaybeEnv(BaseTextEnv):
    """One turn; reward 1 for `maybe`, 0.75 for `no`, 0.5 for `yes`, ignoring surrounding spaces, otherwise 0."""

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=REWARDS.get(action.strip(), 0.0), done=True, metadata={})
