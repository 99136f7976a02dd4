"""What idle processes on shared devices do."""

from __future__ import annotations

import math
from dataclasses import replace

from skyrl_train.config import Config
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
MEMORY_ARGUMENTS = {"gpu_memory_utilization", *CACHE_ARGUMENTS}
"""Arguments of vLLM that size an engine."""


def is_open(config: Config) -> bool:
    return config.trainer.placement.colocate_all and config.trainer.placement.release is None


def with_release(inputs: Inputs, config: Config) -> tuple[Config, Choice]:
    """What idle processes on shared devices do. If all stay, the KV cache is that of a step's samples, because an
    engine that takes what is free does not know what the trainers will need.
    """
    generator, release = config.generator, "trainer.placement.release"
    cache_gb = generator.kv_cache_memory_gb
    if cache_gb is None and generator.gpu_memory_utilization is None:
        num_bytes = cache_bytes(config, inputs.model)
        if num_bytes is None or MEMORY_ARGUMENTS.intersection(generator.engine_init_kwargs):
            return _releasing(config, "offload"), Choice(((release, "offload"),), "the KV cache may take what is free")
        cache_gb = math.ceil(10 * num_bytes / GIB) / 10
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


def _releasing(config: Config, release: str) -> Config:
    trainer = config.trainer
    return replace(config, trainer=replace(trainer, placement=replace(trainer.placement, release=release)))
