"""Estimators that compare the samples of one prompt with each other: rewards [B] -> advantages [B]."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.credit import CreditInputs, compares_samples, per_sample

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


@compares_samples
@per_sample
def maxrl(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(r - mean) / (mean + eps) within each group: rare successes weigh more, as the gradient of log(success rate).

    Meant for rewards that are not negative. Returns: [B] float32; 0 where a group has one sample, all rewards are equal
    or their mean is not above 0. Source: MaxRL, arXiv:2602.02710, equation 9.
    """
    r, group, size = grouped(rewards, group_ids)
    mean = (group_sum(r, group, len(size)) / size)[group]
    return torch.where(mean > 0, (r - mean) / (mean + EPS), torch.zeros_like(r)).to(torch.float32)


@compares_samples
def opo(inputs: CreditInputs) -> Tensor:
    """The reward minus the group's mean reward weighted by length: the baseline of least variance.

    The length of a sample is its number of trained tokens. Returns: [T] float32; 0 where a group has one sample.
    Source: On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585, equation 8.
    """
    lengths = inputs.sample_sums(inputs.loss_mask)
    r, group, size = grouped(inputs.sample_rewards, inputs.group_ids)
    total = group_sum(lengths, group, len(size))
    baseline = group_sum(lengths * r, group, len(size)) / total.clamp(min=1)
    return inputs.at_tokens(torch.where(total[group] > 0, r - baseline[group], torch.zeros_like(r))).float()


@compares_samples
@per_sample
def gpg(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """r - mean within each group, times samples / samples whose reward is not 0. Use it with the loss `reinforce`.

    The factor compensates for groups without signal. Source: GPG, arXiv:2504.02546, equation 7, as in verl.
    """
    r, group, size = grouped(rewards, group_ids)
    scale = len(r) / (r != 0).sum().clamp(min=1)
    return (scale * (r - (group_sum(r, group, len(size)) / size)[group])).to(torch.float32)


@per_sample
def zero(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """0 for every sample: rewards are logged and not trained, for distillation alone."""
    return torch.zeros_like(rewards)


@compares_samples
@per_sample
def pass_at_k(rewards: Tensor, group_ids: Tensor, *, grpo_norm_by_std: bool) -> Tensor:
    """Only the best sample of each group: its reward minus the second best, over the group's std + eps if asked for.

    The gradient of the best of k, not of the mean. Returns: [B] float32; 0 for all other samples, where two samples are
    equally good, and where a group has one sample. Source: arXiv:2503.19595, as in verl (`grpo_passk`).
    """
    r, group, size = grouped(rewards, group_ids)
    result = torch.zeros_like(r)
    for index in torch.nonzero(size > 1)[:, 0]:
        members = torch.nonzero(group == index)[:, 0]
        best, second = r[members].topk(2).values
        scale = r[members].std() + EPS if grpo_norm_by_std else 1.0
        result[members[r[members].argmax()]] = (best - second) / scale
    return result.to(torch.float32)


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
