"""What the configuration and the model's shape mean for splitting batches and for the algorithm."""

from __future__ import annotations

from transformers import PretrainedConfig

from skyrl_train.algorithms.build import build_objective
from skyrl_train.algorithms.objective import Objective
from skyrl_train.batching.limits import MicroBatchLimits
from skyrl_train.config.generator import SamplingConfig
from skyrl_train.config.rl import AlgorithmConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.hf.flops import model_cost
from skyrl_train.ranks import pad_multiple
from skyrl_train.types import SamplingParams


def micro_batch_limits(trainer: TrainingConfig, model: PretrainedConfig, dp_size: int) -> MicroBatchLimits:
    """How a mini-batch is split for the policy's layout."""
    layout = trainer.policy.megatron_config
    pipeline = layout.pipeline_model_parallel_size
    tp = layout.tensor_model_parallel_size if layout.sequence_parallel else 1
    return MicroBatchLimits(
        dp_size=dp_size,
        max_tokens=trainer.max_tokens_per_microbatch,
        max_sample_tokens=model.max_position_embeddings,
        pad_multiple=pad_multiple(tp, layout.context_parallel_size),
        min_micro_batches=pipeline,
        micro_batch_multiple=pipeline if layout.virtual_pipeline_model_parallel_size else 1,
        attention_cost_ratio=model_cost(model).attention_ratio,
    )


def objective(algorithm: AlgorithmConfig, sampling: SamplingConfig, logprobs_chunk_size: int) -> Objective:
    """What an update minimises."""
    return build_objective(algorithm.values, sampling.temperature, logprobs_chunk_size)


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
