"""Two steps of each recipe of configs/experiment on a tiny model, and one of methods that need more than a group."""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.tracking.names import metric_units
from tests.support.jobs import WITHOUT_VLLM, Job, write_world
from tests.support.realistic_model import write_realistic_model
from tests.support.series import run_series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECIPES = {
    "dapo": "regular",
    "gspo": "gspo",
    "dr_grpo": "regular",
    "cispo": "cispo",
    "opsd": "regular",
    "ppo": "regular",
}
METHODS = {
    "remax": ["generator.n_samples_per_prompt=1"],
    "gdpo": ["environment.env_class=named:NamedDigits", "trainer.algorithm.gdpo_reward_weights={short: 0.5}"],
}
"""Estimator -> what it needs."""
IN_TURNS = [
    *("generator.max_turns=2", "environment.env_class=named:Again", "trainer.policy.model.path=qwen3"),
    *("trainer.max_prompt_length=32", "generator.max_input_length=96", "trainer.log_samples_interval=1"),
    *("trainer.num_logged_samples=-1", "trainer.verify_sync_every=1"),
]
CONVERSATIONS = {
    "gspo": [*IN_TURNS, "generator.step_wise_trajectories=true"],
    "cispo": [*IN_TURNS, "generator.use_conversation_multi_turn=false"],
}
"""Recipes that train on conversations of two turns with Qwen3's template, and their form."""
ADAPTERS = {"ppo": ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.dropout=0.1"]}
"""Adapters of the policy, beside a critic of which all weights are trained (test_residency.py has one without)."""
NAMED = """\
from rewards import Digits

class NamedDigits(Digits):
    def step(self, action):
        output = super().step(action)
        named = {"digits": output["reward"], "short": float(len(action) < 6)}
        return {**output, "metadata": {"rewards": named}}

class Again(Digits):
    is_second = False

    def step(self, action):
        done, self.is_second = self.is_second, True
        reward = sum(map(str.isalpha, action)) / 64
        again = [] if done else [{"role": "user", "content": "and again"}]
        return {"observations": again, "reward": reward, "done": done, "metadata": {}}
"""
TINY = [
    WITHOUT_VLLM,
    *("trainer.prepare=null", "trainer.policy.model.path=model", "environment.env_class=rewards:Digits"),
    *("data.train_data=[rows.jsonl]", "data.val_data=[]", "trainer.logger=[console,jsonl]"),
    *("trainer.max_training_steps=2", "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4"),
    *("generator.n_samples_per_prompt=4", "trainer.placement.policy_num_gpus_per_node=1"),
    "trainer.policy.megatron_config.pipeline_model_parallel_size=1",
]
RUNS = {name: (name, [*TINY, *CONVERSATIONS.get(name, []), *ADAPTERS.get(name, [])]) for name in RECIPES} | {
    name: (
        "dr_grpo",
        [*TINY, f"trainer.algorithm.advantage_estimator={name}", "trainer.max_training_steps=1", *own],
    )
    for name, own in METHODS.items()
}
"""Name of the run -> its experiment and overrides."""


def test_every_recipe_trains(tmp_path: Path):
    world = write_world(tmp_path / "world")
    (world / "named.py").write_text(NAMED)
    write_realistic_model("qwen3", world / "qwen3", dtype="float32")
    jobs = run_series(world, RUNS, timeout_s=800)
    for name, loss in RECIPES.items():
        job = jobs[name]
        steps = [row for row in job.metrics if row["trainer/global_step"] > 0]
        assert [row["policy/num_optimizer_steps"] for row in steps] == [2.0, 2.0], name
        assert all(math.isfinite(row["policy/final_loss"]) and row["policy/grad_norm"] > 0 for row in steps), name
        assert f"policy_loss_type: {loss}" in (job.run_dir / "config.yaml").read_text()
    first, second = steps  # of PPO; test_residency.py resumes such a run, and shares its devices
    for row in steps:
        assert row["critic/num_optimizer_steps"] == 2 and row["critic/num_skipped_steps"] == 0
        assert row["critic/grad_norm"] > 0
        assert row["timing/critic_train"] > 0 and "critic/explained_variance" in row
    assert second["critic/loss_metrics/values_mean"] != first["critic/loss_metrics/values_mean"]
    assert not {name for name in second if name.startswith("critic/")} - metric_units().keys()
    for name in CONVERSATIONS:
        assert_conversations(jobs[name], is_step_wise=name == "gspo")
    for name in METHODS:
        job = jobs[name]
        (step,) = [row for row in job.metrics if row["trainer/global_step"] > 0]
        assert step["policy/num_optimizer_steps"] == 2 and step["policy/grad_norm"] > 0, name
    assert 0 < step["reward/named/short"] <= 1 and step["reward/named/digits"] == step["reward/avg_raw_reward"]


def assert_conversations(job: Job, *, is_step_wise: bool) -> None:
    """32 conversations of two turns in each step: as two samples, or as one with the reply in the same message."""
    rows = [json.loads(line) for line in (job.run_dir / "samples.jsonl").read_text().splitlines()]
    turns = 2 if is_step_wise else 1
    assert len(rows) == 2 * 32 * turns

    def name(row: dict[str, Any]) -> tuple[int, str, int]:
        return row["step"], row["uid"], row["conversation"]

    conversations = {key: list(samples) for key, samples in groupby(rows, name)}
    uids = {uid for _, uid, _ in conversations}
    assert len(conversations) == 64 and len(uids) == 16 and {index for *_, index in conversations} == set(range(4))
    for samples in conversations.values():
        assert [row["turns"] for row in samples] == ([1, 1] if is_step_wise else [2])
        if is_step_wise:
            first, second = samples
            assert second["prompt"] == f"user: {first['prompt']}\nassistant: {first['response']}\nuser: and again"
        else:
            assert "\nuser: and again\n" in samples[0]["response"]
        assert samples[-1]["text"].count("<|im_start|>user") == turns
    for step in (row for row in job.metrics if row["trainer/global_step"] > 0):
        assert step["generate/batch_num_seq"] == 32 * turns
        assert step["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
