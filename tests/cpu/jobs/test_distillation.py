"""The recipe of on-policy distillation as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.jobs import WITHOUT_VLLM, write_world
from tests.support.series import run_series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OVERRIDES = [
    WITHOUT_VLLM,
    *("trainer.prepare=null", "trainer.logger=[console,jsonl]", "data.val_data=[]"),
    *("data.train_data=[rows.jsonl]", "environment.env_class=rewards:Digits", "trainer.max_training_steps=2"),
    *("trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "trainer.policy.model.path=model"),
    *("trainer.teacher.model.path=model", "trainer.teacher.model.path_of_data_source={other: twin}"),
    # Teachers in another layout than the policy's two stages.
    *(
        "trainer.teacher.megatron_config.pipeline_model_parallel_size=1",
        "trainer.placement.teacher_num_gpus_per_node=1",
    ),
    *("trainer.algorithm.advantage_estimator=rloo", "trainer.policy.optimizer_config.num_warmup_steps=0"),
    "trainer.algorithm.distillation.distillation_type=topk_reverse",
]
ON_ENGINES = [
    *("trainer.teacher.backend=engine", "trainer.max_training_steps=1"),
    "trainer.algorithm.distillation.distillation_type=advantage",
]


def test_each_sample_is_scored_once_by_the_teacher_of_its_data_source(tmp_path: Path):
    """Both teachers have the policy's initial weights, so the reverse KL is 0 until the first update has moved it: on
    ranks, and in a second run with engines."""
    world = write_world(tmp_path)
    shutil.copytree(world / "model", world / "twin")
    rows = [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()]
    for row in rows[::3]:
        row["data_source"] = "other"
    (world / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = {"ranks": ("opd", OVERRIDES), "engines": ("opd", [*OVERRIDES, *ON_ENGINES])}
    job, engines = run_series(world, runs, timeout_s=400).values()
    first, second = job.metrics
    for name in ("policy/teacher_kl", "policy/teacher_kl_max", "policy/distillation_loss"):
        assert first[name] == pytest.approx(0, abs=1e-4)
    assert 0.5 < first["policy/loss_metrics/teacher_topk_mass"] < 1
    assert second["policy/distillation_loss"] != pytest.approx(0, abs=1e-5)
    assert second["policy/teacher_kl_max"] > 1e-3
    logs = {path.name for path in (job.run_dir / "logs").rglob("*.log")}
    assert {"teacher_0-0.log", "teacher_1-0.log", "policy-1.log"} <= logs
    (scored,) = engines.metrics
    assert scored["policy/teacher_kl"] == pytest.approx(0, abs=1e-5) and scored["policy/teacher_kl_max"] < 1e-4
    assert scored["policy/grad_norm"] > 0
    logs = {path.name for path in (engines.run_dir / "logs").rglob("*.log")}
    assert {"teacher_0-engine-0.log", "teacher_1-engine-0.log"} <= logs and not {"teacher_0-0.log"} & logs
