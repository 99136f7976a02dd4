"""Checks of the engines: sampling, arguments, transports, running servers and HTTP endpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from skyrl_train.checks.training import argument_problems
from skyrl_train.config import Config, ConfigError
from skyrl_train.config.generator import GeneratorConfig, SamplingConfig
from skyrl_train.config.values import is_loopback
from skyrl_train.engines.protocol import engine_kind
from skyrl_train.engines.settings import require_cache_size
from skyrl_train.engines.vllm.models import model_problems as vllm_model_problems
from skyrl_train.engines.vllm.models import quantization_problems
from skyrl_train.weight_sync.channels.table import transport

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SERVER_URL = re.compile(r"^https?://[^/\s]+/?$")
LAST_PORT = 65535
ENGINE_ARGUMENTS = ("vllm.engine.arg_utils:EngineArgs", "vllm.engine.arg_utils:AsyncEngineArgs")
OWN_KEYS = {
    "model": "trainer.policy.model.path",
    "served_model_name": "generator.served_model_name",
    "dtype": "generator.model_dtype",
    "seed": "trainer.seed",
    "tensor_parallel_size": "generator.inference_engine_tensor_parallel_size",
    "quantization": "generator.quantization",
    "quantization_config": "generator.quantization",
    "enforce_eager": "generator.enforce_eager",
    "enable_prefix_caching": "generator.enable_prefix_caching",
    "max_num_batched_tokens": "generator.max_num_batched_tokens",
    "max_num_seqs": "generator.max_num_seqs",
    "enable_lora": "trainer.policy.model.lora",
    "lora_target_modules": "trainer.policy.model.lora.target_modules",
    "max_loras": "trainer.policy.model.lora",
    "max_cpu_loras": "trainer.policy.model.lora",
    "max_lora_rank": "trainer.policy.model.lora.rank",
}
"""Engine arguments that have their own key; each engine gets its own seed, else all would sample the same tokens."""
GIVEN = (
    "logprobs_mode",
    "weight_transfer_config",
    "worker_extension_cls",
    "scheduler_cls",
    "additional_config",
    "enable_sleep_mode",
    "pipeline_parallel_size",
    "data_parallel_size",
)
"""Arguments managed here: an engine is one vLLM core, with one worker per tensor-parallel rank."""
OTHER_DISTRIBUTION = {
    "generation_config": "requests over HTTP would take sampling parameters from a file",
    "override_generation_config": "requests over HTTP would be sampled with these parameters unless they set their own",
    "hf_overrides": "the trainer would not use these values (write them into the model's config.json)",
    "hf_config_path": "the trainer would use another configuration (write it into the model's folder)",
    "logits_processors": "the trainer has no such processor",
    "watermark_config": "the trainer computes logprobs without a watermark",
}
"""Arguments that change the engine's distribution -> why the trainer's would differ."""

LOWEST_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises lower ones above 0 to the first, and refuses requests above the second (since 0.24: vllm#44965)."""
REMOTE_CODE = ("trust_remote_code", "auto_map", "code_revision")
ALL_TOKENS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Values with which the engine samples from all tokens."""


def training_sampling_problems(sampling: SamplingConfig) -> Iterator[str]:
    """Sampling parameters of training that truncate the engine's distribution; evaluation may have them."""
    key = "generator.sampling_params"
    if sampling.temperature == 0:
        yield (
            f"{key}.temperature is 0: all samples of a prompt would be equal. Set it above 0 (evaluation has "
            "eval_sampling_params)"
        )
    for name, neutral in ALL_TOKENS.items():
        value = getattr(sampling, name)
        if value != neutral:
            yield (
                f"{key}.{name} is {value}: the engine would sample from some of the tokens, but the trainer computes "
                f"logprobs over all of them, so every gradient would be wrong. Set it to {neutral} (evaluation may "
                f"truncate: generator.eval_sampling_params.{name})"
            )


def length_problems(config: Config) -> Iterator[str]:
    """Prompts or conversations that are longer than engines may take."""
    generator, prompt = config.generator, config.trainer.max_prompt_length
    if generator.max_input_length < prompt:
        yield (
            f"generator.max_input_length is {generator.max_input_length}: prompts up to trainer.max_prompt_length "
            f"{prompt} would end before their first turn. Set it to at least {prompt}"
        )
    limit, longest = generator.engine_init_kwargs.get("max_model_len"), generator.longest_conversation
    if limit is not None and not isinstance(limit, int):
        yield f"generator.engine_init_kwargs.max_model_len is {limit!r}: write a number of tokens, such as 8192"
    elif limit is not None and longest > limit:
        yield (
            f"generator.max_input_length {generator.max_input_length} + max_generate_length "
            f"{longest - generator.max_input_length} is {longest} tokens: more than "
            f"generator.engine_init_kwargs.max_model_len {limit}. Lower max_input_length or max_generate_length, or "
            "raise max_model_len"
        )


