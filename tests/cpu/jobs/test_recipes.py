"""Two steps of each recipe of configs/experiment on a tiny model, and one of methods that need more than a group."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from skyrl_train.tracking.names import metric_units
from tests.support.jobs import WITHOUT_VLLM, running, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECIPES = {
    "dapo": "regular",
    "gspo": "gspo",
    "dr_grpo": "regular",
    "cispo": "cispo",
    "opsd": "regular",
    "ppo": "regular",
}
METHODS = {
    "remax": ["generator.n_samples_per_prompt=1"],
    "gdpo": ["environment.env_class=named:NamedDigits", "trainer.algorithm.gdpo_reward_weights={short: 0.5}"],
}
"""Estimator -> what it needs."""
RUNS = {name: (name, list[str]()) for name in RECIPES} | {
    name: ("dr_grpo", [f"trainer.algorithm.advantage_estimator={name}", "trainer.max_training_steps=1", *own])
    for name, own in METHODS.items()
}
"""Name of the run -> its experiment and overrides."""
# Threads of several Rays (2.60) may abort the interpreter while it ends, after the last run.
ONE_AFTER_ANOTHER = f"""\
import os
import sys

import skyrl_train

if __name__ == "__main__":
    given = dict(value.split("=", 1) for value in sys.argv[2:])
    for name, (experiment, own) in {RUNS!r}.items():
        values = given | dict(value.split("=", 1) for value in own) | {{"trainer.run_name": name}}
        overrides = [f"{{key}}={{value}}" for key, value in values.items()]
        skyrl_train.run(skyrl_train.load_config(overrides, experiment=experiment))
    sys.stdout.flush()
    os._exit(0)
"""
NAMED = """\
from rewards import Digits

class NamedDigits(Digits):
    def step(self, action):
        output = super().step(action)
        named = {"digits": output["reward"], "short": float(len(action) < 6)}
        return {**output, "metadata": {"rewards": named}}
"""
TINY = [
    WITHOUT_VLLM,
    *("trainer.prepare=null", "trainer.policy.model.path=model", "environment.env_class=rewards:Digits"),
    *("data.train_data=[rows.jsonl]", "data.val_data=[]", "trainer.logger=[console,jsonl]"),
    *("trainer.max_training_steps=2", "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4"),
    *("generator.n_samples_per_prompt=4", "trainer.placement.policy_num_gpus_per_node=1"),
    "trainer.policy.megatron_config.pipeline_model_parallel_size=1",
]


def test_every_recipe_trains(tmp_path: Path):
    """In one process, which imports once."""
    world = write_world(tmp_path / "world")
    (world / "recipes.py").write_text(ONE_AFTER_ANOTHER)
    (world / "named.py").write_text(NAMED)
    with running(world, "trainer.run_name=recipes", *TINY, main="recipes") as job:
        assert job.wait(timeout_s=800) == 0, job.story()
        assert not (left := job.left_behind()), left
    for name, loss in RECIPES.items():
        job.run_name = name
        steps = [row for row in job.metrics if row["trainer/global_step"] > 0]
        assert [row["policy/num_optimizer_steps"] for row in steps] == [2.0, 2.0], name
        assert all(math.isfinite(row["policy/final_loss"]) and row["policy/grad_norm"] > 0 for row in steps), name
        assert f"policy_loss_type: {loss}" in (job.run_dir / "config.yaml").read_text()
    first, second = steps  # of PPO; test_residency.py resumes such a run, and shares its devices
    for row in steps:
        assert row["critic/num_optimizer_steps"] == 2 and row["critic/num_skipped_steps"] == 0
        assert row["critic/grad_norm"] > 0
        assert row["timing/critic_train"] > 0 and "critic/explained_variance" in row
    assert second["critic/loss_metrics/values_mean"] != first["critic/loss_metrics/values_mean"]
    assert not {name for name in second if name.startswith("critic/")} - metric_units().keys()
    for name in METHODS:
        job.run_name = name
        (step,) = [row for row in job.metrics if row["trainer/global_step"] > 0]
        assert step["policy/num_optimizer_steps"] == 2 and step["policy/grad_norm"] > 0, name
    assert 0 < step["reward/named/short"] <= 1 and step["reward/named/digits"] == step["reward/avg_raw_reward"]
