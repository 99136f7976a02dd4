"""Configuration, model and device -> memory and time of every phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from skyrl_train.algorithms.build import build_objective
from skyrl_train.cluster.pool.settings import teacher_generator
from skyrl_train.config import Config
from skyrl_train.config.policy import Layout, LoraConfig, MegatronConfig
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.sft import SftConfig
from skyrl_train.config.training import RunConfig
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.engines.settings import NUM_BYTES
from skyrl_train.forecast import duration, memory
from skyrl_train.forecast.adapters import adapted_layers, num_sent, num_sent_tensors
from skyrl_train.forecast.duration import PhaseTime, Training, Workload
from skyrl_train.forecast.engines import EngineMemory, engine_memory, teacher_memory
from skyrl_train.forecast.layout import stages
from skyrl_train.forecast.memory import ModelOfRanks, Pass
from skyrl_train.forecast.parts import ENGINE, GIB, Part, PhaseMemory
from skyrl_train.forecast.readings import readings
from skyrl_train.forecast.sharing import left_at_start, taking_turns, together
from skyrl_train.hf.matrices import layers, num_parameters, num_tensors

MANY_SAMPLES = 1_000_000
"""With which every micro-batch is full."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a forecast is made from."""

    config: RunConfig
    models: Mapping[str, PretrainedConfig]
    """Path of a model in the configuration -> its config.json; not of every teacher on engines."""
    device: DeviceKind
    workload: Workload
    any_samples: bool = False
    """Whether the number of samples of an update is not that of the configuration, as in a service."""

    @property
    def model(self) -> PretrainedConfig:
        return self.models[self.config.trainer.policy.model.path]

    @property
    def capacity(self) -> float:
        """Bytes of a device."""
        return self.device.memory_gib * GIB


@dataclass(frozen=True, slots=True)
class Forecast:
    """Memory of the fullest rank in every phase, and estimated times."""

    phases: tuple[PhaseMemory, ...]
    host_bytes: float
    """State of all ranks of a node that is on the host, always or between phases."""
    times: tuple[PhaseTime, ...]
    capacity: float
    layout: Layout
    overlaps: bool = False
    """Whether engines generate while the trainers work."""
    uncounted: tuple[str, ...] = ()
    """Teachers on engines whose sizes are not known, so that neither memory nor time of them are here."""

    @property
    def fullest(self) -> PhaseMemory:
        """The phase that needs the most, without what only uses free memory."""
        return max(self.phases, key=lambda phase: phase.high)

    @property
    def impossible(self) -> list[PhaseMemory]:
        """Phases that need more than the device has, whatever the error."""
        return [phase for phase in self.phases if phase.low > self.capacity]

    @property
    def fits(self) -> bool:
        """Whether every phase that is counted fits, whatever the error."""
        return all(phase.high <= self.capacity for phase in self.phases)

    @property
    def seconds(self) -> float:
        """Duration of a step. Engines that generate beside the trainers pause for a weight sync."""
        whole = sum(time.seconds for time in self.times)
        if not self.overlaps:
            return whole
        seconds = {time.phase: time.seconds for time in self.times}
        return max(seconds["generation"] + seconds["weight sync"], whole - seconds["generation"])


def workload_of(config: RunConfig, prompt_tokens: int | None = None, response_tokens: int | None = None) -> Workload:
    """The samples of a step; lengths that are not given are the longest that the configuration allows."""
    trainer = config.trainer
    if not isinstance(config, Config):
        assert isinstance(config, SftConfig)
        rows = trainer.train_batch_size
        return Workload(rows, rows, 0, response_tokens or config.data.max_length)
    generator = config.generator
    longest = generator.max_input_length if generator.max_turns > 1 else config.trainer.max_prompt_length
    return Workload(
        prompts=trainer.train_batch_size,
        samples=trainer.train_batch_size * generator.n_samples_per_prompt,
        prompt_tokens=longest if prompt_tokens is None else prompt_tokens,
        response_tokens=response_tokens or generator.sampling_params.max_generate_length,
        epochs=config.trainer.update_epochs_per_batch,
    )


