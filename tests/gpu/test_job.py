"""Whole jobs, started as a user starts them: policy on one GPU, engine on another, weights over NCCL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cpu.jobs import ROOT, run_to_end, running, write_world

pytestmark = [pytest.mark.gpus(2), pytest.mark.timeout(900)]
DEDICATED = [
    "trainer.placement.policy_num_gpus_per_node=1",
    "trainer.policy.megatron_config.pipeline_model_parallel_size=1",
]


@pytest.mark.parametrize("bf16", ["true", "false"])
def test_a_job_ends_with_every_sync_proven(tmp_path: Path, bf16: str):
    world = write_world(tmp_path / "world")
    code, job = run_to_end(world, f"trainer.bf16={bf16}", "trainer.verify_sync_every=1", *DEDICATED)
    assert code == 0, job.story()
    rows = job.metrics
    assert [row["trainer/global_step"] for row in rows if "policy/grad_norm" in row] == [1, 2]
    assert all(row["perf/sync_gb_per_s"] > 0 for row in rows if "policy/grad_norm" in row)


def test_the_quickstart_learns(tmp_path: Path):
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    settings = ["trainer.run_name=quickstart", "trainer.max_training_steps=60", "trainer.eval_interval=30", *DEDICATED]
    with running(tmp_path, *settings, experiment="quickstart", environment=environment) as job:
        assert job.wait(600) == 0, job.story()
    scores = [row["eval/all/avg_score"] for row in job.metrics if "eval/all/avg_score" in row]
    assert len(scores) >= 2, job.story()
    assert scores[-1] > scores[0] + 0.05
