"""Configuration -> arguments of the ranks of the policy, the critic and frozen models."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from skyrl_train.algorithms.build import build_critic_objective
from skyrl_train.algorithms.objective import Objective
from skyrl_train.cluster.pool.settings import lora_arguments
from skyrl_train.config import Config
from skyrl_train.config.policy import MegatronConfig, ScoringModel
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.hf.hub import local_folder, seen_from_anywhere


def policy_arguments(trainer: TrainingConfig, objective: Objective, num_optimizer_steps: int) -> dict[str, Any]:
    """Keyword arguments of `MegatronPolicy`, apart from the rendezvous."""
    return {
        "model_path": seen_from_anywhere(trainer.policy.model.path),
        "config": _traced_absolutely(trainer.policy.megatron_config),
        "optimizer_config": trainer.policy.optimizer_config,
        "objective": objective,
        "bf16": trainer.bf16,
        "seed": trainer.seed,
        "num_optimizer_steps": num_optimizer_steps,
        "lora": lora_arguments(trainer.policy.model.lora),
    }


def critic_arguments(config: Config, policy_steps: int) -> dict[str, Any]:
    """Keyword arguments of `MegatronCritic`, apart from the rendezvous. Args: policy_steps: of the policy."""
    trainer, critic = config.trainer, config.trainer.critic
    return {
        "model_path": seen_from_anywhere(critic.model.path),
        "config": _traced_absolutely(critic.megatron_config),
        "optimizer_config": critic.optimizer_config,
        "objective": build_critic_objective(trainer.algorithm.values),
        "bf16": trainer.bf16,
        "seed": trainer.seed,
        "num_optimizer_steps": policy_steps * trainer.policy_mini_batch_size // trainer.critic_mini_batch_size,
        "value_head": trainer.algorithm.value_head_prefix,
    }


def frozen_arguments(config: Config, model: ScoringModel, objective: Objective) -> dict[str, Any]:
    """Keyword arguments of `MegatronScorer`, apart from the rendezvous."""
    trainer = config.trainer
    return {
        "name": model.name,
        "topk": num_likeliest(trainer, objective) if model.is_teacher else 0,
        "policy_vocab_size": _vocab_size(trainer.policy.model.path) if model.is_teacher else None,
        "model_path": seen_from_anywhere(model.model_path),
        "config": _traced_absolutely(model.megatron_config),
        "bf16": trainer.bf16,
        "seed": trainer.seed,
        "temperature": config.generator.sampling_params.temperature,
    }


def _vocab_size(path: str) -> int:
    policy = AutoConfig.from_pretrained(local_folder(path), trust_remote_code=False)
    return int(policy.get_text_config().vocab_size)


def num_likeliest(trainer: TrainerConfig, objective: Objective) -> int:
    """Number of likeliest tokens that teachers report."""
    return trainer.algorithm.distillation.distillation_topk if "topk_logprobs" in objective.needs else 0


def _traced_absolutely(config: MegatronConfig) -> MegatronConfig:
    """The configuration with an absolute folder of traces, for processes with other working directories."""
    profiler = config.torch_profiler_config
    path = os.path.abspath(profiler.save_path)
    return replace(config, torch_profiler_config=replace(profiler, save_path=path))
