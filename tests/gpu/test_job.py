"""Whole jobs, started as a user starts them: policy on one GPU, engine on another, weights over NCCL."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import write_family
from tests.support.jobs import ROOT, Job, run_to_end, running, start_command, write_world
from tests.support.tiny import BOS, EOS, PAD, VOCABULARY

pytestmark = [pytest.mark.gpus(2), pytest.mark.timeout(1800)]
DEDICATED = [
    "trainer.placement.policy_num_gpus_per_node=1",
    "trainer.policy.megatron_config.pipeline_model_parallel_size=1",
    "generator.gpu_memory_utilization=0.1",  # eight at once start on the same two
]


@pytest.mark.parametrize("bf16", ["true", "false"])
def test_a_job_ends_with_every_sync_proven(tmp_path: Path, bf16: str):
    world = write_world(tmp_path / "world")
    code, job = run_to_end(world, f"trainer.bf16={bf16}", "trainer.verify_sync_every=1", *DEDICATED)
    assert code == 0, job.story()
    rows = job.metrics
    assert [row["trainer/global_step"] for row in rows if "policy/grad_norm" in row] == [1, 2]
    assert all(row["perf/sync_gb_per_s"] > 0 for row in rows if "policy/grad_norm" in row)


@pytest.mark.parametrize(("sync", "bf16"), [("merged", "false"), ("adapter", "true")])
def test_a_job_that_trains_adapters_ends_with_every_sync_proven(tmp_path: Path, sync: str, bf16: str):
    world = write_world(tmp_path / "world")
    lora = ["trainer.policy.model.lora.rank=4", f"trainer.policy.model.lora.sync={sync}", f"trainer.bf16={bf16}"]
    kl = ["trainer.algorithm.use_kl_loss=true", "trainer.policy_mini_batch_size=8"]
    code, job = run_to_end(world, "trainer.verify_sync_every=1", *lora, *kl, *DEDICATED)
    assert code == 0, job.story()
    rows = [row for row in job.metrics if "policy/grad_norm" in row]
    assert rows[0]["policy/policy_kl"] < 1e-5 < rows[1]["policy/policy_kl"]
    assert all(row["perf/sync_gb_per_s"] > 0 for row in rows)


SPLIT_EXPERTS = [
    "trainer.placement.colocate_all=true",
    "trainer.placement.policy_num_gpus_per_node=2",
    "trainer.policy.megatron_config.pipeline_model_parallel_size=1",
    "trainer.policy.megatron_config.expert_model_parallel_size=2",
    "generator.num_inference_engines=2",
    "generator.gpu_memory_utilization=0.1",
    "generator.kv_cache_memory_gb=4",  # an engine fails to sleep if meanwhile others take more than it returns
]
EXPERTS = ("qwen3_moe", {"head_dim": 64})
LATENT_ATTENTION = (
    "deepseek_v3",
    {
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "topk_method": "noaux_tc"},
    },
)
"""Its heads are DeepSeek-V3's: the engine's kernels have no others."""


@pytest.mark.parametrize(
    ("family", "sizes", "placement"),
    [
        pytest.param(*EXPERTS, DEDICATED, id="experts"),
        pytest.param(*EXPERTS, SPLIT_EXPERTS, id="experts split among two ranks"),
        pytest.param(*LATENT_ATTENTION, DEDICATED, id="latent attention"),
    ],
)
def test_a_job_of_another_architecture_ends_with_every_sync_proven(
    family: str, sizes: dict[str, Any], placement: list[str], tmp_path: Path
):
    world = write_world(tmp_path / "world")
    ids = {f"{name}_token_id": VOCABULARY.index(token) for name, token in (("bos", BOS), ("eos", EOS), ("pad", PAD))}
    write_family(family, world / "model", vocab_size=len(VOCABULARY), num_hidden_layers=2, **ids, **sizes)
    code, job = run_to_end(world, "trainer.bf16=true", "trainer.verify_sync_every=1", *placement)
    assert code == 0, job.story()
    rows = [row for row in job.metrics if "policy/grad_norm" in row]
    assert [row["trainer/global_step"] for row in rows] == [1, 2]
    assert all(row["policy/rollout_train_logprobs_abs_diff_mean"] < 0.05 for row in rows)
    assert all(row["perf/sync_gb_per_s"] > 0 for row in rows)


def test_two_ranks_that_overlap_the_reduction_of_adapters_gradients_train_as_one_does(tmp_path: Path):
    world = write_world(tmp_path / "world")
    rows = [{"prompt": [{"role": "user", "content": f"{n}+{n % 7}="}], "response": str(n + n % 7)} for n in range(64)]
    (world / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = (fine_tune_adapters(world, num_ranks) for num_ranks in (1, 2))
    assert "(DP2)" in two.output and len(one.metrics) == len(two.metrics) == 9
    for mine, theirs in zip(two.metrics, one.metrics, strict=True):
        same = [name for name in ("sft/loss", "sft/eval_loss", "policy/grad_norm") if name in theirs]
        assert [mine[name] for name in same] == pytest.approx([theirs[name] for name in same], rel=1e-4)
    assert two.metrics[-1]["sft/eval_loss"] < two.metrics[0]["sft/eval_loss"] - 0.2


def fine_tune_adapters(world: Path, num_ranks: int) -> Job:
    name = f"ranks_{num_ranks}"
    settings = [
        *("data.train_data=[answers.jsonl]", "data.val_data=[answers.jsonl]", "data.max_length=32"),
        *("trainer.policy.model.path=model", "trainer.policy.model.lora.rank=4", "trainer.bf16=false"),
        *("trainer.logger=[jsonl]", f"trainer.run_name={name}", "trainer.policy.optimizer_config.lr=1e-2"),
        *("trainer.train_batch_size=16", "trainer.max_tokens_per_microbatch=64", "trainer.epochs=2"),
        f"trainer.placement.policy_num_gpus_per_node={num_ranks}",
    ]
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_sft", *settings]
    job = start_command(command, world, name, uuid.uuid4().hex, {})
    try:
        assert job.wait() == 0, job.story()
    finally:
        job.kill()
    return job


def test_the_quickstart_learns(tmp_path: Path):
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    settings = ["trainer.run_name=quickstart", "trainer.max_training_steps=60", "trainer.eval_interval=30", *DEDICATED]
    with running(tmp_path, *settings, experiment="quickstart", environment=environment) as job:
        assert job.wait(600) == 0, job.story()
    scores = [row["eval/all/avg_score"] for row in job.metrics if "eval/all/avg_score" in row]
    assert len(scores) >= 2, job.story()
    assert scores[-1] > scores[0] + 0.05
