"""Corrections for the difference between the engine's distribution and the trainer's: factors of the policy terms.

The importance weight of a token is w = exp(old_logprobs - rollout_logprobs), where the policy before the step is
compared with the engine that sampled. Corrections are applied to every policy loss; their product is.
"""

from __future__ import annotations

import torch

from skyrl_train.algorithms.inputs import Correction, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce

MAX_LOG_RATIO = 20.0


def token_tis(tokens: TokenInputs, *, token_tis_ratio_clip_high: float) -> Correction:
    """Truncated importance sampling: each token weighs min(w, token_tis_ratio_clip_high).

    Source: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, fengyao.notion.site/off-policy-rl
    """
    weight = _weight(tokens)
    factor = weight.clamp(max=token_tis_ratio_clip_high)
    return Correction(
        factor,
        {
            "is_ratio_mean": Metric(weight, Reduce.TOKEN_MEAN),
            "is_ratio_max": Metric(weight, Reduce.MAX),
            "tis_token_clip_high_ratio": Metric((weight > token_tis_ratio_clip_high).float(), Reduce.TOKEN_MEAN),
        },
    )


def icepop(tokens: TokenInputs, *, icepop_low: float, icepop_high: float) -> Correction:
    """Each token weighs w where icepop_low <= w <= icepop_high, and 0 elsewhere.

    Source: Small Leak Can Sink a Great Ship, ringtech.notion.site/icepop
    """
    weight = _weight(tokens)
    is_kept = (weight >= icepop_low) & (weight <= icepop_high)
    return Correction(
        torch.where(is_kept, weight, torch.zeros_like(weight)),
        {
            "is_ratio_mean": Metric(weight, Reduce.TOKEN_MEAN),
            "icepop_masked_ratio": Metric((~is_kept).float(), Reduce.TOKEN_MEAN),
        },
    )


def _weight(tokens: TokenInputs) -> torch.Tensor:
    difference = tokens.old_logprobs - tokens.rollout_logprobs
    return difference.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
