"""Micro-batches and recomputation of the policy, and of models that follow it."""

from __future__ import annotations

import bisect
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from skyrl_train.checks.training import POLICY
from skyrl_train.config import Config
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.config.training import RunConfig
from skyrl_train.device.nvml import gib
from skyrl_train.forecast.choices.choice import Choice
from skyrl_train.forecast.duration import PhaseTime
from skyrl_train.forecast.forecast import Forecast, Inputs, forecast
from skyrl_train.forecast.parts import ENGINE, PhaseMemory
from skyrl_train.hf.matrices import layers
from skyrl_train.ranks import pad_multiple

MICRO_BATCHES = (32_768, 16_384, 8_192, 4_096)
"""Tokens of a micro-batch that are tried, for each context-parallel rank. Twice the largest makes an update of a small
model 3 % faster (docs/readings/gpu_performance.md), for as much memory again.
"""
MUCH_FASTER = 0.6
"""Fraction of the update's time for which more is recomputed than memory requires: estimates have errors."""
ENGINE_PHASES = ("generation", "weight sync")


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to train, with its forecast."""

    config: RunConfig
    made: Forecast
    longest: int
    """Tokens of the longest sample."""

    @property
    def tokens(self) -> int:
        return self.config.trainer.micro_batch_tokens

    @property
    def needed(self) -> float:
        """Bytes with which all phases of trainers fit for sure."""
        return max(phase.high for phase in self.made.phases if not _is_of_engines(phase))

    @property
    def fits(self) -> bool:
        return self.needed <= self.made.capacity

    @property
    def update(self) -> PhaseTime:
        return next(time for time in self.made.times if time.phase == "update")

    @property
    def waits_for_host(self) -> bool:
        return self.update.device_s < self.update.seconds

    @property
    def seconds(self) -> float:
        """Estimated time of the update. Samples that are shorter than the longest fill the micro-batches."""
        filled = self.tokens // self.longest * self.longest / self.tokens
        return max(self.update.device_s, self.update.seconds * (filled if self.waits_for_host else 1))

    def __str__(self) -> str:
        megatron = self.config.trainer.policy.megatron_config
        what = ", ".join(megatron.recomputed) or {None: "nothing", "full": "everything"}.get(megatron.recompute)
        if megatron.recompute == "full" and megatron.recompute_num_layers is not None:
            what = f"{megatron.recompute_num_layers} layers"
        return f"recomputing {what} with {self.tokens:,} tokens"


def _is_of_engines(phase: PhaseMemory) -> bool:
    return phase.device == ENGINE or phase.phase in ENGINE_PHASES


def trainer_choice(inputs: Inputs) -> tuple[_Option, Choice]:
    """The least recomputation that fits for sure, unless more of it, with larger micro-batches, is much faster; with it
    the fastest micro-batch, of equally fast ones the largest.
    """
    tried, fitting = list[_Option](), list[_Option]()
    for megatron in _levels(inputs):
        options = [_option(inputs, megatron, tokens) for tokens in _sizes(inputs, megatron)]
        tried += options
        if fits := [option for option in options if option.fits]:
            fastest = min(fits, key=lambda option: (option.seconds, -option.tokens))
            fitting.append(_fewest_layers(inputs, fastest))
            if not fastest.waits_for_host:
                break
    if fitting:
        fastest = min(fitting, key=lambda option: option.seconds)
        taken = next(option for option in fitting if option.seconds * MUCH_FASTER <= fastest.seconds)
        reason = f"{taken} needs {gib(taken.needed)} of {gib(taken.made.capacity)} GiB, errors included"
        if taken is not fitting[0]:
            reason += f", and takes an estimated {taken.seconds:.1f} s, where {fitting[0]} would take "
            reason += f"{fitting[0].seconds:.1f}, because the GPU would wait for the host"
        elif not tried[0].fits:
            reason += f", and {tried[0]} {gib(tried[0].needed)}"
    else:
        taken = min(tried, key=lambda option: option.needed)
        reason = f"nothing fits for sure, and {taken} needs the least, {gib(taken.needed)} GiB with all errors"
    given, trainer = inputs.config.trainer, taken.config.trainer
    values: dict[str, object] = {}
    if given.max_tokens_per_microbatch is None:
        values["trainer.max_tokens_per_microbatch"] = taken.tokens
    if given.policy.megatron_config.recompute_granularity == "auto":
        megatron = trainer.policy.megatron_config
        values[f"{POLICY}.recompute_granularity"] = megatron.recompute
        if megatron.recomputed:
            values[f"{POLICY}.recompute_modules"] = list(megatron.recomputed)
        if megatron.recompute == "full" and given.policy.megatron_config.recompute_num_layers is None:
            values[f"{POLICY}.recompute_num_layers"] = megatron.recompute_num_layers
    return taken, Choice(tuple(values.items()), reason)


def _levels(inputs: Inputs) -> Iterator[MegatronConfig]:
    """Less and less memory, in more and more time."""
    given = inputs.config.trainer.policy.megatron_config
    if given.recompute_granularity != "auto":
        yield given
        return
    whole = replace(given, recompute_num_layers=None)
    yield replace(whole, recompute_granularity=None)
    modules = given.recompute_modules
    if modules is None:
        modules = _cheap_modules(inputs.model, given, is_half=inputs.config.trainer.bf16)
    if modules:
        yield replace(whole, recompute_granularity="selective", recompute_modules=modules)
    yield replace(given, recompute_granularity="full")


def _cheap_modules(model: PretrainedConfig, megatron: MegatronConfig, *, is_half: bool) -> tuple[str, ...]:
    """Modules of the model's layers that are recomputed in almost no time, and save memory."""
    kinds = {layer.is_sparse for layer in layers(model)}
    has_engine = is_half and importlib.util.find_spec("transformer_engine") is not None
    is_torch = megatron.transformer_impl == "torch" or not has_engine
    saves = {"layernorm": True in kinds or is_torch, "mlp_act": False in kinds and is_torch, "moe_act": True in kinds}
    return tuple(name for name, does in saves.items() if does)


