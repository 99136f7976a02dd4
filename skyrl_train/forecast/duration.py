"""Seconds of the phases of a step: estimates from measured utilisation and data sheets, not promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from skyrl_train.config.policy import Layout
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.forecast.engines import cache_bytes_per_token
from skyrl_train.forecast.layout import Stage, without_recomputation
from skyrl_train.forecast.readings import Generation, Sync, Utilisation, at_size
from skyrl_train.hf.flops import model_cost
from skyrl_train.hf.matrices import num_experts, num_parameters

FORWARD = 1 / 3
"""Fraction of a forward and backward pass."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The samples of a step."""

    prompts: int
    samples: int
    """Number of samples, all prompts together."""
    prompt_tokens: int
    response_tokens: int
    epochs: int = 1

    @property
    def sample_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        return self.samples * self.sample_tokens


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Estimated duration of a phase."""

    phase: str
    seconds: float
    bound: str
    """The limit that binds."""


@dataclass(frozen=True, slots=True)
class Training:
    """One model that ranks train or score with in a step."""

    config: PretrainedConfig
    layout: Layout
    stages: Sequence[Stage]
    micro_batches: int
    """Number of a rank's micro-batches in a mini-batch."""
    workload: Workload
    device: DeviceKind
    utilisation: Utilisation

    @property
    def flops(self) -> float:
        """FLOPs of a forward and backward pass over all samples, with the gradients of all weights."""
        lengths = torch.full((self.workload.samples,), self.workload.sample_tokens)
        return model_cost(self.config).train_flops(lengths)


def update(given: Training) -> PhaseTime:
    """The update of a step."""
    flops, workload = given.flops, given.workload
    if all(stage.trained.total < stage.parameters.total for stage in given.stages):  # no gradients of frozen weights
        flops -= 2 * model_cost(given.config).matrix_weights * workload.tokens
    return _passes("update", flops * workload.epochs, given)


def scoring(name: str, given: Training) -> PhaseTime:
    """A forward pass over the samples of a step: once in all epochs, and nothing is recomputed."""
    return _passes(name, given.flops * FORWARD, replace(given, layout=without_recomputation(given.layout)))


def _passes(phase: str, flops: float, given: Training) -> PhaseTime:
    layout, stages, utilisation = given.layout, given.stages, given.utilisation
    base = utilisation.experts if num_experts(given.config) else utilisation.of_hidden(given.config.hidden_size)
    base *= at_size(utilisation.tensor, layout.tp) * at_size(utilisation.context, layout.cp)
    base *= at_size(utilisation.expert, layout.ep)
    if layout.megatron.recompute == "full":
        base *= utilisation.recomputed
    filled = given.micro_batches / (given.micro_batches + (layout.pp - 1) / layout.vpp)
    balance = sum(stage.cost for stage in stages) / len(stages) / max(stage.cost for stage in stages)
    seconds = flops / (layout.num_ranks * given.device.tflops * 1e12 * base * filled * balance)
    bound = "arithmetic" if filled * balance > 0.85 else "pipeline bubble"
    return PhaseTime(phase, seconds, f"{bound}, {base * filled * balance:.0%} MFU")


def generation(
    config: PretrainedConfig,
    engines: int,
    tp: int,
    width: int,
    running: float,
    workload: Workload,
    device: DeviceKind,
    readings: Generation,
) -> PhaseTime:
    """Sampling of a step. Args: engines, tp: number and tensor-parallel size; running: sequences that an engine
    computes at once, at most.
    """
    samples = math.ceil(workload.samples / engines)
    at_once = max(1.0, min(running, samples))
    rounds = samples / at_once
    weights = num_parameters(config) * width / tp
    cache = at_once * (workload.prompt_tokens + workload.response_tokens / 2) * cache_bytes_per_token(config, tp, width)
    bandwidth, peak = device.memory_gb_s * 1e9 * readings.memory, device.tflops * 1e12 * readings.arithmetic * tp
    cost = model_cost(config)
    arithmetic = 2 * at_once * cost.matrix_weights / peak
    reading = {"weights": weights / bandwidth, "KV cache": cache / bandwidth}
    compute = max(arithmetic, reading["weights"])
    step = compute + reading["KV cache"] + readings.step_s
    prefill = 2 * workload.prompts / engines * workload.prompt_tokens * cost.matrix_weights / peak
    terms = reading | {"arithmetic": arithmetic, "launches and sampling": readings.step_s}
    bound = max(terms, key=lambda name: terms[name])
    seconds = rounds * workload.response_tokens * step + prefill
    return PhaseTime(
        "generation", seconds, f"{bound}, {workload.samples * workload.response_tokens / seconds:,.0f} tokens/s"
    )


def sync(num_bytes: float, num_senders: int, readings: Sync) -> PhaseTime:
    """A weight sync; each pipeline stage sends its own weights."""
    seconds = num_bytes / num_senders / (readings.gb_per_s * 1e9) + readings.fixed_s
    return PhaseTime("weight sync", seconds, f"packing and digests, {num_bytes / 1e9:.1f} GB")
