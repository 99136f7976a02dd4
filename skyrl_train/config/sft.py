"""The configuration of supervised fine-tuning: configs/sft_base_config.yaml laid over ppo_base_config.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from skyrl_train.config.program import Program
from skyrl_train.config.training import DataConfig, RunConfig
from skyrl_train.config.values import Bounds, OneOf

__all__ = ["SFT", "SftConfig", "SftDataConfig", "load_sft_config"]


@dataclass(frozen=True, kw_only=True)
class SftDataConfig(DataConfig):
    """Where the rows come from and which of their tokens are trained."""

    max_length: Annotated[int, Bounds(low=2)]
    """Tokens of the longest row."""
    too_long: Annotated[str, OneOf(("drop", "truncate"))]
    """What happens to longer rows: drop, or truncate (keep the first max_length tokens)."""
    assistant_turns: Annotated[str, OneOf(("all", "last"))]
    """Which turns of a conversation are trained: all, or the last alone."""
    chat_template_kwargs: dict[str, Any]
    """Passed to the tokenizer's chat template."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """The whole configuration of supervised fine-tuning."""

    data: SftDataConfig


SFT = Program(
    module="skyrl_train.entrypoints.main_sft",
    purpose="Fine-tune a language model on conversations, prompts with responses, or tokens.",
    schema=SftConfig,
    base_name="sft_base_config",
)
load_sft_config = SFT.load
