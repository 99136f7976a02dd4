"""Generalised advantage estimation, from the values of a critic."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.advantages.reinforce import discounted_sums
from skyrl_train.algorithms.credit import AdvantagesAndReturns, CreditInputs, whitened
from skyrl_train.algorithms.inputs import needs


@needs("values")
def gae(inputs: CreditInputs, *, gamma: float, lambd: float) -> AdvantagesAndReturns:
    """GAE, whose time steps are the tokens that the policy wrote: the value after a turn is that of the next turn.

    delta_t = reward_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambd A_{t+1}, with V = 0 after the last token. A
    reward on a token of the environment counts for the policy's token before it. Advantages are normalised over all
    trained tokens of the step, as in SkyRL and verl; returns A_t + V_t are not.

    Returns: 0 at tokens that the policy did not write. Source: arXiv:1506.02438, equations 11 and 16.
    """
    mask, bounds = inputs.loss_mask, inputs.cu_seqlens.long()
    written = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    counts = written[bounds].diff()
    values, rewards = inputs.signals["values"][mask].double(), torch.zeros(int(written[-1]), dtype=torch.float64)
    earner = written[1:] - 1  # the last trained token so far, perhaps of an earlier sample
    is_own = earner >= inputs.at_tokens(written[bounds[:-1]])
    rewards.index_add_(0, earner[is_own], inputs.rewards[is_own])
    following = torch.nn.functional.pad(values[1:], (0, 1))
    following[(counts.cumsum(0) - 1)[counts > 0]] = 0
    deltas = rewards + gamma * following - values
    discount = torch.full_like(deltas, gamma * lambd)
    samples = zip(deltas.split(counts.tolist()), discount.split(counts.tolist()), strict=True)
    estimated = torch.cat([discounted_sums(delta, factor) for delta, factor in samples])
    advantages, returns = torch.zeros_like(inputs.rewards), torch.zeros_like(inputs.rewards)
    advantages[mask], returns[mask] = estimated, estimated + values
    return AdvantagesAndReturns(whitened(advantages, mask).masked_fill(~mask, 0), returns)
