"""The recipe of PPO trains policy and critic; test_residency.py resumes such a run, and shares its devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.tracking.names import metric_units
from tests.support.jobs import running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_recipe_runs_for_two_steps(tmp_path: Path):
    changes = ["trainer.max_training_steps=2", "trainer.train_batch_size=16", "trainer.policy_mini_batch_size=8"]
    settings = [*changes, "trainer.eval_interval=-1", "trainer.eval_before_train=false", "trainer.ckpt_interval=-1"]
    with running(tmp_path, "trainer.run_name=ppo", *settings, experiment="ppo") as job:
        assert job.wait() == 0, job.story()
    first, second = job.metrics
    for row in (first, second):
        assert row["critic/num_optimizer_steps"] == row["policy/num_optimizer_steps"] == 2
        assert row["critic/grad_norm"] > 0 and row["critic/num_skipped_steps"] == 0
        assert row["timing/critic_train"] > 0 and "critic/explained_variance" in row
    assert second["critic/loss_metrics/values_mean"] != first["critic/loss_metrics/values_mean"]
    assert not {name for name in second if name.startswith("critic/")} - metric_units().keys()
