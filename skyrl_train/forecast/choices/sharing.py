"""What idle processes on shared devices do."""

from __future__ import annotations

import math
from dataclasses import replace

from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.device.nvml import gib
from skyrl_train.engines.vllm.memory import CACHE_ARGUMENTS
from skyrl_train.forecast.choices.choice import Choice
from skyrl_train.forecast.engines import cache_bytes
from skyrl_train.forecast.forecast import Inputs, forecast, workload_of
from skyrl_train.forecast.parts import GIB

MAX_RESIDENT = 0.9
"""Fraction of a device that trainers and engines may need for sure, if all are to stay on it. What they gain is less
than a run loses that ends for want of memory.
"""
UNCOUNTED = {"gpu_memory_utilization", "speculative_config", *CACHE_ARGUMENTS}
"""Arguments of vLLM of which the forecast does not know the memory."""


def is_open(config: Config) -> bool:
    """Whether `release` has to be chosen."""
    return config.trainer.placement.colocate_all and config.trainer.placement.release is None


def with_release(inputs: Inputs, config: Config) -> tuple[Config, Choice]:
    """What idle processes on shared devices do. If all stay, the KV cache is that of a step's samples, because an
    engine that takes what is free does not know what the trainers will need.
    """
    generator, release = config.generator, "trainer.placement.release"
    if (unknown := _unknown(inputs, config)) is not None:
        return _releasing(config, "offload"), Choice(((release, "offload"),), unknown)
    cache_gb = generator.kv_cache_memory_gb
    if not _is_sized(generator):
        cache_gb = math.ceil(10 * cache_bytes(config, inputs.model) / GIB) / 10
    staying = _releasing(replace(config, generator=replace(generator, kv_cache_memory_gb=cache_gb)), "none")
    made = forecast(replace(inputs, config=staying, workload=workload_of(config)))
    needed, room = made.fullest.high, MAX_RESIDENT * made.capacity
    reason = f"with everything on the device, {made.fullest.phase} needs {gib(needed)} GiB, errors included, "
    if needed > room:
        reason += f"and more than {gib(room)} of {gib(made.capacity)} is not sure enough"
        return _releasing(config, "offload"), Choice(((release, "offload"),), reason)
    values: list[tuple[str, object]] = [(release, "none")]
    if generator.kv_cache_memory_gb != cache_gb:
        values.append(("generator.kv_cache_memory_gb", cache_gb))
    return staying, Choice(tuple(values), reason + f"of {gib(made.capacity)}")


def _unknown(inputs: Inputs, config: Config) -> str | None:
    """Why the memory of all processes together is not known; None if it is."""
    generator = config.generator
    if inputs.any_samples:
        return "jobs of a service are of any size"
    if config.trainer.depth > 0:
        return "engines that generate during an update would slow it down"
    if generator.backend != "vllm":
        return f"what an engine of {generator.backend} needs is not known"
    if generator.enable_http_endpoint and not _is_sized(generator):
        return "clients of the endpoint may send any number of requests"
    if given := sorted(UNCOUNTED.intersection(generator.engine_init_kwargs)):
        return f"generator.engine_init_kwargs.{given[0]} changes what an engine needs"
    return None


def _is_sized(generator: GeneratorConfig) -> bool:
    return generator.kv_cache_memory_gb is not None or generator.gpu_memory_utilization is not None


def _releasing(config: Config, release: str) -> Config:
    trainer = config.trainer
    return replace(config, trainer=replace(trainer, placement=replace(trainer.placement, release=release)))
