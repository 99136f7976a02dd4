"""Phases of engines and trainers on the same devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from transformers import PretrainedConfig

from skyrl_train.config import Config
from skyrl_train.engines.settings import NUM_BYTES
from skyrl_train.forecast import memory
from skyrl_train.forecast.adapters import num_sent
from skyrl_train.forecast.engines import scored_sample
from skyrl_train.forecast.memory import ModelOfRanks
from skyrl_train.forecast.parts import ALL, ESTIMATED, GIB, GUESSED, Part, PhaseMemory
from skyrl_train.forecast.readings import readings
from skyrl_train.hf.matrices import layers

LOADED = ("weights", "gradients", "CUDA context and NCCL")
"""Parts of a trainer that has loaded its model, without the optimizer's copies of it."""
RESIDENT = "resident trainers"
UNUSED = "beyond gpu_memory_utilization"
OF_STEPS = ("KV cache", "engine steps", UNUSED)
"""Parts of an engine that generates."""


def left_at_start(config: Config, phase: PhaseMemory) -> float:
    """Bytes of a trainer on shared devices while the engine starts: offloaded, or loaded and not yet trained."""
    if config.trainer.placement.takes_turns:
        return readings().memory.offloaded_gib * GIB
    return sum(part.likely for part in phase.parts if part.name in LOADED)


def taking_turns(phases: list[PhaseMemory], policy: ModelOfRanks, left: float) -> list[PhaseMemory]:
    """The phases of processes that free shared devices for each other."""
    trainers = Part("offloaded trainers", left, ESTIMATED)
    asleep = Part("sleeping engine", readings().memory.sleeping_engine_gib * GIB, GUESSED)
    engine, *rest = phases
    weights = max((memory.weights(policy, stage) for stage in policy.stages), key=lambda part: part.likely)
    of_sync = tuple(part for part in engine.parts if part.name not in OF_STEPS)
    found = [PhaseMemory("generation", ALL, (*engine.parts, trainers))]
    for phase in rest:
        others = replace(trainers, likely=left - readings().memory.offloaded_gib * GIB)
        found.append(PhaseMemory(phase.phase, ALL, (*phase.parts, others, asleep)))
    sent = replace(weights, name="weights of the policy")
    return [*found, PhaseMemory("weight sync", ALL, (*of_sync, sent, trainers))]


def together(config: Config, phases: list[PhaseMemory], model: PretrainedConfig, capacity: float) -> list[PhaseMemory]:
    """The phases of processes that all keep their memory on shared devices, torch's cache of their peak included."""
    engine, *trainers = (
        replace(phase, parts=tuple(replace(part, least=None) for part in phase.parts)) for phase in phases
    )
    generator, lora = config.generator, config.trainer.policy.model.lora
    awake = [part for part in engine.parts if part.name != UNUSED]
    if config.trainer.verify_sync_every:
        awake.append(scored_sample(generator.longest_conversation, model, capacity))
    if lora.rank > 0 and lora.sync == "adapter":  # one in use, and one that arrives
        sent = 2 * num_sent(layers(model), lora) * NUM_BYTES[generator.model_dtype]
        awake.append(Part("adapters", sent, GUESSED))
    found = [PhaseMemory("generation", ALL, (*awake, _resident(trainers)))]
    for phase in trainers:
        others = [each for each in trainers if each is not phase]
        found.append(PhaseMemory(phase.phase, ALL, (*phase.parts, _resident(others), *_renamed(awake))))
    return found


def _resident(trainers: Sequence[PhaseMemory]) -> Part:
    likely = sum(phase.likely for phase in trainers)
    return Part(RESIDENT, likely, sum(phase.high for phase in trainers) / likely - 1 if likely else 0.0)


def _renamed(awake: Sequence[Part]) -> Iterator[Part]:
    """Parts of the engine with names that a trainer's do not have."""
    return (replace(part, name=f"{part.name} (engine)" if part.name in LOADED else part.name) for part in awake)
