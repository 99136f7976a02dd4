"""What must hold in the configuration of every program that trains; as rl.py."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyrl_train.checks.profiler import profiler_problems
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.config.training import DATA_FILE, HUB_SPLIT, DataConfig, TrainingConfig

POLICY = "trainer.policy.megatron_config"
POLICY_RANKS = "trainer.placement.policy_num_nodes * policy_num_gpus_per_node"


def package_problems(trainer: TrainingConfig, megatron_configs: Mapping[str, MegatronConfig]) -> Iterator[str]:
    """Optional packages that are asked for and not installed."""
    if "wandb" in trainer.logger and importlib.util.find_spec("wandb") is None:
        yield "trainer.logger asks for wandb, which is not installed: pip install wandb, or leave it out"
    for path, megatron in megatron_configs.items():
        wanted = megatron.transformer_impl == "transformer_engine"
        if wanted and importlib.util.find_spec("transformer_engine") is None:
            yield f"{path}.transformer_impl is transformer_engine, which is not installed: use auto or torch"
        elif wanted and not trainer.bf16:
            yield (
                f"{path}.transformer_impl is transformer_engine, which rounds float32 to TensorFloat-32: use "
                "auto or torch, or trainer.bf16=true"
            )


def prepare_problems(trainer: TrainingConfig) -> Iterator[str]:
    """A `trainer.prepare` that is no `module:function`."""
    prepare = trainer.prepare
    if prepare is not None and not re.fullmatch(r"[\w.]+:\w+", prepare):
        yield f"trainer.prepare is {prepare!r}: write module:function, or null"


def resume_problems(trainer: TrainingConfig) -> Iterator[str]:
    """A checkpoint to go on from that is not named, or that would not be read."""
    mode, path = trainer.resume_mode, trainer.resume_path
    if mode == "from_path" and path is None:
        yield "trainer.resume_mode is from_path and resume_path null: name the folder of a checkpoint (global_step_N)"
    if mode != "from_path" and path is not None:
        yield f"trainer.resume_path is {path} and resume_mode {mode or 'null'}: set resume_mode to from_path"


def layout_problems(megatron: MegatronConfig, path: str, world_size: int, world_name: str) -> Iterator[str]:
    """What keeps `world_size` ranks from being laid out as `megatron` says; `path` is its key."""
    tp, pp, cp = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
    if world_size % (tp * pp * cp):
        yield (
            f"{world_name} is {world_size} ranks, not a multiple of {path}'s tensor {tp} x pipeline {pp} x "
            f"context {cp} = {tp * pp * cp}: add ranks or lower the sizes"
        )
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
    if (ep > 1 or etp is not None) and world_size % (ep * (etp or tp) * pp):
        yield (
            f"{world_name} is {world_size} ranks, not a multiple of {path}'s expert {ep} x expert tensor {etp or tp} x "
            f"pipeline {pp} = {ep * (etp or tp) * pp}: add ranks or lower the sizes"
        )
    vpp = megatron.virtual_pipeline_model_parallel_size
    if vpp is not None and pp < 2:
        yield (
            f"{path}.virtual_pipeline_model_parallel_size is {vpp} and pipeline_model_parallel_size {pp}: "
            "an interleaved schedule needs a pipeline of at least 2, or set the first to null"
        )
    if megatron.recompute_granularity == "selective" and not megatron.recompute_modules:
        yield f"{path}.recompute_granularity is selective and recompute_modules empty: name modules, such as core_attn"
    yield from profiler_problems(megatron, path, world_size)


def data_file_problems(data: DataConfig) -> Iterator[str]:
    """Data sources that are missing or that nothing can read."""
    if not data.train_data:
        yield "data.train_data is empty: name files (parquet, json, jsonl) or hub_name:split"
    for key, names in (("train_data", data.train_data), ("val_data", data.val_data)):
        for name in names:
            if DATA_FILE.search(name):
                elsewhere = "://" in name or glob.has_magic(name)
                if not elsewhere and not Path(name).expanduser().is_file():
                    yield f"data.{key} names {name}: there is no such file in {Path.cwd()}"
            elif not HUB_SPLIT.match(name):
                yield f"data.{key} names {name}: it must be a .parquet, .json or .jsonl file, or hub_name:split"
