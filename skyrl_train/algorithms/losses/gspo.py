"""The clipped surrogate with one ratio per sample."""

from __future__ import annotations

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.losses.ppo import surrogate

MAX_LOG_RATIO = 10.0
"""Bound of the mean log-ratio of a sample, as in SkyRL and verl."""


def gspo(tokens: TokenInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossTerms:
    """PPO's clipped surrogate of the geometric mean of each sample's ratios; the paper's bounds are 3e-4 and 4e-4.

    The form GSPO-token: the value is the sample's ratio, the gradient that of the token's own logprob. Where a sample
    has one advantage, this is the gradient of the sequence's ratio. Use it with `loss_reduction=sequence_mean`.
    Source: Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 and 13.
    """
    logprobs = tokens.logprobs
    mean = tokens.per_sample.mean((logprobs - tokens.old_logprobs).detach())
    log_ratio = (mean + logprobs - logprobs.detach()).clamp(max=MAX_LOG_RATIO)
    return surrogate(log_ratio.exp(), tokens.advantages, eps_clip_low, eps_clip_high)
