"""A run with a hub model whose tokenizer is its own code, as a user starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import assert_whole_steps, running, write_world
from tests.support.local_hub import local_hub
from tests.support.remote_code import write_model_with_code

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_ranks_and_engines_read_the_downloaded_model_and_run_its_tokenizer(tmp_path: Path):
    world = write_world(tmp_path / "world")
    model = write_model_with_code(tmp_path / "model")
    pids = tmp_path / "pids"
    with local_hub(model=model) as hub:
        environment = hub.environment | {"HF_HOME": str(tmp_path / "home"), "CHARACTERS_LOG": str(pids)}
        keys = ["trainer.policy.model.path=tests/model", "trainer.trust_remote_code=true"]
        with running(world, *keys, environment=environment) as job:
            job.wait_for("local Ray is up")
            num_requests = len(hub.requests)
            assert job.wait() == 0, job.story()
            assert not (left := job.left_behind()), left
        assert_whole_steps(job)
        assert [name for name in hub.downloads() if name.endswith(".safetensors")] == ["model.safetensors"]
        assert len(hub.requests) == num_requests, "the driver downloads before Ray starts, and nobody asks later"
    assert len(set(pids.read_text().split())) >= 2, "the driver and the engine"
    exported = next(job.run_dir.glob("exports/*"))
    assert {"tokenization_characters.py", "characters.json"} <= {file.name for file in exported.iterdir()}
