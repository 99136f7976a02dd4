"""Values of keys that a configuration leaves open, chosen for a kind of GPU from the forecast.

Without a GPU nothing is chosen: the configuration's classes then say what open keys mean.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from skyrl_train.algorithms.tables import compares_with_greedy
from skyrl_train.checks.training import POLICY
from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.config.training import RunConfig
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.device.nvml import gib
from skyrl_train.engines.settings import NUM_BYTES
from skyrl_train.forecast.duration import engine_step
from skyrl_train.forecast.forecast import ENGINE, Forecast, Inputs, forecast, workload_of
from skyrl_train.forecast.parts import PhaseMemory
from skyrl_train.forecast.readings import readings
from skyrl_train.hf.flops import model_cost
from skyrl_train.hf.matrices import layers

MICRO_BATCHES = (32_768, 16_384, 8_192, 4_096)
"""Tokens of a micro-batch that are tried, for each context-parallel rank. Twice the largest makes an update of a small
model 3 % faster (docs/readings/gpu_performance.md), for as much memory again.
"""
PREFILLS = (8_192, 16_384)
"""Tokens of an engine step that are tried."""
OVERHEADS = 4
"""The arithmetic of such a step takes at least this many times as long as what it takes besides."""
MAX_SEQUENCES = 1_024
"""Sequences of an engine; the logits of more would take memory from its KV cache."""
ENOUGH_SEQUENCES = 512
"""More at once have to generate faster by MIN_GAIN: the samples of a streaming run grow older together."""
MIN_GAIN = 1.1
CAPTURED = 8
"""vLLM captures CUDA graphs for multiples of this number of sequences."""
ENGINE_PHASES = ("generation", "weight sync")


@dataclass(frozen=True, slots=True)
class Choice:
    """Values of keys that were chosen together."""

    values: tuple[tuple[str, object], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Choices:
    """A configuration without open keys, and how it was chosen."""

    config: RunConfig
    made: tuple[Choice, ...]
    device: str
    """Kind of GPU."""


def chosen(inputs: Inputs) -> Choices:
    """Values of all open keys, for the longest samples; keys that are given stay, and the others fit them."""
    config, made = inputs.config, list[Choice]()
    if isinstance(config, Config):
        config, made = _with_engine_choices(config, inputs.model, inputs.device, _samples_at_once(config))
    trainer, megatron = config.trainer, config.trainer.policy.megatron_config
    if trainer.max_tokens_per_microbatch is None or megatron.recompute_granularity == "auto":
        option, choice = _trainer_choice(replace(inputs, config=config, workload=workload_of(config)))
        config, made = option.config, [*made, choice]
    if megatron.recompute_logits is None:
        reason = "each rank keeps the logits for which memory is free"
        made.append(Choice(((f"{POLICY}.recompute_logits", None),), reason))
    return Choices(config, tuple(made), inputs.device.name)


def chosen_for_evaluation(config: Config, model: PretrainedConfig, device: DeviceKind) -> Choices:
    """Like `chosen`, for engines of an evaluation without training."""
    chosen_config, made = _with_engine_choices(config, model, device, _evaluated_at_once(config))
    return Choices(chosen_config, tuple(made), device.name)


def _with_engine_choices(
    config: Config, model: PretrainedConfig, device: DeviceKind, samples_at_once: int
) -> tuple[Config, list[Choice]]:
    """Nothing is chosen for running servers, which have their own settings."""
    if not config.generator.run_engines_locally:
        return config, []
    made = list(_engine_choices(config, model, device, samples_at_once))
    values: dict[str, Any] = {key.rpartition(".")[2]: value for choice in made for key, value in choice.values}
    return replace(config, generator=replace(config.generator, **values)), made


def _engine_choices(
    config: Config, model: PretrainedConfig, device: DeviceKind, samples_at_once: int
) -> Iterator[Choice]:
    generator = config.generator
    if generator.enforce_eager is None:
        yield Choice((("generator.enforce_eager", False),), "GPUs can run CUDA graphs")
    sequences = generator.max_num_seqs
    if sequences is None:
        sequences, reason = _sequences(config, model, device, samples_at_once)
        yield Choice((("generator.max_num_seqs", sequences),), reason)
    if generator.max_num_batched_tokens is None:
        yield _prefill(generator, model, device, sequences)


def _sequences(config: Config, model: PretrainedConfig, device: DeviceKind, samples_at_once: int) -> tuple[int, str]:
    """Sequences of an engine: those that it may get, or fewer if they generate as fast; and why."""
    generator = config.generator
    wanted, reason = samples_at_once, f"an engine may get {samples_at_once:,} samples at once"
    if generator.enable_http_endpoint or generator.rollout:
        who = "clients of the endpoint" if generator.enable_http_endpoint else "a rollout of your own"
        wanted, reason = MAX_SEQUENCES, f"{who} may send any number of requests"
    count = min(MAX_SEQUENCES, -(-wanted // CAPTURED) * CAPTURED)
    if count > ENOUGH_SEQUENCES:
        tp, width = generator.inference_engine_tensor_parallel_size, NUM_BYTES[generator.model_dtype]
        stored = generator.quantization
        many, few = (
            engine_step(model, tp, width, stored, n, workload_of(config), device.in_dtype(width), readings().generation)
            for n in (count, ENOUGH_SEQUENCES)
        )
        gain = count / many.seconds / (ENOUGH_SEQUENCES / few.seconds)
        reason += f", and {count:,} at once would be {gain:.2f} times as fast as {ENOUGH_SEQUENCES}"
        count = count if gain >= MIN_GAIN else ENOUGH_SEQUENCES
    return count, reason


def _samples_at_once(config: Config) -> int:
    """Samples of an engine in training, evaluation or both at once; those of a prompt stay together."""
    generator, trainer = config.generator, config.trainer
    engines = max(1, generator.num_rollout_engines)
    samples = generator.n_samples_per_prompt + compares_with_greedy(trainer.algorithm.advantage_estimator)
    training = -(-trainer.groups_in_flight * samples // engines) + samples
    if not config.data.val_data:
        return training
    evaluation = _evaluated_at_once(config)
    if trainer.evaluates_beside and not generator.eval_num_engines:
        return training + evaluation
    return max(training, evaluation)


def _evaluated_at_once(config: Config) -> int:
    generator = config.generator
    engines, samples = generator.eval_num_engines or generator.num_rollout_engines, generator.eval_n_samples_per_prompt
    return -(-config.trainer.eval_batch_size * samples // max(1, engines)) + samples


def _prefill(generator: GeneratorConfig, model: PretrainedConfig, device: DeviceKind, sequences: int) -> Choice:
    """The fewest tokens with which an engine's step over prompts is arithmetic, not overhead. Args: sequences: that run
    at the same time, at most.
    """
    constants = readings().generation
    device = device.in_dtype(NUM_BYTES[generator.model_dtype])
    speed = device.tflops * 1e12 * constants.arithmetic * generator.inference_engine_tensor_parallel_size
    seconds = {tokens: 2 * tokens * model_cost(model).matrix_weights / speed for tokens in PREFILLS}
    overhead = constants.step_s + constants.sequence_s * sequences
    tokens = next((tokens for tokens in PREFILLS if seconds[tokens] >= OVERHEADS * overhead), PREFILLS[-1])
    reason = f"a full step has {1e3 * seconds[tokens]:.0f} ms of arithmetic and {1e3 * overhead:.0f} of overhead"
    return Choice((("generator.max_num_batched_tokens", tokens),), reason)


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to train, with its forecast."""

    config: RunConfig
    made: Forecast

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
    def seconds(self) -> float:
        """Estimated time of the update."""
        return next(time.seconds for time in self.made.times if time.phase == "update")

    def __str__(self) -> str:
        megatron = self.config.trainer.policy.megatron_config
        what = ", ".join(megatron.recomputed) or {None: "nothing", "full": "everything"}.get(megatron.recompute)
        return f"recomputing {what} with {self.tokens:,} tokens"


