"""What must hold for engines: their arguments, servers that run already, their own endpoints; as rl.py."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.values import is_loopback
from skyrl_train.engines.protocol import engine_kind
from skyrl_train.imports import attribute
from skyrl_train.weight_sync.channels.table import transport

SERVER_URL = re.compile(r"^https?://[^/\s]+/?$")
LAST_PORT = 65535
OWN_KEYS = {
    "model": "trainer.policy.model.path",
    "served_model_name": "generator.served_model_name",
    "dtype": "generator.model_dtype",
    "seed": "trainer.seed",
    "tensor_parallel_size": "generator.inference_engine_tensor_parallel_size",
    "enable_lora": "trainer.policy.model.lora",
    "lora_target_modules": "trainer.policy.model.lora.target_modules",
    "max_loras": "trainer.policy.model.lora",
    "max_cpu_loras": "trainer.policy.model.lora",
    "max_lora_rank": "trainer.policy.model.lora.rank",
}
"""Set by these keys for trainer and engines alike, or each engine's own: engines with one seed draw the same."""
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
"""What training and weight syncs rest on: an engine is one vLLM core, with one worker per tensor-parallel rank."""
OTHER_DISTRIBUTION = {
    "generation_config": "requests over HTTP would take sampling parameters from a file",
    "override_generation_config": "requests over HTTP would be sampled with these parameters unless they set their own",
    "hf_overrides": "the trainer would not compute with these values; write them into the model's config.json",
    "hf_config_path": "the trainer would compute with another configuration; write it into the model's folder",
    "logits_processors": "the trainer has no such processor",
    "watermark_config": "the trainer computes the distribution without a watermark",
}
"""Arguments with which an engine samples from another distribution than the one that the trainer computes."""

REMOTE_CODE = ("trust_remote_code", "auto_map", "code_revision")


def engine_problems(config: Config) -> Iterator[str]:
    """A kind of engine that does not exist, or what is wrong with the configuration for it."""
    try:
        problems = engine_kind(config.generator).problems
    except ValueError as error:
        yield str(error)
        return
    if problems is not None:
        yield from attribute(problems)(config)


def local_engine_problems(config: Config) -> Iterator[str]:
    """vLLM engines that are started here."""
    urls = config.generator.remote_inference_engine_urls
    if urls:
        yield (
            f"generator.remote_inference_engine_urls names {len(urls)} servers: set "
            "generator.run_engines_locally=false to use them"
        )
    yield from engine_argument_problems(config.generator)


def engine_argument_problems(generator: GeneratorConfig) -> Iterator[str]:
    """Arguments that would set aside what the trainer counts on."""
    for name, value in generator.engine_init_kwargs.items():
        given = f"generator.engine_init_kwargs.{name} is {value!r}"
        if name in OWN_KEYS:
            yield f"{given}: leave it out and set {OWN_KEYS[name]}"
        elif name in GIVEN:
            yield f"{given}: leave it out, training relies on the value that the engines are given"
        elif name in OTHER_DISTRIBUTION:
            yield (
                f"{given}: training samples must come from the distribution that the trainer computes, and "
                f"{OTHER_DISTRIBUTION[name]}. Remove {name}"
            )
        elif name == "speculative_config" and (value or {}).get("rejection_sample_method") == "synthetic":
            yield f"{given}: synthetic acceptance keeps tokens that the model did not sample. Use the method standard"
        for path in _paths_of_remote_code(value, f"generator.engine_init_kwargs.{name}"):
            yield (
                f"{path} is set: models and tokenizers that need Python code from their own folder are not supported, "
                "and such code is never run. Remove it, and use a model that transformers has itself"
            )


def _paths_of_remote_code(value: Any, path: str) -> Iterator[str]:
    """Keys, at any depth, by which transformers and vLLM import code from a model's folder or from the hub."""
    if path.rpartition(".")[2] in REMOTE_CODE:
        if value not in (False, None):
            yield path
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _paths_of_remote_code(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _paths_of_remote_code(item, path)


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
            f"{key}, which needs policy and engines on the same GPUs (trainer.placement.colocate_all=true): use auto"
        )
    if not asked.for_stock_servers:
        return
    if generator.run_engines_locally:
        yield f"{key}, which is for stock vLLM servers (generator.run_engines_locally=false): use auto"
    elif config.trainer.verify_sync_every == 0:
        yield (
            f"trainer.verify_sync_every is 0 and {key}: a stock server tells no digests of what it received, so "
            "comparing logprobs is the only proof; set it to at least 1, such as 10"
        )


def remote_engine_problems(config: Config) -> Iterator[str]:
    """Servers that run already."""
    generator = config.generator
    urls, key = generator.remote_inference_engine_urls, "generator.remote_inference_engine_urls"
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
    yield from engine_argument_problems(generator)


def endpoint_problems(config: Config) -> Iterator[str]:
    """Engines that are offered over HTTP, where or to whom they cannot be."""
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
