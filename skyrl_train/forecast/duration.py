"""Seconds of the phases of a step: estimates from measured utilisation and data sheets, not promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from skyrl_train.config.policy import Layout
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.forecast.adapters import AdaptedLayer, Site
from skyrl_train.forecast.engines import cache_bytes_per_token, weight_bytes
from skyrl_train.forecast.layout import Stage, without_recomputation
from skyrl_train.forecast.memory import host_moment_bytes
from skyrl_train.forecast.readings import Generation, Launches, Sync, Utilisation, at_size
from skyrl_train.hf.flops import model_cost
from skyrl_train.hf.matrices import Layer, num_experts

FORWARD = 1 / 3
"""Fraction of a forward and backward pass."""
HOST_GB_PER_S = 45.0
"""Copies of a rank to or from pinned host memory (docs/readings/gpu_performance.md, "Memory": 44 to 50)."""


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
    device_s: float = 0.0
    """Time of a trainer's device in it, which is less if it waits for the host."""


@dataclass(frozen=True, slots=True)
class Training:
    """One model that ranks train or score with in a step."""

    config: PretrainedConfig
    layout: Layout
    stages: Sequence[Stage]
    micro_batches: int
    """Number of a rank's micro-batches in a mini-batch."""
    mini_batches: int
    workload: Workload
    device: DeviceKind
    utilisation: Utilisation
    launches: Launches

    @property
    def flops(self) -> float:
        """FLOPs of a forward and backward pass over all samples, with the gradients of all weights."""
        lengths = torch.full((self.workload.samples,), self.workload.sample_tokens)
        return model_cost(self.config).train_flops(lengths)


def update(given: Training) -> PhaseTime:
    """The update of a step."""
    flops, workload = given.flops, given.workload
    if all(_is_frozen(stage) for stage in given.stages):  # no gradients of frozen weights
        flops -= 2 * model_cost(given.config).matrix_weights * workload.tokens
    made = _passes("update", flops * workload.epochs, given, workload.epochs)
    moments = max(host_moment_bytes(stage.trained, given.layout) for stage in given.stages)
    steps = given.mini_batches * workload.epochs
    moving = steps * moments / (HOST_GB_PER_S * 1e9)
    return replace(made, seconds=made.seconds + moving, device_s=made.device_s + moving)


def scoring(name: str, given: Training) -> PhaseTime:
    """A forward pass over the samples of a step: once in all epochs, and nothing is recomputed."""
    return _passes(name, given.flops * FORWARD, replace(given, layout=without_recomputation(given.layout)), FORWARD)


def _passes(phase: str, flops: float, given: Training, count: float) -> PhaseTime:
    """Args: count: how often all samples are passed forward and backward."""
    layout, stages, utilisation = given.layout, given.stages, given.utilisation
    base = utilisation.experts if num_experts(given.config) else utilisation.of_hidden(given.config.hidden_size)
    if any(site.is_expert for stage in stages for layer in stage.layers for site in _sites(layer)):
        base *= utilisation.adapted_experts
    base *= at_size(utilisation.tensor, layout.tp) * at_size(utilisation.context, layout.cp)
    base *= at_size(utilisation.expert, layout.ep)
    filled = given.micro_batches / (given.micro_batches + (layout.pp - 1) / layout.vpp)
    mean = sum(stage.cost for stage in stages) / len(stages)
    balance = mean / max(stage.cost for stage in stages)
    slowest = max(stage.cost * _with_recomputation(layout, stage, utilisation) for stage in stages)
    mfu = base * filled * mean / slowest
    seconds = flops / (layout.num_ranks * given.device.tflops * 1e12 * mfu)
    bound = "arithmetic" if filled * balance > 0.85 else "pipeline bubble"
    launched = max(_launch_s(layout, stage, given.launches) for stage in stages)
    host_s = count * given.mini_batches * given.micro_batches * launched / filled
    if host_s <= seconds:
        return PhaseTime(phase, seconds, f"{bound}, {mfu:.0%} MFU", seconds)
    mfu *= seconds / host_s
    return PhaseTime(phase, host_s, f"host launches (few tokens per micro-batch), {mfu:.0%} MFU", seconds)


def _launch_s(layout: Layout, stage: Stage, launches: Launches) -> float:
    """Host time of a micro-batch, forward and backward."""
    times = [
        (launches.experts_s if layer.is_sparse else launches.layer_s) + launches.adapter_s * len(_sites(layer))
        for layer in stage.layers
    ]
    again = sum(layout.megatron.num_recomputed(len(chunk)) for chunk in stage.chunks)
    return sum(times) * (1 + FORWARD * again / len(times))


