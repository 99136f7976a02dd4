"""REINFORCE with clipped importance weights."""

from __future__ import annotations

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.losses.ppo import clip_ratio
from skyrl_train.algorithms.ratios import ratio


def cispo(tokens: TokenInputs, *, cispo_eps_clip_low: float, cispo_eps_clip_high: float) -> LossTerms:
    """REINFORCE with a clipped, constant importance weight: -clip(ratio) * A * log p. Every token keeps a gradient.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    ratios = ratio(tokens).detach()
    weight = ratios.clamp(1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)
    return LossTerms(-weight * tokens.advantages * tokens.logprobs, clip_ratio(weight != ratios))
