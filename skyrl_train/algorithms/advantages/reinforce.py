"""Estimators that normalise over all trained tokens of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.credit import CreditInputs

EPS = 1e-8
"""Added to the variance, as in SkyRL and verl."""


def reinforce_plus_plus(inputs: CreditInputs) -> Tensor:
    """The return of each token, normalised over all trained tokens of the step; groups do not matter.

    The return is the sum of the rewards from the token to the end of its sample, undiscounted, also over tokens that
    the policy did not write. Long responses weigh more in the mean and in the (sample) variance than short ones.

    Returns: [T] float32; 0 where all trained tokens have one return, and where no token is trained.
    Source: REINFORCE++, arXiv:2501.03262, section 3, with the KL term left to the loss or the reward.
    """
    parts = torch.split(inputs.rewards, inputs.cu_seqlens.diff().tolist())
    returns = torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])
    trained = returns[inputs.loss_mask]
    centred = returns - (trained.mean() if len(trained) else 0.0)
    variance = trained.var() if len(trained) > 1 else trained.new_zeros(())
    return (centred * (variance + EPS).rsqrt()).to(torch.float32)
