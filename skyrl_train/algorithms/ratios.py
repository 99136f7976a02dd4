"""Ratios between the probabilities of the current policy, of the policy before the step, and of the engine."""

from __future__ import annotations

from torch import Tensor

from skyrl_train.algorithms.inputs import TokenInputs

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: beyond it, float32 sums lose the other tokens; exp(89) would be infinite."""


def clamped(log_ratio: Tensor) -> Tensor:
    """The log-ratio between -20 and 20, without gradient outside."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_ratio(tokens: TokenInputs) -> Tensor:
    """Clamped log of `ratio`: [P], with gradient."""
    return clamped(tokens.logprobs - tokens.old_logprobs)


def ratio(tokens: TokenInputs) -> Tensor:
    """Probability under the policy over that before the step: [P], with gradient."""
    return log_ratio(tokens).exp()


def rollout_ratio(tokens: TokenInputs) -> Tensor:
    """Probability under the policy over that under the engine that sampled, [P], with gradient."""
    return clamped(tokens.logprobs - tokens.rollout_logprobs).exp()
