"""An advantage estimator of one's own; docs/extending.md explains it."""

import torch

from skyrl_train.algorithms.credit import CreditInputs


def discounted_returns(inputs: CreditInputs, *, discount: float) -> torch.Tensor:
    """What each token still earns, discounted by its distance, over the mean of all tokens that are trained."""
    returns = []
    for rewards in torch.split(inputs.rewards, inputs.cu_seqlens.diff().tolist()):
        distance = torch.arange(len(rewards))
        weights = (discount ** (distance[None] - distance[:, None]).clamp(min=0).double()).triu()
        returns.append(weights @ rewards)
    whole = torch.cat(returns)
    return whole - whole[inputs.loss_mask].mean()
