"""Whole runs with a streaming source: equal to the synchronous one at staleness 0, and through deaths and resumes."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import DEADLY, WITHOUT_VLLM, Job, run_to_end, running, write_world
from tests.support.series import run_series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STREAMING, KEPT = "trainer.source=streaming", "generator.recompute_kv_cache=false"
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
    """Six steps over an epoch's end, two mini-batches each, sampled with seeds. Nothing runs during a sync, so engines
    that do not recompute KV caches make no difference, if no later request finds an old one."""
    shared = ["trainer.epochs=2", "trainer.max_training_steps=6", "trainer.hf_save_interval=3"]
    shared.append("trainer.ckpt_interval=-1")
    own = {"synchronous": [], "streamed": [STREAMING, "trainer.max_staleness=0", KEPT]}
    runs = {name: ("tiny", [*shared, *overrides]) for name, overrides in own.items()}
    synchronous, streamed = run_series(world, runs, timeout_s=400).values()
    assert numbers(synchronous) == numbers(streamed) and len(numbers(streamed)) == 6
    assert exported(synchronous) == exported(streamed) and len(exported(streamed)) == 2
    assert all(row["async/staleness_max"] == 0 for row in streamed.metrics)


def source_of(record: Path) -> dict[str, Any]:
    """State of the source in a checkpoint."""
    state: dict[str, Any] = json.loads(record.read_text())["state"]["source"]
    return state


def test_a_run_survives_an_engine_and_its_driver_and_trains_each_row_once(world: Path):
    """Both are killed in random calls of the environment; the epoch of 32 rows has four steps of 8.

    The driver takes its processes with it. Before the checkpoint of step 1, at most 16 groups may start (64 calls) and
    an evaluation (32). Syncs abort the running responses, which continue. Evaluations run beside the training. The
    engines that resume are of another kind, and one of them is reserved for evaluations."""
    own = [STREAMING, "trainer.run_name=killed", "trainer.max_training_steps=4", "trainer.ckpt_interval=1"]
    own += ["environment.env_class=deadly:Deadly", "generator.pause_mode=abort"]
    own += ["data.val_data=[rows.jsonl]", "trainer.eval_before_train=false", "trainer.eval_interval=1"]
    run_dir = world / "runs/killed"
    engine, driver = random.randint(10, 60), random.randint(97, 128)
    print(f"the engine dies in call {engine}, the driver in call {driver}")
    deaths = {engine: f"{run_dir}/logs/engine-0.log", driver: "driver"}
    with running(world, *own, environment={"DEATHS": json.dumps(deaths)}) as job:
        assert job.wait() == -signal.SIGKILL, job.story()
        assert not (left := job.left_behind()), left
    assert "restarting engine-0" in job.output, job.output
    saved = source_of(max(run_dir.glob("checkpoints/global_step_*/checkpoint.json")))
    ledger = saved["ledger"]
    assert ledger["trained"] == 8 * saved["step"] and ledger["generated"] == ledger["trained"] + ledger["waiting"]
    assert len(saved["pending"]) + ledger["waiting"] == 8 * (saved["step"] < 4)
    assert saved["order"]["position"] == min(32, 8 * saved["step"] + 8)
    reserved = ["generator.num_inference_engines=2", "generator.eval_num_engines=1"]
    code, resumed = run_to_end(world, *own, *reserved, WITHOUT_VLLM, "trainer.resume_mode=latest")
    assert code == 0, resumed.story()
    rows = {row["trainer/global_step"]: row for row in resumed.metrics if "trainer/epoch" in row}
    assert sorted(rows) == [1, 2, 3, 4] and "eval/all/avg_score" in rows[4]
    assert all(row["async/staleness_max"] <= 1 and row["generate/batch_num_seq"] == 32 for row in rows.values())
    beside = [row["eval/share_of_version"] for row in resumed.metrics if "eval/share_of_version" in row]
    assert all(share == 1.0 for share in beside)
    if saved["step"] < 3:
        assert beside and any("timing/sync_eval_engines" in row for row in resumed.metrics)
    nothing_lost = {"generated": 32, "waiting": 0, "trained": 32, "filtered": 0, "failed": 0, "cancelled": 0}
    assert source_of(run_dir / "checkpoints/global_step_4/checkpoint.json")["ledger"] == nothing_lost


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
        "trainer.algorithm.prox_logp_method=loglinear",
    )
    assert code == 0, job.story()
    assert [row["async/staleness_max"] <= 2 for row in job.metrics] == [True] * 4
    assert job.metrics[-1]["async/staleness_max"] > 0
    for row in job.metrics:
        has_tokens = [row[f"async/share_{n}_behind"] > 0 for n in range(3)]
        assert [f"policy/staleness_{n}/loss_metrics/clip_ratio" in row for n in range(3)] == has_tokens, (
            "as the ranks say"
        )
