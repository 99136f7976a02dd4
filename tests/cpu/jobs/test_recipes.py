"""Two steps of each recipe of configs/experiment on a tiny model."""

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
# Threads of several Rays (2.60) may abort the interpreter while it ends, after the last run.
ONE_AFTER_ANOTHER = """\
import os
import sys

import skyrl_train

if __name__ == "__main__":
    for name in "NAMES".split():
        own = [f"trainer.run_name={name}" if value == "trainer.run_name=recipes" else value for value in sys.argv[2:]]
        skyrl_train.run(skyrl_train.load_config(own, experiment=name))
    sys.stdout.flush()
    os._exit(0)
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
    (world / "recipes.py").write_text(ONE_AFTER_ANOTHER.replace("NAMES", " ".join(RECIPES)))
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
