"""Checks of the configuration of every program that trains. Each problem is a sentence with key, value and remedy."""

from __future__ import annotations

import glob
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter

from skyrl_train.checks.custom import imported_problems, logger_problems, takes
from skyrl_train.config.policy import Layout, LoraConfig, MegatronConfig
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import DATA_FILE, HUB_SPLIT, DataConfig, TrainingConfig
from skyrl_train.hf.hub import address_problem
from skyrl_train.hf.transformer_config import pinned_problems
from skyrl_train.imports import declared_fields
from skyrl_train.spelling import nearest

MODEL = "trainer.policy.model.path"
POLICY = "trainer.policy.megatron_config"
POLICY_RANKS = "trainer.placement.policy_num_nodes * policy_num_gpus_per_node"
LORA = "trainer.policy.model.lora"
TRANSFORMER_CONFIG = (
    "megatron.core.model_parallel_config:ModelParallelConfig",
    "megatron.core.transformer.transformer_config:MLATransformerConfig",
    "megatron.core.transformer.transformer_config:TransformerConfig",
)


def package_problems(trainer: TrainingConfig, megatron_configs: Mapping[str, MegatronConfig]) -> Iterator[str]:
    """Packages that are missing on this machine."""
    if "wandb" in trainer.logger and importlib.util.find_spec("wandb") is None:
        yield "trainer.logger contains wandb, which is not installed. Run pip install wandb, or remove it from the list"
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    for path, megatron in megatron_configs.items():
        if megatron.transformer_impl == "transformer_engine" and not has_engine:
            yield f"{path}.transformer_impl is transformer_engine, which is not installed. Use auto or torch"


def training_problems(trainer: TrainingConfig, megatron_configs: Mapping[str, MegatronConfig]) -> Iterator[str]:
    """A malformed `trainer.prepare`, a class that is not a sink, arguments of Megatron that are unknown or fixed,
    rounded float32, a checkpoint that is not named or would not be read.
    """
    for path, megatron in megatron_configs.items():
        key, kwargs = f"{path}.transformer_config_kwargs", megatron.transformer_config_kwargs
        yield from argument_problems(key, kwargs, *TRANSFORMER_CONFIG)
        yield from pinned_problems(key, kwargs)
        if megatron.transformer_impl == "transformer_engine" and not trainer.bf16:
            yield (
                f"{path}.transformer_impl is transformer_engine, which rounds float32 to TensorFloat-32. Use auto or "
                "torch, or set trainer.bf16=true"
            )
    written = {name: getattr(trainer, name) for name in ("run_name", "run_dir", "ckpt_path", "export_path")}
    if isinstance(trainer, TrainerConfig):
        written["placement.state_path"] = trainer.placement.state_path
    own = {name: path for name, path in written.items() if not path.startswith(f"{trainer.run_dir}/")}
    problems = (address_problem(f"trainer.{name}", path) for name, path in own.items())
    yield from (problem for problem in problems if problem is not None)
    if trainer.prepare is not None and not re.fullmatch(r"[\w.]+:\w+", trainer.prepare):
        yield f"trainer.prepare is {trainer.prepare!r}: not a function's name. Write module:function, or null"
    yield from logger_problems(trainer.logger)
    mode, checkpoint = trainer.resume_mode, trainer.resume_path
    if mode == "from_path" and checkpoint is None:
        yield (
            "trainer.resume_mode is from_path and trainer.resume_path is null: no checkpoint is named. Set resume_path "
            "to the folder of a checkpoint (global_step_N)"
        )
    if mode != "from_path" and checkpoint is not None:
        yield (
            f"trainer.resume_path is {checkpoint} and trainer.resume_mode is {mode or 'null'}: the path would not be "
            "read. Set resume_mode=from_path, or resume_path=null"
        )


def argument_problems(key: str, given: Iterable[str], *classes: str) -> Iterator[str]:
    """Names that a dataclass of a library does not have. Args: classes: of its hierarchy, `module:Class`, it last."""
    if given and (names := declared_fields(*classes)):
        for name in sorted(set(given) - names):
            near = nearest(name, names)
            hint = f"; did you mean {near}?" if near else ". Remove it"
            yield f"{key}.{name} is set: {classes[-1].rpartition(':')[2]} has no such field{hint}"


