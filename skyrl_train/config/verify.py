"""The configuration of verify_layout: configs/verify_layout_config.yaml laid over ppo_base_config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skyrl_train.config.program import Program
from skyrl_train.config.rl import Config
from skyrl_train.config.values import AboveZero, Bounds, Count, Text


@dataclass(frozen=True, kw_only=True)
class AgainstConfig:
    """The layout to compare with."""

    num_ranks: Count | None
    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: Annotated[int, Bounds(low=2)] | None
    context_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Count | None


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """The mini-batch and the layouts that are compared."""

    num_ranks: Count | None
    num_samples: Count
    max_length: Annotated[int, Bounds(low=2)]
    max_tokens_per_microbatch: Count
    timeout_s: AboveZero
    json_file: Text | None
    against: AgainstConfig


@dataclass(frozen=True, kw_only=True)
class VerifyLayoutConfig(Config):
    """The configuration of a training run, and what is compared."""

    verify: VerifyConfig


VERIFY = Program(
    module="skyrl_train.entrypoints.verify_layout",
    purpose="Check that a parallel layout computes what Hugging Face computes.",
    schema=VerifyLayoutConfig,
    base_name="verify_layout_config",
)
