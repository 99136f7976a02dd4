"""What goes wrong in a running job: one clear error within its deadline, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import DEADLY, MAIN, WITHOUT_VLLM, Job, error_of, run_to_end, write_world
from tests.support.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# Starts the engines on another model than the trainer's.
OTHER_WEIGHTS = f"""\
import dataclasses, os, sys
from skyrl_train.cluster import launch
from {MAIN} import main

def others(*args):
    return [dataclasses.replace(one, model_path=os.path.abspath("other")) for one in settings(*args)]

if __name__ == "__main__":
    settings, launch.all_engine_settings = launch.all_engine_settings, others
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("failures") / "world")


def status(job: Job) -> str:
    return json.loads((job.run_dir / "run.json").read_text())["status"]


def test_a_run_continues_without_its_engine_and_ends_with_its_rank(world: Path):
    """Of an engine of another kind (examples/custom), which serves each version of the policy. The environment kills it
    when it scores the last sample of the first step, so that the sync of that step finds it dead, and one of two ranks
    in the middle of the third. tests/cpu/trainer/test_publish.py has the other moments."""
    (world / "deadly.py").write_text(DEADLY)
    overrides = [
        WITHOUT_VLLM,
        "trainer.verify_sync_every=1",
        "trainer.run_name=deaths",
        "trainer.max_training_steps=100",
        "trainer.epochs=100",
        "trainer.timeout_s=100_000",
        "environment.env_class=deadly:Deadly",
        "trainer.placement.policy_num_gpus_per_node=2",
    ]
    logs = world / "runs/deaths/logs"
    deaths = {32: f"{logs}/engine-0.log", 70: f"{logs}/policy-1.log"}
    code, job = run_to_end(world, *overrides, environment={"DEATHS": json.dumps(deaths)})
    assert code == 1 and status(job) == "failed", "it must not wait for trainer.timeout_s"
    assert job.output.count("restarting engine-0 (1 of ") == 1 and "engine-0 was restarted" in job.output
    message = error_of(job)
    assert "policy-1" in message and "policy-1.log" in message
    assert "crashed or was killed" in message
    assert "Traceback" in (job.run_dir / "logs/driver.log").read_text()
    assert (job.run_dir / "report.html").exists()
    assert [row["trainer/global_step"] for row in job.metrics] == [1, 2]
    assert all(row["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5 for row in job.metrics)
    assert all(row["policy/grad_norm"] > 0 for row in job.metrics)
    assert "vllm" not in (job.run_dir / "logs/engine-0.log").read_text().lower()


def test_a_run_whose_engine_holds_other_weights_ends_before_it_trains(world: Path):
    """Without checks of the syncs, so that the samples of the step alone give it away."""
    (world / "other_weights.py").write_text(OTHER_WEIGHTS)
    write_tiny_model(world / "other", seed=1)
    overrides = [WITHOUT_VLLM, "trainer.run_name=other", "trainer.verify_sync_every=0", "trainer.ckpt_interval=1"]
    code, job = run_to_end(world, *overrides, main="other_weights")
    assert code == 1 and status(job) == "failed"
    message = error_of(job)
    assert "trainer.logprob_difference.fail is 0.001: the logprobs of engine and trainer differ by" in message
    assert "an engine that holds other weights" in message
    assert not job.metrics and not list(job.run_dir.glob("checkpoints/*"))
