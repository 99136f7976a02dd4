"""Policy, critic, reference and engine on shared devices compute what they compute on their own, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import tensors_of
from tests.support.jobs import GREEDILY, Job, write_world
from tests.support.series import run_series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# Samples are greedy: other ones depend on which requests meet in a batch of the engine.
OVERRIDES = [
    *GREEDILY,
    "trainer.algorithm.advantage_estimator=gae",
    "trainer.critic_mini_batch_size=8",
    "trainer.update_epochs_per_batch=2",
    "trainer.algorithm.use_kl_loss=true",
    "trainer.algorithm.kl_loss_coef=0.1",
    "trainer.hf_save_interval=1",
    "trainer.ckpt_interval=1",
    "trainer.max_ckpts_to_keep=-1",
    "trainer.eval_interval=1",
    "data.val_data=[rows.jsonl]",
    "trainer.verify_sync_every=10",
]
SAME = ("policy", "critic", "reward", "eval", "loss")
"""First parts of the names of metrics that do not depend on times."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("residency") / "world", num_rows=16)


@pytest.fixture(scope="module")
def jobs(world: Path) -> dict[str, Job]:
    shared = "trainer.placement.colocate_all=true"
    own = {
        "dedicated": [],
        "offload": [shared],
        "resumed": [
            *(shared, "trainer.placement.release=none", "trainer.resume_mode=from_path"),
            f"trainer.resume_path={world}/runs/offload/checkpoints/global_step_1",
        ],
    }
    runs = {name: ("tiny", [*OVERRIDES, *overrides]) for name, overrides in own.items()}
    return run_series(world, runs, timeout_s=500, greedy=True)


def weights(job: Job, step: int) -> dict[str, torch.Tensor]:
    """Those of the policy's export and of the critic's checkpoint."""
    critic = torch.load(job.run_dir / f"checkpoints/global_step_{step}/critic/rank_0.pt")["weights"][0]
    policy = tensors_of(job.run_dir / f"exports/global_step_{step}")
    return policy | {f"critic.{name}": tensor for name, tensor in critic.items()}


def assert_same_weights(job: Job, other: Job, step: int) -> None:
    mine, theirs = weights(job, step), weights(other, step)
    assert mine.keys() == theirs.keys() and mine
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


def test_a_run_that_resumes_from_a_checkpoint_ends_at_the_same_weights(jobs: dict[str, Job]):
    """Of step 1 of the run that offloads, with models and engine that stay on the device."""
    job, dedicated, folder = jobs["resumed"], jobs["dedicated"], jobs["offload"].run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_1", "global_step_2"]
    assert f"resumes after step 1, from {folder.resolve()}/global_step_1" in job.output
    assert [row["trainer/global_step"] for row in job.metrics] == [2]
    assert_same_weights(job, dedicated, 2)
    (mine,), theirs = job.metrics, dedicated.metrics[2]
    same = [name for name in theirs if name.split("/")[0] in SAME]
    assert [(name, mine[name]) for name in same] == [(name, theirs[name]) for name in same]
    assert {path.name for path in (job.run_dir / "checkpoints/global_step_2").iterdir()} == {
        "rank_0.pt",
        "checkpoint.json",
        "critic",
    }
    assert not {"timing/offload", "timing/reload", "timing/engine_sleep", "timing/engine_wake"} & mine.keys()


def test_taking_turns_ends_at_the_same_weights(world: Path, jobs: dict[str, Job]):
    job, dedicated = jobs["offload"], jobs["dedicated"]
    for step in (1, 2):
        assert_same_weights(job, dedicated, step)
    before, exported = tensors_of(world / "model"), tensors_of(job.run_dir / "exports/global_step_2")
    assert exported.keys() == before.keys() and all(not torch.equal(exported[k], before[k]) for k in before)
    critic = torch.load(job.run_dir / "checkpoints/global_step_1/critic/rank_0.pt")
    assert critic["policy_version"] == 2, "two epochs of one mini-batch, where the policy has two"
    assert job.metrics[-1]["critic/num_optimizer_steps"] == 2 and job.metrics[-1]["policy/num_optimizer_steps"] == 4
    for mine, theirs in zip(job.metrics, dedicated.metrics, strict=True):
        same = [name for name in theirs if name.split("/")[0] in SAME]
        assert [(name, mine[name]) for name in same] == [(name, theirs[name]) for name in same]
    for row in job.metrics[1:]:
        assert {"timing/offload", "timing/reload", "timing/engine_sleep", "timing/engine_wake"} <= row.keys()
        assert row["perf/offload_gb_per_s"] > 0 and row["memory/training/policy_gib"] > 0
        assert {
            "memory/rollout/engine_gib",
            "memory/reference/reference_gib",
            "memory/sync/device_free_gib",
        } <= row.keys()