def vllm_sampling_problems(generator: GeneratorConfig) -> Iterator[str]:
    """Sampling parameters that vLLM refuses or changes in every request."""
    for name in ("sampling_params", "eval_sampling_params"):
        temperature, stop = getattr(generator, name).temperature, getattr(generator, name).stop
        if "" in stop:
            yield f"generator.{name}.stop is {list(stop)}: an empty text stops nothing. Write [] for none"
        if temperature and not LOWEST_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            allowed = f"from {LOWEST_TEMPERATURE} to {MAX_TEMPERATURE}, or 0 for greedy evaluations"
            yield f"generator.{name}.temperature is {temperature}: vLLM samples {allowed}"


def quantization_key_problems(generator: GeneratorConfig) -> Iterator[str]:
    """Keys with which engines would not be quantised."""
    given = f"generator.quantization is {generator.quantization}"
    if generator.quantization is None:
        return
    if generator.model_dtype == "float32":
        yield (
            f"{given} and generator.model_dtype is float32: quantised engines compute the rest in half precision. Set "
            "generator.model_dtype=bfloat16, or quantization=null"
        )
    if not generator.run_engines_locally:
        yield (
            f"{given} and generator.run_engines_locally is false: running servers quantise only if they were started "
            "so. Set quantization=null, or run_engines_locally=true"
        )


def engine_problems(config: Config) -> Iterator[str]:
    """An unknown kind of engine, or the problems of the configured kind."""
    yield from quantization_key_problems(config.generator)
    try:
        problems = engine_kind(config.generator).problems
    except ValueError as error:
        yield str(error)
        return
    if problems is not None:
        yield from resolve_name(problems)(config)


def local_engine_problems(config: Config) -> Iterator[str]:
    urls = config.generator.remote_inference_engine_urls
    if urls:
        yield (
            f"generator.remote_inference_engine_urls names {len(urls)} servers and generator.run_engines_locally is "
            "true: they would not be used. Set run_engines_locally=false, or remove the servers"
        )
    arguments = config.generator.engine_init_kwargs
    yield from argument_problems("generator.engine_init_kwargs", arguments, *ENGINE_ARGUMENTS)
    yield from engine_argument_problems(config.generator)
    yield from vllm_sampling_problems(config.generator)


def engine_argument_problems(generator: GeneratorConfig) -> Iterator[str]:
    """Arguments that contradict what the trainer relies on."""
    for name, value in generator.engine_init_kwargs.items():
        given = f"generator.engine_init_kwargs.{name} is {value!r}"
        if name in OWN_KEYS:
            yield f"{given}: this argument has its own key. Remove it and set {OWN_KEYS[name]}"
        elif name in GIVEN:
            yield f"{given}: this argument is managed by skyrl_train. Remove it"
        elif name in OTHER_DISTRIBUTION:
            yield (
                f"{given}: training samples must come from the distribution that the trainer computes, but "
                f"{OTHER_DISTRIBUTION[name]}. Remove {name}"
            )
        elif name == "speculative_config" and not isinstance(value or {}, Mapping):
            yield f"{given}: write its fields, as in {{method: ngram, num_speculative_tokens: 2}}"
        elif name == "speculative_config" and (value or {}).get("rejection_sample_method") == "synthetic":
            yield f"{given}: synthetic acceptance keeps tokens that the model did not sample. Use the method standard"
        for path in _paths_of_remote_code(value, f"generator.engine_init_kwargs.{name}"):
            yield (
                f"{path} is set: one key decides for driver and engines whether Python code from a model's folder may "
                "run. Remove it, and set trainer.trust_remote_code=true if you trust the code"
            )


