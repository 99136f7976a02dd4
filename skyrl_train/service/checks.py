"""What of a configuration cannot work in a service."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.checks.lora import lora_problems
from skyrl_train.checks.model import model_problems
from skyrl_train.checks.rl import check
from skyrl_train.config import Config, ConfigError
from skyrl_train.config.values import names_of_this_process


def check_service(config: Config, files: bool = True) -> None:
    """Raises: ConfigError with everything that cannot work. The data keys are not read: callers bring the samples.

    Args: files: as for `check`.
    """
    check(config, None, files=False)
    problems = [*_problems(config)]
    if files:
        problems += [*model_problems(config), *lora_problems(config.trainer.policy.model.lora)]
    if problems:
        raise ConfigError(problems)


def _problems(config: Config) -> Iterator[str]:
    if config.trainer.resume_mode is not None:
        yield (
            f"trainer.resume_mode is {config.trainer.resume_mode}, and a service writes no checkpoints: set it to "
            "null, and trainer.policy.model.path to the last save"
        )
    algorithm = config.trainer.algorithm
    for key, name, table in (
        ("advantage_estimator", algorithm.advantage_estimator, ("advantages", "ADVANTAGES")),
        ("loss_reduction", algorithm.loss_reduction, ("reductions", "REDUCTIONS")),
    ):
        if name in names_of_this_process(*table):
            yield (
                f"trainer.algorithm.{key} is {name}: this program has put it into {table[1]}, and a service is another "
                "process, which a custom entry cannot reach yet. Choose one of skyrl_train itself"
            )
    scheduler = config.trainer.policy.optimizer_config.scheduler
    if scheduler != "constant_with_warmup":
        yield (
            f"trainer.policy.optimizer_config.scheduler is {scheduler}, which falls towards the last step, and a "
            "service has none: use constant_with_warmup"
        )
