"""Estimators that compare the samples of one prompt with each other: rewards [B] -> advantages [B]."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.credit import compares_samples, per_sample

EPS = 1e-6
"""Added to a standard deviation before dividing by it, as in SkyRL and verl; TRL adds 1e-4."""


@compares_samples
@per_sample
def grpo(rewards: Tensor, group_ids: Tensor, *, grpo_norm_by_std: bool) -> Tensor:
    """Group-relative advantages: (r - mean) / (std + eps) within each group, or r - mean without `grpo_norm_by_std`.

    The standard deviation is the sample one (divides by G - 1), as SkyRL, verl and TRL read the paper. Without
    `grpo_norm_by_std` this is the estimator of Dr. GRPO, arXiv:2503.20783.

    Args: rewards [B] float32; group_ids [B] int64, equal for samples of the same prompt, in any order.
    Returns: [B] float32; 0 where a group has one sample or all rewards are equal.
    Raises: ValueError if the shapes differ.
    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    r, group, size = grouped(rewards, group_ids)
    centred = r - (group_sum(r, group, len(size)) / size)[group]
    if grpo_norm_by_std:
        centred = centred / (_std(centred, group, size) + EPS)[group]
    return centred.to(torch.float32)


@compares_samples
@per_sample
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Leave-one-out advantages: the reward minus the mean reward of the *other* samples of the group.

    The estimator is unbiased because it does not scale.

    Args: rewards [B] float32; group_ids [B] int64, equal for samples of the same prompt, in any order.
    Returns: [B] float32; 0 where a group has one sample or all rewards are equal.
    Raises: ValueError if the shapes differ.
    Source: Back to Basics, arXiv:2402.14740, section 3.2.
    """
    r, group, size = grouped(rewards, group_ids)
    centred = r - (group_sum(r, group, len(size)) / size)[group]
    # r_i - sum_{j != i} r_j / (G - 1) = (r_i - mean) * G / (G - 1); a lone sample has centred = 0.
    return (centred * (size / (size - 1).clamp(min=1))[group]).to(torch.float32)


def grouped(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards [B] float64, the index of each sample's group [B], and the size of each group [num_groups]."""
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must be two vectors of one length"
        )
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return rewards.to(torch.float64), group, size


def group_sum(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """[B] -> [num_groups]"""
    return values.new_zeros(num_groups).index_add_(0, group, values)


def _std(centred: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """[num_groups], dividing by G - 1; 0 for a group of one."""
    return (group_sum(centred.square(), group, len(size)) / (size - 1).clamp(min=1)).sqrt()