def _is_of_engines(phase: PhaseMemory) -> bool:
    return phase.device == ENGINE or phase.phase in ENGINE_PHASES


def _trainer_choice(inputs: Inputs) -> tuple[_Option, Choice]:
    """The least recomputation that fits for sure; with it the fastest micro-batch, of equally fast ones the largest."""
    tried, fitting = list[_Option](), list[_Option]()
    for megatron in _levels(inputs):
        options = [_option(inputs, megatron, tokens) for tokens in _sizes(inputs, megatron)]
        tried += options
        if fitting := [option for option in options if option.fits]:
            break
    if fitting:
        taken = min(fitting, key=lambda option: (option.seconds, -option.tokens))
        reason = f"{taken} needs {gib(taken.needed)} of {gib(taken.made.capacity)} GiB, errors included"
        if not tried[0].fits:
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
    return taken, Choice(tuple(values.items()), reason)


def _levels(inputs: Inputs) -> Iterator[MegatronConfig]:
    """Less and less memory, in more and more time."""
    given = inputs.config.trainer.policy.megatron_config
    if given.recompute_granularity != "auto":
        yield given
        return
    yield replace(given, recompute_granularity=None)
    modules = given.recompute_modules
    if modules is None:
        modules = _cheap_modules(inputs.model, given, is_half=inputs.config.trainer.bf16)
    if modules:
        yield replace(given, recompute_granularity="selective", recompute_modules=modules)
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
    return list(dict.fromkeys(max(size * megatron.context_parallel_size, longest) for size in MICRO_BATCHES))


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
    return _Option(config, forecast(replace(inputs, config=config)))


def _like_the_policy(
    inputs: Inputs, policy: MegatronConfig, own: MegatronConfig, model: PretrainedConfig
) -> MegatronConfig:
    """A critic's configuration with the policy's recomputation, as far as its layers have these modules."""
    if policy.recompute_granularity != "selective":
        return replace(own, recompute_granularity=policy.recompute_granularity)
    has = _cheap_modules(model, own, is_half=inputs.config.trainer.bf16)
    modules = tuple(name for name in policy.recompute_modules or () if name in has)
    return replace(own, recompute_granularity="selective" if modules else None, recompute_modules=modules or None)
