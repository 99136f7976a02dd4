"""The recipe of PPO trains policy and critic, and a resumed run ends at the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train.tracking.names import metric_units
from tests.support.jobs import GREEDILY, GREEDY_MAIN, Job, run_to_end, running, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CHECKPOINTS = ("trainer.ckpt_interval=1", "trainer.max_ckpts_to_keep=-1", "trainer.hf_save_interval=2")


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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("ppo") / "world", num_rows=16)


def train(world: Path, name: str, *overrides: str) -> Job:
    # Samples are drawn greedily: what is drawn otherwise depends on which requests meet in a batch of the engine.
    settings = [f"trainer.run_name={name}", *GREEDILY, *CHECKPOINTS, "trainer.algorithm.advantage_estimator=gae"]
    code, job = run_to_end(world, *settings, "trainer.update_epochs_per_batch=2", *overrides, main=GREEDY_MAIN)
    assert code == 0, job.story()
    return job


def states(job: Job) -> list[dict[str, torch.Tensor]]:
    """Weights of the critic's last checkpoint, and the policy's last export."""
    critic = torch.load(job.run_dir / "checkpoints/global_step_2/critic/rank_0.pt")["weights"][0]
    (export,) = (job.run_dir / "exports/global_step_2").glob("*.safetensors")
    return [critic, load_file(export)]


def assert_equal(mine: Job, other: Job) -> None:
    for ours, theirs in zip(states(mine), states(other), strict=True):
        assert ours.keys() == theirs.keys()
        assert not [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def test_resumed_runs_and_shared_devices_end_at_the_same_weights(world: Path):
    whole = train(world, "whole", "trainer.critic_mini_batch_size=8")
    folder = whole.run_dir / "checkpoints/global_step_1"
    critic = torch.load(folder / "critic/rank_0.pt")
    assert critic["policy_version"] == 2, "two epochs of one mini-batch, where the policy has two"
    assert whole.metrics[-1]["critic/num_optimizer_steps"] == 2
    resume = ("trainer.resume_mode=from_path", f"trainer.resume_path={folder}")
    assert_equal(train(world, "resumed", *resume, "trainer.critic_mini_batch_size=8"), whole)
    for release in ("offload", "exit"):
        shared = ("trainer.placement.colocate_all=true", f"trainer.placement.release={release}")
        job = train(world, f"shared_{release}", *shared, "trainer.critic_mini_batch_size=8")
        assert_equal(job, whole)
        assert not list(job.run_dir.glob("state/**/*.pt"))
