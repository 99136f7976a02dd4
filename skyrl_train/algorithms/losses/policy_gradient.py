"""Policy gradients without a clipped surrogate."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.losses.ppo import clip_ratio
from skyrl_train.algorithms.ratios import ratio, rollout_ratio


def reinforce(tokens: TokenInputs) -> LossTerms:
    """-A * log p, on-policy; the loss of GPG (arXiv:2504.02546, equation 6)."""
    return LossTerms(-tokens.advantages * tokens.logprobs)


def importance_sampling(tokens: TokenInputs) -> LossTerms:
    """-ratio * A without a clip: unbiased, with a variance that grows with the distance from the policy before."""
    return LossTerms(-ratio(tokens) * tokens.advantages)


def rollout_is(tokens: TokenInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossTerms:
    """-w * A * log p, w the constant ratio to the engine's policy; tokens outside (1 - low, 1 + high) are dropped.

    The ratio is to the engine, so no correction is needed beside it. Source: GLM-5, arXiv:2602.15763, section 3.2.
    """
    weight = rollout_ratio(tokens).detach()
    outside = (weight <= 1 - eps_clip_low) | (weight >= 1 + eps_clip_high)
    weight = torch.where(outside, torch.zeros_like(weight), weight)
    return LossTerms(-weight * tokens.advantages * tokens.logprobs, clip_ratio(outside))
