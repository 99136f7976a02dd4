"""Values of all keys that a configuration leaves open.

Without a GPU nothing is chosen: the configuration's classes then say what open keys mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from skyrl_train.checks.training import POLICY
from skyrl_train.config import Config
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.forecast.choices.choice import Choice, Choices
from skyrl_train.forecast.choices.engines import engine_choices, evaluated_at_once, samples_at_once
from skyrl_train.forecast.choices.sharing import is_open, with_release
from skyrl_train.forecast.choices.trainers import trainer_choice
from skyrl_train.forecast.forecast import Inputs, workload_of


def chosen(inputs: Inputs) -> Choices:
    """Values of all open keys, for the longest samples; keys that are given stay, and the others fit them."""
    config, made = inputs.config, list[Choice]()
    if isinstance(config, Config):
        config, made = _with_engine_choices(config, inputs.model, inputs.device, samples_at_once(config))
    trainer, megatron = config.trainer, config.trainer.policy.megatron_config
    if trainer.max_tokens_per_microbatch is None or megatron.recompute_granularity == "auto":
        option, choice = trainer_choice(replace(inputs, config=config, workload=workload_of(config)))
        config, made = option.config, [*made, choice]
    if megatron.recompute_logits is None:
        reason = "each rank keeps the logits for which memory is free"
        made.append(Choice(((f"{POLICY}.recompute_logits", None),), reason))
    if isinstance(config, Config) and is_open(config):
        config, choice = with_release(inputs, config)
        made.append(choice)
    return Choices(config, tuple(made), inputs.device.name)


def chosen_for_evaluation(config: Config, model: PretrainedConfig, device: DeviceKind) -> Choices:
    """Like `chosen`, for engines of an evaluation without training."""
    chosen_config, made = _with_engine_choices(config, model, device, evaluated_at_once(config))
    return Choices(chosen_config, tuple(made), device.name)


def _with_engine_choices(
    config: Config, model: PretrainedConfig, device: DeviceKind, samples_at_once: int
) -> tuple[Config, list[Choice]]:
    """Nothing is chosen for running servers, which have their own settings."""
    if not config.generator.run_engines_locally:
        return config, []
    made = list(engine_choices(config, model, device, samples_at_once))
    values: dict[str, Any] = {key.rpartition(".")[2]: value for choice in made for key, value in choice.values}
    return replace(config, generator=replace(config.generator, **values)), made
