"""A data set and a reward function in TRL's shape train with at most ten lines of the user's own."""

from __future__ import annotations

import datasets
import pytest

from tests.support.jobs import run_to_end, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LINES = """\
import skyrl_train
def digits(completions, answer, **kwargs):
    return [sum(character.isdigit() for character in text) / 8 for text in completions]
if __name__ == "__main__":
    skyrl_train.run(skyrl_train.load_config(["data.train_data=[sums.parquet]", "data.columns={prompt: question}",
        "environment.reward_fn=mine:digits", "trainer.policy.model.path=model", "trainer.run_name=mine",
        "trainer.epochs=8", "trainer.train_batch_size=32", "trainer.policy_mini_batch_size=32", "trainer.bf16=false",
        "trainer.policy.optimizer_config.lr=3e-3", "trainer.algorithm.use_kl_loss=false",
        "trainer.max_prompt_length=16", "generator.n_samples_per_prompt=4", "generator.kv_cache_memory_gb=0.0625",
        "generator.sampling_params.max_generate_length=8"]))
"""


def test_ten_lines_train_and_the_reward_rises(tmp_path):
    assert len(LINES.splitlines()) <= 10
    world = write_world(tmp_path / "world")
    rows = [{"question": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(32)]
    datasets.Dataset.from_list(rows).to_parquet(world / "sums.parquet")
    (world / "mine.py").write_text(LINES)
    code, job = run_to_end(world, "trainer.run_name=mine", main="mine")
    assert code == 0, job.story()
    rewards = [row["reward/named/digits"] for row in job.metrics if row["trainer/global_step"] > 0]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > sum(rewards[:2]), rewards
    assert all(
        row["reward/avg_raw_reward"] == pytest.approx(row["reward/named/digits"])
        for row in job.metrics
        if "reward/named/digits" in row
    )
