"""Ctrl-C and a killed driver: the step in flight is finished, and nothing is left running."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.jobs import START_S, WITHOUT_VLLM, assert_interrupted, assert_whole_steps, running, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_S = 240
"""For an end that takes seconds, on a machine that may stall."""
LONG = ["trainer.max_training_steps=1000", "trainer.epochs=1000", "environment.env_class=rewards:Hangs"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("signals") / "world")


def test_ctrl_c_finishes_the_step_in_flight_and_a_second_one_ends_at_once(world: Path):
    """Two starts of one run, which resumes. SIGTERM to the driver alone is in test_training_on_a_cluster.py, to the
    whole process group in test_training.py, and a killed driver in test_streaming_run.py; both of those with vLLM."""
    with running(world, "trainer.run_name=twofold", *LONG, WITHOUT_VLLM) as job:
        job.wait_for_step(1)
        done = len(job.metrics)
        time.sleep(0.3)  # into the next step
        job.interrupt()
        assert job.wait(PATIENCE_S) == 130
        assert "stopping after this step" in job.output
        assert len(job.metrics) > done, "the step in flight was not finished"
        assert_whole_steps(job)
        assert_interrupted(job)
    last = len(job.metrics)
    assert [path.name for path in (job.run_dir / "checkpoints").iterdir()] == [f"global_step_{last}"]
    with running(world, "trainer.run_name=twofold", *LONG, WITHOUT_VLLM, "trainer.resume_mode=latest") as job:
        job.wait_for_step(last + 2)
        (world / "hang").touch()
        job.wait_until((world / "hanging").exists, "hang in a step", START_S)
        job.interrupt()
        job.wait_for("stopping after this step")
        time.sleep(2)
        assert job.process.poll() is None, "one Ctrl-C waits for the step"
        job.interrupt()
        assert job.wait(PATIENCE_S) == 130, "the step lasts for a day"
        assert_interrupted(job)
    assert [row["trainer/global_step"] for row in job.metrics] == list(range(1, len(job.metrics) + 1))
    first = job.metrics[last]
    assert first["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5, "the engine did not get the policy's weights"
    assert first["trainer/epoch"] == last // 4, "32 rows, 8 of them in a step"


def test_ctrl_c_while_processes_start_ends_cleanly(world: Path):
    with running(world, "trainer.run_name=early") as job:
        job.wait_for("Ray is up")
        time.sleep(1)
        job.interrupt()
        assert job.wait(PATIENCE_S) == 130
        assert_interrupted(job)


def test_ctrl_c_while_the_quickstart_makes_its_model_ends_quietly(tmp_path: Path):
    with running(tmp_path, "trainer.run_name=prepare", experiment="quickstart") as job:
        # A signal in the middle of an import may be swallowed by a library.
        draft = tmp_path / "quickstart" / ".model.draft"
        job.wait_until(draft.exists, "begin the warm start", START_S)
        job.interrupt()
        assert job.wait(PATIENCE_S) == 130
        assert job.output.endswith("interrupted\n") and "Traceback" not in job.output
        assert not (left := job.left_behind()), left
        assert not (tmp_path / "quickstart/model").exists()
