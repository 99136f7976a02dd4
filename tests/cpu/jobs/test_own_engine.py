"""An engine kind from a file outside the package (examples/custom/own_engine.py) samples, and receives weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, run_to_end, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_world(tmp_path_factory.mktemp("engine") / "world")
    shutil.copy(ROOT / "examples/custom/own_engine.py", folder)
    return folder


def test_an_own_engine_serves_each_version_of_the_policy(world: Path):
    code, job = run_to_end(world, "generator.backend=own_engine:ENGINE", "trainer.verify_sync_every=1")
    assert code == 0, job.story()
    steps = [row for row in job.metrics if row["trainer/global_step"] > 0]
    assert len(steps) == 2 and all(row["policy/grad_norm"] > 0 for row in steps)
    log = (job.run_dir / "logs" / "engine-0.log").read_text()
    assert "vllm" not in log.lower()


def test_what_it_cannot_do_is_said_before_anything_starts(world: Path):
    code, job = run_to_end(
        world,
        "generator.backend=own_engine:ENGINE",
        "generator.eval_sampling_params.stop=[a]",
        "trainer.placement.colocate_all=true",
    )
    assert code == 2
    assert "generator.eval_sampling_params has stop" in job.output and "own_engine does not sleep" in job.output
