"""A trust region on probabilities instead of ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.losses.ppo import clip_ratio
from skyrl_train.algorithms.ratios import rollout_ratio

EPS = 1e-8


def dppo(tokens: TokenInputs, *, dppo_type: str, delta_low: float, delta_high: float) -> LossTerms:
    """-A * ratio to the engine's policy; a token whose probability has moved too far in A's direction gets no gradient.

    Moved too far: by more than delta_high where A > 0 and the token became likelier, by more than delta_low where A < 0
    and it became less likely. `binary_tv` measures |p - q|, `binary_kl` the KL divergence between "this token" and "any
    other" under q (the engine's) and p. The ratio is to the engine, so no correction is needed beside it.
    Source: arXiv:2602.04879, section 4.
    """
    p, q = tokens.logprobs.detach().exp(), tokens.rollout_logprobs.exp()
    distance = (p - q).abs() if dppo_type == "binary_tv" else _binary_kl(q, p, tokens)
    advantages = tokens.advantages
    outside = ((advantages > 0) & (p > q) & (distance > delta_high)) | (
        (advantages < 0) & (p < q) & (distance > delta_low)
    )
    terms = -rollout_ratio(tokens) * advantages
    return LossTerms(torch.where(outside, torch.zeros_like(terms), terms), clip_ratio(outside))


def _binary_kl(q: Tensor, p: Tensor, tokens: TokenInputs) -> Tensor:
    """KL divergence from (q, 1 - q) to (p, 1 - p), [P]."""
    difference = tokens.rollout_logprobs - tokens.logprobs.detach()
    return q * difference + (1 - q) * ((1 - q + EPS) / (1 - p + EPS)).log()
