"""What the configuration and the model's shape mean for cutting batches and for the objective."""

from __future__ import annotations

from functools import partial

from transformers import PretrainedConfig

from skyrl_train.algorithms.advantages import ADVANTAGES
from skyrl_train.algorithms.losses import LossSettings
from skyrl_train.algorithms.objective import Objective
from skyrl_train.batching.build import Advantage
from skyrl_train.batching.rules import MicroBatchRules
from skyrl_train.config.generator import SamplingConfig
from skyrl_train.config.rl import AlgorithmConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.megatron.model.flops import model_cost
from skyrl_train.ranks import pad_multiple
from skyrl_train.types import SamplingParams


def micro_batch_rules(trainer: TrainingConfig, model: PretrainedConfig, dp_size: int) -> MicroBatchRules:
    """How a mini-batch is cut for the policy's layout."""
    layout = trainer.policy.megatron_config
    pipeline = layout.pipeline_model_parallel_size
    tp = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    return MicroBatchRules(
        dp_size=dp_size,
        max_tokens=trainer.max_tokens_per_microbatch,
        max_sample_tokens=model.max_position_embeddings,
        pad_multiple=pad_multiple(tp, layout.context_parallel_size),
        min_micro_batches=pipeline,
        micro_batch_multiple=pipeline if layout.virtual_pipeline_model_parallel_size else 1,
        attention_cost_ratio=model_cost(model).attention_ratio,
    )


def objective(algorithm: AlgorithmConfig, sampling: SamplingConfig, logprobs_chunk_size: int) -> Objective:
    """The loss of an update."""
    return Objective(
        loss=algorithm.policy_loss_type,
        settings=LossSettings(
            eps_clip_low=algorithm.eps_clip_low,
            eps_clip_high=algorithm.eps_clip_high,
            clip_ratio_c=algorithm.clip_ratio_c,
            cispo_eps_clip_low=algorithm.cispo.cispo_eps_clip_low,
            cispo_eps_clip_high=algorithm.cispo.cispo_eps_clip_high,
        ),
        kl_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        kl_estimator=algorithm.kl_estimator_type,
        entropy_coef=algorithm.entropy_loss_coef if algorithm.use_entropy_loss else 0.0,
        temperature=sampling.temperature,
        logprobs_chunk_size=logprobs_chunk_size,
    )


def cross_entropy_objective(logprobs_chunk_size: int) -> Objective:
    """The loss of supervised fine-tuning; no ratio, so no bound of one is read."""
    return Objective(
        loss="cross_entropy",
        settings=LossSettings(
            eps_clip_low=0.0, eps_clip_high=0.0, clip_ratio_c=1.0, cispo_eps_clip_low=0.0, cispo_eps_clip_high=0.0
        ),
        kl_coef=0.0,
        kl_estimator="k3",
        entropy_coef=0.0,
        temperature=1.0,
        logprobs_chunk_size=logprobs_chunk_size,
    )


def advantage(algorithm: AlgorithmConfig) -> Advantage:
    """The advantage estimator with its settings."""
    return partial(ADVANTAGES[algorithm.advantage_estimator], norm_by_std=algorithm.grpo_norm_by_std)


def sampling_params(config: SamplingConfig) -> SamplingParams:
    """What engines are asked for."""
    return SamplingParams(
        max_generate_length=config.max_generate_length,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=config.stop,
    )
