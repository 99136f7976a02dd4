"""Configuration -> settings of each engine."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import TypeVar

from skyrl_train.cluster.sharing import build_sharing
from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.policy import LoraConfig, ScoringModel
from skyrl_train.engines.settings import EngineSettings, Margin
from skyrl_train.hf.hub import seen_from_anywhere


def all_engine_settings(
    config: Config, max_model_len: int, backend: str, policy_version: int = 0
) -> list[EngineSettings]:
    """Settings of the policy's engines.

    Args: backend: transport of the weight sync; policy_version: first version that the engines serve; it changes their
        seeds, so that a resumed run does not repeat random numbers.
    """
    generator, trainer, sharing = config.generator, config.trainer, build_sharing(config)
    lora = trainer.policy.model.lora
    return [
        EngineSettings(
            generator=replace(generator, weight_sync_backend=backend),
            index=index,
            model_path=seen_from_anywhere(trainer.policy.model.path),
            served_model_name=served_model_name(config),
            max_model_len=max_model_len,
            seed=_seed(trainer.seed + index, policy_version),
            rpc_timeout_s=trainer.timeout_s,
            api_key=None if generator.run_engines_locally else api_key(generator),
            margin=sharing.engine_margin(max_model_len if trainer.verify_sync_every else 0),
            enable_sleep_mode=sharing.takes_turns,
            cached_sequences=sharing.cached_sequences,
            lora=lora_arguments(lora) if lora.rank > 0 and lora.sync == "adapter" else None,
            custom_modules=trainer.custom_modules,
            trust_remote_code=trainer.trust_remote_code,
        )
        for index in range(generator.num_engines)
    ]


def teacher_engine_settings(
    config: Config, model: ScoringModel, max_model_len: int, backend: str
) -> list[EngineSettings]:
    """Settings of one teacher's engines: those of the policy's, without HTTP endpoint, max_model_len and quantisation
    (the student would learn its error).

    Args: max_model_len: tokens of the longest sample that they score, and one more; backend: of the weight sync.
    """
    trainer, generator = config.trainer, replace(teacher_generator(config), weight_sync_backend=backend)
    return [
        EngineSettings(
            generator=generator,
            index=index,
            model_path=seen_from_anywhere(model.model_path),
            model_key=model.path_key,
            served_model_name=model.name,
            max_model_len=max_model_len,
            seed=trainer.seed + index,
            rpc_timeout_s=trainer.timeout_s,
            margin=Margin(scored_tokens=max_model_len),
            custom_modules=trainer.custom_modules,
            trust_remote_code=trainer.trust_remote_code,
        )
        for index in range(generator.num_inference_engines)
    ]


def teacher_generator(config: Config) -> GeneratorConfig:
    """The `generator` section of the configuration, adapted to a teacher's engines."""
    teacher, kwargs = config.trainer.teacher, config.generator.engine_init_kwargs
    return replace(
        config.generator,
        run_engines_locally=True,
        enable_http_endpoint=False,
        quantization=None,
        num_inference_engines=teacher.num_inference_engines,
        inference_engine_tensor_parallel_size=teacher.inference_engine_tensor_parallel_size,
        engine_init_kwargs={name: value for name, value in kwargs.items() if name != "max_model_len"},
    )


def api_key(generator: GeneratorConfig) -> str | None:
    """API key of running servers."""
    variable = generator.remote_api_key_env
    return None if variable is None else os.environ[variable]


def _seed(seed: int, policy_version: int) -> int:
    """At most 32 bits, the limit of numpy's seed."""
    if policy_version == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {policy_version}".encode()).digest()[:4], "big")


L = TypeVar("L", bound=LoraConfig)


def lora_arguments(lora: L) -> L:
    """The adapter configuration, for processes with other working directories."""
    return lora if lora.path is None else replace(lora, path=seen_from_anywhere(lora.path))


def served_model_name(config: Config) -> str:
    """Name of the served model; over HTTP it is NAME and NAME@VERSION."""
    return config.generator.served_model_name or config.trainer.run_name