def forecast(inputs: Inputs) -> Forecast:
    """The forecast of a run on GPUs."""
    config, constants = inputs.config, readings()
    trainer = config.trainer
    layout = Layout(trainer.policy.megatron_config, trainer.placement.num_policy_ranks)
    policy = model_of_ranks(inputs, inputs.model, layout, trainer.policy.model.lora)
    longest = replace(inputs, workload=_most_samples(inputs))  # memory has to be enough for these
    mini_batch = trainer.policy_mini_batch_size if isinstance(trainer, TrainerConfig) else trainer.train_batch_size
    largest = largest_pass(longest, layout, mini_batch)
    mean = largest_pass(inputs, layout, mini_batch)
    sending = (
        (memory.weight_syncs(config.generator.weight_sync_bucket_mb, constants.memory),)
        if isinstance(config, Config) and not config.trainer.placement.colocate_all
        else ()
    )
    phases = [_trainer_phase("update", "policy", policy, largest, inputs.capacity, sending=sending)]
    per_node = min(layout.num_ranks, trainer.placement.policy_num_gpus_per_node)  # of each model, if devices are shared
    host, moments = _offloaded_bytes(policy) * per_node, _host_moment_bytes(policy) * per_node
    args = inputs.workload, inputs.device.in_dtype(policy.width), constants.utilisation, constants.launches
    mini_batches = trainer.train_batch_size // mini_batch
    training = Training(inputs.model, layout, policy.stages, mean.micro_batches, mini_batches, *args)
    times = [duration.update(training)]
    if not isinstance(config, Config):
        return Forecast(tuple(phases), moments, tuple(times), inputs.capacity, layout)
    base = replace(training, stages=stages(inputs.model, layout))  # passes with adapters off
    for name in _passes_of_policy(config.trainer):
        times.append(duration.scoring(name, training if name in ("old logprobs", "teacher") else base))
    for other in config.trainer.scoring_models:
        own_layout = Layout(other.megatron_config, other.num_ranks)
        is_critic = other.is_trained
        own = model_of_ranks(inputs, inputs.models[other.model_path], own_layout, None, is_critic=is_critic)
        own_batch = config.trainer.critic_mini_batch_size if is_critic else mini_batch
        own_pass = largest_pass(longest, own_layout, own_batch)
        phase = _trainer_phase(other.name, other.name, own, own_pass, inputs.capacity, trained=is_critic)
        phases.append(phase)
        mean = largest_pass(inputs, own_layout, own_batch)
        own_batches = trainer.train_batch_size // own_batch
        training = Training(own.config, own_layout, own.stages, mean.micro_batches, own_batches, *args)
        times.append(duration.scoring(other.name, training))
        if is_critic:  # its values, then its update
            learning = duration.update(training)
            times[-1] = PhaseTime("critic", times[-1].seconds + learning.seconds, learning.bound)
        weights = sum(stage.parameters.total for stage in own.stages) / len(own.stages) * own.width
        host += (_offloaded_bytes(own) if is_critic else weights) * per_node
        moments += _host_moment_bytes(own) * per_node if is_critic else 0.0
    shared = config.trainer.placement.colocate_all
    if config.generator.run_engines_locally:
        left = sum(left_at_start(config, phase) for phase in phases) if shared else 0.0
        engine = engine_memory(config, inputs.model, inputs.capacity, left, constants.memory)
        phases.insert(0, PhaseMemory("generation", ENGINE, engine.parts))
        times.insert(0, _generation_time(inputs, config, engine))
        times.append(_sync_time(config, inputs.model, layout))
        if config.trainer.placement.takes_turns:
            phases = taking_turns(phases, policy, left)
        elif shared:
            phases = together(config, phases, inputs.model, inputs.capacity)
    teachers = config.trainer.engine_teachers
    for teacher in teachers:
        if (model := inputs.models.get(teacher.model_path)) is not None:
            served = teacher_memory(config, model, inputs.capacity, constants.memory)
            phases.append(PhaseMemory(teacher.name, ENGINE, served.parts))
            times.append(_served_time(inputs, config, teacher.name, model))
    overlaps = config.trainer.depth > 0 and not shared and config.generator.run_engines_locally
    host = moments + (host if config.trainer.placement.takes_turns else 0.0)
    uncounted = tuple(each.name for each in teachers if each.model_path not in inputs.models)
    return Forecast(tuple(phases), host, tuple(times), inputs.capacity, layout, overlaps, uncounted)


def _most_samples(inputs: Inputs) -> Workload:
    """The workload of the configuration. If it does not say how many samples there are, all micro-batches are full."""
    workload, config = workload_of(inputs.config), inputs.config
    has_own_number = isinstance(config, Config) and (
        config.generator.step_wise_trajectories or config.generator.rollout is not None
    )
    return replace(workload, samples=MANY_SAMPLES) if inputs.any_samples or has_own_number else workload


def model_of_ranks(
    inputs: Inputs, model: PretrainedConfig, layout: Layout, lora: LoraConfig | None, *, is_critic: bool = False
) -> ModelOfRanks:
    width = 2 if inputs.config.trainer.bf16 else 4
    return ModelOfRanks(model, layout, width, stages(model, layout, lora, is_critic=is_critic))


