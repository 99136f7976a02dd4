"""The model of a service with its tokenizer, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_train.checks.model_folder import check_reference, checked_folder
from skyrl_train.checks.tokenizer import check_tokenizer, load_tokenizer
from skyrl_train.config import Config
from skyrl_train.hf import adapter_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def checked_model(config: Config) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Raises: ValueError for a missing model, or for weights, tokenizer, adapter or reference that do not fit."""
    path = config.trainer.policy.model.path
    folder, model = checked_folder("trainer.policy.model.path", path)
    adapter_file.check(folder, config.trainer.policy.model.lora)
    tokenizer = load_tokenizer(folder)
    check_tokenizer(tokenizer, model.vocab_size, path)
    check_reference(config.trainer, tokenizer)
    return model, tokenizer
