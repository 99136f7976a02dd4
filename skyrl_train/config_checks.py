"""What must hold between the values of a configuration, checked before anything heavy starts, all failures at once.

What a value must be by itself stands with its field in config*.py and is checked when the configuration is read.

Quick (no torch, Ray, vLLM or Megatron) and without side effects. Every sentence names the key, the value and the cure.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyrl_train.config import Config, ConfigError
from skyrl_train.config_checks_engines import engine_argument_problems
from skyrl_train.config_checks_lora import lora_problems, lora_reference_problems, lora_sync_problems
from skyrl_train.config_checks_profiler import profiler_problems, restart_problems
from skyrl_train.config_policy import MegatronConfig
from skyrl_train.config_training import DataConfig, TrainingConfig
from skyrl_train.config_values import is_loopback
from skyrl_train.model_checks import longest_conversation, model_problems

POLICY = "trainer.policy.megatron_config"
REF = "trainer.ref.megatron_config"
POLICY_RANKS = "trainer.placement.policy_num_nodes * policy_num_gpus_per_node"
DATA_FILE = re.compile(r"\.(?P<format>parquet|jsonl|json)(\.(gz|bz2|xz|zst))?$")
HUB_SPLIT = re.compile(r"^(?P<name>[^:]+):(?P<split>[^:/]+)$")
SERVER_URL = re.compile(r"^https?://[^/\s]+/?$")
LAST_PORT = 65535
GROUP_ESTIMATORS = ("grpo", "rloo")
"""Estimators for which a group of one sample has no advantage."""


def check(config: Config, num_train_prompts: int | None, files: bool = True) -> None:
    """Raise ConfigError with everything that cannot work, or return.

    Args:
        num_train_prompts: rows left in the training data, None where they are not known yet.
        files: also look at the model folders and data files; False before `trainer.prepare` has made them.
    """
    problems = [
        *package_problems(config.trainer, _megatron_configs(config)),
        *prepare_problems(config.trainer),
        *_batches(config, num_train_prompts),
        *_algorithm(config),
        *_lengths(config),
        *_remote_engines(config),
        *engine_argument_problems(config.generator),
        *lora_reference_problems(config.trainer),
        *_endpoint(config),
        *_colocation(config),
        *_deadlines(config),
        *lora_sync_problems(config),
    ]
    problems += _layouts(config)
    if files:
        problems += data_file_problems(config.data)
        problems += model_problems(config)
        problems += lora_problems(config.trainer.policy.model.lora)
    if problems:
        raise ConfigError(problems)


def _megatron_configs(config: Config) -> dict[str, MegatronConfig]:
    """Key -> layout of each model that is started; the reference's only where it has one of its own."""
    policy, ref = config.trainer.policy.megatron_config, config.trainer.ref.megatron_config
    return {POLICY: policy} | ({REF: ref} if config.trainer.starts_reference and ref != policy else {})


def package_problems(trainer: TrainingConfig, megatron_configs: Mapping[str, MegatronConfig]) -> Iterator[str]:
    """Optional packages that are asked for and not installed."""
    if "wandb" in trainer.logger and importlib.util.find_spec("wandb") is None:
        yield "trainer.logger asks for wandb, which is not installed: pip install wandb, or leave it out"
    for path, megatron in megatron_configs.items():
        wanted = megatron.transformer_impl == "transformer_engine"
        if wanted and importlib.util.find_spec("transformer_engine") is None:
            yield f"{path}.transformer_impl is transformer_engine, which is not installed: use auto or torch"


def _deadlines(config: Config) -> Iterator[str]:
    sync_s, call_s = config.generator.weight_sync_timeout_s, config.trainer.timeout_s
    if sync_s > call_s:
        yield (
            f"generator.weight_sync_timeout_s={sync_s:g} is longer than trainer.timeout_s={call_s:g}, the deadline of "
            "the policy's whole part in a weight sync: lower the first or raise the second"
        )


def prepare_problems(trainer: TrainingConfig) -> Iterator[str]:
    """A `trainer.prepare` that is no `module:function`."""
    prepare = trainer.prepare
    if prepare is not None and not re.fullmatch(r"[\w.]+:\w+", prepare):
        yield f"trainer.prepare is {prepare!r}: write module:function, or null"


