"""The geometric mean of each sample's clipped ratios."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.losses.ppo import clip_ratio
from skyrl_train.algorithms.ratios import log_ratio


def gmpo(tokens: TokenInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossTerms:
    """-A * exp(mean over the sample of the clipped log-ratios): one ratio per sample, clipped token by token.

    Advantages that differ within a sample count as their mean. The bounds hold for the *log*-ratio, on the side that
    PPO clips; the paper has 0.4 for both. Use it with `loss_reduction=sequence_mean`. Source: Geometric-Mean
    Policy Optimization, arXiv:2507.20673, equation 4.
    """
    advantages = tokens.per_sample.mean(tokens.advantages)
    free = log_ratio(tokens)
    bounded = free.clamp(-eps_clip_low, eps_clip_high)
    pessimistic = torch.where(advantages > 0, torch.minimum(free, bounded), torch.maximum(free, bounded))
    terms = -advantages * tokens.per_sample.mean(pessimistic).exp()
    return LossTerms(terms, clip_ratio(pessimistic != free))
