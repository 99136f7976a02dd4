"""REINFORCE that trusts good samples fully and bad ones by their ratio."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.losses.ppo import clip_ratio
from skyrl_train.algorithms.ratios import log_ratio


def topr(tokens: TokenInputs) -> LossTerms:
    """-w * A * log p, w constant: 1 where A > 0, elsewhere the product of the sample's ratios, at most 1.

    So a bad sample that has already become unlikely is not pushed further. Source: Tapered Off-Policy REINFORCE,
    arXiv:2503.14286, equation 8.
    """
    advantages = tokens.advantages
    tapered = tokens.per_sample.sum(log_ratio(tokens).detach()).clamp(max=0.0).exp()
    weight = torch.where(advantages > 0, torch.ones_like(tapered), tapered)
    return LossTerms(-weight * advantages * tokens.logprobs, clip_ratio(weight < 1))
