"""Engines in FP8 on GPUs: weights that are quantised as they arrive, and whole jobs with them."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_job import LATENT_ATTENTION
from tests.gpu.test_weight_sync import CONTEXT, PROMPTS, answers_of, two_checkpoints
from tests.support.families import write_family
from tests.support.jobs import run_to_end, write_world
from tests.support.tiny import BOS, EOS, PAD, VOCABULARY

SIZES = {
    "qwen3_tied": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    "qwen2": {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    "qwen3_moe": {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 128},
    "deepseek_v3": LATENT_ATTENTION[1] | {"hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 32},
}
ROUNDING = {"qwen3_tied": 0.2, "qwen2": 0.2, "qwen3_moe": 0.4, "deepseek_v3": 0.4}
"""Mean difference in nats above which a run warns (docs/exactness.md)."""


def of_prompts(answers: list[Any]) -> list[float]:
    """Logprobs of the tokens of all prompts but the first of each."""
    return [row[0] for (_, rows), prompt in zip(answers, PROMPTS, strict=True) for row in rows[: len(prompt) - 1]]


def difference(one: list[Any], other: list[Any]) -> float:
    pairs = list(zip(of_prompts(one), of_prompts(other), strict=True))
    return sum(abs(mine - theirs) for mine, theirs in pairs) / len(pairs)


@pytest.mark.gpus(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", list(SIZES))
def test_weights_quantised_on_arrival_are_those_quantised_when_an_engine_starts(kind: str, tmp_path: Path):
    folders = two_checkpoints(kind, tmp_path, **SIZES[kind])
    order, fp8 = [1, 0, 1, 1], "fp8"
    updates = [[], [], [], [folders[which] for which in order]]
    with ProcessPoolExecutor(4, mp_context=CONTEXT) as pool:
        found = list(
            pool.map(answers_of, [*folders, folders[0], folders[0]], updates, [fp8, fp8, None, fp8], timeout=300)
        )
    fresh, (plain,) = [answers for ((_, answers),) in found[:2]], [answers for _, answers in found[2]]
    assert 0 < difference(fresh[0], plain) < ROUNDING[kind]
    assert difference(fresh[1], plain) > 2 * difference(fresh[0], plain), "other weights are told from rounding"
    for which, (is_copied, answers) in zip(order, found[3], strict=True):
        assert not is_copied
        assert answers == fresh[which]


SHARED = [
    "trainer.placement.colocate_all=true",
    "trainer.placement.policy_num_gpus_per_node=1",
    "generator.kv_cache_memory_gb=4",  # an engine fails to sleep if meanwhile others take more than it returns
]
DEDICATED = ["trainer.placement.policy_num_gpus_per_node=1"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "placement"),
    [
        pytest.param("qwen3_tied", SHARED, marks=pytest.mark.gpus(1), id="shared GPU"),
        pytest.param("qwen3_moe", SHARED, marks=pytest.mark.gpus(1), id="experts, shared GPU"),
        pytest.param("qwen3_tied", DEDICATED, marks=pytest.mark.gpus(2), id="two GPUs"),
    ],
)
def test_a_job_with_fp8_engines_is_corrected_and_ends_with_every_sync_proven(
    family: str, placement: list[str], tmp_path: Path
):
    world = write_world(tmp_path / "world")
    ids = {f"{name}_token_id": VOCABULARY.index(token) for name, token in (("bos", BOS), ("eos", EOS), ("pad", PAD))}
    shape: dict[str, Any] = SIZES[family] | ids | {"vocab_size": len(VOCABULARY), "num_hidden_layers": 2}
    write_family(family, world / "model", **shape)
    code, job = run_to_end(
        world,
        *("generator.quantization=fp8", "generator.gpu_memory_utilization=0.1", "trainer.bf16=true"),
        *("trainer.verify_sync_every=1", "trainer.max_training_steps=3"),
        *("trainer.policy.megatron_config.pipeline_model_parallel_size=1", *placement),
    )
    assert code == 0, job.story()
    assert "corrected by token_tis" in job.output
    rows = [row for row in job.metrics if "policy/grad_norm" in row]
    assert [row["trainer/global_step"] for row in rows] == [1, 2, 3]
    assert all(0 < row["policy/rollout_train_logprobs_abs_diff_mean"] < ROUNDING[family] for row in rows)
    assert all("policy/correction/token_tis/is_ratio_mean" in row for row in rows)
