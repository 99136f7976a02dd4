"""Jobs of a service, and the samples that clients submit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.types import Example, Group, Message


@dataclass(frozen=True, kw_only=True)
class SubmittedSample:
    reward: float
    sampling_params: dict[str, Any] | None = None
    """Copy of the engine's answer; if given, a sample of another distribution than the trained one is rejected."""
    policy_versions: list[int] | None = None
    """Copy of the engine's answer; if given, a job is rejected unless they are the version that is trained."""
    finish_reason: str | None = None
    """Copy of the engine's answer, of the last turn; if `length`, the token that ends a turn was not sampled."""


@dataclass(frozen=True, kw_only=True)
class ChatSample(SubmittedSample):
    """A conversation with its reward; every turn of the assistant is trained."""

    messages: list[Message]


@dataclass(frozen=True, kw_only=True)
class TokenSample(SubmittedSample):
    """Tokens of a prompt and its sampled response, with their reward."""

    token_ids: list[int]
    """[L]"""
    loss_mask: list[int]
    """[L] 1 where the policy wrote the token."""
    logprobs: list[float] | None = None
    """[L] of the engine, read where loss_mask is 1; only compared with the trainer's own."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    groups: tuple[Group, ...]
    has_logprobs: bool
    """Whether every sample came with the engine's logprobs."""
    sampled_by: Mapping[int, str]
    """Policy version -> the first sample with tokens of it, for errors."""


@dataclass(frozen=True, slots=True)
class SftJob:
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    folder: str


@dataclass(frozen=True, slots=True)
class HealthCheckJob:
    """Replace dead engines and sync the replacements. Submitted by the service itself."""


Job = TrainJob | SftJob | SaveJob | HealthCheckJob
