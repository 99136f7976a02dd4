"""How much better than expected each sample was: rewards [B] -> advantages [B].

All estimators share one signature, so that the configuration can choose one by name. Sums are taken in float64: for
equal float32 rewards the mean is then exactly that reward, and their advantages are exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6
"""Added to a standard deviation before dividing by it, as in SkyRL and verl; TRL adds 1e-4."""


def grpo_advantages(rewards: Tensor, group_ids: Tensor, *, norm_by_std: bool, eps: float = EPS) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + eps) within each group, or r - mean without `norm_by_std`.

    The standard deviation is the sample one (divides by G - 1), as SkyRL, verl and TRL read the paper. Without
    `norm_by_std` this is the estimator of Dr. GRPO, arXiv:2503.20783.

    Args: rewards [B] float32; group_ids [B] int64, equal for samples of the same prompt, in any order.
    Returns: [B] float32; 0 where a group has one sample or all rewards are equal.
    Raises: ValueError if the shapes differ.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    r, group, size = _grouped(rewards, group_ids)
    centred = r - (_group_sum(r, group, len(size)) / size)[group]
    if norm_by_std:
        variance = _group_sum(centred.square(), group, len(size)) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[group]
    return centred.to(torch.float32)


def rloo_advantages(rewards: Tensor, group_ids: Tensor, *, norm_by_std: bool) -> Tensor:
    """Leave-one-out advantages: the reward minus the mean reward of the *other* samples of the group.

    `norm_by_std` is not used: the estimator is unbiased because it does not scale.

    Args: rewards [B] float32; group_ids [B] int64, equal for samples of the same prompt, in any order.
    Returns: [B] float32; 0 where a group has one sample or all rewards are equal.
    Raises: ValueError if the shapes differ.
    Source: Back to Basics, arXiv:2402.14740, section 3.2.
    """
    r, group, size = _grouped(rewards, group_ids)
    centred = r - (_group_sum(r, group, len(size)) / size)[group]
    # r_i - sum_{j != i} r_j / (G - 1) = (r_i - mean) * G / (G - 1); a lone sample has centred = 0.
    return (centred * (size / (size - 1).clamp(min=1))[group]).to(torch.float32)


def reinforce_plus_plus_advantages(
    rewards: Tensor, group_ids: Tensor, *, norm_by_std: bool, eps: float = EPS
) -> Tensor:
    """Globally normalised advantages: (r - mean) / (std + eps) over all samples of the step; groups do not matter.

    The mean and the (sample) standard deviation are over samples, so a long response does not weigh more than a short
    one. `norm_by_std` is not used: the global normalisation is the method.

    Args: rewards [B] float32; group_ids [B] int64.
    Returns: [B] float32; 0 where there is one sample or all rewards are equal.
    Raises: ValueError if the shapes differ.
    Source: REINFORCE++, arXiv:2501.03262, section 3, with the KL term left to the loss or the reward.
    """
    return grpo_advantages(rewards, torch.zeros_like(group_ids), norm_by_std=True, eps=eps)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce++": reinforce_plus_plus_advantages,
}
"""`trainer.algorithm.advantage_estimator` -> f(rewards [B], group_ids [B], *, norm_by_std: bool) -> [B] float32"""


def _grouped(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards [B] float64, the index of each sample's group [B], and the size of each group [num_groups]."""
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be two vectors of one length"
        )
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return rewards.to(torch.float64), group, size


def _group_sum(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add_(0, group, values)