def layout_problems(megatron: MegatronConfig, path: str, world_size: int, world_name: str) -> Iterator[str]:
    """Why `world_size` ranks cannot have the layout of `megatron`, whose key is `path`."""
    layout = Layout(megatron, world_size)
    tp, pp, cp, ep, etp = layout.tp, layout.pp, layout.cp, layout.ep, layout.etp
    if world_size % (tp * pp * cp):
        yield (
            f"{world_name} is {world_size} ranks: not a multiple of {path}'s tensor {tp} x pipeline {pp} x "
            f"context {cp} = {tp * pp * cp}. Add ranks or lower the sizes"
        )
    is_set = ep > 1 or megatron.expert_tensor_parallel_size is not None
    if is_set and world_size % (ep * etp * pp):
        yield (
            f"{world_name} is {world_size} ranks: not a multiple of {path}'s expert {ep} x expert tensor {etp} x "
            f"pipeline {pp} = {ep * etp * pp}. Add ranks or lower the sizes"
        )
    vpp = megatron.virtual_pipeline_model_parallel_size
    if vpp is not None and pp < 2:
        yield (
            f"{path}.virtual_pipeline_model_parallel_size is {vpp} and pipeline_model_parallel_size is {pp}: an "
            "interleaved schedule needs a pipeline of at least 2. Set virtual_pipeline_model_parallel_size=null, or "
            "raise the pipeline size"
        )
    if megatron.recompute == "selective" and not megatron.recomputed:
        yield (
            f"{path}.recompute_granularity is selective and recompute_modules is empty: nothing would be recomputed. "
            "Name modules, such as core_attn"
        )
    has_number = path == POLICY and megatron.recompute_num_layers is not None  # other models inherit the policy's
    if has_number and megatron.recompute_granularity not in ("full", "auto"):
        given = megatron.recompute_granularity or "null"
        yield (
            f"{path}.recompute_num_layers is {megatron.recompute_num_layers} and recompute_granularity is {given}: the "
            "number has no effect. Set recompute_granularity=full, or remove recompute_num_layers"
        )
    profiler = megatron.torch_profiler_config
    if profiled(megatron) and not any(rank < world_size for rank in profiler.ranks):
        yield (
            f"{path}.torch_profiler_config.ranks is {list(profiler.ranks)}: no such rank exists. Name ranks from 0 to "
            f"{world_size - 1}"
        )
    if profiler.enable and not profiler.steps:
        yield f"{path}.torch_profiler_config.steps is empty: nothing would be traced. Name steps, counted from 1"


def profiled(megatron: MegatronConfig) -> list[str]:
    """Enabled keys of torch_profiler_config."""
    return [key for key in ("enable", "record_memory") if getattr(megatron.torch_profiler_config, key)]


def lora_problems(lora: LoraConfig) -> Iterator[str]:
    """Keys of adapters without effect, and adapters that would train nothing."""
    if lora.rank > 0 and not lora.target_modules:
        yield f"{LORA}.target_modules is empty: nothing would be trained. Name modules, or all-linear"
    adapted = {"target_modules": list(lora.target_modules), "sync": getattr(lora, "sync", "merged")}
    for name, value in adapted.items() if lora.rank == 0 else ():
        if value not in (["all-linear"], "merged"):
            yield (
                f"{LORA}.{name} is {value} and {LORA}.rank is 0: there are no adapters, and all weights would be "
                f"trained. Set rank, or remove {name}"
            )
    if lora.path is not None and lora.rank == 0:
        yield (
            f"{LORA}.path is {lora.path} and {LORA}.rank is 0: the adapter would not be read. Set rank to the "
            "adapter's rank, or path=null"
        )


def adapter_problems(lora: LoraConfig) -> Iterator[str]:
    """An initial adapter that does not exist."""
    if lora.path is not None and lora.rank > 0 and not Path(lora.path).expanduser().is_dir():
        yield f"{LORA}.path is {lora.path}: there is no such folder in {Path.cwd()}. Name the folder of an adapter"


def data_problems(data: DataConfig) -> Iterator[str]:
    """A row function that cannot be called, names of columns that are not text, a template that cannot be read."""
    if data.row_fn is not None:
        yield from imported_problems("data.row_fn", data.row_fn, _row_fn_problems)
    for name, column in data.columns.items():
        if column is not None and not isinstance(column, str):
            yield (
                f"data.columns.{name} is {column!r}: it must be the name of a column of the data set, or null to "
                "remove the column"
            )
    if data.prompt_template is not None:
        try:
            fields = [field for _, field, _, _ in Formatter().parse(data.prompt_template) if field is not None]
        except ValueError as error:
            yield f"data.prompt_template is {data.prompt_template!r}: {error}. Write braces of the text twice"
        else:
            if not fields or "" in fields:
                yield (
                    f"data.prompt_template is {data.prompt_template!r}: write a column in braces, as in {{question}}, "
                    "and braces of the text twice"
                )


def _row_fn_problems(found: object) -> Iterator[str]:
    if not callable(found) or not takes(found, 1):
        yield "it must be a function of one row (a dict) that returns a row, or None to drop it"


def data_file_problems(data: DataConfig) -> Iterator[str]:
    """Data sources that are missing or have an unknown format."""
    if not data.train_data:
        yield "data.train_data is empty: nothing to train on. Name files (parquet, json, jsonl) or hub_name:split"
    yield from source_problems("train_data", data.train_data)
    yield from source_problems("val_data", data.val_data)


def source_problems(key: str, names: Sequence[str]) -> Iterator[str]:
    """Like `data_file_problems`, for one key."""
    for name in names:
        if DATA_FILE.search(name):
            is_remote = "://" in name or glob.has_magic(name)
            if not is_remote and not Path(name).expanduser().is_file():
                where = "" if Path(name).expanduser().is_absolute() else f" in {Path.cwd()}"
                yield f"data.{key} contains {name}: there is no such file{where}"
        elif not HUB_SPLIT.match(name):
            yield (
                f"data.{key} contains {name}: it must be a .parquet, .json or .jsonl file, hub_name:split or "
                "hub_name:config:split"
            )