def _paths_of_remote_code(value: Any, path: str) -> Iterator[str]:
    """Keys, at any depth, with which transformers and vLLM import code from a model's folder or the hub."""
    if path.rpartition(".")[2] in REMOTE_CODE:
        if value not in (False, None):
            yield path
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _paths_of_remote_code(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _paths_of_remote_code(item, path)


def check_vllm(config: Config, model: PretrainedConfig, device_type: str | None) -> None:
    """Check vLLM engines that the run starts.

    Args: device_type: theirs, None if unknown. Raises: ValueError for a model that they cannot load, or if they have no
        GPU and no size of the KV cache.
    """
    generator, policy = config.generator, config.trainer.policy.model
    if generator.backend != "vllm" or not generator.run_engines_locally:
        return
    if device_type is not None:
        require_cache_size(generator, device_type)
    given = f"trainer.policy.model.path is {policy.path}"
    text = model.get_text_config()
    problems = list(vllm_model_problems(text, given, device_type, _sync_of_adapters(config)))
    if problems := [*problems, *quantised_model_problems(config, text, device_type)]:
        raise ConfigError(problems)


def quantised_model_problems(config: Config, model: PretrainedConfig, device_type: str | None) -> Iterator[str]:
    """Why engines cannot quantise the policy, if they are to. Args: device_type: theirs, None if unknown."""
    quantization, path = config.generator.quantization, config.trainer.policy.model.path
    if quantization is not None:
        given = f"generator.quantization is {quantization}, and trainer.policy.model.path is {path}"
        tp_size = config.generator.inference_engine_tensor_parallel_size
        yield from quantization_problems(model, given, device_type, _sync_of_adapters(config), tp_size)


def _sync_of_adapters(config: Config) -> str | None:
    lora = config.trainer.policy.model.lora
    return lora.sync if lora.rank > 0 else None


def transport_problems(config: Config) -> Iterator[str]:
    """A weight transport that does not exist, or that these engines cannot use."""
    generator, name = config.generator, config.generator.weight_sync_backend
    if name == "auto":
        return
    key = f"generator.weight_sync_backend is {name}"
    try:
        asked = transport(name)
    except ValueError as error:
        yield str(error)
        return
    if asked.shares_gpus and not config.trainer.placement.colocate_all:
        yield (
            f"{key}: it needs policy and engines on the same GPUs. Use auto, or set trainer.placement.colocate_all=true"
        )
    if not asked.for_stock_servers:
        return
    if generator.run_engines_locally:
        yield f"{key}: it is for stock vLLM servers (generator.run_engines_locally=false). Use auto"
    elif config.trainer.verify_sync_every == 0:
        yield (
            f"trainer.verify_sync_every is 0 and {key}: stock vLLM servers report no digests, so comparing logprobs is "
            "the only check. Set it to at least 1 (for example 10)"
        )


def remote_engine_problems(config: Config) -> Iterator[str]:
    generator = config.generator
    urls, key = generator.remote_inference_engine_urls, "generator.remote_inference_engine_urls"
    if not urls:
        yield (
            f"generator.run_engines_locally is false and {key} is empty: there are no engines. Name the servers, as "
            "[http://host:8000]"
        )
    for url in urls:
        if not SERVER_URL.match(url):
            yield f"{key} contains {url!r}: not a server's address. Write http://host:port, without /v1 or another path"
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield f"{key} contains {url} twice: each server is one engine. Remove one"
    yield from api_key_problems(generator)
    yield from engine_argument_problems(generator)
    yield from vllm_sampling_problems(generator)


def api_key_problems(generator: GeneratorConfig) -> Iterator[str]:
    variable = generator.remote_api_key_env
    if variable is not None and not os.environ.get(variable):
        yield f"generator.remote_api_key_env is {variable}: this environment variable is not set. Export it first"


def endpoint_problems(config: Config) -> Iterator[str]:
    generator = config.generator
    if not generator.enable_http_endpoint:
        return
    host, port = generator.http_endpoint_host, generator.http_endpoint_port
    if not generator.run_engines_locally:
        yield (
            "generator.enable_http_endpoint is true and generator.run_engines_locally is false: running servers have "
            "their own endpoints. Set enable_http_endpoint=false"
        )
    if generator.http_api_key is None and not is_loopback(host):
        yield (
            f"generator.http_endpoint_host is {host} and http_api_key is null: anyone on the network could use the "
            "engines. Set generator.http_api_key (for example ${oc.env:NAME}), or http_endpoint_host=127.0.0.1"
        )
    if port and port + generator.num_inference_engines - 1 > LAST_PORT:
        yield (
            f"generator.http_endpoint_port is {port}: {generator.num_inference_engines} engines would need ports above "
            f"{LAST_PORT}. Set it to at most {LAST_PORT + 1 - generator.num_inference_engines}"
        )
