"""The surrogate with a soft gate instead of a clip."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.ratios import ratio


def sapo(tokens: TokenInputs, *, tau_pos: float, tau_neg: float) -> LossTerms:
    """-A * (4 / tau) * sigmoid(tau * (ratio - 1)), with tau_pos where A > 0 and tau_neg elsewhere.

    At ratio 1 the gradient is that of the unclipped surrogate; it fades on both sides, faster for a larger tau.
    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347, equations 5 and 6.
    """
    advantages = tokens.advantages
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio(tokens) - 1)) * (4 / tau)
    return LossTerms(-gate * advantages)
