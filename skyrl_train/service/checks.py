"""What of a configuration cannot work in a service."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.algorithms.tables import ADVANTAGES, LOSSES
from skyrl_train.checks.model import model_problems
from skyrl_train.checks.rl import check
from skyrl_train.checks.training import lora_problems
from skyrl_train.config import Config, ConfigError


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
    if config.trainer.source != "on_policy" or config.generator.rollout is not None:
        yield (
            "trainer.source or generator.rollout is set, and a service trains on samples of its callers: remove both"
        )
    for table in (ADVANTAGES, LOSSES):
        name = getattr(config.trainer.algorithm, table.key.rpartition(".")[2])
        place = name.partition(":")[0] if ":" in name else table.place(name)
        if place == "__main__" or (":" not in name and place not in (None, *config.trainer.custom_modules)):
            yield (
                f"{table.key} is {name}, which this program registered, and a service is another process: name it "
                "module:attribute, or put the module that registers it into trainer.custom_modules"
            )
    scheduler = config.trainer.policy.optimizer_config.scheduler
    if scheduler != "constant_with_warmup":
        yield (
            f"trainer.policy.optimizer_config.scheduler is {scheduler}, which falls towards the last step, and a "
            "service has none: use constant_with_warmup"
        )
