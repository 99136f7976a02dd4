"""Checks of the configuration of supervised fine-tuning."""

from __future__ import annotations

from skyrl_train.checks.model import cut_problems
from skyrl_train.checks.training import (
    MODEL,
    POLICY,
    POLICY_RANKS,
    adapter_problems,
    data_file_problems,
    data_problems,
    layout_problems,
    lora_problems,
    package_problems,
    training_problems,
)
from skyrl_train.config.errors import ConfigError
from skyrl_train.config.sft import SftConfig


def check_sft(config: SftConfig, num_train_rows: int | None, files: bool = True) -> None:
    """Raise ConfigError with everything that cannot work.

    Args:
        num_train_rows: rows left in the training data, None if unknown.
        files: also check the model folder and data files; False before `trainer.prepare` has created them.
    """
    trainer = config.trainer
    layout, batch = trainer.policy.megatron_config, trainer.train_batch_size
    problems = [
        *package_problems(trainer, {POLICY: layout}),
        *training_problems(trainer, {POLICY: layout}),
        *layout_problems(layout, POLICY, trainer.placement.num_policy_ranks, POLICY_RANKS),
    ]
    problems += [*data_problems(config.data), *lora_problems(trainer.policy.model.lora)]
    if num_train_rows is not None and batch > num_train_rows:
        problems.append(
            f"trainer.train_batch_size is {batch}: more than the {num_train_rows} rows of data.train_data. Set it to "
            f"at most {num_train_rows} (rows dropped for data.max_length are not counted)"
        )
    if files:
        problems += data_file_problems(config.data)
        problems += cut_problems(trainer.policy.model.path, MODEL, layout, POLICY)
        problems += adapter_problems(trainer.policy.model.lora)
    if problems:
        raise ConfigError(problems)
