"""Whether the weights of the reference are complete, and have a row for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_train.checks.model_folder import checked_folder
from skyrl_train.checks.tokenizer import check_tokenizer
from skyrl_train.config.rl import TrainerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_reference(trainer: TrainerConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises: ValueError for a reference of its own that cannot score the policy's tokens."""
    path = trainer.ref.model.path
    if trainer.starts_reference and path != trainer.policy.model.path:
        _, config = checked_folder("trainer.ref.model.path", path)
        check_tokenizer(tokenizer, config.vocab_size, path)