def largest_pass(inputs: Inputs, layout: Layout, mini_batch_size: int) -> Pass:
    """The micro-batches of a rank's largest mini-batch. Args: mini_batch_size: in prompts, or rows."""
    trainer, longest = inputs.config.trainer, inputs.workload.sample_tokens
    mini_batches = max(1, trainer.train_batch_size // mini_batch_size)
    of_rank = max(1, math.ceil(inputs.workload.samples / mini_batches / layout.dp)) * longest
    tokens = min(max(trainer.micro_batch_tokens, longest), of_rank)  # which samples shorter than the longest fill
    longest_samples = max(1, trainer.micro_batch_tokens // longest) * longest
    return Pass(tokens, max(-(-of_rank // longest_samples), min(layout.pp, of_rank // longest)))


def _trainer_phase(
    phase: str,
    device: str,
    model: ModelOfRanks,
    largest: Pass,
    capacity: float,
    *,
    trained: bool = True,
    sending: Sequence[Part] = (),
) -> PhaseMemory:
    """Memory of the stage that needs the most. Args: sending: what its weight syncs keep."""
    constants = readings().memory
    found = []
    for stage in model.stages:
        parts = memory.update(model, stage, largest) if trained else memory.scoring(model, stage, largest)
        outside = memory.allocator(parts, constants), memory.outside_torch(model.layout, constants)
        whole = PhaseMemory(phase, device, (*parts, *outside, *sending))
        found.append(whole.within(memory.room_for_logits(capacity)))
    return max(found, key=lambda memory: memory.likely)


def _offloaded_bytes(model: ModelOfRanks) -> float:
    """Bytes that a rank moves to the host between phases: weights and optimizer state, of the fullest stage."""
    return max(
        stage.parameters.total * model.width + memory.optimizer_bytes(stage.trained, model.layout, model.width)
        for stage in model.stages
    )


def _host_moment_bytes(model: ModelOfRanks) -> float:
    return max(memory.host_moment_bytes(stage.trained, model.layout) for stage in model.stages)


def _passes_of_policy(trainer: TrainerConfig) -> list[str]:
    """Signals that the policy's ranks compute before the update."""
    algorithm, lora = trainer.algorithm, trainer.policy.model.lora
    several = trainer.versions_per_step > 1 or (lora.rank > 0 and lora.dropout > 0)
    found = []
    selects = bool(build_objective(algorithm.values, temperature=1.0).selections)
    if (
        selects
        or (algorithm.use_kl_in_reward and algorithm.needs_reference)
        or (several and algorithm.prox_logp_method != "loglinear")
    ):
        found.append("old logprobs")
    if algorithm.needs_reference and lora.rank > 0:
        found.append("reference")
    if trainer.teacher.backend == "policy":
        found.append("teacher")
    return [*found, *(teacher.name for teacher in trainer.base_teachers)]


def _sync_time(config: Config, model: PretrainedConfig, layout: Layout) -> PhaseTime:
    lora, constants = config.trainer.policy.model.lora, readings().sync
    width, own = NUM_BYTES[config.generator.model_dtype], layers(model)
    if lora.rank > 0 and lora.sync == "adapter":
        return duration.sync(num_sent(own, lora) * width, num_sent_tensors(own, lora), 0.0, constants)
    adapted = adapted_layers(own, lora) if lora.rank > 0 else []
    merged = sum(site.weights(layout) for layer in adapted for site in layer.sites)
    return duration.sync(num_parameters(model) * width, num_tensors(model), merged * width, constants)


def _generation_time(inputs: Inputs, config: Config, engine: EngineMemory) -> PhaseTime:
    generator, workload = config.generator, inputs.workload
    longest, mean = generator.longest_conversation, workload.prompt_tokens + workload.response_tokens / 2
    running = min(generator.step_sequences, engine.sequences * longest / mean)
    tp, width = generator.inference_engine_tensor_parallel_size, NUM_BYTES[generator.model_dtype]
    constants, stored = readings().generation, generator.quantization
    engines = generator.num_rollout_engines
    device = inputs.device.in_dtype(width)
    return duration.generation(inputs.model, engines, tp, width, stored, running, workload, device, constants)


def _served_time(inputs: Inputs, config: Config, name: str, model: PretrainedConfig) -> PhaseTime:
    generator, constants = teacher_generator(config), readings().generation
    gpus = generator.num_inference_engines * generator.inference_engine_tensor_parallel_size
    device = inputs.device.in_dtype(NUM_BYTES[generator.model_dtype])
    return duration.served(name, model, gpus, inputs.workload, device, constants)


def with_layout(config: RunConfig, megatron: MegatronConfig) -> RunConfig:
    """The configuration with another layout of the policy, and of the models that follow it."""
    trainer = config.trainer
    changed: dict[str, object] = {"policy": replace(trainer.policy, megatron_config=megatron)}
    if isinstance(config, Config):
        for name in ("ref", "critic", "teacher"):
            other = getattr(trainer, name)
            if other.megatron_config == trainer.policy.megatron_config:
                changed[name] = replace(other, megatron_config=megatron)
    return replace(config, trainer=replace(trainer, **changed))  # type: ignore[arg-type]
