"""What a service can be asked for, and the samples that callers hand in. No Ray, no process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.types import Example, Group, Message


@dataclass(frozen=True, kw_only=True)
class ChatSample:
    """A conversation with its reward; every turn of the assistant is trained."""

    messages: list[Message]
    reward: float
    sampling_params: dict[str, Any] | None = None
    """Those of the engine's answer; where given, a sample of another distribution than the trained one is refused."""
    policy_versions: list[int] | None = None
    """As the engine's answer names them; where given, a job is refused unless they are the version that is trained."""


@dataclass(frozen=True, kw_only=True)
class TokenSample:
    """The tokens that an engine read and drew, with their reward."""

    token_ids: list[int]
    """[L]"""
    loss_mask: list[int]
    """[L] 1 where the policy wrote the token."""
    reward: float
    logprobs: list[float] | None = None
    """[L] the engine's, read where loss_mask is 1; only compared with the trainer's own."""
    sampling_params: dict[str, Any] | None = None
    """Those of the engine's answer; where given, a sample of another distribution than the trained one is refused."""
    policy_versions: list[int] | None = None
    """As the engine's answer names them; where given, a job is refused unless they are the version that is trained."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    """Reinforcement learning on groups."""

    groups: tuple[Group, ...]
    num_mini_batches: int
    has_logprobs: bool
    """Whether every sample came with the engine's logprobs."""
    drawn_by: Mapping[int, str]
    """Versions that samples were drawn by -> the first of these samples."""


@dataclass(frozen=True, slots=True)
class SftJob:
    """One step of supervised fine-tuning."""

    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Write a Hugging Face checkpoint."""

    folder: str


@dataclass(frozen=True, slots=True)
class CareJob:
    """Find lost engines, and give the weights to those that were started in their place. The service's own."""


Job = TrainJob | SftJob | SaveJob | CareJob
