"""Whole runs with a streaming source: equal to the synchronous one at staleness 0, and through deaths and resumes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.jobs import DEADLY, Job, run_to_end, running, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STREAMING = "trainer.source=streaming"
TIMES = ("timing/", "perf/", "memory/", "async/", "trainer/unix_time_s", "generate/num_retried_rollouts")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_world(tmp_path_factory.mktemp("streaming") / "world")
    (folder / "deadly.py").write_text(DEADLY)
    return folder


def numbers(job: Job) -> list[dict[str, float]]:
    """Metrics of all steps that are no times."""
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in job.metrics]


def exported(job: Job) -> list[str]:
    """Digests of the weights of every export."""
    return [path.read_text() for path in sorted(job.run_dir.glob("exports/*/SHA256SUMS"))]


def test_at_staleness_0_metrics_and_weights_are_those_of_the_synchronous_run(world: Path):
    """Six steps over an epoch's end, two mini-batches each, two data-parallel ranks, sampled with seeds."""
    layout = ["trainer.placement.policy_num_gpus_per_node=2", "trainer.epochs=2", "trainer.max_training_steps=6"]
    shared = [*layout, "trainer.hf_save_interval=3", "trainer.ckpt_interval=-1"]
    jobs = []
    for name, own in (("synchronous", []), ("streamed", [STREAMING, "trainer.max_staleness=0"])):
        code, job = run_to_end(world, f"trainer.run_name={name}", *shared, *own)
        assert code == 0, job.story()
        jobs.append(job)
    synchronous, streamed = jobs
    assert numbers(synchronous) == numbers(streamed) and len(numbers(streamed)) == 6
    assert exported(synchronous) == exported(streamed) and len(exported(streamed)) == 2
    assert all(row["async/staleness_max"] == 0 for row in streamed.metrics)


def test_a_run_survives_an_engine_and_its_driver_and_trains_each_row_once(world: Path):
    """The engine is killed in the middle, the driver after a checkpoint; the epoch of 32 rows has four steps of 8.

    Syncs abort the running responses, which continue."""
    own = [STREAMING, "trainer.run_name=killed", "trainer.max_training_steps=4", "trainer.ckpt_interval=1"]
    own += ["environment.env_class=deadly:Deadly", "generator.pause_mode=abort"]
    run_dir = world / "runs/killed"
    death = {"DEADLY_CALL": "40", "DEADLY_LOG": str(run_dir / "logs/engine-0.log")}
    with running(world, *own, environment=death) as job:
        job.wait_for_step(2)
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait(60)
    assert "restarting engine-0" in job.output, job.output
    (record,) = run_dir.glob("checkpoints/global_step_*/checkpoint.json")
    saved = json.loads(record.read_text())["state"]["source"]
    assert len(saved["pending"]) + saved["ledger"]["waiting"] == 8
    assert saved["order"]["position"] == 8 * saved["step"] + 8
    never = {"DEADLY_CALL": "-1", "DEADLY_LOG": ""}
    code, resumed = run_to_end(world, *own, "trainer.resume_mode=latest", environment=never)
    assert code == 0, resumed.story()
    rows = resumed.metrics
    assert [row["trainer/global_step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["async/staleness_max"] <= 1 and row["generate/batch_num_seq"] == 32 for row in rows)


def test_engines_on_shared_devices_continue_frozen_rollouts_after_the_update(world: Path):
    code, job = run_to_end(
        world,
        STREAMING,
        "trainer.run_name=shared",
        "trainer.max_staleness=2",
        "trainer.max_training_steps=4",
        "trainer.placement.colocate_all=true",
        "generator.sampling_params.max_generate_length=48",
        "trainer.max_tokens_per_microbatch=512",
    )
    assert code == 0, job.story()
    assert [row["async/staleness_max"] <= 2 for row in job.metrics] == [True] * 4
    assert job.metrics[-1]["async/staleness_max"] > 0
