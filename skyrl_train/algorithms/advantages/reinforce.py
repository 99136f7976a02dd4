"""Estimators that normalise over all trained tokens of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.advantages.groups import group_sum, grouped
from skyrl_train.algorithms.credit import CreditInputs, compares_samples, compares_with_greedy, whitened


def reinforce_plus_plus(inputs: CreditInputs, *, gamma: float) -> Tensor:
    """The return of each token, normalised over all trained tokens of the step; groups do not matter.

    The return is the sum of the rewards from the token to the end of its sample, discounted by gamma for each trained
    token in between. Long responses weigh more in the mean and in the (sample) variance than short ones.

    Returns: [T] float32; 0 where all trained tokens have one return, and where no token is trained.
    Source: REINFORCE++, arXiv:2501.03262, section 3, with the KL term left to the loss or the reward.
    """
    lengths = inputs.cu_seqlens.diff().tolist()
    discounts = torch.where(inputs.loss_mask, gamma, 1.0).double()
    samples = zip(torch.split(inputs.rewards, lengths), torch.split(discounts, lengths), strict=True)
    returns = torch.cat([discounted_sums(rewards, discount) for rewards, discount in samples])
    return whitened(returns, inputs.loss_mask).to(torch.float32)


@compares_samples
def reinforce_plus_plus_baseline(inputs: CreditInputs) -> Tensor:
    """The reward minus the group's mean, normalised over all trained tokens of the step.

    Returns: [T] float32; 0 where a group has one sample, if all have. Source: REINFORCE++, arXiv:2501.03262,
    section 3.3, with the KL term left to the loss or the reward.
    """
    r, group, size = grouped(inputs.sample_rewards, inputs.group_ids)
    centred = inputs.at_tokens(r - (group_sum(r, group, len(size)) / size)[group])
    return whitened(centred, inputs.loss_mask).to(torch.float32)


@compares_with_greedy
def remax(inputs: CreditInputs) -> Tensor:
    """The return of each token, not discounted, minus the reward of the greedy response to the prompt.

    Returns: [T] float32. Raises: ValueError for a source that generates no greedy responses.
    Source: ReMax, arXiv:2310.10505, section 4.
    """
    if inputs.baselines is None:
        raise ValueError(
            "remax needs a greedy response for each prompt: the groups of this source have none. Use "
            "trainer.source=on_policy or streaming, or SourceParts.collect in your own"
        )
    returns = [discounted_sums(rewards, torch.ones_like(rewards)) for rewards in _of_samples(inputs)]
    return (torch.cat(returns) - inputs.at_tokens(inputs.baselines)).to(torch.float32)


def _of_samples(inputs: CreditInputs) -> tuple[Tensor, ...]:
    return torch.split(inputs.rewards, inputs.cu_seqlens.diff().tolist())


def discounted_sums(rewards: Tensor, discounts: Tensor) -> Tensor:
    """The return at each token of one sample, where what follows a token is multiplied by its discount. [L]"""
    if bool((discounts == 1).all()):
        return rewards.flip(0).cumsum(0).flip(0)
    total, returns = 0.0, []
    for reward, discount in zip(rewards.flip(0).tolist(), discounts.flip(0).tolist(), strict=True):
        total = reward + discount * total
        returns.append(total)
    return torch.tensor(returns, dtype=rewards.dtype).flip(0)
