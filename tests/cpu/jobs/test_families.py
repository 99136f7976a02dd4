"""Whole jobs of models that are not a dense Qwen3: experts over two ranks, latent attention in two stages. They learn,
and engine and trainer agree on every token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.families import write_family
from tests.support.jobs import run_to_end, write_world
from tests.support.sync_proof import KINDS
from tests.support.tiny import BOS, EOS, PAD, VOCABULARY, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAYOUT = "trainer.policy.megatron_config"
LEARNING = [
    "trainer.max_training_steps=10",
    "trainer.epochs=10",
    "trainer.policy.optimizer_config.lr=3e-3",
    "trainer.placement.policy_num_gpus_per_node=2",
    "trainer.verify_sync_every=1",
]
RISE = 0.15
"""Difference between the mean rewards of the last and the first three steps; with this seed it is 0.33 and 0.34."""
IDS = {f"{name}_token_id": VOCABULARY.index(token) for name, token in (("bos", BOS), ("eos", EOS), ("pad", PAD))}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("experts", f"{LAYOUT}.expert_model_parallel_size=2"),
        ("latent attention", f"{LAYOUT}.pipeline_model_parallel_size=2"),
    ],
    ids=["Qwen3-MoE, EP2", "DeepSeek-V3, PP2"],
)
def test_the_reward_rises(kind: str, layout: str, tmp_path: Path):
    world = write_world(tmp_path / "world")
    shutil.rmtree(world / "model")
    family, changes = KINDS[kind]
    size = {"vocab_size": len(VOCABULARY), "num_hidden_layers": 2}
    write_family(family, world / "model", **{**changes, **size, **IDS})
    tiny_tokenizer().save_pretrained(world / "model")
    code, job = run_to_end(world, *LEARNING, layout)
    assert code == 0, job.story()
    assert all(row["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5 for row in job.metrics)
    rewards = [row["reward/avg_raw_reward"] for row in job.metrics]
    assert len(rewards) == 10 and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + RISE, rewards
