"""What must hold between the values of a configuration of supervised fine-tuning; as rl.py."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.checks.lora import lora_problems
from skyrl_train.checks.model import cut_problems
from skyrl_train.checks.training import (
    POLICY,
    POLICY_RANKS,
    data_file_problems,
    layout_problems,
    package_problems,
    prepare_problems,
    resume_problems,
)
from skyrl_train.config.errors import ConfigError
from skyrl_train.config.sft import SftConfig


def check_sft(config: SftConfig, num_train_rows: int | None, files: bool = True) -> None:
    """Raise ConfigError with everything that cannot work, or return.

    Args:
        num_train_rows: rows left in the training data, None where they are not known yet.
        files: also look at the model folder and data files; False before `trainer.prepare` has made them.
    """
    trainer = config.trainer
    place, layout = trainer.placement, trainer.policy.megatron_config
    problems = [
        *package_problems(trainer, {POLICY: layout}),
        *prepare_problems(trainer),
        *resume_problems(trainer),
        *_batches(config, num_train_rows),
        *layout_problems(layout, POLICY, place.num_policy_ranks, POLICY_RANKS),
    ]
    if files:
        problems += data_file_problems(config.data)
        problems += cut_problems(trainer.policy.model.path, "trainer.policy.model.path", layout, POLICY)
        problems += lora_problems(trainer.policy.model.lora)
    if problems:
        raise ConfigError(problems)


def _batches(config: SftConfig, num_train_rows: int | None) -> Iterator[str]:
    batch = config.trainer.train_batch_size
    if num_train_rows is not None and batch > num_train_rows:
        yield (
            f"trainer.train_batch_size is {batch}, more than the {num_train_rows} rows of data.train_data: set it to "
            f"at most {num_train_rows} (rows that were dropped for data.max_length are not counted)"
        )