def _sizes(inputs: Inputs, megatron: MegatronConfig) -> list[int]:
    given, longest = inputs.config.trainer.max_tokens_per_microbatch, inputs.workload.sample_tokens
    if given is not None:
        return [given]
    cp = megatron.context_parallel_size
    multiple = pad_multiple(megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1, cp)
    padded = -(-longest // multiple) * multiple
    sizes = [max(size * cp, longest) for size in MICRO_BATCHES]
    # A multiple of the longest sample holds as many of them, and leaves no room that shorter samples would fill.
    return list(dict.fromkeys(each for size in sizes for each in (size, size // padded * padded) if each))


def _fewest_layers(inputs: Inputs, option: _Option) -> _Option:
    """An option that fits; if it recomputes all layers and their number is open, with as few of them as fit for sure.

    The micro-batch keeps its size: a smaller one needs fewer layers, but was measured to take longer than it saves
    (docs/readings/gpu_performance.md).
    """
    megatron = option.config.trainer.policy.megatron_config
    is_open = inputs.config.trainer.policy.megatron_config.recompute_granularity == "auto"
    if not is_open or megatron.recompute != "full" or megatron.recompute_num_layers is not None:
        return option

    def with_layers(num: int) -> _Option:
        return _option(inputs, replace(megatron, recompute_num_layers=num), option.tokens)

    nums = range(1, len(layers(inputs.model)))
    fewest = with_layers(1 + bisect.bisect_left(nums, True, key=lambda num: with_layers(num).fits))
    return fewest if fewest.seconds < option.seconds else option


def _option(inputs: Inputs, megatron: MegatronConfig, tokens: int) -> _Option:
    """A critic whose recomputation is open follows the policy; frozen models have nothing to recompute."""
    trainer, fields = inputs.config.trainer, {"max_tokens_per_microbatch": tokens}
    changed: dict[str, object] = {"policy": replace(trainer.policy, megatron_config=megatron)}
    for name in ("ref", "critic", "teacher") if isinstance(inputs.config, Config) else ():
        other = getattr(trainer, name)
        if other.megatron_config.recompute_granularity == "auto":
            own = replace(other.megatron_config, recompute_granularity=None)
            if name == "critic" and other.model.path in inputs.models:
                own = _like_the_policy(inputs, megatron, own, inputs.models[other.model.path])
            changed[name] = replace(other, megatron_config=own)
    config = replace(inputs.config, trainer=replace(trainer, **fields, **changed))  # type: ignore[arg-type]
    return _Option(config, forecast(replace(inputs, config=config)), inputs.workload.sample_tokens)


def _like_the_policy(
    inputs: Inputs, policy: MegatronConfig, own: MegatronConfig, model: PretrainedConfig
) -> MegatronConfig:
    """A critic's configuration with the policy's recomputation, as far as its layers have these modules."""
    if policy.recompute_granularity != "selective":
        given = inputs.config.trainer.policy.megatron_config.recompute_num_layers
        is_own = own.recompute_num_layers not in (None, given)
        num = own.recompute_num_layers if is_own else policy.recompute_num_layers
        return replace(own, recompute_granularity=policy.recompute_granularity, recompute_num_layers=num)
    has = _cheap_modules(model, own, is_half=inputs.config.trainer.bf16)
    modules = tuple(name for name in policy.recompute_modules or () if name in has)
    return replace(own, recompute_granularity="selective" if modules else None, recompute_modules=modules or None)
