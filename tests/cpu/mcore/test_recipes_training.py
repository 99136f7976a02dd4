"""The recipes for real models: each trains a small model of a real shape for two steps, in one process.

Rows, environments, chat template, objective and optimizer are those of the recipe. Its answers are written by hand, so
that some are right; their logprobs are Hugging Face's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_train.algorithms.objective import cross_entropy_objective
from skyrl_train.batching.build import build_examples, build_experience
from skyrl_train.batching.split import split
from skyrl_train.checks.rl import check
from skyrl_train.checks.sft import check_sft
from skyrl_train.config import load_config
from skyrl_train.config.sft import SFT
from skyrl_train.entrypoints.experiment import Experiment
from skyrl_train.entrypoints.sft_run import SftRun
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from skyrl_train.rollout.env_pool import EnvPool
from skyrl_train.rollout.source import SourceParts
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.trainer.from_config import max_lengths, micro_batch_limits, objective, sampling_params
from skyrl_train.types import Generation, Group, SamplingParams
from tests.support import realistic_rows as rows
from tests.support.realistic_model import write_realistic_model
from tests.support.rollouts import Quiet
from tests.support.samples import in_order

pytestmark = pytest.mark.slow
Answer = Callable[[str, bool], str]
SMALL = (
    *("data.val_data=[]", "trainer.bf16=false", "trainer.train_batch_size=4", "trainer.max_training_steps=2"),
    *("trainer.placement.policy_num_gpus_per_node=1", "trainer.max_tokens_per_microbatch=16384", "trainer.logger=[]"),
    "trainer.policy.optimizer_config.num_warmup_steps=0",
)
SMALL_RL = (
    *("trainer.policy_mini_batch_size=2", "trainer.placement.colocate_all=false", "generator.n_samples_per_prompt=4"),
    *("generator.num_inference_engines=1", "generator.kv_cache_memory_gb=0.1"),
    "trainer.policy.megatron_config.tensor_model_parallel_size=1",
)


@dataclass(frozen=True)
class Recipe:
    shape: str
    rows: list[rows.Row]
    answer: Answer
    turns: int = 1
    rewards: tuple[float, float] = (0.0, 1.0)


RECIPES = {
    "gsm8k_1gpu": Recipe("qwen2_5", rows.GSM8K, rows.gsm8k),
    "gsm8k_4gpu": Recipe("deepseek_v3", rows.GSM8K, rows.gsm8k),
    "lora_single_gpu": Recipe("llama3", rows.GSM8K, rows.gsm8k),
    "dapo_math": Recipe("qwen3", rows.DAPO, rows.dapo, rewards=(-1.0, 1.0)),
    "search": Recipe("qwen2_5", rows.SEARCH, rows.search, turns=2),
    "text2sql": Recipe("llama3", rows.SQL, rows.sql, turns=2),
}


class Engine:
    """Answers a conversation right every other time, with the logprobs of Hugging Face's model."""

    def __init__(self, folder: str, experiment: Experiment, answer: Answer) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer, self._answer, self._asked = experiment.tokenizer, answer, dict[int, int]()

    async def generate(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        assert params.seed is not None
        text = self._answer(self._tokenizer.decode(token_ids), params.seed % 2 == 0)
        ended = "" if any(text.endswith(stop) for stop in params.stop) else self._tokenizer.eos_token
        made = self._tokenizer.encode(text + ended, add_special_tokens=False)
        logprobs = self.logprobs(torch.tensor(token_ids + made))[len(token_ids) :]
        return Generation(made, logprobs.tolist(), text, "stop", 0)

    @torch.no_grad()
    def logprobs(self, token_ids: Tensor) -> Tensor:
        """[T] of a sequence; 0 for its first token."""
        rows = self._model(token_ids[None]).logits[0, :-1].float().log_softmax(-1)
        return torch.cat([torch.zeros(1), rows.gather(1, token_ids[1:, None])[:, 0]])


def two_steps(rendezvous: Rendezvous, arguments: tuple[str, list[str], Answer]) -> dict[str, Any]:
    """Rewards, turns, gradient norms, and by step the largest difference to Hugging Face's logprobs before training."""
    name, overrides, answer = arguments
    config = load_config([f"+experiment={name}", *overrides])
    check(config, None)
    experiment = Experiment(config, Console(quiet=True))
    trainer, folder = config.trainer, config.trainer.policy.model.path
    engine, pool = Engine(folder, experiment, answer), EnvPool(4, 60.0)
    goal = objective(trainer.algorithm, config.generator.sampling_params)
    policy = MegatronPolicy(
        rendezvous, folder, trainer.policy.megatron_config, trainer.policy.optimizer_config, goal,
        bf16=trainer.bf16, seed=trainer.seed, num_optimizer_steps=4, lora=trainer.policy.model.lora,
    )  # fmt: skip

    async def awake() -> None: ...

    async def groups_of_two_steps() -> list[list[Group]]:
        source = experiment.get_source(
            SourceParts(
                config=config,
                prompts=experiment.train_prompts,
                sampling_params=sampling_params(config.generator.sampling_params),
                collector=experiment.get_collector(engine.generate, experiment.get_rollout(pool)),
                progress=Quiet(),
                timers=Timers(),
                wake_engines=awake,
            )
        )
        return [await source.next() for _ in range(2)]

    found: dict[str, Any] = {"rewards": [], "turns": [], "norms": [], "differences": []}
    limits = micro_batch_limits(trainer, experiment.model_config, 1)
    for groups in asyncio.run(groups_of_two_steps()):
        batch = build_experience(groups, policy.num_steps)
        (shard,) = split(
            batch, limits, num_mini_batches=2, reductions=goal.reductions, max_lengths=max_lengths(config.generator),
            step_id=policy.num_steps,
        )  # fmt: skip
        samples = [sample for group in groups for sample in group.samples]
        own = policy.prompt_logprobs(shard)
        assert own is not None
        hf = in_order(
            torch.cat([engine.logprobs(sample.token_ids) for sample in samples]), batch.cu_seqlens, shard.sample_ids
        )
        found["differences"].append(float((own - hf)[shard.loss_mask].abs().max()))
        advantages = CreditAssignment(trainer.algorithm)(batch, None).advantages
        values = {"advantages": in_order(advantages, batch.cu_seqlens, shard.sample_ids)}
        if "ref_logprobs" in goal.needs:
            values["ref_logprobs"] = policy.reference_logprobs(shard) if trainer.policy.model.lora.rank else hf
        policy.keep_old_logprobs(shard)
        found["norms"].append(policy.update(shard, 1, goal, **values).metrics["policy/grad_norm"])
        found["rewards"] += [sample.reward for sample in samples]
        found["turns"] += [sample.turns for sample in samples]
    pool.close(timeout_s=5.0)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_reinforcement_learning_trains_two_steps(name: str, tmp_path: Path):
    recipe = RECIPES[name]
    model = write_realistic_model(recipe.shape, tmp_path / "model")
    source = rows.write_rows(recipe.rows, tmp_path / "rows.jsonl")
    overrides = [f"trainer.policy.model.path={model}", f"data.train_data=[{source}]", *SMALL, *SMALL_RL]
    rows.write_database(tmp_path / "databases")
    kwargs = "environment.skyrl_gym.env_kwargs"
    with rows.retriever() as (address, queries):
        overrides += [f"{kwargs}.search.search_url={address}", f"{kwargs}.text2sql.db_path={tmp_path / 'databases'}"]
        (found,) = run_on_ranks(two_steps, (name, overrides, recipe.answer), 1, timeout_s=200)
    assert set(found["rewards"]) == set(recipe.rewards)
    assert set(found["turns"]) == {recipe.turns}
    assert len(found["norms"]) == 2 and all(math.isfinite(norm) and norm > 0 for norm in found["norms"]), found
    assert found["differences"][0] < 1e-4, found
    assert len(queries) >= 32 if name == "search" else not queries
    assert all(query["topk"] == 3 and query["query"] == "capital" for query in queries)


def two_steps_of_sft(rendezvous: Rendezvous, overrides: list[str]) -> list[tuple[float, float]]:
    """Loss and gradient norm of two steps on the same rows."""
    config = SFT.load(["+experiment=sft_chat", *overrides])
    check_sft(config, None, True)
    run, trainer, goal = SftRun(config, Console(quiet=True)), config.trainer, cross_entropy_objective()
    policy = MegatronPolicy(
        rendezvous, trainer.policy.model.path, trainer.policy.megatron_config, trainer.policy.optimizer_config, goal,
        bf16=trainer.bf16, seed=trainer.seed, num_optimizer_steps=2, lora=trainer.policy.model.lora,
    )  # fmt: skip
    limits = micro_batch_limits(trainer, run.model_config, 1)
    found = []
    for step in range(2):
        (shard,) = split(build_examples(run.train_examples), limits, step_id=step)
        metrics = policy.update(shard, 1, goal).metrics
        found.append((metrics["policy/policy_loss"], metrics["policy/grad_norm"]))
    return found


def test_the_recipe_of_fine_tuning_trains_two_steps(tmp_path: Path):
    model = write_realistic_model("qwen2_5", tmp_path / "model")
    source = rows.write_rows(rows.CHAT, tmp_path / "rows.jsonl")
    overrides = [f"trainer.policy.model.path={model}", f"data.train_data=[{source}]", *SMALL]
    (found,) = run_on_ranks(two_steps_of_sft, overrides, 1, timeout_s=200)
    (first, norm), (second, second_norm) = found
    assert norm > 0 and second_norm > 0 and second < first
    assert first == pytest.approx(math.log(8000), rel=0.02)  # a new model knows nothing
