"""Keys of all programs that train. configs/ppo_base_config.yaml says what each key means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from skyrl_train.config.policy import PolicyConfig
from skyrl_train.config.values import AboveZero, Bounds, Count, CountOrNever, FolderText, NotNegative, OneOf, Seed, Text

DATA_FILE = re.compile(r"\.(?P<format>parquet|jsonl|json)(\.(gz|bz2|xz|zst))?$")
HUB_SPLIT = re.compile(r"^(?P<name>[^:]+):((?P<config>[^:/\[\]]+):)?(?P<split>[^:/\[\]]+(\[[^/\[\]]*\])?)$")
"""`hub_name:split` or `hub_name:config:split`; a split may be a slice, `train[:100]`."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training and evaluation data."""

    train_data: tuple[str, ...]
    val_data: tuple[str, ...]
    row_fn: Text | None
    columns: dict[str, Any]
    prompt_template: Text | None
    system_prompt: Text | None


@dataclass(frozen=True, kw_only=True)
class PolicyPlacementConfig:
    """Devices and processes of the policy."""

    policy_num_nodes: Count
    policy_num_gpus_per_node: Count
    cpus_per_worker: NotNegative
    strategy: Annotated[str, OneOf(("PACK", "SPREAD"))]
    timeout_s: AboveZero

    @property
    def num_policy_ranks(self) -> int:
        return self.policy_num_nodes * self.policy_num_gpus_per_node


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Sizes, intervals and outputs of a run."""

    prepare: str | None
    seed: Seed
    project_name: Text
    run_name: FolderText
    run_dir: Text
    logger: tuple[Annotated[str, OneOf(("console", "jsonl", "tensorboard", "wandb"), "module:Class")], ...]
    epochs: Count
    max_training_steps: CountOrNever
    train_batch_size: Count
    max_tokens_per_microbatch: Count | None
    eval_batch_size: Count
    eval_before_train: bool
    eval_interval: CountOrNever
    hf_save_interval: Annotated[int, Bounds(low=-1)]
    export_path: Text
    ckpt_interval: CountOrNever
    ckpt_path: Text
    max_ckpts_to_keep: CountOrNever
    resume_mode: Annotated[str, OneOf(("latest", "from_path"))] | None
    resume_path: Text | None
    timeout_s: AboveZero
    download_timeout_s: AboveZero
    trust_remote_code: bool
    placement: PolicyPlacementConfig
    policy: PolicyConfig
    bf16: bool

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens per forward pass of one rank, also if nothing was chosen."""
        return self.max_tokens_per_microbatch or 16_384


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a program that trains."""

    data: DataConfig
    trainer: TrainingConfig
    extra: dict[str, Any]
