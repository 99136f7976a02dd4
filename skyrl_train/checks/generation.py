"""Checks of the configuration of an evaluation without training: keys that only affect training are not checked."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.checks.custom import reward_problems, rollout_problems
from skyrl_train.checks.engines import endpoint_problems, engine_problems, length_problems
from skyrl_train.checks.model import served_model_problems
from skyrl_train.checks.training import LORA, data_problems, package_problems, source_problems, training_problems
from skyrl_train.config import Config, ConfigError


def check_generation(config: Config, files: bool = True) -> None:
    """Raise ConfigError with everything that cannot work. Args: files: like `checks.rl.check`."""
    problems = [
        *package_problems(config.trainer, {}),
        *training_problems(config.trainer, {}),
        *rollout_problems(config),
        *reward_problems(config),
        *data_problems(config.data),
        *length_problems(config),
        *_engines(config),
        *endpoint_problems(config),
    ]
    if not config.data.val_data:
        problems.append(
            "data.val_data is empty: nothing to evaluate. Name files (parquet, json, jsonl) or hub_name:split"
        )
    if files:
        problems += source_problems("val_data", config.data.val_data)
        if config.trainer.resume_mode is None:  # a checkpoint names its model itself
            problems += served_model_problems(config)
    if problems:
        raise ConfigError(problems)


def _engines(config: Config) -> Iterator[str]:
    if not config.generator.run_engines_locally:
        yield (
            "generator.run_engines_locally is false: which weights a running server serves is only known after a "
            "weight sync from a trainer. Set it to true"
        )
        return
    yield from engine_problems(config)
    adapter = config.trainer.policy.model.lora.path
    if adapter is not None and config.trainer.resume_mode is None:
        yield (
            f"{LORA}.path is {adapter}: engines are started with merged weights only. Name the merged export of "
            f"its run in trainer.policy.model.path (the folder above adapter/), and set {LORA}.path=null"
        )
