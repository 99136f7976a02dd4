"""Values derived from the configuration and the model's shape."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers import PretrainedConfig

from skyrl_train.algorithms.build import build_objective
from skyrl_train.algorithms.objective import Objective
from skyrl_train.algorithms.reductions import MaxLengths
from skyrl_train.algorithms.staleness import Buckets
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.cluster.pool.settings import lora_arguments
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.generator import GeneratorConfig, SamplingConfig
from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.hf.flops import model_cost
from skyrl_train.hf.hub import seen_from_anywhere
from skyrl_train.ranks import pad_multiple
from skyrl_train.types import SamplingParams

MAX_BUCKET = 4
"""Staleness in steps of the last bucket of metrics, which includes all older samples."""


def micro_batch_limits(
    trainer: TrainingConfig, model: PretrainedConfig, dp_size: int, layout: MegatronConfig | None = None
) -> MicroBatchLimits:
    """Limits of micro-batches in the layout, by default the policy's."""
    layout = layout or trainer.policy.megatron_config
    pipeline = layout.pipeline_model_parallel_size
    tp = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    return MicroBatchLimits(
        dp_size=dp_size,
        max_tokens=trainer.micro_batch_tokens,
        max_sample_tokens=model.max_position_embeddings,
        pad_multiple=pad_multiple(tp, layout.context_parallel_size),
        min_micro_batches=pipeline,
        micro_batch_multiple=pipeline if layout.virtual_pipeline_model_parallel_size else 1,
        attention_cost_ratio=model_cost(model).attention_ratio,
    )


def objective(algorithm: AlgorithmConfig, sampling: SamplingConfig) -> Objective:
    """Objective of an update."""
    return build_objective(algorithm.values, sampling.temperature)


def staleness_buckets(trainer: TrainerConfig) -> Buckets | None:
    """Buckets of metrics by staleness; None if all samples come from the current weights."""
    return Buckets(min(trainer.staleness, MAX_BUCKET), trainer.versions_per_step) if trainer.staleness else None


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """Sampling parameters of a request, without a seed."""
    return SamplingParams(
        max_generate_length=config.max_generate_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=config.stop,
    )


def max_lengths(generator: GeneratorConfig) -> MaxLengths:
    """Longest response and conversation of training, in tokens."""
    response = generator.sampling_params.max_generate_length
    return MaxLengths(response, generator.max_input_length + response)


def settings_of(trainer: TrainingConfig) -> dict[str, Any]:
    """Key -> value of everything that must not change on resume: the ranks' files depend on the layout, steps and
    learning rate on the batches, and adapters on their base model.
    """
    model = trainer.policy.model
    settings = _sizes("trainer.policy.megatron_config", trainer.policy.megatron_config) | {
        "trainer.placement.policy_num_nodes * policy_num_gpus_per_node": trainer.placement.num_policy_ranks,
        "trainer.bf16": trainer.bf16,
        "trainer.train_batch_size": trainer.train_batch_size,
        "trainer.policy.model.lora.rank": model.lora.rank,
    }
    if isinstance(trainer, TrainerConfig):
        if trainer.source != "on_policy":
            settings["trainer.source"] = trainer.source
        settings["trainer.policy_mini_batch_size"] = trainer.policy_mini_batch_size
        settings["trainer.update_epochs_per_batch"] = trainer.update_epochs_per_batch
        if trainer.algorithm.needs_critic:
            critic = trainer.scoring_models[-1]
            settings |= _sizes(f"{critic.key}.megatron_config", critic.megatron_config) | {
                "trainer.algorithm.advantage_estimator": trainer.algorithm.advantage_estimator,
                "trainer.critic_mini_batch_size": trainer.critic_mini_batch_size,
                critic.ranks_key: critic.num_ranks,
            }
    if model.lora.rank:
        settings["trainer.policy.model.path"] = model.path
        for key in ("alpha", "target_modules", "exclude_modules"):
            settings[f"trainer.policy.model.lora.{key}"] = getattr(model.lora, key)
    as_read: dict[str, Any] = json.loads(json.dumps(settings))
    return as_read


def model_of(trainer: TrainingConfig) -> dict[str, Any]:
    """Settings from which the policy's ranks build their model, for exports of a checkpoint without its run."""
    policy, lora = trainer.policy, lora_arguments(trainer.policy.model.lora)
    adapters = {field.name: getattr(lora, field.name) for field in dataclasses.fields(LoraConfig)}
    return {
        "path": seen_from_anywhere(policy.model.path),
        "bf16": trainer.bf16,
        "seed": trainer.seed,
        "megatron_config": dataclasses.asdict(policy.megatron_config),
        "lora": adapters,
    }


def _sizes(key: str, megatron: MegatronConfig) -> dict[str, Any]:
    kinds = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
    return {f"{key}.{kind}_parallel_size": getattr(megatron, f"{kind}_parallel_size") for kind in kinds}
