"""Ctrl-C and SIGTERM: the step in flight is finished, and nothing is left running."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.support.jobs import Job, assert_whole_steps, running, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONG = ["trainer.max_training_steps=1000", "trainer.epochs=1000", "environment.env_class=rewards:Slow"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("signals") / "world")


def assert_clean_end(job: Job, status: str = "interrupted") -> None:
    assert "Traceback" not in job.output and "error:" not in job.output, job.output
    assert json.loads((job.run_dir / "run.json").read_text())["status"] == status
    assert not (left := job.left_behind()), left


def test_ctrl_c_finishes_the_step_in_flight_and_a_killed_driver_takes_its_processes_with_it(world: Path):
    """Two starts of one run, which goes on; SIGTERM to the driver alone is in test_training_on_a_cluster.py."""
    with running(world, "trainer.run_name=twofold", *LONG) as job:
        job.wait_for_step(1)
        done = len(job.metrics)
        time.sleep(0.3)  # into the next step
        job.interrupt()
        assert job.wait(60) == 130
        assert "stopping after this step" in job.output
        assert len(job.metrics) > done, "the step in flight was not finished"
        assert_whole_steps(job)
        assert_clean_end(job)
    last = len(job.metrics)
    assert [path.name for path in (job.run_dir / "checkpoints").iterdir()] == [f"global_step_{last}"]
    with running(world, "trainer.run_name=twofold", *LONG, "trainer.resume_mode=latest") as job:
        job.wait_for_step(last + 2)
        assert len(job.processes()) > 5
        job.process.kill()
        assert job.wait(10) == -signal.SIGKILL
        assert not (left := job.left_behind(patience_s=30)), left
    assert [row["trainer/global_step"] for row in job.metrics] == list(range(1, len(job.metrics) + 1))
    first = job.metrics[last]
    assert first["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5, "the engine did not get the policy's weights"
    assert first["trainer/epoch"] == last // 4, "32 rows, 8 of them in a step"


def test_sigterm_to_the_whole_process_group_finishes_the_step_in_flight(world: Path):
    """As `timeout` and batch systems send it: Ray's own processes must outlive it until the driver ends them."""
    with running(world, "trainer.run_name=term", *LONG) as job:
        job.wait_for_step(1)
        done = len(job.metrics)
        time.sleep(0.3)  # into the next step
        job.interrupt(signal.SIGTERM)
        assert job.wait(30) == 143, job.story()
        assert len(job.metrics) > done, "the step in flight was not finished"
        assert_whole_steps(job)
        assert_clean_end(job)


def test_a_second_ctrl_c_ends_at_once(world: Path):
    with running(world, "trainer.run_name=twice", "environment.env_class=rewards:Hangs") as job:
        job.wait_for("policy and engines are up")
        time.sleep(2)
        job.interrupt()
        time.sleep(2)
        assert job.process.poll() is None, "one Ctrl-C waits for the step"
        job.interrupt()
        second = time.monotonic()
        assert job.wait(30) == 130
        assert time.monotonic() - second < 20
        assert_clean_end(job)


def test_ctrl_c_while_processes_start_ends_cleanly(world: Path):
    with running(world, "trainer.run_name=early") as job:
        job.wait_for("Ray is up")
        time.sleep(1)
        job.interrupt()
        assert job.wait(60) == 130
        assert_clean_end(job)


def test_ctrl_c_while_the_quickstart_makes_its_model_ends_quietly(tmp_path: Path):
    with running(tmp_path, "trainer.run_name=prepare", experiment="quickstart") as job:
        job.wait_until(lambda: len(job.processes()) > 1, "start the warm start", 60)
        # The warm start is heard by its first words: a signal in the middle of an import may be swallowed by a library.
        warm_start = tmp_path / "quickstart" / ".model.draft"
        job.wait_until(warm_start.exists, "write its first model", 60)
        job.interrupt()
        assert job.wait(30) == 130
        assert job.output.endswith("interrupted\n") and "Traceback" not in job.output
        assert not (left := job.left_behind()), left
        assert not (tmp_path / "quickstart/model").exists()