def _batches(config: Config, num_train_prompts: int | None) -> Iterator[str]:
    batch, mini = config.trainer.train_batch_size, config.trainer.policy_mini_batch_size
    if batch % mini:
        near = max(divisor for divisor in range(1, min(batch, mini) + 1) if batch % divisor == 0)
        yield (
            f"trainer.train_batch_size is {batch}, not a multiple of trainer.policy_mini_batch_size {mini}: "
            f"set policy_mini_batch_size to a divisor such as {near}"
        )
    if num_train_prompts is not None and batch > num_train_prompts:
        yield (
            f"trainer.train_batch_size is {batch}, more than the {num_train_prompts} prompts of data.train_data: "
            f"set it to at most {num_train_prompts} (prompts over trainer.max_prompt_length are not counted)"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    if config.generator.sampling_params.temperature == 0:
        yield (
            "generator.sampling_params.temperature is 0: training learns from differing samples, set it above 0 "
            "(evaluation has eval_sampling_params)"
        )
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield "trainer.algorithm.use_kl_loss and use_kl_in_reward are both true: set one of them to false"
    samples = config.generator.n_samples_per_prompt
    if algorithm.advantage_estimator in GROUP_ESTIMATORS and samples < 2:
        yield (
            f"generator.n_samples_per_prompt is {samples}: {algorithm.advantage_estimator} compares the samples of a "
            "prompt with each other, set it to at least 2"
        )


def _remote_engines(config: Config) -> Iterator[str]:
    generator = config.generator
    urls, key = generator.remote_inference_engine_urls, "generator.remote_inference_engine_urls"
    stock = generator.weight_sync_backend == "vllm_nccl"
    if generator.weight_sync_backend == "cuda_ipc" and not config.trainer.placement.colocate_all:
        yield (
            "generator.weight_sync_backend is cuda_ipc, which needs policy and engines on the same GPUs "
            "(trainer.placement.colocate_all=true): use auto"
        )
    if generator.run_engines_locally:
        if urls:
            yield f"{key} names {len(urls)} servers: set generator.run_engines_locally=false to use them"
        if stock:
            yield (
                "generator.weight_sync_backend is vllm_nccl, which is for stock vLLM servers "
                "(generator.run_engines_locally=false): use auto"
            )
        return
    if not urls:
        yield f"generator.run_engines_locally is false and {key} is empty: name the servers, as [http://host:8000]"
    for url in urls:
        if not SERVER_URL.match(url):
            yield f"{key} names {url!r}: write http://host:port, without /v1 or another path"
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield f"{key} names {url} twice: each server is one engine"
    variable = generator.remote_api_key_env
    if variable is not None and not os.environ.get(variable):
        yield f"generator.remote_api_key_env is {variable}: no such environment variable is set, export it first"
    if stock and config.trainer.verify_sync_every == 0:
        yield (
            "trainer.verify_sync_every is 0 and generator.weight_sync_backend vllm_nccl: a stock server tells no "
            "digests of what it received, so comparing logprobs is the only proof; set it to at least 1, such as 10"
        )


def _lengths(config: Config) -> Iterator[str]:
    generator, prompt = config.generator, config.trainer.max_prompt_length
    if generator.max_input_length < prompt:
        yield (
            f"generator.max_input_length is {generator.max_input_length}, below trainer.max_prompt_length {prompt}: "
            "longer prompts would end before their first turn, set it to at least as much"
        )
    limit = generator.engine_init_kwargs.get("max_model_len")
    longest = longest_conversation(generator)
    if limit is not None and longest > limit:
        yield (
            f"generator.max_input_length + max_generate_length is {longest} tokens, more than "
            f"generator.engine_init_kwargs.max_model_len {limit}: lower the first or raise the last"
        )


def _endpoint(config: Config) -> Iterator[str]:
    generator = config.generator
    if not generator.enable_http_endpoint:
        return
    host, port = generator.http_endpoint_host, generator.http_endpoint_port
    if not generator.run_engines_locally:
        yield (
            "generator.enable_http_endpoint is true and generator.run_engines_locally false: those servers have "
            "endpoints of their own, set it to false"
        )
    if generator.http_api_key is None and not is_loopback(host):
        yield (
            f"generator.http_endpoint_host is {host} and http_api_key null: anybody in the network could use the "
            "engines, set a key (such as ${oc.env:NAME}), or the host to 127.0.0.1"
        )
    if port and port + generator.num_inference_engines - 1 > LAST_PORT:
        yield (
            f"generator.http_endpoint_port is {port}: {generator.num_inference_engines} engines would need ports above "
            f"{LAST_PORT}, set it to at most {LAST_PORT + 1 - generator.num_inference_engines}"
        )


def _colocation(config: Config) -> Iterator[str]:
    place, generator = config.trainer.placement, config.generator
    if not place.colocate_all:
        if place.release == "exit":
            yield (
                "trainer.placement.release is exit and colocate_all false: trainers with devices of their own keep "
                "them, set colocate_all to true or leave release at offload"
            )
        return
    if place.release == "exit":
        for path, megatron in _megatron_configs(config).items():
            yield from restart_problems(megatron, path)
    if not generator.run_engines_locally:
        yield (
            "trainer.placement.colocate_all is true and generator.run_engines_locally false: servers elsewhere cannot "
            "take turns with the trainer, set one of them the other way"
        )
        return
    ranks = place.policy_num_nodes * place.policy_num_gpus_per_node
    engines, tp = generator.num_inference_engines, generator.inference_engine_tensor_parallel_size
    if ranks != engines * tp:
        yield (
            f"trainer.placement.colocate_all is true with {ranks} policy ranks and generator.num_inference_engines "
            f"{engines} x inference_engine_tensor_parallel_size {tp} = {engines * tp} engine ranks: the numbers must "
            "be equal, each device serves one of either"
        )
    ref_ranks = place.ref_num_nodes * place.ref_num_gpus_per_node
    if config.trainer.starts_reference and ref_ranks != ranks:
        yield (
            f"trainer.placement.colocate_all is true with {ranks} policy ranks and {ref_ranks} reference ranks: the "
            "numbers must be equal, leave ref_num_nodes and ref_num_gpus_per_node away"
        )


def _layouts(config: Config) -> Iterator[str]:
    placement = config.trainer.placement
    policy, ref = config.trainer.policy.megatron_config, config.trainer.ref.megatron_config
    policy_ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    ref_ranks = placement.ref_num_nodes * placement.ref_num_gpus_per_node
    yield from layout_problems(policy, POLICY, policy_ranks, POLICY_RANKS)
    # The reference follows the policy unless its keys are given: what is wrong with both is said once.
    if config.trainer.starts_reference and (ref, ref_ranks) != (policy, policy_ranks):
        ref_key = "trainer.placement.ref_num_nodes * ref_num_gpus_per_node"
        yield from layout_problems(ref, REF, ref_ranks, ref_key)


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
