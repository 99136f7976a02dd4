"""The keys that reinforcement learning and supervised fine-tuning have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from skyrl_train.config.policy import PolicyConfig
from skyrl_train.config.values import AboveZero, Count, CountOrNever, FolderText, NotNegative, OneOf, Seed, Text

DATA_FILE = re.compile(r"\.(?P<format>parquet|jsonl|json)(\.(gz|bz2|xz|zst))?$")
HUB_SPLIT = re.compile(r"^(?P<name>[^:]+):(?P<split>[^:/]+)$")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the prompts come from."""

    train_data: tuple[str, ...]
    """Files (parquet, json, jsonl) or `hub_name:split`."""
    val_data: tuple[str, ...]
    """The same, for evaluation; empty means no evaluation."""


@dataclass(frozen=True, kw_only=True)
class PolicyPlacementConfig:
    """How many policy ranks run where."""

    policy_num_nodes: Count
    """Times policy_num_gpus_per_node: the number of policy ranks; where they come to lie is `strategy`'s choice."""
    policy_num_gpus_per_node: Count
    """Policy ranks per node, also where there is no GPU."""
    cpus_per_worker: NotNegative
    """CPUs that Ray sets aside for each rank and engine."""
    strategy: Annotated[str, OneOf(("PACK", "SPREAD"))]
    """PACK fills a node first, SPREAD uses many nodes evenly."""
    timeout_s: AboveZero
    """Seconds that Ray has to find room."""

    @property
    def num_policy_ranks(self) -> int:
        return self.policy_num_nodes * self.policy_num_gpus_per_node


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Of every run: sizes, intervals and what is written."""

    prepare: str | None
    """`module:function` that makes the model and data of an experiment if missing."""
    seed: Seed
    """Of data order, sampling and model initialisation."""
    project_name: Text
    """Weights & Biases project."""
    run_name: FolderText
    """Name of the run and of its folder."""
    run_dir: Text
    """Folder of everything that the run writes."""
    logger: tuple[Annotated[str, OneOf(("console", "jsonl", "tensorboard", "wandb"))], ...]
    """Any of console, jsonl, tensorboard, wandb."""
    epochs: Count
    """Passes over the training data."""
    max_training_steps: CountOrNever
    """Stop after this many steps; -1 means all of the epochs."""
    train_batch_size: Count
    """Prompts (rows, in supervised fine-tuning) per step."""
    max_tokens_per_microbatch: Count
    """Tokens of one forward pass of one rank."""
    eval_batch_size: Count
    """Prompts in flight during evaluation (rows of one pass, in supervised fine-tuning)."""
    eval_before_train: bool
    """Evaluate the model as it is before the first step."""
    eval_interval: CountOrNever
    """Steps between evaluations; -1 means never (the last step is always evaluated)."""
    hf_save_interval: CountOrNever
    """Steps between exports of a Hugging Face checkpoint; -1 means never."""
    export_path: Text
    """Folder of those exports."""
    ckpt_interval: CountOrNever
    """Steps between checkpoints, from which a run can go on (the last step is one too); -1 means never."""
    ckpt_path: Text
    """Folder of the checkpoints of one run; on several nodes a shared one."""
    max_ckpts_to_keep: CountOrNever
    """The newest that stay; -1 means all."""
    resume_mode: Annotated[str, OneOf(("latest", "from_path"))] | None
    """latest: go on from the newest checkpoint in ckpt_path, if there is one; from_path: from resume_path; null starts
    anew."""
    resume_path: Text | None
    """Folder of one checkpoint (`.../global_step_N`), for from_path."""
    timeout_s: AboveZero
    """Seconds that each remote call of a step has."""
    placement: PolicyPlacementConfig
    policy: PolicyConfig
    bf16: bool
    """dtype of the policy and reference: true bfloat16, false float32."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the configurations of all programs that train have."""

    data: DataConfig
    trainer: TrainingConfig
    extra: dict[str, Any]
    """The user's own values, under any names; nothing here reads them."""
