"""Settings of engines in tests: the base configuration with a few keys of `generator`, and what a run would know."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from skyrl_train.config import load_config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.engines.settings import EngineSettings

KEYS = {field.name for field in fields(GeneratorConfig)}
MIB = 2**20 / 2**30
"""In GiB, as generator.kv_cache_memory_gb has it."""


def engine_settings(
    model_path: str, served_model_name: str, model_dtype: str, max_model_len: int, **values: Any
) -> EngineSettings:
    """Args: values: of keys of `generator`, or of fields of EngineSettings."""
    facts: dict[str, Any] = {"index": 0, "seed": 0, "rpc_timeout_s": 600.0}
    facts |= {"model_path": model_path, "served_model_name": served_model_name, "max_model_len": max_model_len}
    generator = replace(load_config([]).generator, model_dtype=model_dtype)
    return changed(EngineSettings(generator=generator, **facts), **values)


def remote_settings(
    url: str,
    api_key: str | None,
    model_path: str,
    model_dtype: str,
    max_model_len: int,
    backend: str,
    rpc_timeout_s: float = 600.0,
    **values: Any,
) -> EngineSettings:
    """Of a server that runs already."""
    local = engine_settings(
        model_path, "served", model_dtype, max_model_len, rpc_timeout_s=rpc_timeout_s, api_key=api_key, **values
    )
    return local.changed(run_engines_locally=False, remote_inference_engine_urls=(url,), weight_sync_backend=backend)


def changed(settings: EngineSettings, **values: Any) -> EngineSettings:
    """Args: as `engine_settings`."""
    keys = {name: value for name, value in values.items() if name in KEYS}
    return replace(settings.changed(**keys), **{name: value for name, value in values.items() if name not in KEYS})