def _sites(layer: Layer) -> tuple[Site, ...]:
    return layer.sites if isinstance(layer, AdaptedLayer) else ()


def _is_frozen(stage: Stage) -> bool:
    """Whether adapters are trained instead of the weights."""
    return stage.trained.total < stage.parameters.total


def _with_recomputation(layout: Layout, stage: Stage, utilisation: Utilisation) -> float:
    """Factor of a stage's time. A forward pass is a third of the FLOPs, without gradients of weights a half."""
    again = [layer for chunk in stage.chunks for layer in chunk[: layout.megatron.num_recomputed(len(chunk))]]
    fraction = sum(layer.used_weights for layer in again) / sum(layer.used_weights for layer in stage.layers)
    return 1 + fraction * (1 / utilisation.recomputed - 1) * (1.5 if _is_frozen(stage) else 1)


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Estimated seconds of the parts of a decoding step."""

    weights: float
    arithmetic: float
    """Overlaps with reading the weights."""
    cache: float
    overhead: float
    """Launches, scheduling and sampling."""

    @property
    def seconds(self) -> float:
        return max(self.weights, self.arithmetic) + self.cache + self.overhead

    @property
    def bound(self) -> str:
        parts = {"weights": self.weights, "arithmetic": self.arithmetic, "KV cache": self.cache}
        parts["launches and scheduling"] = self.overhead
        return max(parts, key=lambda name: parts[name])


def engine_step(
    config: PretrainedConfig,
    tp: int,
    width: int,
    quantization: str | None,
    running: float,
    workload: Workload,
    device: DeviceKind,
    readings: Generation,
) -> EngineStep:
    """Args: tp: tensor-parallel size of the engine; running: sequences that it computes at once. Arithmetic in FP8
    counts like that in bfloat16: how much faster it is was not measured.
    """
    cached = running * (workload.prompt_tokens + workload.response_tokens / 2)
    bandwidth, peak = device.memory_gb_s * 1e9 * readings.memory, device.tflops * 1e12 * readings.arithmetic * tp
    return EngineStep(
        weights=weight_bytes(config, width, quantization) / tp / bandwidth,
        arithmetic=2 * running * model_cost(config).matrix_weights / peak,
        cache=cached * cache_bytes_per_token(config, tp, width) / bandwidth,
        overhead=readings.step_s + readings.sequence_s * running,
    )


def generation(
    config: PretrainedConfig,
    engines: int,
    tp: int,
    width: int,
    quantization: str | None,
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
    step = engine_step(config, tp, width, quantization, at_once, workload, device, readings)
    prompts = workload.prompts / engines * workload.prompt_tokens
    prefill = prompts / at_once * step.arithmetic
    seconds = samples / at_once * workload.response_tokens * step.seconds + prefill
    speed = workload.samples * workload.response_tokens / seconds
    return PhaseTime("generation", seconds, f"{step.bound}, {speed:,.0f} tokens/s")


def served(
    name: str, config: PretrainedConfig, gpus: int, workload: Workload, device: DeviceKind, readings: Generation
) -> PhaseTime:
    """Engines on as many GPUs score the samples of a step, with the arithmetic of a forward pass."""
    lengths = torch.full((workload.samples,), workload.sample_tokens)
    flops = model_cost(config).train_flops(lengths) * FORWARD
    return PhaseTime(name, flops / (gpus * device.tflops * 1e12 * readings.arithmetic), "arithmetic")


def sync(num_bytes: float, num_tensors: int, merged_bytes: float, readings: Sync) -> PhaseTime:
    """A weight sync; pipeline stages send one after another. Args: merged_bytes: of a rank of each stage, weights with
    which adapters are merged before they are sent.
    """
    merging = merged_bytes / (readings.merged_gb_per_s * 1e9)
    parts = {
        f"sending {num_bytes / 1e9:.1f} GB": num_bytes / (readings.gb_per_s * 1e9),
        f"host launches for {num_tensors:,} tensors": num_tensors * readings.tensor_s,
    }
    limit = max(parts, key=lambda name: parts[name])
    seconds = parts[limit] + merging + readings.fixed_s
    return PhaseTime("weight sync", seconds, limit if parts[limit] > merging else "merging adapters")
