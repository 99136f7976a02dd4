"""Configuration -> what each engine is started with, or connected to."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import TypeVar

from skyrl_train.config import Config
from skyrl_train.config.policy import LoraConfig
from skyrl_train.engines.settings import EngineSettings, HttpSettings, Margin, RemoteEngineSettings
from skyrl_train.hf.hub import seen_from_anywhere

LEFT_BY_TRAINER = 2 << 30
"""Bytes that an offloaded trainer comes to hold after the engine has started, for NCCL, kernels and what stays of
torch's pages. All that a rank of a pipeline holds is 1.0 GiB of an H200; ranks of tensor parallelism, for which it was
not read, have one more communicator, of as many channels as NCCL takes."""

SHARE_OF_STAYING_TRAINERS = 0.5
"""Of what is free before their first step, for moments of Adam and whatever torch keeps of a step's memory."""


def all_engine_settings(
    config: Config, max_model_len: int, backend: str, policy_version: int = 0
) -> list[EngineSettings | RemoteEngineSettings]:
    """Args: policy_version: which the engines serve first; a run that goes on draws with other random numbers than at
    its start."""
    generator = config.generator
    if generator.run_engines_locally:
        engines = range(generator.num_inference_engines)
        return [_engine_settings(config, max_model_len, index, policy_version) for index in engines]
    variable = generator.remote_api_key_env
    return [
        RemoteEngineSettings(
            url=url,
            api_key=None if variable is None else os.environ[variable],
            model_path=seen_from_anywhere(config.trainer.policy.model.path),
            model_dtype=generator.model_dtype,
            max_model_len=max_model_len,
            weight_sync_backend=backend,
            sync_timeout_s=generator.weight_sync_timeout_s,
            rpc_timeout_s=config.trainer.timeout_s,
            pause_mode=generator.pause_mode,  # type: ignore[arg-type]  # the configuration knows its three names
        )
        for url in generator.remote_inference_engine_urls
    ]


def _seed(seed: int, policy_version: int) -> int:
    """At most 32 bits, as numpy takes, which the engines seed."""
    if policy_version == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {policy_version}".encode()).digest()[:4], "big")


def _engine_settings(config: Config, max_model_len: int, index: int, policy_version: int) -> EngineSettings:
    generator = config.generator
    lora = config.trainer.policy.model.lora
    cache_gb = generator.kv_cache_memory_gb
    return EngineSettings(
        model_path=seen_from_anywhere(config.trainer.policy.model.path),
        served_model_name=served_model_name(config),
        model_dtype=generator.model_dtype,
        max_model_len=max_model_len,
        seed=_seed(config.trainer.seed + index, policy_version),
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        enforce_eager=generator.enforce_eager,
        enable_prefix_caching=generator.enable_prefix_caching,
        gpu_memory_utilization=generator.gpu_memory_utilization,
        margin=_margin(config, max_model_len),
        kv_cache_memory_bytes=None if cache_gb is None else int(cache_gb * 2**30),
        cached_sequences=_cached_sequences(config),
        max_num_batched_tokens=generator.max_num_batched_tokens,
        max_num_seqs=generator.max_num_seqs,
        enable_sleep_mode=config.trainer.placement.colocate_all,
        rpc_timeout_s=config.trainer.timeout_s,
        sync_timeout_s=generator.weight_sync_timeout_s,
        pause_mode=generator.pause_mode,  # type: ignore[arg-type]  # the configuration knows its three names
        http=_http_settings(config, index),
        engine_init_kwargs=generator.engine_init_kwargs,
        lora=lora_arguments(lora) if lora.rank > 0 and lora.sync == "adapter" else None,
        lora_seed=config.trainer.seed,
    )


def _cached_sequences(config: Config) -> int | None:
    """What of the KV cache is worth its way off shared devices and back: an engine's part of a step's samples, and one
    prompt's more, for they are dealt by prompts. Of clients over HTTP nobody knows how many there are."""
    generator, trainer = config.generator, config.trainer
    if not trainer.placement.colocate_all or generator.enable_http_endpoint:
        return None
    samples = trainer.train_batch_size * generator.n_samples_per_prompt
    each = -(-samples // generator.num_inference_engines) + generator.n_samples_per_prompt
    # What waits for its environment keeps its cache; a sample of one turn that is not computed has none.
    return min(each, generator.max_num_seqs) if generator.max_turns == 1 else each


def _margin(config: Config, max_model_len: int) -> Margin:
    """Engines start when the trainers of their devices have left them for the first time, before their first step."""
    trainer = config.trainer
    margin = Margin(scored_tokens=max_model_len if trainer.verify_sync_every else 0)
    if not trainer.placement.colocate_all or trainer.placement.release == "exit":
        return margin
    if trainer.placement.release == "none":
        return replace(margin, share=SHARE_OF_STAYING_TRAINERS)
    return replace(margin, for_trainers=LEFT_BY_TRAINER * (2 if trainer.starts_reference else 1))


L = TypeVar("L", bound=LoraConfig)


def lora_arguments(lora: L) -> L:
    """The adapters' configuration for processes with other working directories."""
    return lora if lora.path is None else replace(lora, path=seen_from_anywhere(lora.path))


def served_model_name(config: Config) -> str:
    """What the engines call the model; over HTTP it is NAME and NAME@VERSION."""
    return config.generator.served_model_name or config.trainer.run_name


def _http_settings(config: Config, index: int) -> HttpSettings | None:
    generator = config.generator
    if not generator.enable_http_endpoint:
        return None
    return HttpSettings(
        host=generator.http_endpoint_host,
        port=generator.http_endpoint_port and generator.http_endpoint_port + index,
        api_key=generator.http_api_key,
        chat_template_kwargs=generator.chat_template_kwargs,
    )
