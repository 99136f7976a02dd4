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
    """Source of the rows, and which of their tokens are trained."""

    max_length: Annotated[int, Bounds(low=2)]
    too_long: Annotated[str, OneOf(("drop", "truncate"))]
    assistant_turns: Annotated[str, OneOf(("all", "last"))]
    chat_template_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """The configuration of supervised fine-tuning."""

    data: SftDataConfig


SFT = Program(
    module="skyrl_train.entrypoints.main_sft",
    purpose="Fine-tune a language model on conversations, prompts with responses, or tokens.",
    schema=SftConfig,
    base_name="sft_base_config",
)
load_sft_config = SFT.load
