"""Sums with two named rewards, for `gdpo`."""

from __future__ import annotations

from pathlib import Path

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput

from skyrl_train.config import Config
from skyrl_train.envs.built_in import AdditionEnv
from skyrl_train.tasks import quickstart, tiny

ROWS = "quickstart/named.jsonl"


def prepare(config: Config) -> None:
    """The quickstart's files, and its rows for `NamedAddition`."""
    quickstart.prepare(config)
    train, _ = tiny.addition_rows(seed=0)
    tiny.write_rows(Path(ROWS), [{**row, "env_class": None} for row in train])


class NamedAddition(AdditionEnv):
    """`addition`, whose reward stays; named are the right answer, and a number with the right number of digits."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        output = super().step(action)
        given = action.strip()
        has_form = given.isdigit() and len(given) == len(self.ground_truth)
        return {**output, "metadata": {"rewards": {"correct": output["reward"], "form": float(has_form)}}}
