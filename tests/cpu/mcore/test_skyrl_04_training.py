"""The algorithms of skyrl_train 0.4's command lines: each trains a tiny model for two steps, in one process."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import torch

from skyrl_train.batching.build import build_experience
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.batching.select import selections_of
from skyrl_train.batching.split import split
from skyrl_train.checks.rl import check
from skyrl_train.config import Config, ConfigError, load_config
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from skyrl_train.trainer.credit import CreditAssignment
from skyrl_train.trainer.from_config import max_lengths, objective
from skyrl_train.types import ExperienceBatch, Generation, Group, Prompt
from tests.support.policies import ADAM
from tests.support.samples import in_order, sample
from tests.support.tiny import write_tiny_model

COMMANDS = json.loads((Path(__file__).parents[2] / "data/skyrl_04.json").read_text())["commands"]
CHOSEN = (
    *("cispo/run_cispo_gsm8k", "clip_cov_kl_cov/run_clip_cov", "clip_cov_kl_cov/run_kl_cov", "dapo/run_dapo_gsm8k"),
    *("dapo/run_dapo_qwen3_30b_a3b_megatron_aime", "drgrpo/run_drgrpo_gsm8k", "gspo/run_gspo_gsm8k"),
    *("reinforce++/run_reinforce++", "rloo/run_rloo", "sapo/run_sapo_gsm8k", "sapo/run_sapo_qwen3_4b_aime"),
    *("custom_policy_loss/run_custom_policy_loss", "examples/ppo/run_ppo", "fully_async/fully_async_run_gsm8k"),
    *("async/async_run_gsm8k", "examples/gsm8k/run_gsm8k", "search/run_search_conversation_format"),
    *("on_policy_distillation/run_on_policy_distill_math_qwen3_4b", "tis_correction/run_dapo_tis"),
    *("megatron/run_megatron", "mini_swe_agent/run_mini_swe_8B", "turn_level_rewards/run_gsm8k_multi_turn"),
)
LIMITS = MicroBatchLimits(dp_size=1, max_tokens=64, max_sample_tokens=64, pad_multiple=1)


def passing(name: str) -> Config:
    """The configuration of a command line, which passes every check that needs no files."""
    (script,) = (script for script in COMMANDS if script.endswith(f"{name}.sh"))
    config = load_config(shlex.split(COMMANDS[script]["arguments"]))
    try:
        check(config, None, files=False)
    except ConfigError as error:
        raise AssertionError(f"{name}: {error}") from error
    return config


def experience(seed: int) -> ExperienceBatch:
    """Four prompts with four answers each, of different lengths and rewards."""
    random = torch.Generator().manual_seed(seed)
    groups = []
    for number in range(4):
        answers = []
        for _ in range(4):
            length = int(torch.randint(2, 8, (), generator=random))
            tokens = torch.randint(1, 12, (length,), generator=random).tolist()
            generation = Generation(tokens, [-2.0] * length, "", "stop", 0)
            answers.append(sample([1, 2, 3], generation, float(torch.rand((), generator=random))))
        groups.append(Group(Prompt(str(number), [], "e", {}, "d"), tuple(answers)))
    return build_experience(groups, 0)


def two_steps(rendezvous: Rendezvous, arguments: tuple[str, list[Config]]) -> list[list[float]]:
    """Norm of the gradient in each of two steps with two mini-batches, for every configuration."""
    model, configs = arguments
    first = configs[0].trainer
    megatron = load_config().trainer.policy.megatron_config
    made = objective(first.algorithm, configs[0].generator.sampling_params)
    policy = MegatronPolicy(
        rendezvous, model, megatron, ADAM, made, bf16=False, seed=1, num_optimizer_steps=4 * len(configs)
    )
    norms = []
    for config in configs:
        norms.append([one_step(policy, config, step) for step in range(2)])
    return norms


def one_step(policy: MegatronPolicy, config: Config, step: int) -> float:
    algorithm = config.trainer.algorithm
    goal = objective(algorithm, config.generator.sampling_params)
    batch = experience(step)
    (shard,) = split(
        batch, LIMITS, num_mini_batches=2, reductions=goal.reductions, max_lengths=max_lengths(config.generator),
        step_id=policy.num_steps,
    )  # fmt: skip
    random = torch.Generator().manual_seed(step)
    values = torch.randn(len(batch.token_ids), generator=random) if algorithm.needs_critic else None
    credit = CreditAssignment(algorithm)(batch, None, values)
    own = policy.prompt_logprobs(shard)
    assert own is not None
    noise = 0.1 * torch.randn(len(own), generator=random)
    given = {name: own + noise for name in ("ref_logprobs", "teacher_logprobs") if name in goal.needs}
    policy.keep_old_logprobs(shard)
    fetched = dict.fromkeys(goal.selection_needs, in_order(own, shard.cu_seqlens, shard.sample_ids.argsort()))
    chosen = selections_of(goal, batch, credit.advantages, fetched, 2)
    tokens = {"advantages": credit.advantages, **chosen}
    arranged = {name: in_order(each, batch.cu_seqlens, shard.sample_ids) for name, each in tokens.items()}
    report = policy.update(shard, 1, goal, **arranged, **given)
    return report.metrics["policy/grad_norm"]


def test_twenty_two_command_lines_train_two_steps(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model")
    configs = [passing(name) for name in CHOSEN]
    (norms,) = run_on_ranks(two_steps, (str(model), configs), 1, timeout_s=300)
    assert len(norms) == 22
    for name, each in zip(CHOSEN, norms, strict=True):
        assert len(each) == 2 and all(math.isfinite(norm) and norm > 0 for norm in each), (name, each)
