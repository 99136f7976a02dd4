"""Parts of one's own, from files outside the package, in a whole run by skyrl_train.run inside a running loop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, run_to_end, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
IN_A_NOTEBOOK = """\
import asyncio
import sys

import skyrl_train


async def cell():
    return skyrl_train.run(skyrl_train.load_config(sys.argv[1:]))


if __name__ == "__main__":
    print("the run is in", asyncio.run(cell()))
"""
OWN = [
    "trainer.custom_modules=[own_names]",
    "generator.weight_sync_backend=own_transport:FILES",
    "generator.rollout=own_rollout:draft_and_revise",
    "trainer.source=own_source:GroupsThatTeach",
    'trainer.logger=[console,jsonl,"own_sink:FileSink"]',
    "extra={wanted_digits: 4, max_batches: 2}",
    "generator.max_input_length=32",
    "trainer.algorithm.policy_loss_type=own_loss:soft_clip",
    "trainer.algorithm.corrections=[own_loss:drop_surprises]",
    "trainer.algorithm.advantage_estimator=own_credit:discounted_returns",
    "trainer.algorithm.parameters={discount: 0.99, softness: 0.5, most_surprise: 2.0}",
    "data.val_data=[rows.jsonl]",
    "trainer.eval_before_train=false",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_world(tmp_path_factory.mktemp("custom") / "world")
    for file in (ROOT / "examples/custom").glob("own_*.py"):
        shutil.copy(file, folder)
    (folder / "in_a_notebook.py").write_text(IN_A_NOTEBOOK)
    (folder / "own_names.py").write_text('print("own_names is imported", flush=True)')
    return folder


def test_own_parts_train_by_a_call_inside_a_running_loop(world: Path):
    """The other jobs run by the command; entrypoints/test_api.py shows that the configuration is the same."""
    code, job = run_to_end(world, "trainer.run_name=by_call", *OWN, main="in_a_notebook")
    assert code == 0, job.story()
    assert f"the run is in {job.run_dir}" in job.output
    steps = [row for row in job.metrics if row["trainer/global_step"] > 0]
    assert len(steps) == 2
    for row in steps:
        assert row["generate/batch_num_seq"] == 8 * 4 * 2, "two samples of each of four conversations about 8 prompts"
        assert row["policy/num_optimizer_steps"] == 2 and row["policy/grad_norm"] > 0
        assert 0 < row["policy/loss_metrics/weight"] <= 1 and row["policy/loss_metrics/largest_drift"] >= 0
        assert row["policy/correction/drop_surprises/dropped_share"] == 0, "the engine computes what the trainer does"
        assert 0 < row["own/share_of_teaching_groups"] <= 1 and "reward/avg_pass_at_8" in row
    logged = (job.run_dir / "metrics.csv").read_text().splitlines()
    assert f"2,policy/grad_norm,{steps[-1]['policy/grad_norm']}" in logged, "the own sink gets all metrics"
    assert "eval/all/pass_at_2" in steps[-1], "an evaluation plays the same rollout"
    for process in ("policy-0", "engine-0"):
        log = (job.run_dir / "logs" / f"{process}.log").read_text()
        assert log.count("own_names is imported") == 1, f"{process} has not imported trainer.custom_modules: {log}"
