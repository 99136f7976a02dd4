"""PPO's clipped surrogate, also with a bound on terms with negative advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.algorithms.ratios import ratio


def regular(tokens: TokenInputs, *, eps_clip_low: float, eps_clip_high: float) -> LossTerms:
    """PPO's clipped surrogate, -min(ratio * A, clip(ratio) * A), with its own bound on each side.

    Source: PPO, arXiv:1707.06347, equation 7; separate bounds ("clip higher"): DAPO, arXiv:2503.14476, section 3.1.
    """
    return surrogate(ratio(tokens), tokens.advantages, eps_clip_low, eps_clip_high)


def dual_clip(tokens: TokenInputs, *, eps_clip_low: float, eps_clip_high: float, clip_ratio_c: float) -> LossTerms:
    """`regular`, and where the advantage is negative the term is at most clip_ratio_c * |A|.

    `regular` leaves the ratio of a bad token unbounded above; one token that became much likelier can then dominate.
    Source: Mastering Complex Control in MOBA Games, arXiv:1912.09729, equation 5.
    """
    advantages = tokens.advantages
    terms, metrics = surrogate(ratio(tokens), advantages, eps_clip_low, eps_clip_high)
    ceiling = -clip_ratio_c * advantages
    beyond = (advantages < 0) & (terms > ceiling)
    clipped = torch.maximum(metrics["clip_ratio"].values, beyond.float())
    return LossTerms(torch.where(beyond, ceiling, terms), clip_ratio(clipped))


def surrogate(ratios: Tensor, advantages: Tensor, eps_clip_low: float, eps_clip_high: float) -> LossTerms:
    """The clipped surrogate of any ratios [P]."""
    free = -ratios * advantages
    bounded = -ratios.clamp(1 - eps_clip_low, 1 + eps_clip_high) * advantages
    return LossTerms(torch.maximum(free, bounded), clip_ratio(bounded > free))


def clip_ratio(clipped: Tensor) -> dict[str, Metric]:
    """Fraction of tokens that are clipped; clipped [P]."""
    return {"clip_ratio": Metric(clipped.detach().float(), Reduce.TOKEN_MEAN)}
