"""Policy losses, per token. The loss of a mini-batch is `weighted_sum(terms, loss_weights)` (see reductions.py).

All losses have one signature, f(logprobs [T], old_logprobs [T], advantages [T], settings) -> (terms [T], clipped [T]):
- logprobs carry the gradient; old_logprobs and advantages do not. advantages are per token (a sample's, repeated).
- terms [T]: to be minimised.
- clipped [T] float, without gradient: 1 where the clip is in force. Its weighted sum is `clip_ratio`.

Terms exist for every token, also for those that the policy did not write (their weight is 0). So that 0 * inf cannot
make a NaN, log(p / old) is clamped to +-20 wherever it is exponentiated: terms and gradients are finite for all
finite inputs. A trained token is that far from the old policy only after a divergence, and gets no gradient then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Bounds of the losses. The names are those of `trainer.algorithm`; each loss reads only its own."""

    eps_clip_low: float
    """Ratios below 1 - eps_clip_low are clipped (regular, dual_clip)."""
    eps_clip_high: float
    """Ratios above 1 + eps_clip_high are clipped (regular, dual_clip)."""
    clip_ratio_c: float
    """> 1: the term of a negative advantage is at most clip_ratio_c * |advantage| (dual_clip)."""
    cispo_eps_clip_low: float
    """The weight of a token is at least 1 - cispo_eps_clip_low; 1 means no lower bound (cispo)."""
    cispo_eps_clip_high: float
    """The weight of a token is at most 1 + cispo_eps_clip_high (cispo)."""


Loss = Callable[[Tensor, Tensor, Tensor, LossSettings], tuple[Tensor, Tensor]]


def regular(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, -min(ratio * A, clip(ratio) * A), with its own bound on each side.

    Source: PPO, arXiv:1707.06347, equation 7; separate bounds ("clip higher"): DAPO, arXiv:2503.14476, section 3.1.
    """
    ratio = _ratio(logprobs, old_logprobs)
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - settings.eps_clip_low, 1 + settings.eps_clip_high) * advantages
    return torch.maximum(free, bounded), _as_float(bounded > free)


def dual_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """`regular`, and where the advantage is negative the term is at most clip_ratio_c * |A|.

    `regular` leaves the ratio of a bad token unbounded above; one token that became much likelier can then dominate.
    Source: Mastering Complex Control in MOBA Games, arXiv:1912.09729, equation 5.
    """
    terms, clipped = regular(logprobs, old_logprobs, advantages, settings)
    ceiling = -settings.clip_ratio_c * advantages
    beyond = (advantages < 0) & (terms > ceiling)
    return torch.where(beyond, ceiling, terms), torch.maximum(clipped, _as_float(beyond))


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """REINFORCE with a clipped, constant importance weight: -clip(ratio) * A * log p. Every token keeps a gradient.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    ratio = _ratio(logprobs, old_logprobs).detach()
    weight = ratio.clamp(1 - settings.cispo_eps_clip_low, 1 + settings.cispo_eps_clip_high)
    return -weight * advantages * logprobs, _as_float(weight != ratio)


def cross_entropy(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Supervised fine-tuning: -log p of every trained token. Old logprobs and advantages are not used."""
    return -logprobs, torch.zeros_like(logprobs)


LOSSES: dict[str, Loss] = {
    "regular": regular,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "cross_entropy": cross_entropy,
}
"""`trainer.algorithm.policy_loss_type` -> loss"""


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _as_float(condition: Tensor) -> Tensor:
    return condition.to(torch.float32)
